"""The state beside the package: the original bytes by sha256, and a journal of what was applied to which file.

It is a hint. Every verdict comes from the bytes of the file; the journal says how to get back.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlapatch.disk import (
    TEMPORARY,
    drop_leftovers,
    environment_errors,
    make_folder,
    sync_folder,
    write_atomically,
)
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.write import Staged, replace_file, sha256, stage
from mlapatch.jsontext import parsed_object

LOCK_SECONDS = 30.0
FORMAT = 1
WRITTEN: set[Path] = set()
"""Files that this process has given new bytes, for whoever must say what an interruption left."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """One patched file: the sha256 of its bytes without and with the patches, and the patches by name and digest."""

    base: str
    after: str
    sglang: str
    patches: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {"base": self.base, "after": self.after, "sglang": self.sglang, "patches": dict(self.patches)}


@dataclass(frozen=True)
class Change:
    """One file's step: from `old` to `new` bytes, and the entry to keep (None: forget the file)."""

    relative: str
    path: Path
    old: bytes
    new: bytes
    entry: Entry | None
    kept: Mapping[str, bytes] = field(default_factory=dict)  # objects to keep, by sha256


class Journal:
    """The state folder. Reading needs no lock; `transaction` is the one writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def raw(self) -> bytes:
        """The journal's own bytes; empty where there is none."""
        try:
            return (self.folder / "journal.json").read_bytes()
        except OSError:
            return b""

    def entries(self, raw: bytes | None = None, found: Mapping[str, str] | None = None) -> dict[str, Entry]:
        """What is applied, by file; an interrupted transaction counts for the files that it reached.

        `raw` and `found` (sha256 by file) are what was read at one moment, else both are read now.
        """
        try:
            return _entries(self._read(raw), found or {})
        except (AttributeError, KeyError, TypeError, ValueError):  # damaged: as good as none
            return {}

    def object(self, digest: str) -> bytes | None:
        """Kept bytes, proven by their sha256."""
        if not _DIGEST.fullmatch(digest):  # a damaged journal can name any file
            return None
        try:
            data = (self.folder / "objects" / digest).read_bytes()
        except OSError:
            return None
        return data if sha256(data) == digest else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One writer at a time; MlapatchError (exit 5) where another one does not finish."""
        if self.folder.is_symlink():  # a checkout can bring one: what it leads to is not ours to write to
            raise MlapatchError(
                Exit.ENVIRONMENT,
                "the state folder is a link, and mlapatch writes through none; nothing was changed",
                where=str(self.folder),
                found=f"a link to {self.folder.readlink()}",
                next="remove the link, then run the same command again",
            )
        with environment_errors(self.folder.parent):
            make_folder(self.folder)
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / "lock")
        with environment_errors(self.folder):
            try:
                lock.acquire(timeout=LOCK_SECONDS)
            except Timeout:  # an OSError too
                raise MlapatchError(
                    Exit.ENVIRONMENT,
                    "another mlapatch is writing to this SGLang",
                    where=str(self.folder / "lock"),
                    next="wait for it to end, then run the same command again",
                ) from None
            except NotImplementedError:  # older releases of filelock have nothing to fall back to
                raise MlapatchError(
                    Exit.ENVIRONMENT,
                    "this file system knows no file locks; nothing was changed",
                    where=str(self.folder / "lock"),
                    next="pip install -U filelock, then run the same command again from one node only",
                ) from None
        try:
            with environment_errors(self.folder):
                self._settle()
            yield
        finally:
            with contextlib.suppress(OSError):  # the end of the process gives it back
                lock.release()

    def repair(self) -> None:
        """Take back what a kill left half done, where there is something and the state can be written."""
        if self._pending() or any(self.folder.rglob(f"*{TEMPORARY}")):
            with contextlib.suppress(MlapatchError), self.locked():
                pass

    def _settle(self) -> None:
        """Under the lock: what a kill left half-written goes, and an interrupted transaction becomes what it did."""
        ignore = self.folder / ".gitignore"
        if not ignore.exists():
            write_atomically(ignore, b"*\n")
        for folder in (self.folder, self.folder / "objects", self.folder / "guard"):
            drop_leftovers(folder)
        if pending := self._pending():
            for step in pending.values():
                path = Path(step["path"])
                drop_leftovers(path.parent, path.name)
                if path.parent.is_dir():
                    sync_folder(path.parent)  # the kill may have come between the rename and its sync
            self._write(self.entries(), {})

    def _pending(self) -> dict[str, Any]:
        kept = self._read()
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            _entries(kept, {})
            return dict(kept["pending"]) if kept.get("format") == FORMAT else {}
        return {}

    def commit(self, changes: list[Change]) -> None:
        """Carry out changes: objects first, then the intent, then each file, then the record of it.

        A kill leaves each file old or new, and the journal knows which by its bytes. An error undoes the files done.
        """
        with environment_errors(self.folder.parent):
            self._refuse_newer()
            entries = self.entries()
            self._keep({digest: data for change in changes for digest, data in change.kept.items()})
            pending = {
                c.relative: {"path": str(c.path), "new": sha256(c.new), "entry": c.entry and c.entry.as_dict()}
                for c in changes
            }
            self._write(entries, pending)
            self._replace([change for change in changes if change.new != change.old], entries)
            listed = {**entries, **{c.relative: c.entry for c in changes}}
            after = {name: entry for name, entry in listed.items() if entry is not None}
            with contextlib.suppress(OSError):  # the intent says as much, and the next writer settles it
                self._write(after, {})
                self._forget(entries, after)

    def _replace(self, changes: list[Change], entries: Mapping[str, Entry]) -> None:
        """Every file or none: all are written beside before the first takes its name."""
        staged: list[Staged] = []
        done: list[Change] = []
        try:
            for change in changes:
                WRITTEN.add(change.path)
                staged.append(stage(change.path, change.new, found=sha256(change.old)))
            for one, change in zip(staged, changes, strict=True):
                done.append(change)
                one.place()
        except BaseException as error:
            for one in staged:
                one.drop()
            self._undo(done, entries, error)
            WRITTEN.difference_update(change.path for change in changes)
            raise

    def _undo(self, done: list[Change], entries: Mapping[str, Entry], error: BaseException) -> None:
        changed = [change for change in done if _sha256_of(change.path) == sha256(change.new)]
        try:
            for change in reversed(changed):
                replace_file(change.path, change.old, found=sha256(change.new))
        except OSError as second:
            raise MlapatchError(
                Exit.ENVIRONMENT,
                f"cannot write: {getattr(error, 'strerror', None) or error}; nor can what was written be undone",
                where=str(second.filename or changed[-1].path),
                found=f"each file is whole, old or new; with the patches of this command: {_new_among(changed)}",
                next="mend the disk; then run the same command again, or mlapatch revert",
            ) from None
        with contextlib.suppress(OSError):  # the files are the old ones: the intent counts for none of them
            self._write(entries, {})

    def _read(self, raw: bytes | None = None) -> dict[str, Any]:
        try:
            return parsed_object(self.raw if raw is None else raw)
        except ValueError:
            return {}

    def _refuse_newer(self) -> None:
        """Never write over the state of a newer mlapatch: it may be the only place that has the original bytes."""
        kept = self._read().get("format", FORMAT)
        if kept != FORMAT:
            raise MlapatchError(
                Exit.ENVIRONMENT,
                "the state was written by another version of mlapatch; nothing was changed",
                where=str(self.folder),
                expected=f"format {FORMAT}",
                found=f"format {kept}",
                next="use the mlapatch that wrote it, or move the folder away (status works without it)",
            )

    def _write(self, entries: Mapping[str, Entry], pending: Mapping[str, Any]) -> None:
        kept = {
            "format": FORMAT,
            "targets": {name: entry.as_dict() for name, entry in entries.items()},
            "pending": dict(pending),
        }
        write_atomically(self.folder / "journal.json", json.dumps(kept, indent=1).encode())

    def _keep(self, contents: Mapping[str, bytes]) -> None:
        folder = self.folder / "objects"
        make_folder(folder)
        for digest, data in contents.items():
            if self.object(digest) is None:
                write_atomically(folder / digest, data)
        sync_folder(folder)  # one that is there may be of a kill between its rename and its sync

    def _forget(self, before: Mapping[str, Entry], after: Mapping[str, Entry]) -> None:
        """Drop objects that this step made needless, and half-written ones of kills.

        What no journal speaks of stays: it may be the only copy of an original that a damaged journal named.
        """
        needless = _digests(before) - _digests(after)
        with contextlib.suppress(OSError):
            for item in (self.folder / "objects").iterdir():
                if item.name in needless or item.name.endswith(TEMPORARY):
                    item.unlink()


def _digests(entries: Mapping[str, Entry]) -> set[str]:
    return {digest for e in entries.values() for digest in (e.base, e.after, *e.patches.values())}


def _entries(kept: Mapping[str, Any], found: Mapping[str, str]) -> dict[str, Entry]:
    if kept.get("format") != FORMAT:
        return {}
    entries = {name: _entry(value) for name, value in kept.get("targets", {}).items()}
    for name, step in kept.get("pending", {}).items():
        if (found.get(name) or _sha256_of(Path(step["path"]))) == step["new"]:
            entries.pop(name, None)
            if step["entry"]:
                entries[name] = _entry(step["entry"])
    return entries


def _entry(kept: Mapping[str, Any]) -> Entry:
    patches = {str(name): str(digest) for name, digest in kept["patches"].items()}
    return Entry(str(kept["base"]), str(kept["after"]), str(kept["sglang"]), patches)


def _new_among(changes: list[Change]) -> str:
    still = [change.relative for change in changes if _sha256_of(change.path) == sha256(change.new)]
    return ", ".join(still) or "none"


def _sha256_of(path: Path) -> str:
    try:
        return sha256(path.read_bytes()) if path.is_file() else ""
    except OSError:
        return ""
