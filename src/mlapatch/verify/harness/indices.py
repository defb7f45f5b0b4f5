# ruff: noqa: ARG001, ARG002 - the signatures are SGLang's
"""Stand-ins for SGLang's index-building kernels and its id translator, in torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class RequestIndices:
    """`create_flashinfer_kv_indices_triton[grid](...)`: each request's slots, one after another, at its offset.

    0.5.1 alone passes a page size, and gets pages instead of slots.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(
            table: torch.Tensor,
            rows: torch.Tensor,
            lens: torch.Tensor,
            indptr: torch.Tensor,
            starts: torch.Tensor | None,
            out: torch.Tensor,
            stride: int,
            page: int = 1,
            **_: Any,
        ) -> None:
            for r in range(grid[0]):
                first = 0 if starts is None else int(starts[r])
                n, at = -(-int(lens[r]) // page), int(indptr[r])
                out[at : at + n] = (table[int(rows[r]), first : first + n * page : page] // page).to(out.dtype)

        return run


class DraftIndices:
    """`generate_draft_decode_kv_indices[(steps, requests, topk)](...)` for topk 1.

    Step i of request r sees its committed tokens and the i + 1 that follow: `kv_indices[i]` holds them at `sum(lens
    before r) + r * (i + 1)`, `kv_indptr[i]` is the prefix sum of `positions` plus `i + 1` a request. `parameters` are
    the release's own parameter names, since their order differs between releases.
    """

    def __init__(self, parameters: list[str]) -> None:
        self._parameters = parameters

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        steps, requests, topk = grid
        if topk != 1:
            raise ValueError("the flashinfer MLA backend takes topk 1 only")

        def run(*args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            table, rows, lens = given["req_to_token"], given["req_pool_indices"], given["paged_kernel_lens"]
            out, indptr, positions = given["kv_indices"], given["kv_indptr"], given["positions"]
            for i in range(steps):
                at = 0
                for r in range(requests):
                    n = int(lens[r]) + i + 1
                    out[i, at : at + n] = table[int(rows[r]), :n].to(out.dtype)
                    at += n
                    indptr[i, r + 1] = int(positions[: r + 1].sum()) + (r + 1) * (i + 1)

        return run


class Translator:
    """`KVIndexTranslator` over a static pool: reads need no translation."""

    needs_read_translate = False
    reads_are_translated = False

    def __init__(self, table: torch.Tensor) -> None:
        self.req_to_token = table

    def pack_read_stream(
        self,
        plan: Any = None,
        *,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        indptr: torch.Tensor,
        out: torch.Tensor,
        kv_start_idx: torch.Tensor | None = None,
        **_: Any,
    ) -> bool:
        """Fills `out` with the slots of each request; False: they are not translated."""
        run = RequestIndices()[(int(seq_lens.numel()),)]
        run(self.req_to_token, req_pool_indices, seq_lens, indptr, kv_start_idx, out, self.req_to_token.stride(0))
        return False

    fill_packed_read_stream = pack_read_stream  # its name in 0.5.20 and 0.5.21

    def read_source(self, plan: Any = None, *, req_pool_indices: torch.Tensor, **_: Any) -> SimpleNamespace:
        """The table and rows that a gather reads."""
        return SimpleNamespace(
            ids=self.req_to_token,
            row_ids=req_pool_indices,
            row_stride=self.req_to_token.stride(0),
            entry_page_size=1,
            is_translated=False,
            v2p=None,
        )

    build_index_table = read_source  # 0.5.19

    def index_table_for_batch(self, forward_batch: Any) -> SimpleNamespace:
        """0.5.19: the same for an eager batch."""
        return self.read_source(req_pool_indices=forward_batch.req_pool_indices)

    def make_capture_tables(self, **_: Any) -> None:
        """0.5.19: a static pool needs none."""

    def translate_dcp_read_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids as they are."""
        return ids


def own_lengths(world_size: int, lens: torch.Tensor) -> None:
    """Lengths of rank 0's share under decode context parallelism, in place: it owns every `world_size`-th position."""
    if world_size > 1:
        lens.copy_((lens + world_size - 1) // world_size)


def keep_own_share(
    world_size: int,
    kv_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    init_metadata_replay: bool,
    fast_decode_kwargs: dict[str, Any],
    bs: int,
) -> int:
    """`plan_dcp_decode_metadata` of rank 0: drops the positions of other ranks from the indices, in place; returns how
    many stay."""
    offsets, kept = [0], []
    for r in range(bs):
        first, last = int(kv_indptr[r]), int(kv_indptr[r + 1])
        kept.append(kv_indices[first:last:world_size].clone())
        offsets.append(offsets[-1] + len(kept[-1]))
    if kept:
        kv_indices[: offsets[-1]] = torch.cat(kept)
    own_lengths(world_size, kv_lens)
    kv_indptr[: bs + 1] = torch.tensor(offsets, dtype=kv_indptr.dtype, device=kv_indptr.device)
    return offsets[-1]
