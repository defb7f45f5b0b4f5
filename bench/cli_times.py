"""Whole-process times of the command line on the real file of one release; writes bench/results/cli_times.json.

    python bench/cli_times.py [RELEASE] [--runs N]

Medians over N processes (default 15), on a small site-packages in a temporary folder: `status` warm (file and catalogue
unchanged), `status` cold (MLAPATCH_CACHE is an empty folder), `apply`, and for scale an interpreter that does nothing.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"status warm": 0.25, "status cold": 1.2, "apply": 1.5}
PATCH = "gather-cast"


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    runs = int(sys.argv[sys.argv.index("--runs") + 1]) if "--runs" in sys.argv else 15
    release = next((word for word in words if "." in word), "0.5.23")
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from tests.corpus import Corpus, cache_root

    with tempfile.TemporaryDirectory() as folder:
        site = Corpus(cache_root()).install_tree(release, Path(folder) / "site-packages")
        times = measured(site, Path(folder), runs)
    result = {
        "release": release,
        "runs": runs,
        "seconds": {name: summary(values) for name, values in times.items()},
        "limits": LIMITS,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()[0]},
        "versions": {name: version(name) for name in ("typer", "libcst", "packaging", "filelock")}
        | {"python": platform.python_version()},
        "commit": git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "src", "patches") else ""),
    }
    target = ROOT / "bench" / "results" / "cli_times.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    for name, values in times.items():
        limit = LIMITS.get(name)
        said = (
            "" if limit is None else f"  limit {limit:.2f}  {'ok' if statistics.median(values) <= limit else 'MISSED'}"
        )
        print(f"{name:14} median {statistics.median(values):.3f} s  min {min(values):.3f}  max {max(values):.3f}{said}")


def measured(site: Path, folder: Path, runs: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"python": [], "status warm": [], "status cold": [], "apply": [], "revert": []}
    warm = folder / "warm"
    timed(warm, "status", "--sglang", str(site))
    for run in range(runs):  # in turn, so that a busy moment hits all alike
        times["python"].append(timed(None))
        times["status warm"].append(timed(warm, "status", "--sglang", str(site)))
        times["status cold"].append(timed(folder / f"cold-{run}", "status", "--sglang", str(site)))
        times["apply"].append(timed(warm, "apply", PATCH, "--sglang", str(site)))
        times["revert"].append(timed(warm, "revert", "--sglang", str(site)))
    return times


def timed(cache: Path | None, *arguments: str) -> float:
    """One process, from start to end, in seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MLAPATCH_CACHE": str(cache or "")}
    command = [sys.executable, *(["-m", "mlapatch", *arguments] if cache else ["-c", ""])]
    begin = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
