"""What attention.py times: all layers' attention by fused-decode, by flashinfer after each cast, by SGLang's Triton."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from batches import LATENT, ROPE, SCALE, WIDTH, Batch

CONTEXT, TRITON_SPLITS = 200_000, 8  # compare.py's --context-length; SGLang's own --triton-attention-num-kv-splits


class Row(NamedTuple):
    """One line of the table."""

    name: str
    step: Callable[[], None]  # all layers, into batch.out
    check: bool = True  # a BF16 pool of zeros and reads alone have no result to check
    layer: Callable[..., Any] | None = None  # fused-decode's: one layer, (pool, with_lse=)


def tuning_of(text: str, module: ModuleType) -> Any:
    """FusedTuning of "32.4.3.2o", None of "shipped"."""
    if text == "shipped":
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)\.(\d+)(o?)", text)
    if not match:
        raise SystemExit(f"--tunings: '{text}' is neither 'shipped' nor TILE.WARPS.STAGES.PROGRAMS[o]")
    return module.FusedTuning(*(int(number) for number in match.groups()[:4]), overlap=bool(match[5]))


def fused_layer(module: ModuleType, batch: Batch, pool: torch.Tensor, tuning: Any, *, with_lse: bool = False) -> Any:
    """One layer into batch.out; servers ask for no log-sum-exp."""
    latent, rope = pool[..., :LATENT], pool[..., LATENT:]
    inputs = (batch.query, batch.rope, latent, rope, batch.indices, batch.indptr)
    return module.fused_attention(*inputs, batch.requests, SCALE, batch.out, tuning, with_lse=with_lse)


def fused_step(module: ModuleType, batch: Batch, pools: list[torch.Tensor], tuning: Any) -> Callable[[], None]:
    def step() -> None:
        for pool in pools:
            fused_layer(module, batch, pool, tuning)

    return step


@triton.jit
def read_kernel(pool, indices, sums, tokens, TILE: tl.constexpr):  # noqa: ANN001, ANN201 (Triton's types)
    """Reads the rows of `indices`, TILE a step, as fast as the GPU can: nothing but a sum is made of them."""
    total = tl.zeros((TILE, 128), tl.int32)
    total_rope = tl.zeros((TILE, 16), tl.int32)
    column, rope = tl.arange(0, 128), 128 + tl.arange(0, 16)
    for start in range(tl.program_id(0) * TILE, tokens, tl.num_programs(0) * TILE):
        slot = tl.load(indices + start + tl.arange(0, TILE))
        row = (slot * 144)[:, None]
        total ^= tl.load(pool + row + column[None, :])
        total_rope ^= tl.load(pool + row + rope[None, :])
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0) + tl.sum(tl.sum(total_rope, 1), 0))


def read_step(batch: Batch, pools: list[torch.Tensor]) -> Callable[[], None]:
    """Only the reads of the step: whole tiles of rows, everywhere enough of them in flight."""
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")

    def step() -> None:
        for pool in pools:
            read_kernel[(programs,)](
                pool.view(torch.int32), batch.indices, sums, batch.indices.numel(), TILE=16, num_warps=4, num_stages=3
            )

    return step


def flashinfer_rows(
    module: ModuleType, batch: Batch, pools: list[torch.Tensor], only: re.Pattern[str]
) -> Iterator[Row]:
    """The rows that run flashinfer's MLA decode: on a BF16 pool, and after each cast."""
    import flashinfer

    def wrapper(indices: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
        made = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="auto"
        )
        lengths = batch.indptr.diff()
        queries = torch.arange(batch.requests + 1, dtype=torch.int32, device="cuda")
        made.plan(
            queries, batch.indptr, indices, lengths, batch.heads, LATENT, ROPE, 1, False, SCALE, torch.bfloat16, dtype
        )
        return made

    def run(made: Any, rows: torch.Tensor, **scales: float) -> None:
        made.run(batch.query, batch.rope, rows[..., :LATENT], rows[..., LATENT:], out=batch.out, **scales)

    in_place = wrapper(batch.indices)
    sequence = torch.arange(batch.indices.numel(), dtype=torch.int32, device="cuda")
    compact = wrapper(sequence)
    live = SimpleNamespace(_kv_indptr_buf=batch.indptr, _page_size=1)

    def cast(pool: torch.Tensor, rows: torch.Tensor, *, compact: bool) -> torch.Tensor:
        return module.cast_slots(pool, rows, live, batch.indices, batch.indptr, compact=compact)

    workspace = torch.zeros(batch.slots, 1, WIDTH, dtype=torch.bfloat16, device="cuda")

    def bf16() -> None:
        for _ in pools:
            run(in_place, workspace)

    def active() -> None:
        for pool in pools:
            run(in_place, cast(pool, workspace, compact=False))

    def gather() -> None:
        for pool in pools:
            run(compact, cast(pool, workspace, compact=True))

    def stock() -> None:
        for pool in pools:
            run(in_place, pool.to(torch.bfloat16))

    for name, step in (("bf16-pool", bf16), ("active-cast", active), ("gather-cast", gather), ("stock", stock)):
        if only.search(name):
            yield Row(name, step, check=name != "bf16-pool")
    if only.search("fp8-plan"):
        native = wrapper(batch.indices, torch.float8_e4m3fn)

        def fp8() -> None:
            for pool in pools:
                run(native, pool, ckv_scale=1.0, kpe_scale=1.0)

        yield Row("fp8-plan", fp8)


