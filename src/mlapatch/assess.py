"""What is true of one SGLang: its files, the journal, and a verdict per patch. Shared by every verb that needs it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mlapatch.catalogue import Catalogue
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.patch import Patch, patch_from_raw
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.facts import Flashinfer, detected_sms, flashinfer_of
from mlapatch.install.journal import Entry, Journal
from mlapatch.install.target import Target
from mlapatch.install.write import sha256
from mlapatch.misfits import absent, in_edited_file
from mlapatch.verdict_cache import VerdictCache


@dataclass(frozen=True)
class Machine:
    """The GPUs and flashinfer that patches may require; `sm_source` says where the capabilities come from."""

    sms: tuple[int, ...]
    sm_source: str
    flashinfer: Flashinfer | None

    def objection(self, patch: Patch) -> str:
        """Why the patch cannot run here, or ''."""
        needs = patch.requires
        why = f": {needs.reason}" if needs.reason else ""
        if needs.flashinfer:
            if self.flashinfer is None:
                return f"needs flashinfer {needs.flashinfer}, and none is installed or pinned beside this SGLang{why}"
            from packaging.specifiers import SpecifierSet

            if not SpecifierSet(needs.flashinfer).contains(self.flashinfer.version, prereleases=True):
                found = f"flashinfer {self.flashinfer.version} is {self.flashinfer.source}"
                return f"needs flashinfer {needs.flashinfer}, and {found}{why}"
        if needs.sm:
            wanted = " or ".join(f"SM{sm}" for sm in needs.sm)
            if not self.sms:
                return f"needs {wanted}, and no GPU was found here (--gpu h200 or --sm 90 stands in for one)"
            others = [sm for sm in self.sms if sm not in needs.sm]
            if others:
                return f"needs {wanted}, and the GPU is SM{others[0]} ({self.sm_source}){why}"
        return ""


def machine_of(target: Target, *, gpu: str | None = None, sm: int | None = None) -> Machine:
    """The machine as detected, or as `--gpu` and `--sm` say."""
    flashinfer = flashinfer_of(target)
    if gpu is None and sm is None:
        return Machine(detected_sms(), "detected", flashinfer)
    sms, source = given_sms(gpu, sm)
    return Machine(sms, source, flashinfer)


def given_sms(gpu: str | None, sm: int | None) -> tuple[tuple[int, ...], str]:
    """What `--gpu` and `--sm` say, and the one that says it; nothing without either. MlapatchError (exit 2)."""
    from mlapatch.measure.gpus import stand_in

    found = stand_in(gpu, sm)
    return ((found[0],), found[1]) if found else ((), "")


LOOKS = 20
"""A look that a writer came into is taken again, so often at most."""


@dataclass(frozen=True)
class File:
    """One target file: its bytes now, and what the journal and the installer say of it."""

    relative: str
    path: Path
    data: bytes
    entry: Entry | None
    original_sha256: str  # the release's or HEAD's; '' where nothing says

    @cached_property
    def sha256(self) -> str:
        """Of the bytes now."""
        return sha256(self.data)

    @property
    def edited(self) -> bool:
        """Whether the release or commit is known, and somebody else than mlapatch has changed its bytes."""
        return bool(self.original_sha256) and self.state(applied=True) == "edited"

    def state(self, applied: bool) -> str:
        """`pristine`; `patched`: differs from the release by mlapatch's patches only; `edited`: by others too."""
        if self.original_sha256 and self.sha256 == self.original_sha256:
            return "pristine"
        entry = self.entry
        if applied and entry and entry.after == self.sha256 and entry.base == (self.original_sha256 or entry.base):
            return "patched"
        if not self.original_sha256 and not applied:
            return "pristine" if entry is None else "edited"
        return "edited"


