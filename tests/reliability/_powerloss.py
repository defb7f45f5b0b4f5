"""What a power loss may leave: recorded changes, replayed on a disk that keeps only what was synced, plus some more.

Harsher than any one file system. Between two syncs of a folder, each change of a name in it may be on disk or not,
whatever their order; a file's bytes since its last sync may be there, gone, half there, or zero bytes long. A rename
is one step.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.reliability._syscalls import Event

FEW = 4  # up to so many open changes of names, every subset of them is tried


@dataclass
class Content:
    """One file's bytes: as they are, and as they were at its last sync (None: never)."""

    now: bytearray
    synced: bytes | None

    @property
    def dirty(self) -> bool:
        return self.synced is None or self.now != self.synced

    def left(self, how: str) -> bytes:
        synced = self.synced or b""
        if not self.dirty or how == "all":
            return bytes(self.now)
        if how == "half":
            return (
                bytes(self.now[: max(len(synced), len(self.now) // 2)]) if synced == self.now[: len(synced)] else synced
            )
        return b"" if how == "empty" and self.synced is None else synced


@dataclass
class Step:
    """One change of names that is not on disk yet; `content` None: a folder."""

    folder: str
    gone: str = ""
    name: str = ""
    content: Content | None = None


Names = dict[str, "Content | None"]


@dataclass
class Disk:
    """What programs see (`names`), what is surely on disk (`kept`), and what is on its way (`open`)."""

    names: Names = field(default_factory=dict)
    kept: Names = field(default_factory=dict)
    open: list[Step] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> Disk:
        """Everything in a folder, safely on disk."""
        names: Names = {str(root): None}
        for path in sorted(root.rglob("*")):
            data = None if path.is_dir() else path.read_bytes()
            names[str(path)] = None if data is None else Content(bytearray(data), data)
        return cls(names, dict(names))

    def take(self, event: Event) -> None:
        """Do one change."""
        path = event.path.removesuffix(" (deleted)")
        content = self.names.get(path)
        if event.what == "create":
            self._step(Step(_folder(path), name=path, content=Content(bytearray(), None)))
        elif event.what == "mkdir":
            self._step(Step(_folder(path), name=path))
        elif event.what == "unlink":
            self._step(Step(_folder(path), gone=path))
        elif event.what == "rename":
            self._step(Step(_folder(event.other), event.path, event.other, content))
        elif event.what == "sync" and content is not None:
            content.synced = bytes(content.now)
        elif event.what == "sync":
            self._settle(path)
        elif content is not None and event.what in ("empty", "truncate"):
            size = event.offset if event.what == "truncate" else 0
            content.now[:] = content.now[:size].ljust(size, b"\0")
        elif content is not None and event.what == "write":
            content.now[:] = content.now.ljust(event.offset, b"\0")
            content.now[event.offset : event.offset + len(event.data)] = event.data

    def _step(self, step: Step) -> None:
        _do(self.names, step)
        self.open.append(step)

    def _settle(self, folder: str) -> None:
        for step in self.open:
            if step.folder == folder:
                _do(self.kept, step)
        self.open = [step for step in self.open if step.folder != folder]

    def losses(self) -> Iterator[dict[str, bytes | None]]:
        """Every tree that a power loss now may leave: paths and bytes, None for folders."""
        for chosen in _choices(self.open):
            names = dict(self.kept)
            for step in chosen:
                _do(names, step)
            reachable = {path: what for path, what in names.items() if _has_folders(path, names)}
            dirty = any(what is not None and what.dirty for what in reachable.values())
            for how in ("all", "half", "synced", "empty") if dirty else ("all",):
                yield {path: None if what is None else what.left(how) for path, what in reachable.items()}


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _do(names: Names, step: Step) -> None:
    if step.gone:
        names.pop(step.gone, None)
    if step.name:
        names[step.name] = step.content


def _choices(steps: list[Step]) -> Iterable[list[Step]]:
    if len(steps) <= FEW:
        return (list(some) for n in range(len(steps) + 1) for some in itertools.combinations(steps, n))
    some = [steps[:n] for n in range(len(steps) + 1)] + [steps[n:] for n in range(len(steps))]
    some += [[step] for step in steps] + [[s for s in steps if s is not step] for step in steps]
    folders = {step.folder for step in steps}
    return some + [[step for step in steps if step.folder == folder] for folder in folders]


def _has_folders(path: str, names: Names) -> bool:
    root = min(names, key=len)
    while path != root:
        path = _folder(path)
        if names.get(path, path) is not None:
            return False
    return True


def states(root: Path, before: Path, events: list[Event]) -> Iterator[tuple[int, bool, dict[str, bytes | None]]]:
    """Each different tree that a loss may leave: after how many events, whether after the last, and the tree.

    `before` has what was in `root` at the first event.
    """
    disk = Disk.of(before)
    there = {path.replace(str(before), str(root), 1): what for path, what in disk.names.items()}
    disk = Disk(there, dict(there))
    seen: set[bytes] = set()
    for number in range(len(events) + 1):
        last = number == len(events)
        for tree in disk.losses():
            mark = hashlib.sha256(bytes(last))
            for path, data in sorted(tree.items()):
                mark.update(path.encode() + (b"/" if data is None else hashlib.sha256(data).digest()))
            if mark.digest() not in seen:
                seen.add(mark.digest())
                yield number, last, tree
        if not last:
            disk.take(events[number])


def lay_out(root: Path, tree: dict[str, bytes | None]) -> None:
    """Make a folder have exactly such a tree. Times are new, as after a restore."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, data in sorted(tree.items()):
        path = Path(name)
        if data is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(data)
