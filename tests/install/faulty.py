"""Every step of a write, cut short: run as a program, prints one JSON line a step; see test_faults.py.

An audit hook sees each call that changes the file system below the install. At the n-th one the process dies
(`kill`), that call fails (`once`), or it and all later ones fail (`ever`: a full or read-only disk). Each step runs in
a fork of this process, which has everything parsed already.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlapatch.install.journal
from mlapatch.commands.apply import apply
from mlapatch.commands.revert import revert
from mlapatch.commands.status import status
from mlapatch.errors import MlapatchError
from tests.corpus import BACKEND, RUNNER

KILLED = 99
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.truncate"}
ACTIONS: dict[str, Callable[[Path], Any]] = {
    "apply": lambda site: apply(["gather-cast"], sglang=site),
    "apply two": lambda site: apply(["gather-cast", "profile-decode"], sglang=site),
    "revert": lambda site: revert(sglang=site),
    "revert one": lambda site: revert(["gather-cast"], sglang=site),
}
FIRST: dict[str, list[str]] = {"apply two": [], "revert": ["apply"], "revert one": ["apply two"]}


class Fault:
    """Counts the changes below a folder, and acts at one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.at, self.mode = str(folder), 0, -1, ""
        sys.addaudithook(self.seen)

    def seen(self, event: str, args: tuple[Any, ...]) -> None:
        if self.at < 0 or not self.is_change(event, args):
            return
        self.count += 1
        if self.count == self.at and self.mode == "kill":
            os._exit(KILLED)
        if self.count == self.at or (self.mode == "ever" and self.count > self.at):
            raise OSError(errno.ENOSPC, "No space left on device", self.folder)

    def is_change(self, event: str, args: tuple[Any, ...]) -> bool:
        if event in CHANGES:
            return isinstance(args[0], int) or os.fspath(args[0]).startswith(self.folder)
        if event != "open" or isinstance(args[0], int):
            return False
        flags = args[2] if isinstance(args[2], int) else 0
        return str(args[0]).startswith(self.folder) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def digests(site: Path) -> list[str]:
    return [hashlib.sha256((site / path).read_bytes()).hexdigest() for path in (BACKEND, RUNNER)]


def leftovers(site: Path) -> list[str]:
    return [str(path.relative_to(site)) for path in (site / "sglang").rglob("*mlapatch-tmp")]


def attempt(fault: Fault, site: Path, action: str, mode: str, at: int) -> int:
    """The action in a fork, with a fault; its exit code (98: no fault was reached)."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 97
    try:
        fault.mode, fault.at = mode, at
        ACTIONS[action](site)
        code = 98 if fault.count < at else 0
    except MlapatchError as error:
        code = int(error.exit)
    except OSError as error:
        print(json.dumps({"raw": repr(error), "action": action, "mode": mode, "at": at}), flush=True)
    finally:
        os._exit(code)


def main(tree: Path, work: Path, action: str, modes: list[str]) -> None:
    mlapatch.install.journal.LOCK_SECONDS = 0.2
    site, prepared = work / "site", work / "before"
    shutil.copytree(tree, site)
    original = digests(site)
    for earlier in FIRST[action]:
        ACTIONS[earlier](site)
    shutil.copytree(site, prepared)
    old = digests(site)
    ACTIONS[action](site)
    new = digests(site)
    fault = Fault(site)
    for mode in modes:
        for at in range(1, 200):
            shutil.rmtree(site)
            shutil.copytree(prepared, site)
            code = attempt(fault, site, action, mode, at)
            if code == 98:
                break
            print(json.dumps(aftermath(site, code, action, mode, at, old, new, original)), flush=True)


def aftermath(
    site: Path, code: int, action: str, mode: str, at: int, old: list[str], new: list[str], original: list[str]
) -> dict[str, Any]:
    """What a user finds afterwards: the bytes, a status, the same command again, and everything reverted."""
    now = digests(site)
    sides = [
        {o: "old", n: "new"}.get(d, "neither") if o != n else "same" for d, o, n in zip(now, old, new, strict=True)
    ]
    verdicts = [str(patch["verdict"]) for patch in status(sglang=site).data["patches"]]  # type: ignore[attr-defined]
    ACTIONS[action](site)
    again = digests(site) == new
    revert(sglang=site)
    return {
        "action": action, "mode": mode, "at": at, "exit": code, "sides": sides, "verdicts": verdicts, "again": again,
        "reverted": digests(site) == original, "leftovers": leftovers(site),
    }  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
