"""Faults at every system call of everything that writes, and every state that a power loss may leave.

The work is done by `_injected`, a process with `_syscalls.c` preloaded: it lets each write path run in a fork, with one
fault at the n-th system call that changes something, and then does what a user does: a status, a revert, and the same
command again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.reliability import _syscalls
from tests.reliability.figures import Figure, Setting

ROOT = Path(__file__).parents[2]
GROUPS = {
    "apply": ("apply", "apply two", "apply another", "apply after an upgrade"),
    "revert": ("revert one", "revert"),
    "guard record": ("guard record", "guard record --replace"),
    "runs (SQLite)": ("the first run", "another run", "runs --import", "runs --export"),
    "caches": ("verdict cache", "wheel cache", "wheel cache, more files", "unpacked wheel"),
    "a server's record and log": ("server record", "server log"),
}
THOROUGH = ["--stride", "4", "--loss-stride", "3", "--killed", "40"]
#: A quick run tries these, and few calls of each.
QUICK = ["--stride", "97", "--loss-stride", "301"]
FEW = ["apply two", "revert one"]
FEW_TOO = [
    "guard record",
    "another run",
    "runs --export",
    "verdict cache",
    "wheel cache",
    "server record",
    "server log",
]


def campaign(setting: Setting) -> Iterator[Figure]:
    """A few processes at once, each with its share of the write paths."""
    library = _syscalls.build(setting.work)
    patching = [path for name in ("apply", "revert") for path in GROUPS[name]]
    if setting.thorough and os.environ.get("MLAPATCH_EVERY_FAULT"):
        others = [path for paths in GROUPS.values() for path in paths if path not in patching]
        shares = [(paths, ["--stride", "1", *THOROUGH[2:]]) for paths in (patching, others)]
    elif setting.thorough:
        others = [path for paths in GROUPS.values() for path in paths if path not in patching]
        shares = [(patching[::2], THOROUGH), (patching[1::2], THOROUGH), (others, ["--stride", "2", *THOROUGH[2:]])]
    else:
        shares = [(FEW, QUICK), (FEW_TOO, QUICK)]
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    running = []
    for number, (paths, how) in enumerate(shares):
        work = setting.work / str(number)
        work.mkdir()
        command = [sys.executable, "-m", "tests.reliability._injected", str(work), *how, "--paths", *paths]
        with (work / "out").open("wb") as out, (work / "err").open("wb") as err:
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=err)
        running.append((process, work))
    lines = []
    for process, work in running:
        if process.wait():
            raise RuntimeError((work / "err").read_text()[-3000:])
        lines += [json.loads(line) for line in (work / "out").read_text().splitlines()]
    yield from _figures(lines)


def _figures(lines: list[dict[str, object]]) -> Iterator[Figure]:
    found: dict[tuple[str, bool], list[dict[str, object]]] = defaultdict(list)
    for group, paths in GROUPS.items():
        for line in lines:
            if line["path"] in paths:
                found[group, line["fault"] == "power loss"].append(line)
    for (group, loss), rows in found.items():
        tried, lost = (sum(int(str(row[name])) for row in rows) for name in ("tried", "lost"))
        failures = tuple(str(one) for row in rows for one in row["failures"])  # type: ignore[attr-defined]
        kind = "a power loss, un-synced bytes and names gone" if loss else "a kill or an error at a system call"
        yield Figure("faults", f"{group}: {kind}", tried, tried - lost, failures[:10])
