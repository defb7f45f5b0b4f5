#!/usr/bin/env python3
"""Attention of a whole model's layers by CUDA graph replay: fused-decode's tunings beside the other patches and stock.

    python3 bench/gpu/attention.py --json OUT.json [--budget 80] [--only fused] [--cases 1x512,16x4096] [--tunings A,B]

Every row is checked against float64 on fresh random data (the outputs are NaN before) and timed as the median of
replays of one graph of all layers, each layer with a pool of its own. A case is REQUESTSxTOKENS[v][hHEADS][qPOWER]: v
for lengths that vary from 0 to twice TOKENS, POWER for a query times 2 ** POWER. A tuning is written
TILE.WARPS.STAGES.PROGRAMS with o (overlapped launches), or "shipped": what the patch itself takes for the batch. The
row "read" only reads the rows: the limit of random access. Needs torch and Triton; the rows that need flashinfer or
SGLang appear where they can be imported (--site). The snippets come from patches/, as an applied patch has them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from batches import LATENT, ROPE, SCALE, WIDTH, Batch, Case, batch_of, reference
from snippets import FUSED_DECODE, load

ROOT = Path(__file__).resolve().parents[2]
CASES = ("1x512", "1x8192", "1x131072", "16x4096", "64x4096")
TUNINGS = ("shipped",)
COPY_BYTES_PER_S = 4.2e12
CONTEXT, TRITON_SPLITS = 200_000, 8  # compare.py's --context-length; SGLang's own --triton-attention-num-kv-splits


def tuning_of(text: str, module: ModuleType) -> Any:
    """FusedTuning of "32.4.3.2o", None of "shipped"."""
    if text == "shipped":
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)\.(\d+)(o?)", text)
    if not match:
        raise SystemExit(f"--tunings: '{text}' is neither 'shipped' nor TILE.WARPS.STAGES.PROGRAMS[o]")
    return module.FusedTuning(*(int(number) for number in match.groups()[:4]), overlap=bool(match[5]))


def replay_ms(step: Callable[[], None], *, seconds: float = 0.12) -> tuple[float, Callable[[], None]]:
    """Median time of one replay of a captured step, and the replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 8 or (time.perf_counter() - begin < seconds and len(times) < 60):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[2:]), graph.replay


@contextlib.contextmanager
def without_combine(module: ModuleType) -> Iterator[None]:
    """fused_attention that launches its first kernel only."""

    class Nothing:
        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_args, **_kwargs: None

    kept, module.fused_decode_combine = module.fused_decode_combine, Nothing()
    try:
        yield
    finally:
        module.fused_decode_combine = kept


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


def lse_error(module: ModuleType, batch: Batch, pool: torch.Tensor, tuning: Any) -> float:
    """Largest error of the log-sum-exp, relative where it is above 1."""
    found = fused_layer(module, batch, pool, tuning, with_lse=True).double()
    apart = (found - batch.wanted_lse).abs() / batch.wanted_lse.abs().clamp(min=1.0)
    return torch.where(found == batch.wanted_lse, 0.0, apart).max().item()  # -inf twice without tokens


def compile_one(job: tuple[str, Case]) -> str:
    """Run one tuning on a tiny batch in a process of its own: its kernels are then in Triton's cache."""
    text, case = job
    module = load(FUSED_DECODE)
    batch = batch_of(replace(case, tokens=4, ragged=False), max(64, 4 * case.requests))
    pool = torch.zeros(batch.slots, 1, WIDTH, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    try:
        fused_step(module, batch, [pool], tuning_of(text, module))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{text} {case.name}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(tunings: list[str], cases: list[Case]) -> list[str]:
    seen = {(text, case.requests, case.heads): (text, case) for text in tunings for case in cases}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(12, len(seen)), mp_context=context) as pool:
        return [line for line in pool.map(compile_one, seen.values()) if line]


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
) -> Iterator[tuple[str, Callable[[], None]]]:
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
            yield name, step
    if only.search("fp8-plan"):
        native = wrapper(batch.indices, torch.float8_e4m3fn)

        def fp8() -> None:
            for pool in pools:
                run(native, pool, ckv_scale=1.0, kpe_scale=1.0)

        yield "fp8-plan", fp8


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
    module: ModuleType, batch: Batch, pools: list[torch.Tensor], args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], None], bool]]:
    """Name, step and whether its result can be checked (a BF16 pool of zeros and half a kernel cannot)."""
    only = re.compile(args.only)
    for text in args.tunings:
        if only.search("fused"):
            yield f"fused {text}", fused_step(module, batch, pools, tuning_of(text, module)), True
    if only.search("read"):
        yield "read", read_step(batch, pools), False
    if args.site:
        for name, step in flashinfer_rows(module, batch, pools, only):
            yield name, step, name != "bf16-pool"
        if only.search("sglang-triton"):
            yield "sglang-triton", sglang_triton_step(batch, pools), True