@dataclass
class Assessment:
    """A target, its files by relative path, and a judgement per patch of the catalogue."""

    target: Target
    catalogue: Catalogue
    machine: Machine
    files: dict[str, File]
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def applied(self, relative: str) -> list[str]:
        """The patches that are applied to a file, as the bytes say."""
        return self._with(relative, (Verdict.APPLIED,))

    def present(self, relative: str) -> list[str]:
        """The patches that are applied to a file, also where somebody has changed their code since."""
        return self._with(relative, (Verdict.APPLIED, Verdict.EDITED))

    def _with(self, relative: str, verdicts: Sequence[Verdict]) -> list[str]:
        names = [n for n, j in self.judgements.items() if j.verdict in verdicts]
        return [name for name in names if self.catalogue.patches[name].target == relative]

    @property
    def digest(self) -> str:
        """Equal on nodes with the same bytes in every file that a patch may change."""
        return digest_of({file.relative: file.sha256 for file in self.files.values()})


def digest_of(files: Mapping[str, str]) -> str:
    """Of the target files by relative path and sha256. Bytes only: no path, time, version, kind of install or journal.

    The bytes say which patches are applied, so that equal digests mean equal patches too.
    """
    text = "\n".join(f"{relative} {digest}" for relative, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def assess(target: Target, catalogue: Catalogue, machine: Machine) -> Assessment:
    """Judge every patch of the catalogue against the target's files."""
    found = Assessment(target, catalogue, machine, _files(target, catalogue))
    cache = VerdictCache.default()
    for patch in catalogue.patches.values():
        found.judgements[patch.name] = _judge(found, patch, cache)
    _settle_conflicts(found)
    for name, judgement in found.judgements.items():
        found.judgements[name] = _with_history(found, catalogue.patches[name], judgement)
    cache.save()
    return found


def _files(target: Target, catalogue: Catalogue) -> dict[str, File]:
    """The target files and the journal as they are at one moment, though somebody may be writing: no lock is taken."""
    journal = Journal(target.state_folder)
    relatives = dict.fromkeys(patch.target for patch in catalogue.patches.values())
    for _ in range(LOOKS):
        raw = journal.raw
        read = {relative: _read(target.file(relative)) for relative in relatives}
        if journal.raw == raw:
            break
    there = {relative: data for relative, data in read.items() if data is not None}
    entries = journal.entries(raw, {relative: sha256(data) for relative, data in there.items()})
    return {
        relative: File(relative, target.file(relative), data, entries.get(relative), _original(target, relative))
        for relative, data in there.items()
    }


def _read(path: Path) -> bytes | None:
    """The bytes; None where nothing has this name."""
    try:
        if path.is_file():
            return path.read_bytes()
        if not path.is_symlink() and not path.exists():
            return None
        found = "a folder" if path.is_dir() else "a device or pipe" if path.exists() else "a link to nothing"
    except OSError as error:
        found = str(error.strerror)
    raise MlapatchError(
        Exit.ENVIRONMENT,
        "a target file cannot be read",
        where=str(path),
        expected="a regular file that this user may read",
        found=found,
        next="run as the user who may read it, or put the file back (git checkout, or install this SGLang anew)",
    )


def _original(target: Target, relative: str) -> str:
    recorded = target.recorded_sha256(relative)
    if recorded or target.repository is None:
        return recorded
    from mlapatch.install.git import head_bytes

    committed = head_bytes(target.repository, target.file(relative))
    return sha256(committed) if committed is not None else ""


def _judge(found: Assessment, patch: Patch, cache: VerdictCache) -> Judgement:
    file = found.files.get(patch.target)
    if file is None:
        return absent(found.target, patch, came=bool(_original(found.target, patch.target)))
    judgement = cache.judge(file.data, patch, found.target.version)
    if judgement.verdict in (Verdict.EDITED, Verdict.DRIFTED) and file.entry and patch.name in file.entry.patches:
        kept = kept_patch(Journal(found.target.state_folder), file.entry, patch.name)
        if kept and kept.digest != patch.digest:
            older = cache.judge(file.data, kept, found.target.version)
            if older.verdict is Verdict.APPLIED:
                return older.but(
                    Verdict.APPLIED,
                    f"an older text of it is applied ({kept.digest[:12]}; the catalogue has {patch.digest[:12]})",
                    f"mlapatch apply {patch.name}",
                )
    if judgement.verdict is Verdict.APPLICABLE and (objection := found.machine.objection(patch)):
        return judgement.but(Verdict.UNSUPPORTED, objection)
    if judgement.verdict in (Verdict.DRIFTED, Verdict.AMBIGUOUS) and file.edited and judgement.scope != patch.target:
        return in_edited_file(judgement, found.target)
    return judgement  # where the scope is the whole file, it is no Python, and the judgement says what to do


def kept_patch(journal: Journal, entry: Entry, name: str) -> Patch | None:
    """A patch exactly as it was applied, from the state."""
    raw = journal.object(entry.patches.get(name, ""))
    with contextlib.suppress(ValueError, KeyError, TypeError):  # of another mlapatch, with another form
        return patch_from_raw(raw.decode()) if raw else None
    return None


def _settle_conflicts(found: Assessment) -> None:
    """A patch that another one in the file excludes is in conflict, whatever its own anchors say."""
    before = dict(found.judgements)
    for name, judgement in before.items():
        if judgement.verdict in (Verdict.APPLIED, Verdict.SUPERSEDED):
            continue
        rivals = [its for its in before.values() if its.patch != name and _excludes(found.catalogue, its.patch, name)]
        mine = _presence_of(found, judgement)
        there = [its for its in rivals if its.verdict in (Verdict.APPLIED, Verdict.EDITED)]
        there = [its for its in there if _presence_of(found, its) > mine]
        if there:
            its = max(there, key=lambda one: _presence_of(found, one))
            found.judgements[name] = judgement.but(
                Verdict.CONFLICTS,
                f"excluded by {its.patch}, which is {its.verdict}",
                f"mlapatch revert {its.patch} && mlapatch apply {name}",
            )


def _excludes(catalogue: Catalogue, one: str, other: str) -> bool:
    return other in catalogue.patches[one].excludes or one in catalogue.patches[other].excludes


def _presence_of(found: Assessment, judgement: Judgement) -> tuple[bool, bool, bool, int, int, str]:
    """How much speaks for a patch, where two that share helpers could be meant: whole, in the journal, in the bytes."""
    name, file = judgement.patch, found.files.get(found.catalogue.patches[judgement.patch].target)
    listed = bool(file and file.entry and name in file.entry.patches)
    there = judgement.verdict in (Verdict.APPLIED, Verdict.EDITED)
    whole = judgement.verdict is Verdict.APPLIED
    return there, whole, listed, -judgement.troubles, judgement.traces, name


def _with_history(found: Assessment, patch: Patch, judgement: Judgement) -> Judgement:
    """`lost`: the journal says applied, and nothing of it is in the file."""
    file = found.files.get(patch.target)
    entry = file.entry if file else None
    if entry is None or patch.name not in entry.patches or judgement.traces or judgement.verdict is Verdict.APPLIED:
        return judgement
    now = found.target.version
    moved = f"the file is now {now}'s" if str(now) != entry.sglang else "the file was replaced since"
    history = f"it was applied on SGLang {entry.sglang}, and {moved}"
    if judgement.verdict is Verdict.APPLICABLE:
        return judgement.but(Verdict.LOST, history, f"mlapatch apply {patch.name}")
    return judgement.but(judgement.verdict, f"{history}; {judgement.reason}", judgement.next)


def as_json(found: Assessment, guard: Mapping[str, object], inside: Mapping[str, int]) -> dict[str, object]:
    """`status --json`. `inside`: by target file, in how many places lines of patches were changed by hand."""
    target = found.target
    return {
        "sglang": {
            "version": str(target.version) if target.version else None,
            "path": str(target.package),
            "install": target.install,
            "python": target.python,
            "flashinfer": str(found.machine.flashinfer.version) if found.machine.flashinfer else None,
            "others": [str(path) for path in target.others],
        },
        "targets": [
            {
                "path": f.relative,
                "sha256": f.sha256,
                "state": f.state(bool(found.applied(f.relative))),
                "changed_inside": inside.get(f.relative, 0),
            }
            for f in found.files.values()
        ],
        "patches": [judgement.as_dict() for judgement in found.judgements.values()],
        "guard": dict(guard),
        "digest": found.digest,
    }