def sglang_triton_step(batch: Batch, pools: list[torch.Tensor]) -> Callable[[], None]:
    """SGLang's own Triton decode on the same FP8 pool, as its backend calls it for this model on a server.

    That is layers/attention/triton_backend.py of 0.5.15.post1 (the payload's): the most splits that MLA gets there,
    how many of them a request takes by its length (found once a step, before the layers), int64 indices, has_mla and
    PDL. The server also joins the two parts of the query in each layer; that is left out here.
    """
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd
    from sglang.srt.layers.attention.triton_ops.metadata import get_num_kv_splits_triton

    cores = torch.cuda.get_device_properties(0).multi_processor_count
    context = triton.next_power_of_2(triton.cdiv(CONTEXT, 32))
    most = max(TRITON_SPLITS, min(triton.next_power_of_2(cores), context))
    splits = torch.full((batch.requests,), most, dtype=torch.int32, device="cuda")
    lengths = batch.indptr.diff().long()
    # The backend counts as many KV heads as the model's config.json names: as many as heads.
    get_num_kv_splits_triton[(1,)](
        splits,
        lengths,
        batch.requests,
        1,
        batch.heads,
        batch.heads,
        most,
        cores,
        MAX_NUM_SEQ=max(256, triton.next_power_of_2(batch.requests)),
    )
    batch.facts["splits"] = sorted(set(splits.tolist()))
    query = torch.cat((batch.query, batch.rope), -1)
    indices = batch.indices.long()
    part = torch.zeros(batch.requests, batch.heads, most, LATENT, dtype=torch.float32, device="cuda")
    lse = torch.zeros(batch.requests, batch.heads, most, dtype=torch.float32, device="cuda")
    pdl = torch.cuda.get_device_capability()[0] >= 9

    def step() -> None:
        for pool in pools:
            decode_attention_fwd(
                query,
                pool,
                pool[..., :LATENT],
                batch.out,
                batch.indptr,
                indices,
                part,
                lse,
                splits,
                most,
                SCALE,
                1.0,
                1.0,
                logit_cap=0.0,
                sinks=None,
                xai_temperature_len=-1,
                has_mla=True,
                use_pdl=pdl,
                page_size=1,
            )

    return step


def rows_of(
    module: ModuleType,
    batch: Batch,
    pools: list[torch.Tensor],
    *,
    only: re.Pattern[str],
    tunings: Sequence[str],
    site: bool,
) -> Iterator[Row]:
    """The rows whose names `only` finds; those of flashinfer and SGLang where `site` says that these are there."""
    for text in tunings:
        if only.search("fused"):
            tuning = tuning_of(text, module)
            step = fused_step(module, batch, pools, tuning)
            yield Row(f"fused {text}", step, layer=functools.partial(fused_layer, module, batch, tuning=tuning))
    if only.search("read"):
        yield Row("read", read_step(batch, pools), check=False)
    if site:
        yield from flashinfer_rows(module, batch, pools, only)
        if only.search("sglang-triton"):
            yield Row("sglang-triton", sglang_triton_step(batch, pools))