def measured(
    name: str, step: Callable[[], None], batch: Batch, *, check: bool, module: ModuleType | None
) -> dict[str, Any]:
    """One cell of the table."""
    try:
        ms, replay = replay_ms(step)
    except Exception as error:  # a tuning that does not fit this GPU is a result
        torch.cuda.synchronize()
        return {"row": name, "case": batch.case.name, "error": f"{type(error).__name__}: {str(error)[:160]}"}
    cell: dict[str, Any] = {"row": name, "case": batch.case.name, "ms": ms}
    if name == "sglang-triton":
        cell |= batch.facts
    if check and batch.wanted is not None:
        batch.out.fill_(float("nan"))
        replay()
        cell["relative_error"] = ((batch.out.double() - batch.wanted).norm() / batch.wanted.norm()).item()
    if module is not None:
        with without_combine(module):
            cell["first_kernel_ms"] = replay_ms(step, seconds=0.05)[0]
    return cell


def table(cells: list[dict[str, Any]], cases: list[str]) -> str:
    lines = ["ms a step (first kernel alone) {relative error e-4}"]
    names = list(dict.fromkeys(cell["row"] for cell in cells))
    width = max(len(name) for name in names)
    lines.append(" " * width + "".join(f"{case:>24}" for case in cases))
    for name in names:
        row = {cell["case"]: cell for cell in cells if cell["row"] == name}
        texts = []
        for case in cases:
            cell = row.get(case, {})
            text = f"{cell['ms']:.3f}" if "ms" in cell else cell.get("error", "-")[:20]
            if "first_kernel_ms" in cell:
                text += f" ({cell['first_kernel_ms']:.3f})"
            if "relative_error" in cell:
                text += f" {{{cell['relative_error'] * 1e4:.1f}}}"
            texts.append(f"{text:>24}")
        lines.append(f"{name:<{width}}" + "".join(texts))
    return "\n".join(lines)


def version(module: str) -> str | None:
    """Of a module that is imported already."""
    return getattr(sys.modules.get(module), "__version__", None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no further cell is measured")
    parser.add_argument("--only", default=".", help="regular expression on the rows' names")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--tunings", type=lambda text: text.split(","), default=list(TUNINGS))
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--slots", type=int, default=495552)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument(
        "--site", type=Path, help="folder with flashinfer and sglang; without it their rows are left out"
    )
    parser.add_argument("--profile", action="store_true", help="run the first case and tuning three times, for ncu")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    begin = time.perf_counter()
    if args.site:
        sys.path.insert(0, str(args.site))
    trouble: list[str] = []
    cases = [Case.parsed(name, args.heads) for name in args.cases]
    if not args.profile and re.search(args.only, "fused"):
        trouble = compile_all(args.tunings, cases)
    compiled = time.perf_counter() - begin
    module = load(FUSED_DECODE)
    torch.manual_seed(int(time.time()))
    layers = 2 if args.profile else args.layers
    pools = [
        torch.randn(args.slots, 1, WIDTH, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for _ in range(layers)
    ]
    cells: list[dict[str, Any]] = []
    ready = time.perf_counter() - begin
    for case in cases:
        batch = batch_of(case, args.slots)
        if args.profile:
            step = fused_step(module, batch, pools, tuning_of(args.tunings[0], module))
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            return
        batch.wanted, batch.wanted_lse = reference(batch, pools[-1])
        for name, step, check in rows_of(module, batch, pools, args):
            if time.perf_counter() - begin > args.budget:
                trouble.append(f"budget of {args.budget} s spent before {name} at {case.name}")
                break
            fused = name.startswith("fused")
            cells.append(measured(name, step, batch, check=check, module=module if fused else None))
            if fused and "ms" in cells[-1]:
                tuning = tuning_of(name.split()[1], module)
                cells[-1]["lse_error"] = lse_error(module, batch, pools[-1], tuning)
        limit = 1e3 * batch.indices.numel() * WIDTH * layers / COPY_BYTES_PER_S
        cells.append({"row": "limit", "case": case.name, "ms": limit})
        del batch
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("MLAPATCH_COMMIT", "unknown"),
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FUSED_DECODE},
        "flashinfer": version("flashinfer"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "layers": layers,
        "slots": args.slots,
        "heads": args.heads,
        "cells": cells,
        "trouble": trouble,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    for line in trouble:
        print("trouble:", line)
    print(f"compiled {compiled:.0f} s, ready {ready:.0f} s, all {time.perf_counter() - begin:.0f} s")
    print(table(cells, args.cases))


if __name__ == "__main__":
    main()
