"""A repository's objects read without the git program: HEAD, its tree and its blobs, through gitdb.

For machines that have no git, and for checkouts that git refuses to look at (another owner, before git 2.38). SHA-256
repositories and the reftable format are not read: the answer is None, as where there is no repository.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Objects:
    """The objects of the repository whose work tree is a folder (worktrees, submodules and alternates too)."""

    def __init__(self, work_tree: Path) -> None:
        self.git_dir = _git_dir(work_tree)
        self.common = self.git_dir
        with contextlib.suppress(OSError):
            self.common = self.git_dir / (self.git_dir / "commondir").read_text("utf-8").strip()
        self._store: Any = None

    def head(self) -> str:
        """The id of the commit that HEAD names ('' without one)."""
        name = _line(self.git_dir / "HEAD")
        for _ in range(5):  # a symbolic ref may name another one
            if not name.startswith("ref: "):
                return name
            ref = name.removeprefix("ref: ")
            name = _line(self.git_dir / ref) or _line(self.common / ref) or self._packed_ref(ref)
        return ""

    def tree(self, commit: str, folder: str) -> dict[str, str] | None:
        """The id of every file below a folder of a commit, by path inside the folder; None where it cannot be read."""
        try:
            return dict(self._files(self._at(commit, folder), ""))
        except (KeyError, ValueError, OSError):
            return None

    def blob(self, commit: str, path: str) -> bytes | None:
        """A file's bytes in a commit; None where it is not there or cannot be read."""
        try:
            return self._read(self._at(commit, path))
        except (KeyError, ValueError, OSError):
            return None

    def _at(self, commit: str, path: str) -> str:
        """The id of what stands at a path of a commit."""
        head, _, _ = self._read(commit).partition(b"\n")
        found = head.removeprefix(b"tree ").decode()
        for part in path.split("/"):
            found = {name: identity for _, name, identity in _entries(self._read(found))}[part]
        return found

    def _files(self, tree: str, prefix: str) -> Iterator[tuple[str, str]]:
        for mode, name, found in _entries(self._read(tree)):
            if mode == b"40000":
                yield from self._files(found, f"{prefix}{name}/")
            elif mode.startswith(b"100"):
                yield prefix + name, found

    def _read(self, identity: str) -> bytes:
        from gitdb.db import GitDB
        from gitdb.exc import ODBError

        try:
            if self._store is None:
                self._store = GitDB(str(self.common / "objects"))
            return bytes(self._store.stream(bytes.fromhex(identity)).read())
        except (ODBError, AssertionError, TypeError) as error:
            raise KeyError(identity) from error

    def _packed_ref(self, ref: str) -> str:
        with contextlib.suppress(OSError):
            for line in (self.common / "packed-refs").read_text("utf-8").splitlines():
                identity, _, name = line.partition(" ")
                if name == ref:
                    return identity
        return ""


def _git_dir(work_tree: Path) -> Path:
    """`.git`, or the folder that a `.git` file names (worktrees and submodules)."""
    link = work_tree / ".git"
    named = _line(link)
    return work_tree / named.removeprefix("gitdir: ") if named.startswith("gitdir: ") else link


def _line(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _entries(tree: bytes) -> Iterator[tuple[bytes, str, str]]:
    """Mode, name and id of each entry of a tree object."""
    at = 0
    while at < len(tree):
        end = tree.index(b"\0", at)
        mode, _, name = tree[at:end].partition(b" ")
        yield mode, name.decode("utf-8", "surrogateescape"), tree[end + 1 : end + 21].hex()
        at = end + 21


def blob_id(data: bytes, like: str) -> str:
    """The id that git gives to a file's bytes; `like` is another id of the repository (SHA-1 or SHA-256)."""
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(usedforsecurity=False)
    digest.update(b"blob %d\0" % len(data))
    digest.update(data)
    return digest.hexdigest()
