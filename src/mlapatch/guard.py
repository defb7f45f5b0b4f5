"""The guard: are the local edits of a baseline still there, and is there no other? Diffs are compared, not words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mlapatch.assess import Assessment
from mlapatch.engine.textdiff import hunks, patched, unified
from mlapatch.install.baseline import WATCHED, Baseline, Recorded, find_baseline, kept_bytes, load_baseline
from mlapatch.install.sources import origin_among, origin_of
from mlapatch.install.write import sha256
from mlapatch.local_edits import Edit, LocalEdits


class State(str, Enum):
    """What became of one file's local edit."""

    UNTOUCHED = "untouched"  # as recorded
    UNEDITED = "unedited"  # watched, and without an edit
    GONE = "gone"
    CHANGED = "changed"
    NEW = "new"  # not in the baseline
    COMMITTED = "committed"  # part of the commit (or release) now: no local edit any more

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class GuardedFile:
    """One file, its state and why, and the diff to show: the recorded bytes to the ones now, where both are here."""

    path: str
    state: State
    reason: str
    diff: str = ""

    @property
    def fine(self) -> bool:
        """Whether this file is as the baseline says."""
        return self.state in (State.UNTOUCHED, State.UNEDITED)


SHOWN = 6
"""Files that one line names."""


@dataclass(frozen=True)
class GuardReport:
    """Every file that the baseline names or that has a local edit; what it all comes to.

    `state` is `clean`, `violated`, or `unrecorded` (no baseline). `origin` names what the files were compared with.
    """

    state: str
    has_local_edits: bool
    files: tuple[GuardedFile, ...]
    baseline: Path | None = None
    origin: str = ""
    trouble: str = ""  # why nothing could be compared
    complete: bool = True  # every file of the package was looked at
    unseen: tuple[str, ...] = ()  # edited targets that were not looked into

    @property
    def refuses(self) -> bool:
        """Whether `guard check` and `launch` stop with exit 4."""
        return self.state == "violated" or (self.state == "unrecorded" and self.has_local_edits)

    @property
    def text(self) -> str:
        """One line for people."""
        named = [f"{file.path} ({file.state})" for file in self.files if not file.fine]
        more = f", and {len(named) - SHOWN} more (mlapatch guard check)" if len(named) > SHOWN else ""
        wrong = ", ".join(named[:SHOWN]) + more
        if self.state == "violated":
            return f"violated: {wrong or self.trouble}" + (f"; baseline {self.baseline}" if self.baseline else "")
        if self.state == "clean":
            count = sum(file.state is State.UNTOUCHED for file in self.files)
            return f"clean: {count} edited file(s) as in {self.baseline}"
        if wrong:
            return f"local edits that no baseline records: {wrong}"
        if not self.origin:
            return "no baseline"
        if self.complete:
            return "no baseline, and no local edit"
        if self.unseen:
            return f"no baseline; not looked into: {', '.join(self.unseen)} (`mlapatch guard check` looks at all)"
        return "no baseline; no local edit in the files looked at (`mlapatch guard check` looks at all)"

    def as_json(self) -> dict[str, object]:
        """The `guard` of `status --json`."""
        files = [{"path": f.path, "state": str(f.state), "reason": f.reason} for f in self.files]
        where = {"baseline": str(self.baseline or ""), "origin": self.origin}
        return {"state": self.state, **where, "complete": self.complete, "files": files}


def guard_state(found: Assessment, *, file: Path | None = None, scan: bool = True, fetch: bool = False) -> GuardReport:
    """Compare an SGLang with its baseline (`file`, else the first of `default_places`). Writes nothing.

    Without `scan` (`status`, which must be quick) and without a baseline only the watched files of a wheel are looked
    at, and targets that have no patch and are not the release's. `fetch`: the package index may be asked for the
    release's wheel, for the diffs that need it. MlapatchError: exit 2 where `file` is missing, 4 where a baseline
    cannot be read, 5 where a file of SGLang cannot be.
    """
    path = find_baseline(found.target, file)
    if path is None:
        return _unrecorded(found, scan, fetch)
    edits = LocalEdits(found, origin_of(found.target, fetch=fetch))
    files = tuple(Comparison(load_baseline(path), edits).files())
    state = "clean" if all(one.fine for one in files) else "violated"
    return GuardReport(state, bool(edits.all), files, path, edits.label)


def preflight(found: Assessment) -> tuple[str, str]:
    """`clean`, `violated` or `unrecorded` and a line, for `launch`; `unrecorded` only where there are local edits."""
    report = guard_state(found)
    return (report.state if report.refuses else "clean"), report.text


def _unrecorded(found: Assessment, scan: bool, fetch: bool) -> GuardReport:
    unseen: tuple[str, ...] = ()
    if scan:
        edits = LocalEdits(found, origin_of(found.target, fetch=fetch))
    elif found.target.install == "wheel":
        # To take patches off first would need the parser.
        targets = {patch.target for patch in found.catalogue.patches.values()}
        looked = {*WATCHED, *(path for path in targets if not found.present(path))}
        rest = ((path, file) for path, file in found.files.items() if path not in looked)
        unseen = tuple(path for path, file in rest if file.state(bool(found.applied(path))) == "edited")
        edits = LocalEdits(found, origin_among(found.target, looked))
    else:
        return GuardReport("unrecorded", False, (), complete=False)
    local = edits.all
    files = tuple(
        GuardedFile(edit.path, State.NEW, edit.trouble or "no baseline records it", edits.diff(edit) if scan else "")
        for _, edit in sorted(local.items())
    )
    return GuardReport("unrecorded", bool(files), files, None, edits.label, complete=scan, unseen=unseen)


