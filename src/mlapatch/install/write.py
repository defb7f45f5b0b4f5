"""The only place that writes to an installed SGLang: one file at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlapatch.disk import drop_leftovers, escaped, sync_folder, written_beside
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.mirrors import mirrors


def sha256(data: bytes) -> str:
    """Hex sha256."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Staged:
    """New bytes of a file, on disk beside it under another name; `place` gives them the name."""

    path: Path
    temporary: Path
    found: str

    def place(self) -> None:
        """Take the name in one step, if the file is still the one that was found."""
        _refuse_changed(self.path, self.found)
        drop_bytecode(self.path)
        self.temporary.replace(self.path)
        sync_folder(self.path.parent)
        drop_bytecode(self.path)

    def drop(self) -> None:
        """Forget the bytes; nothing where they were placed."""
        with contextlib.suppress(OSError):
            self.temporary.unlink()


def replace_file(path: Path, data: bytes, *, found: str) -> None:
    """Replace a file's bytes if they still have the sha256 `found`; mode and owner are kept."""
    staged = stage(path, data, found=found)
    try:
        staged.place()
    except BaseException:
        staged.drop()
        raise


def stage(path: Path, data: bytes, *, found: str) -> Staged:
    """Write new bytes beside a file, synced, with its mode and owner; the lock must be ours.

    They take the name later and in one step, so a hard link's other names and a symlink's target keep theirs; and a
    full disk or a folder that cannot be written to shows before any file of a transaction is touched.
    """
    _refuse_changed(path, found)
    drop_leftovers(path.parent, path.name)
    return Staged(path, written_beside(path, data, path.stat()), found)


def _refuse_changed(path: Path, found: str) -> None:
    current = sha256(path.read_bytes())
    if current != found:
        raise MlapatchError(
            Exit.REFUSED,
            "the file changed while mlapatch was working; nothing was written",
            where=str(path),
            expected=f"sha256 {found[:16]}",
            found=f"sha256 {current[:16]}",
            next="run the same command again",
        )


def drop_bytecode(path: Path) -> None:
    """Remove the compiled forms of a source file, of every interpreter and optimisation level, for good.

    A restored file can have the size and time of the one that was compiled, and an unchecked-hash .pyc is never
    compared with its source at all: one that a power loss brings back beside other bytes would run.
    """
    for folder in bytecode_folders(path.parent):
        for compiled in folder.glob(f"{escaped(path.stem)}.*.pyc"):
            with contextlib.suppress(FileNotFoundError):
                compiled.unlink()
        with contextlib.suppress(FileNotFoundError):
            sync_folder(folder)


def bytecode_folders(folder: Path) -> Iterator[Path]:
    """`__pycache__` beside the sources, and the same folder under PYTHONPYCACHEPREFIX."""
    yield folder / "__pycache__"
    for prefix in {os.environ.get("PYTHONPYCACHEPREFIX"), sys.pycache_prefix}:
        if prefix:
            yield from mirrors(Path(prefix), folder)
