#!/usr/bin/env python3
"""Write the README's table from the recorded runs: python3 bench/gpu/table.py [--check].

Times come from RUNS; how far the next token's log-probabilities are from stock's comes from WEIGHTS, a run of
`compare.py --weights attention --untimed`, in which outputs depend on what attention computes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
RUNS = ("h200_run6.json",)  # the latest first; a row comes from the first that has it
WEIGHTS = "h200_weights.json.gz"
CONTROL = "off-by-one"
ENOUGH = 10
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


def table(runs: dict[str, dict[str, Any]], weights: dict[str, Any]) -> str:
    """The section between the markers."""
    lines = [
        "| TPOT, ms a token | 512 tokens | 8,192 | 65,536 | 16 streams | log-prob. moved: median, largest |",
        "|---|---:|---:|---:|---:|---|",
    ]
    scored = weights["variants"]
    for variant, title in ROWS.items():
        for kept in runs.values():
            entry = kept["variants"].get(variant)
            if entry and "single" in entry:
                apart = "" if variant == "stock" else nats(scored.get(variant, {}))
                lines.append(row(title, entry, apart + earlier(scored.get(variant), entry)))
                break
    lines.append(row(f"control, wrong on purpose: `{CONTROL}`", {"single": {}}, nats(scored[CONTROL])))
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
        "[bench/gpu/README.md](bench/gpu/README.md) says. Last column: by how many nats the next token's "
        "log-probability is from stock's, on servers whose outputs depend on attention "
        f"([how](bench/gpu/README.md#outputs-that-depend-on-attention), [{WEIGHTS}](bench/results/{WEIGHTS})). "
        "Rounding in another order moves it by some 0.1, at times by 0.45; leaving out one token, as the control does, "
        "by whole nats."
    )
    return "\n".join([*lines, "", about])


def row(title: str, entry: dict[str, Any], apart: str) -> str:
    """One variant's line."""
    times = [f"{entry['single'][length]['tpot_ms']:.2f}" if length in entry["single"] else "" for length in LENGTHS]
    streams = f"{entry['streams']['tok_s']:,.0f} tok/s" if "streams" in entry else ""
    return f"| {title} | {' | '.join(times)} | {streams} | {apart} |"


def nats(entry: dict[str, Any]) -> str:
    """How far the decoded tokens of single prompts are from stock's: the worst length's median, of those with ENOUGH
    tokens to have one, and the largest of all."""
    facts = [entry["apart"][length] for length in LENGTHS if length in entry.get("apart", {})]
    known = [fact for fact in facts if fact["tokens"]]
    if not known:
        return "not run"
    median = max(fact["median"] for fact in [one for one in known if one["tokens"] >= ENOUGH] or known)
    largest = max(fact["largest"] for fact in known)
    lost = sum(fact["not_among_the_best"] for fact in facts)
    count = f"{sum(fact['tokens'] for fact in known)} tokens"
    if lost:
        count += f"; {lost} more not among stock's best few"
    return (f"{median:.2f}, {largest:.2f}" if largest else "0, 0") + f" ({count})"


def earlier(scored: dict[str, Any] | None, entry: dict[str, Any]) -> str:
    """A word where the two runs did not have the same patched file."""
    if not scored or scored["patch"]["sha256"] == entry["patch"]["sha256"]:
        return ""
    return f", of another form ({scored['commit'][:7]})"


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
    weights = json.loads(gzip.decompress((RESULTS / WEIGHTS).read_bytes()))
    new = f"{head}{START}\n{table(runs, weights)}\n{END}{tail}"
    if new == text:
        return 0
    if check:
        print("README.md does not have the table of the recorded run: python3 bench/gpu/table.py", file=sys.stderr)
        return 1
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
