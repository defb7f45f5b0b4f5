"""What a server that starts would run of a file that is being patched."""

from __future__ import annotations

import hashlib
import importlib.machinery
import marshal
import os
import time
from typing import Any

from tests.corpus import BACKEND
from tests.reliability._world import World, digest


class SlowLoader(importlib.machinery.SourceFileLoader):
    """Python's own loader, with its .pyc, which pauses where a writer can come in between."""

    def path_stats(self, path: str) -> Any:
        found = super().path_stats(path)
        time.sleep(os.getpid() % 3 * 0.004)
        return found

    def set_data(self, path: str, data: Any, **more: Any) -> None:
        time.sleep(os.getpid() % 5 * 0.004)
        super().set_data(path, data, **more)


def code_of(world: World) -> str:
    """What an import of the file would run."""
    loader = SlowLoader("raced", str(world.site / BACKEND))
    return hashlib.sha256(marshal.dumps(loader.get_code("raced"))).hexdigest()


def imported(world: World, codes: dict[str, str]) -> str:
    path = world.site / BACKEND
    before = (digest(path), path.stat().st_mtime_ns)
    code = code_of(world)
    after = (digest(path), path.stat().st_mtime_ns)
    if code not in codes.values():
        return "code that is neither old nor new"
    return "" if before != after or codes[before[0]] == code else "the code of a stale .pyc"
