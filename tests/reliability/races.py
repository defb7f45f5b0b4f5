"""Many processes at once: on one tree, on the runs, on the caches; locks whose holder is gone; servers that start.

The work is done by `_racers`, a process of its own, whose forks race; pauses between the steps of reading and writing
make happen what could happen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.reliability.figures import Figure, Setting

ROOT = Path(__file__).parents[2]
#: A quick run leaves out what starts 20 interpreters.
FEW = [
    "20 processes apply, revert and read",
    "processes killed at any moment",
    "the holder of the lock is killed",
    "servers import while the file is patched",
    "20 processes keep and list runs",
    "20 processes fill cold caches",
]


def campaign(setting: Setting) -> Iterator[Figure]:
    """Races, one after the other; a figure each."""
    how = ["--many", "8"] if setting.thorough else ["--many", "1", "--races", *FEW]
    command = [sys.executable, "-m", "tests.reliability._racers", str(setting.work), "--seed", str(setting.seed), *how]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    for line in map(json.loads, done.stdout.splitlines()):
        tried, lost = line["tried"], line["lost"]
        yield Figure("races", line["race"], tried, tried - lost, tuple(line["failures"]))
