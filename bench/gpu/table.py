#!/usr/bin/env python3
"""Write the README's table from the recorded run: python3 bench/gpu/table.py [--check]."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
RUNS = ("h200_run4.json",)  # the latest first; a row comes from the first that has it
README = HERE.parents[1] / "README.md"
START, END = "<!-- table: python3 bench/gpu/table.py -->", "<!-- /table -->"
ROWS = {
    "stock": "stock",
    "fp8-plan": "`fp8-plan` (flashinfer 0.6.18)",
    "triton": "stock, `--attention-backend triton`",
    "gather-cast": "`gather-cast`",
    "active-cast": "**`active-cast`**",
    "fused-decode": "`fused-decode`",
}
LENGTHS = ("512", "8192", "65536")


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The section between the markers."""
    lines = [
        "| TPOT, ms a token | 512 tokens | 8,192 | 65,536 | 16 streams, shared prefix | outputs as stock's | run |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for variant, title in ROWS.items():
        for number, kept in runs.items():
            entry = kept["variants"].get(variant)
            if entry and "single" in entry:
                lines.append(row(title, entry, number, stock=variant == "stock"))
                break
    where = [
        f"{number}: {kept['date']}, commit {kept['commit']}, [{number}.json](bench/results/{number}.json)"
        for number, kept in runs.items()
    ]
    first = next(iter(runs.values()))
    machine, patch = first["machine"], first["variants"]["stock"]["patch"]
    about = (
        f"Real server, CUDA graphs on, {machine['gpu']}, SGLang {patch['sglang']}, flashinfer {patch['flashinfer']}, "
        f"torch {machine['torch']}, FP8 pool of {first['pool_tokens']:,} tokens x {first['layers']} layers. "
        f"{'; '.join(where)}. Repeat them with `python3 bench/gpu/compare.py` as "
        "[bench/gpu/README.md](bench/gpu/README.md) says. The streams' figure covers the whole window with its "
        "prefill. The weights are random and tiny, so that outputs are equal proves little (a patch that leaves "
        "out the newest token passes as well: variant off-by-one of the run); `mlapatch verify` is the proof. "
        "Several servers were on the GPU; all but the measured one stood still."
    )
    return "\n".join([*lines, "", about])


def row(title: str, entry: dict[str, Any], number: str, *, stock: bool) -> str:
    """One variant's line."""
    times = [f"{entry['single'][length]['tpot_ms']:.2f}" if length in entry["single"] else "" for length in LENGTHS]
    streams = f"{entry['streams']['tok_s']:,.0f} tok/s" if "streams" in entry else ""
    agreed = entry.get("agreement")
    equal = "" if stock else f"{agreed['equal']} of {agreed['compared']}" if agreed else "not compared"
    return f"| {title} | {' | '.join(times)} | {streams} | {equal} | {number} |"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit 1 unless the README has the table of the recorded run"
    )
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    runs = {name.removesuffix(".json"): json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in RUNS}
    new = f"{head}{START}\n{table(runs)}\n{END}{tail}"
    if new == text:
        return 0
    if check:
        print("README.md does not have the table of the recorded run: python3 bench/gpu/table.py", file=sys.stderr)
        return 1
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
