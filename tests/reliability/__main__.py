"""Run campaigns, print their figures, and keep them: `python -m tests.reliability [PART...] [--quick] [--seed N]`.

Every module beside this one that has a function `campaign(setting)` is a part; without names all of them run. The
figures go into bench/results/reliability.json by part, and the table of docs/reliability.md is made from
that file. Exit 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.corpus import Corpus, cache_root
from tests.reliability.figures import Figure, Setting

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def parts() -> list[str]:
    beside = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    return [name for name in beside if hasattr(importlib.import_module(f"tests.reliability.{name}"), "campaign")]


def run(part: str, seed: int, thorough: bool) -> dict[str, Any]:
    """One part's figures with the facts that make them repeatable."""
    module = importlib.import_module(f"tests.reliability.{part}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"reliability-{part}-") as work:
        found: list[Figure] = list(module.campaign(Setting(Corpus(cache_root()), Path(work), seed, thorough)))
    for figure in found:
        print(f"{figure.part:<12} {figure.survived:>6} of {figure.tried:<6} {figure.kind}", flush=True)
        for failure in figure.failures:
            print(f"    lost: {failure}", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 1),
        "command": f"python -m tests.reliability {part}{'' if thorough else ' --quick'} --seed {seed}",
        "commit": commit.stdout.strip(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "figures": [asdict(figure) for figure in found],
    }


def table(kept: dict[str, Any]) -> str:
    """The table of docs/reliability.md."""
    lines = ["| part | what was tried | times | survived | command |", "|---|---|---|---|---|"]
    for part, run_ in sorted(kept.items()):
        for figure in run_["figures"]:
            row = (part, figure["kind"], f"{figure['tried']:,}", f"{figure['survived']:,}", f"`{run_['command']}`")
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def refresh(kept: dict[str, Any]) -> None:
    if not PAGE.exists():
        return
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(kept)}\n\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--quick", action="store_true", help="the small run that the tests make; keeps no figures")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    known = parts()
    if unknown := set(asked.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    lost = False
    for part in asked.parts or known:
        outcome = run(part, asked.seed, not asked.quick)
        lost = lost or any(figure["survived"] < figure["tried"] for figure in outcome["figures"])
        if not asked.quick:
            kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # now: others run, too
            kept[part] = outcome
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
            refresh(kept)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
