#!/usr/bin/env python3
"""Write the README's table from the recorded run: python3 bench/gpu/table.py [--check]."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "results" / "h200_compare.json"
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


def table(kept: dict[str, Any]) -> str:
    """The section between the markers."""
    variants = kept["variants"]
    lines = [
        "| TPOT, ms a token | 512 tokens | 8,192 | 65,536 | 16 streams, shared 4k prefix | greedy output as stock's |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, title in ROWS.items():
        entry = variants.get(name)
        if not entry or "single" not in entry:
            continue
        times = [f"{entry['single'][length]['tpot_ms']:.2f}" if length in entry["single"] else "" for length in LENGTHS]
        streams = f"{entry['streams']['tok_s']:,.0f} tok/s" if "streams" in entry else ""
        agreed = entry.get("agreement")
        equal = f"{agreed['equal']} of {agreed['compared']}" if agreed else ("" if name == "stock" else "not compared")
        lines.append(f"| {title} | {' | '.join(times)} | {streams} | {equal} |")
    machine, patch = kept["machine"], variants["stock"]["patch"]
    where = (
        f"Real server, CUDA graphs on, {machine['gpu']}, SGLang {patch['sglang']}, flashinfer {patch['flashinfer']}, "
        f"torch {machine['torch']}, FP8 pool of {kept['pool_tokens']:,} tokens x {kept['layers']} layers, "
        f"{kept['date']}, commit {kept['commit'][:12]}. Recorded in [bench/results/h200_compare.json]"
        "(bench/results/h200_compare.json); repeat it with `python3 bench/gpu/compare.py` as "
        "[bench/gpu/README.md](bench/gpu/README.md) says."
    )
    lines += ["", where]
    return "\n".join(lines)


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
    new = f"{head}{START}\n{table(json.loads(RESULT.read_text(encoding='utf-8')))}\n{END}{tail}"
    if new == text:
        return 0
    if check:
        print("README.md does not have the table of the recorded run: python3 bench/gpu/table.py", file=sys.stderr)
        return 1
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
