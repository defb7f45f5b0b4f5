"""The local edits of an SGLang: how its files differ from where they came from, without mlapatch's own patches.

Applying and reverting patches changes nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mlapatch.assess import Assessment, File
from mlapatch.engine.textdiff import unified
from mlapatch.errors import MlapatchError
from mlapatch.install.baseline import kept_bytes
from mlapatch.install.journal import Entry, Journal
from mlapatch.install.sources import Origin, Sources
from mlapatch.install.write import sha256


@dataclass(frozen=True)
class Edit:
    """One file as it came and as it is now, without mlapatch's patches; '' and None: not there (or not to be had)."""

    path: str
    original: str
    now: str
    data: bytes | None
    trouble: str = ""  # mlapatch's own lines were changed by hand: the user's edits cannot be told apart

    @property
    def is_local(self) -> bool:
        """Whether the file differs from where it came from."""
        return bool(self.trouble) or self.now != self.original


@dataclass(frozen=True)
class LocalEdits:
    """The local edits of a target: what `guard record` writes down and `guard check` compares."""

    found: Assessment
    origin: Origin | None

    @cached_property
    def sources(self) -> Sources:
        """The files and their origin."""
        return Sources(self.found.target, self.origin)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """What mlapatch applied."""
        return Journal(self.found.target.state_folder).entries()

    @cached_property
    def all(self) -> dict[str, Edit]:
        """Every local edit by path."""
        edits = (self._edit(path, data) for path, data in self.sources.differing.items())
        return {edit.path: edit for edit in edits if edit.is_local}

    def of(self, path: str) -> Edit:
        """One file, edited or not."""
        return self.all[path] if path in self.all else self._edit(path, self.sources.read(path))

    @property
    def label(self) -> str:
        """What the files are compared with, for a sentence."""
        return self.origin.label if self.origin else ""

    def original(self, edit: Edit) -> bytes | None:
        """A file as it came; None where it did not, or where that cannot be had now."""
        if not edit.original or self.origin is None:
            return None
        return kept_bytes(self.found.target, edit.original) or self.origin.content(edit.path)

    def diff(self, edit: Edit) -> str:
        """The file as it came to the file now; '' where its origin is not at hand."""
        original = self.original(edit)
        if edit.trouble or (edit.original and original is None):
            return ""
        return unified(original or b"", edit.data or b"", edit.path)

    def _edit(self, path: str, data: bytes | None) -> Edit:
        original = self.origin.sha256(path) if self.origin else ""
        if data is None:
            return Edit(path, original, "", None)
        whole = self.origin.unix(path, data) if self.origin else data
        if sha256(whole) == original:
            return Edit(path, original, original, whole)
        try:
            data = self._without_patches(path, data)
        except MlapatchError as error:
            return Edit(path, original, sha256(data), data, f"{error.what}\n{error.detail}")
        data = self.origin.unix(path, data) if self.origin else data
        now = sha256(data)
        return Edit(path, original if self.origin else now, now, data)

    def _without_patches(self, path: str, data: bytes) -> bytes:
        entry, file = self.entries.get(path), self.found.files.get(path)
        if entry and sha256(data) == entry.after:
            base = Journal(self.found.target.state_folder).object(entry.base)
            if base is not None:
                return base
        if file is None and entry is None:
            return data
        if entry is None and not any(
            judgement.traces
            for name, judgement in self.found.judgements.items()
            if self.found.catalogue.patches[name].target == path
        ):
            return data
        from mlapatch.rebase import unpatched

        file = file or File(path, self.found.target.file(path), data, entry, "")
        return unpatched(self.found, file).base


def inside_patches(found: Assessment, file: File) -> int:
    """In how many places lines that a patch changed were changed by hand since: `revert` refuses then.

    0 also where nothing says what the patches left (no state folder), or none of them is applied as it should be.
    """
    entry = file.entry
    if entry is None or entry.after == file.sha256 or not set(entry.patches) & set(found.applied(file.relative)):
        return 0
    journal = Journal(found.target.state_folder)
    base, after = journal.object(entry.base), journal.object(entry.after)
    if base is None or after is None:
        return 0
    from mlapatch.engine.merge import Conflict, merge

    merged = merge(after, file.data, base)
    return merged.count if isinstance(merged, Conflict) else 0
