"""Where PYTHONPYCACHEPREFIX keeps the compiled files of a folder: under the path that was imported, by any name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("site-packages", "dist-packages")
_MOST = 20_000


def mirrors(prefix: Path, folder: Path) -> Iterator[Path]:
    """The folders below the prefix that stand for `folder`: by its own path first, then by every link that leads to it.

    `/opt/venv -> /opt/venv-2` is the usual one: the server's compiled files are under `/opt/venv` then. Other packages
    are not visited, nor more than 20,000 folders.
    """
    own = prefix / folder.relative_to(folder.anchor)
    yield own
    real, parts = folder.resolve(), set(folder.parts)
    pending = [(prefix, Path(folder.anchor))]
    for _ in range(_MOST):
        if not pending:
            return
        here, named = pending.pop()
        for name in _folders(here):
            if here.name in _PACKAGES and name not in parts:
                continue
            if (named / name).resolve() != real:
                pending.append((here / name, named / name))
            elif here / name != own:
                yield here / name


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
