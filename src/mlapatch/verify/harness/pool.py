# ruff: noqa: ARG002 - the signatures are SGLang's
"""Stand-ins for SGLang's MLA KV pool and its table of request slots."""

from __future__ import annotations

from typing import Any

import torch

from .device import FP8, fill_nan

LORA_RANK, ROPE_DIM = 512, 64
HEAD_DIM = LORA_RANK + ROPE_DIM
PACKED_DIM = 656
"""Bytes of a row of the packed DSA pool: 512 e4m3, 16 of float32 scales, 128 of BF16 rope."""


class KVPool:
    """`MLATokenToKVPool`: one `[size + page_size, 1, width]` arena a layer; FP8 is stored as bytes and viewed.

    As in every release, the write casts without a scale and the read returns the whole arena.
    """

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, layers: int, device: str, width: int = HEAD_DIM
    ) -> None:
        self.size, self.page_size, self.dtype, self.device = size, page_size, dtype, device
        self.store_dtype = torch.uint8 if dtype in FP8 else dtype
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = LORA_RANK, ROPE_DIM, width
        self.layer_num, self.start_layer, self.end_layer = layers, 0, layers - 1
        self.layer_transfer_counter = None
        self.use_nsa = self.nsa_kv_cache_store_fp8 = width == PACKED_DIM
        self.use_dsa = self.dsa_kv_cache_store_fp8 = self.use_nsa
        self.kv_buffer = [
            torch.zeros((size + page_size, 1, width), dtype=self.store_dtype, device=device) for _ in range(layers)
        ]

    @property
    def slots(self) -> int:
        """Rows of the arena of one layer."""
        return self.size + self.page_size

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The whole arena of a layer, `[slots, 1, width]` in the cache's dtype."""
        return self.kv_buffer[layer_id - self.start_layer].view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of the arena, `[slots, 1, 512]`."""
        return self.get_key_buffer(layer_id)[..., :LORA_RANK]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both views of the arena."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of `loc`, `[n, 1, 512]` and `[n, 1, 64]`, cast while gathering."""
        rows = self.kv_buffer[layer.layer_id - self.start_layer][loc.long()].view(self.dtype)
        rows = rows.to(dst_dtype or self.dtype)
        return rows[..., :LORA_RANK].contiguous(), rows[..., LORA_RANK:].contiguous()

    def set_kv_buffer(self, layer: Any, loc: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, **_: Any) -> None:
        """Writes whole rows `[n, 1, 576]` at `loc` (a tensor, or a `KVWriteLoc` from 0.5.22)."""
        loc = getattr(loc, "loc", loc)
        if self.kv_cache_dim == PACKED_DIM:
            return  # the packed pool quantises rows in its own way; what it holds here is noise anyway
        rows = cache_k.reshape(loc.numel(), 1, cache_k.shape[-1]).to(self.dtype).view(self.store_dtype)
        self.kv_buffer[layer.layer_id - self.start_layer][loc] = rows

    def set_mla_kv_buffer(self, layer: Any, loc: Any, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
        """Writes `[n, 1, 512]` and `[n, 1, 64]` as rows at `loc`."""
        n = getattr(loc, "loc", loc).numel()
        parts = (k_nope.reshape(n, 1, LORA_RANK), k_rope.reshape(n, 1, ROPE_DIM))
        self.set_kv_buffer(layer, loc, torch.cat(parts, dim=-1), k_nope)

    def fill(self, layer_id: int, live: torch.Tensor, rows: torch.Tensor) -> None:
        """NaN everywhere, then `rows` `[n, width]` at the slots `live`, and zeros at slot 0, which padding reads."""
        buffer = self.get_key_buffer(layer_id)
        fill_nan(buffer)
        stored = self.kv_buffer[layer_id]
        stored[0] = 0
        stored[live] = rows.to(self.dtype)[:, None, :].view(self.store_dtype)

    def fill_bytes(self, generator: torch.Generator) -> None:
        """Any bytes at all: a pool whose rows mean something else."""
        for buffer in self.kv_buffer:
            noise = torch.randint(0, 256, buffer.shape, generator=generator, dtype=torch.uint8)
            buffer.view(torch.uint8).copy_(noise if buffer.element_size() == 1 else noise.repeat_interleave(2, dim=-1))


class RequestTable:
    """`ReqToTokenPool`: row r, column p -> the slot of token p of request r. Row 0 is what padded requests read."""

    def __init__(self, table: torch.Tensor) -> None:
        self.req_to_token = table
        self.size = table.shape[0]
        self.max_context_len = table.shape[1]