@dataclass(frozen=True)
class Comparison:
    """A baseline and the local edits now, file by file."""

    baseline: Baseline
    edits: LocalEdits

    def files(self) -> Iterator[GuardedFile]:
        """Every file that the baseline names or that has a local edit."""
        for path in sorted({*self.baseline.files, *self.edits.all}):
            recorded = self.baseline.files.get(path)
            yield self._compare(recorded or Recorded(path, "", ""), self.edits.of(path), recorded is not None)

    def _compare(self, recorded: Recorded, edit: Edit, known: bool) -> GuardedFile:
        if edit.trouble:
            return GuardedFile(edit.path, State.CHANGED, *edit.trouble.split("\n", 1))
        same_origin = self.edits.origin is None or edit.original == recorded.original
        if known and edit.now == recorded.edited and same_origin:
            kind = State.UNTOUCHED if recorded.has_edit else State.UNEDITED
            return GuardedFile(edit.path, kind, "as recorded")
        if not known or not recorded.has_edit:
            if self.edits.origin is not None and not edit.is_local:
                return GuardedFile(edit.path, State.UNEDITED, f"as in {self.edits.label}")
            return GuardedFile(edit.path, State.NEW, "not in the baseline", self._since(recorded, edit, known))
        if self.edits.origin is not None and not edit.is_local:
            return self._without_edit(recorded, edit)
        if not same_origin:
            return self._on_another_origin(recorded, edit)
        return GuardedFile(edit.path, State.CHANGED, self._lost(recorded, edit), self._since(recorded, edit))

    def _without_edit(self, recorded: Recorded, edit: Edit) -> GuardedFile:
        if self._contains(recorded, edit.data):
            why = f"the recorded edit is part of {self.edits.label} now"
            return GuardedFile(edit.path, State.COMMITTED, why, recorded.diff)
        why = f"the file is as in {self.edits.label}" if edit.data is not None else "the file was deleted"
        return GuardedFile(edit.path, State.GONE, why, self._since(recorded, edit))

    def _on_another_origin(self, recorded: Recorded, edit: Edit) -> GuardedFile:
        """The release or commit moved on below the edit: the edits are compared without their place."""
        now, then = hunks(self.edits.diff(edit)), hunks(recorded.diff)
        if now and now == then:
            return GuardedFile(edit.path, State.UNTOUCHED, f"the same edit, on {self.edits.label} now")
        original = self.edits.original(edit)
        if self._contains(recorded, original) or (edit.now == recorded.edited and now < then):
            part = "part of it is" if now & then else "it is"
            why = f"{part} in {self.edits.label} now" + ("; another edit is here" if now - then else "")
            return GuardedFile(edit.path, State.COMMITTED, why, recorded.diff)
        return GuardedFile(edit.path, State.CHANGED, self._lost(recorded, edit), self._since(recorded, edit))

    def _lost(self, recorded: Recorded, edit: Edit) -> str:
        if edit.data is None:
            return "the file was deleted"
        now, then = hunks(self.edits.diff(edit)), hunks(recorded.diff)
        if not now or not then:
            return "the edit is not the recorded one"
        gone, come = (then - now).total(), (now - then).total()
        said = [f"{gone} of {then.total()} recorded edit(s) gone or changed"] if gone else []
        said += [f"{come} other edit(s) here"] if come else []
        return ", ".join(said) or "the edits stand at other places than recorded"

    def _since(self, recorded: Recorded, edit: Edit, known: bool = True) -> str:
        """The recorded bytes to the bytes now; else what is at hand: the edit now, else the recorded one."""
        then = self._recorded_bytes(recorded, recorded.edited) if known else None
        if then is not None:
            return unified(then, edit.data or b"", edit.path)
        return (edit.is_local and self.edits.diff(edit)) or recorded.diff

    def _contains(self, recorded: Recorded, data: bytes | None) -> bool:
        """Whether bytes have the recorded edit: merging it into them changes nothing."""
        if data is None:
            return not recorded.edited
        if sha256(data) == recorded.edited:
            return True
        old = self._recorded_bytes(recorded, recorded.original)
        new = self._recorded_bytes(recorded, recorded.edited)
        if old is None or new is None or sha256(data) == recorded.original:
            return False
        from mlapatch.engine.merge import Merged, merge

        merged = merge(old, new, data)
        return isinstance(merged, Merged) and merged.source == data

    def _recorded_bytes(self, recorded: Recorded, digest: str) -> bytes | None:
        """The recorded original or edited bytes: from the state, else from the origin of then and the diff."""
        if not digest:
            return b""
        data = kept_bytes(self.edits.found.target, digest) or self._original(recorded)
        if data is not None and sha256(data) != digest:
            data = patched(data, recorded.diff)
        return data if data is not None and sha256(data) == digest else None

    def _original(self, recorded: Recorded) -> bytes | None:
        if not recorded.original:
            return b""
        target, commit = self.edits.found.target, self.baseline.commit
        data = self.edits.origin.content(recorded.path) if self.edits.origin else None
        if (data is None or sha256(data) != recorded.original) and commit and target.repository:
            from mlapatch.install.git import committed_bytes

            folder = target.package.relative_to(target.repository).as_posix()
            data = committed_bytes(target.repository, commit, f"{folder}/{recorded.path}")
        return data
