"""Which files of a package differ from where it came from: RECORD for a wheel, HEAD for a checkout, the same answers.

Every file is read and hashed: a size, a time or git's index would each miss an edit that a tool put back or that
`git update-index --assume-unchanged` hides. Compiled files and caches are not sources.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.target import Target
from mlapatch.install.write import sha256

_COMPILED = (".pyc", ".pyo", ".so")
_SOURCES = (
    *(".py", ".json", ".jinja", ".jinja2", ".toml", ".yaml"),
    *(".cu", ".cuh", ".h", ".hpp", ".c", ".cc", ".cpp", ".hip"),
)
#: Written by SGLang's own build into a checkout.
_GENERATED = ("_version.py", "_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True)
class Origin:
    """Where the package came from: the digest of each file, by path inside the package.

    `label` names it in a sentence, `commit` is set for a checkout. `complete`: it lists every file, so another one was
    added by somebody.
    """

    label: str
    digests: Mapping[str, str]
    digest: Callable[[bytes], str]
    read: Callable[[Collection[str]], Mapping[str, bytes]]
    commit: str = ""
    complete: bool = True
    wanted: set[str] = field(default_factory=set)  # read together with the first one, in one visit of the wheel
    kept: dict[str, bytes | None] = field(default_factory=dict)

    def content(self, relative: str) -> bytes | None:
        """A file as it came; None where it has none of that name, or where it cannot be had now (offline)."""
        if relative not in self.digests:
            return None
        if relative not in self.kept:
            names = {relative, *(self.wanted & self.digests.keys())} - self.kept.keys()
            found = self.read(names)
            self.kept.update({name: found.get(name) for name in names})
        return self.kept[relative]

    def holds(self, relative: str, data: bytes) -> bool:
        """Whether a file came as these bytes, or as these with other line endings."""
        digest = self.digests.get(relative)
        return self.digest(data) == digest or (
            bool(self.commit) and b"\r\n" in data and self.digest(data.replace(b"\r\n", b"\n")) == digest
        )

    def unix(self, relative: str, data: bytes) -> bytes:
        """A working file with the line endings of its origin (`core.autocrlf` changes them in a checkout)."""
        if not self.commit or b"\r\n" not in data:
            return data
        origin = self.content(relative)
        return data.replace(b"\r\n", b"\n") if origin is not None and b"\r\n" not in origin else data

    def sha256(self, relative: str) -> str:
        """sha256 of a file as it came; '' where it has none of that name."""
        if relative not in self.digests:
            return ""
        if not self.commit:
            return self.digests[relative]
        origin = self.content(relative)
        return sha256(origin) if origin is not None else self.digests[relative]


@dataclass(frozen=True)
class Sources:
    """The files of a target's package, compared with their origin (None: nothing says what they were)."""

    target: Target
    origin: Origin | None

    def read(self, relative: str) -> bytes | None:
        """A file's bytes now; None where it is gone. MlapatchError (exit 5) where it cannot be read."""
        try:
            return _regular(self.target.file(relative))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise MlapatchError(
                Exit.ENVIRONMENT,
                "a file cannot be read",
                where=str(error.filename),
                found=str(error.strerror),
                next="run as the user who may read it",
            ) from None

    @cached_property
    def differing(self) -> dict[str, bytes | None]:
        """Each file that is not as it came, with its bytes now (None: deleted), mlapatch's own edits included."""
        origin = self.origin
        if origin is None:
            return {}
        found: dict[str, bytes | None] = {}
        for path in origin.digests:
            if not path.endswith(_COMPILED):
                data = self.read(path)
                if data is None or not origin.holds(path, data):
                    found[path] = data
        if origin.complete:
            added = (path for path in _walk(self.target) if path not in origin.digests and _is_source(path))
            found.update({path: self.read(path) for path in added})
        origin.wanted.update(found)
        return found


def origin_of(target: Target, *, fetch: bool) -> Origin | None:
    """RECORD, else HEAD, else the wheel of the same version. Without `fetch` no wheel is asked for over the network."""
    if target.install == "wheel" and target.record:
        return _of_record(target, target.record, fetch)
    if target.repository is not None and (found := _of_head(target)):
        return found
    return _of_wheel(target, fetch)


def origin_among(target: Target, paths: Collection[str]) -> Origin:
    """RECORD of a wheel install for a few files only: the others' lines are not even parsed."""
    said = {f"{target.package.name}/{path}": target.recorded_sha256(path) for path in paths}
    return _of_record(target, {path: digest for path, digest in said.items() if digest}, False, complete=False)


def _of_record(target: Target, record: Mapping[str, str], fetch: bool, *, complete: bool = True) -> Origin:
    inside = f"{target.package.name}/"
    digests = {path.removeprefix(inside): digest for path, digest in record.items() if path.startswith(inside)}

    def read(names: Collection[str]) -> Mapping[str, bytes]:
        from mlapatch.install.wheels import WheelStore

        store, paths = WheelStore.default(), [inside + name for name in names]
        if target.version is None or not (fetch or store.has(target.version, paths)):
            return {}
        try:
            found = store.files(target.version, paths).files
        except MlapatchError:  # offline, or a build that is on no index
            return {}
        return {n: found[inside + n] for n in names if inside + n in found and sha256(found[inside + n]) == digests[n]}

    return Origin(f"the wheel of SGLang {target.version}", digests, sha256, read, complete=complete)


def _of_head(target: Target) -> Origin | None:
    from mlapatch.install.git import committed_bytes, committed_files, head_commit
    from mlapatch.install.gitobjects import blob_id

    repository = target.repository
    assert repository is not None  # noqa: S101
    commit, folder = head_commit(repository), target.package.relative_to(repository).as_posix()
    digests = committed_files(repository, commit, folder) if commit else None
    if not digests:  # an empty repository, or one that does not know the package
        return None
    like = next(iter(digests.values()))

    def read(names: Collection[str]) -> Mapping[str, bytes]:
        found = {name: committed_bytes(repository, commit, f"{folder}/{name}") for name in names}
        return {name: data for name, data in found.items() if data is not None}

    return Origin(
        f"commit {commit[:12]}",
        digests,
        lambda data: blob_id(data, like),
        read,
        commit=commit,
    )


def _of_wheel(target: Target, fetch: bool) -> Origin | None:
    from mlapatch.install.wheels import WheelStore

    if target.version is None:
        return None
    store = WheelStore.default()
    try:
        if not fetch and not store.has(target.version, []):
            return None
        return _of_record(target, store.files(target.version, []).record, fetch, complete=False)
    except MlapatchError:
        return None


def _regular(path: Path) -> bytes:
    """The bytes of a file; OSError for what only has a file's name: reading a FIFO or a device might never end."""
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:  # half the time of Path.open
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _walk(target: Target) -> Iterator[str]:
    """Every file below the package, by path inside it."""
    pending = [str(target.package)]
    cut = len(pending[0]) + 1
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name != "__pycache__":
                            pending.append(entry.path)
                    else:
                        yield entry.path[cut:]
        except OSError:  # a folder that vanished or cannot be entered; its files are missed one by one
            continue


def _is_source(path: str) -> bool:
    return path.endswith(_SOURCES) and not path.endswith(_GENERATED)
