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
from types import ModuleType
from typing import Any

import torch
import triton
from batches import WIDTH, Batch, Case, batch_of, reference
from rows import Row, fused_step, rows_of, tuning_of
from snippets import FUSED_DECODE, load

CASES = ("1x512", "1x8192", "1x131072", "16x4096", "64x4096")
TUNINGS = ("shipped",)
COPY_BYTES_PER_S = 4.2e12


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


def lse_error(layer: Callable[..., Any], batch: Batch, pool: torch.Tensor) -> float:
    """Largest error of the log-sum-exp, relative where it is above 1."""
    found = layer(pool, with_lse=True).double()
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


def measured(row: Row, batch: Batch, pool: torch.Tensor, module: ModuleType) -> dict[str, Any]:
    """One cell of the table; pool: the last layer's, whose result batch.out keeps."""
    cell: dict[str, Any] = {"row": row.name, "case": batch.case.name}
    try:
        cell["ms"], replay = replay_ms(row.step)
    except Exception as error:  # a tuning that does not fit this GPU is a result
        torch.cuda.synchronize()
        return cell | {"error": f"{type(error).__name__}: {str(error)[:160]}"}
    if row.name == "sglang-triton":
        cell |= batch.facts
    if row.check and batch.wanted is not None:
        batch.out.fill_(float("nan"))
        replay()
        cell["relative_error"] = ((batch.out.double() - batch.wanted).norm() / batch.wanted.norm()).item()
    if row.layer is not None:
        with without_combine(module):
            cell["first_kernel_ms"] = replay_ms(row.step, seconds=0.05)[0]
        cell["lse_error"] = lse_error(row.layer, batch, pool)
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
    only = re.compile(args.only)
    if not args.profile and only.search("fused"):
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
        rows = rows_of(module, batch, pools, only=only, tunings=args.tunings, site=bool(args.site))
        for row in rows:
            if time.perf_counter() - begin > args.budget:
                trouble.append(f"budget of {args.budget} s spent before {row.name} at {case.name}")
                break
            cells.append(measured(row, batch, pools[-1], module))
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
