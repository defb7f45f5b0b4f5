"""Speed and peak memory of `mlapatch trace` on a synthetic trace, 2 GB of JSON by default; writes bench/results/.

    python bench/trace_speed.py [GIGABYTES] [--eager]

The trace is generated as a stream into a gzip file; reading it runs in a process of its own, so that its peak memory
is the reader's alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ = """
import json, resource, sys, time
from pathlib import Path
from mlapatch.commands.trace import trace
begin = time.perf_counter()
data = trace(files=[Path(sys.argv[1])]).data
seconds, cpu = time.perf_counter() - begin, time.process_time()
rank = data["ranks"][0]
print(json.dumps({
    "seconds": seconds, "cpu_seconds": cpu, "bytes": rank["bytes"], "events": rank["events"], "steps": rank["steps"],
    "cast_share": rank["cast"]["share_of_step"], "layers": rank["cast"]["layers"],
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def main() -> None:
    sizes = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    gigabytes = float(sizes[0]) if sizes else 2.0
    eager = "--eager" in sys.argv
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from tests.measure.synthetic import Scene

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "1.0-TP-0.trace.json.gz"
        begin = time.perf_counter()
        scene = Scene(steps=max(2, int(gigabytes * (1100 if eager else 2200))), graphs=not eager)
        scene.write(path)
        print(f"generated {path.stat().st_size / 1e6:.0f} MB gzip in {time.perf_counter() - begin:.0f} s", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [sys.executable, "-c", READ, str(path)], env=environment, check=True, capture_output=True, text=True
        )
    result = json.loads(done.stdout)
    result["mb_per_s"] = result["bytes"] / result["seconds"] / 1e6
    result["mb_per_cpu_s"] = result["bytes"] / result["cpu_seconds"] / 1e6
    result["expected_cast_share"] = scene.cast_total / scene.steps / scene.wall
    result |= {
        "mode": "eager" if eager else "cuda-graphs",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()},
        "versions": {"python": platform.python_version(), "orjson": __import__("orjson").__version__},
        "commit": _git("rev-parse", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "src/mlapatch/measure") else ""),
    }
    print(json.dumps(result, indent=2))
    target = ROOT / "bench" / "results" / f"trace_speed-{result['mode']}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
