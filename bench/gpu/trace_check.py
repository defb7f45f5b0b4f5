#!/usr/bin/env python3
"""`mlapatch profile` on a running server, beside a count of the same trace's events that shares no code with it.

    python3 bench/gpu/trace_check.py --url http://127.0.0.1:30011 --name stock --out DIR

The count takes the whole file as JSON, keeps the kernels, groups them by the CUDA-graph launch they came from (a
correlation id with hundreds of kernels is a decode step), and adds up the copies that run longer than 100 us: no copy
of a decode step but the cast of a whole KV pool does. Writes DIR/trace-NAME.json; exit 1 if the shares differ by 2
points.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LONG_US = 100.0
POINTS = 2.0


def counted(path: Path) -> dict[str, Any]:
    """Steps, their period, and the long copies in them."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    launches: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in kernels:
        launches[event["args"].get("correlation", -1)].append(event)
    steps = sorted((step for step in launches.values() if len(step) > 300), key=lambda step: min(e["ts"] for e in step))
    if len(steps) < 2:
        raise SystemExit(f"{path}: no decode steps of CUDA graphs in it")
    starts = [min(event["ts"] for event in step) for step in steps]
    periods = [after - before for before, after in itertools.pairwise(starts)]
    copies = [[event for event in step if "copy" in event["name"] and event["dur"] > LONG_US] for step in steps]
    copied = [sum(event["dur"] for event in step) for step in copies]
    period = statistics.median(periods)
    return {
        "steps": len(steps),
        "step_ms": period / 1e3,
        "long_copies_per_step": sorted({len(step) for step in copies}),
        "long_copy_ms_per_step": statistics.median(copied) / 1e3,
        "share_of_step": statistics.median(copied) / period,
        "names": sorted({event["name"][:120] for step in copies for event in step}),
        "kernels": len(kernels),
        "bytes": path.stat().st_size,
    }


def profiled(url: str, folder: Path) -> dict[str, Any]:
    """What `mlapatch profile --json` says."""
    command = [sys.executable, "-m", "mlapatch", "profile", "--url", url, "--steps", "8", "--no-keep"]
    command += ["--output-dir", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def main() -> int:
    """Profile, count, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True, help="of the server, for the files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = args.out / f"profile-{args.name}-{time.strftime('%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=True)
    said = profiled(args.url, folder)
    rank = said["trace"]["ranks"][0]
    cast = rank["cast"] or {"share_of_step": 0.0, "calls": 0}
    path = Path(rank["file"])
    events = counted(path)
    difference = 100 * abs(cast["share_of_step"] - events["share_of_step"])
    kept = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("MLAPATCH_COMMIT", "unknown"),
        "setup": said["setup"],
        "trace": path.name,
        "mlapatch": {key: rank[key] for key in ("steps", "step_ms", "busy_ms", "without_cast_ms", "cast")},
        "advice": said["trace"].get("advice"),
        "events": events,
        "difference_in_points": difference,
    }
    (args.out / f"trace-{args.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(
        f"{args.name}: mlapatch {100 * cast['share_of_step']:.2f} % of a step in {cast['calls']} calls, "
        f"events {100 * events['share_of_step']:.2f} % in {events['long_copies_per_step']} a step"
    )
    return int(difference >= POINTS or bool(cast["calls"]) != bool(events["names"]))


if __name__ == "__main__":
    sys.exit(main())
