"""`mlapatch guard record` and `mlapatch guard check`: a baseline of the local edits, and whether they are untouched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlapatch.assess import Assessment, assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.guard import Comparison, GuardedFile, GuardReport, State, guard_state
from mlapatch.install.baseline import (
    NAME,
    WATCHED,
    Baseline,
    Recorded,
    default_places,
    find_baseline,
    is_there,
    keep,
    load_baseline,
    save_baseline,
)
from mlapatch.install.sources import origin_of
from mlapatch.install.target import Target, find_target
from mlapatch.local_edits import LocalEdits
from mlapatch.outcome import Block, Diff, Outcome, Table, Text, Warn

#: A tree without its tests has hundreds of deleted files: so many files and lines of diff are printed; JSON has all.
_SHOWN_FILES, _SHOWN_LINES = 40, 2_000


def record(
    *,
    file: Path | None = None,
    replace: bool = False,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
) -> Outcome:
    """Write the baseline to `file`. Without `replace` a baseline whose edits are gone or changed stays (exit 4)."""
    found = _assessed(sglang, python, patches)
    edits = LocalEdits(found, origin_of(found.target, fetch=True))
    path = file or Path.cwd() / NAME
    for edit in edits.all.values():
        if edit.trouble:
            what, _, detail = edit.trouble.partition("\n")
            raise MlapatchError(Exit.REFUSED, what, where=edit.path, detail=detail, next="mlapatch status")
    if not replace:
        _refuse_to_forget(path, edits)
    recorded, notes = _recorded(edits)
    version, commit = str(found.target.version or ""), edits.origin.commit if edits.origin else ""
    baseline = Baseline(version, commit, recorded)
    save_baseline(path, baseline)
    try:
        keep(found.target, baseline, _contents(edits, recorded))
    except MlapatchError as error:
        notes.append(_not_kept(error, found.target, path))
    edited = [one for one in recorded.values() if one.has_edit]
    lines = [f"{len(edited)} edited file(s) recorded in {path}; compared with {edits.label or 'nothing'}"]
    lines += [f"  {one.path}: {_size(one)}" for one in edited[:_SHOWN_FILES]]
    if len(edited) > _SHOWN_FILES:
        lines.append(f"  and {len(edited) - _SHOWN_FILES} more, named in that file")
    lines += ["commit that file; to compare: mlapatch guard check"]
    data: dict[str, object] = {
        "baseline": str(path),
        "origin": edits.label,
        "files": [{"path": o.path, "original": o.original, "edited": o.edited, "diff": o.diff} for o in edited],
        "watched": sorted(recorded),
    }
    return Outcome(Exit.OK, data, [*(Warn(note) for note in (*found.target.notes, *notes)), Text(lines)])


def check(
    *,
    file: Path | None = None,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
) -> Outcome:
    """Exit 4 where a recorded edit is not as it was, or where there is an edit that no baseline records."""
    found = _assessed(sglang, python, patches)
    report = guard_state(found, file=file, fetch=True)
    data = report.as_json()
    data["files"] = [{"path": f.path, "state": str(f.state), "reason": f.reason, "diff": f.diff} for f in report.files]
    blocks: list[Block] = [Warn(note) for note in found.target.notes]
    blocks.append(Text((f"guard: {report.text}",), style="bold red" if report.refuses else ""))
    blocks += _shown(report)
    if report.refuses:
        blocks.append(Text((_next(report),)))
    return Outcome(Exit.REFUSED if report.refuses else Exit.OK, data, blocks)


def _shown(report: GuardReport) -> list[Block]:
    """What a person wants to read: what is not as it was, and its diffs as far as they are of a readable size."""
    off, fine = [one for one in report.files if not one.fine], [one for one in report.files if one.fine]
    named = [*off[:_SHOWN_FILES], *fine[: max(_SHOWN_FILES - len(off), 0)]]
    rows = [(one.path, str(one.state), one.reason) for one in named]
    left = {"not as recorded": len(off[_SHOWN_FILES:]), "as recorded": len(report.files) - len(named)}
    left["as recorded"] -= left["not as recorded"]
    rows += [(f"{n} more file(s)", kind, "mlapatch guard check --json names them all") for kind, n in left.items() if n]
    blocks: list[Block] = [Table(("file", "state", "reason"), rows)] if rows else []
    room = _SHOWN_LINES
    for one in off[:_SHOWN_FILES]:
        if not one.diff:
            blocks.append(Text((f"{one.path}: its original is not at hand, no diff",)))
        elif (lines := one.diff.count("\n")) > room:
            blocks.append(Text((_too_long(one, lines),)))
        else:
            blocks.append(Diff(one.diff))
            room -= lines
    return blocks


def _assessed(sglang: Path | None, python: str | None, patches: Sequence[Path] | None) -> Assessment:
    catalogue = load_catalogue(patches)
    target = find_target(sglang, python)
    return assess(target, catalogue, machine_of(target, sm=1))


def _not_kept(error: MlapatchError, target: Target, path: Path) -> str:
    """The state folder has no copy of the baseline: where it is found all the same."""
    here, *anywhere, _ = default_places(target)
    what = f"no copy is kept beside SGLang: {error.what.partition(';')[0]}"
    if path.absolute() in anywhere:
        return f"{what}; {path} is found without it"
    if path.absolute() == here:
        return f"{what}; run guard check and launch in {here.parent}, where the baseline is"
    return f"{what}; pass --file {path} to guard check; launch takes it only as {NAME} of the folder it runs in"


def _refuse_to_forget(path: Path, edits: LocalEdits) -> None:
    """A new baseline must not forget, in passing, an edit that was lost since the last one."""
    # A folder that may not be looked into may not be written to either, and the write says so.
    hidden = path.parent.exists() and not os.access(path.parent, os.X_OK)
    before = path if not hidden and is_there(path) else find_baseline(edits.found.target)
    if before is None:
        return
    files = Comparison(load_baseline(before), edits).files()
    lost = [one for one in files if one.state in (State.GONE, State.CHANGED)]
    if lost:
        raise MlapatchError(
            Exit.REFUSED,
            "the baseline that is there records edits that are not as they were; nothing was written",
            where=str(before),
            found="; ".join(f"{one.path} is {one.state}: {one.reason}" for one in lost),
            detail="\n".join(_short(one) for one in lost if one.diff),
            next="restore the edits, or, if they are as they should be: mlapatch guard record --replace",
        )


def _short(one: GuardedFile) -> str:
    lines = one.diff.count("\n")
    return one.diff if lines <= 200 else _too_long(one, lines)


def _too_long(one: GuardedFile, lines: int) -> str:
    return f"{one.path}: a diff of {lines} lines, in mlapatch guard check --json"


def _recorded(edits: LocalEdits) -> tuple[dict[str, Recorded], list[str]]:
    """What to write down, and what to warn of."""
    recorded, notes = {}, []
    if edits.origin is None:
        notes.append("no RECORD, commit or wheel says what these files were; only the watched ones are recorded")
    for path in sorted({*edits.all, *WATCHED}):
        edit = edits.of(path)
        if not (edit.original or edit.now):  # watched, and not in this release
            continue
        diff = edits.diff(edit) if edit.is_local else ""
        if edit.is_local and not diff and edit.original and edits.original(edit) is None:
            notes.append(f"{path}: its original is not at hand (offline?), so the baseline has its sha256 and no diff")
        recorded[path] = Recorded(path, edit.original, edit.now, diff)
    return recorded, notes


def _contents(edits: LocalEdits, recorded: dict[str, Recorded]) -> list[bytes]:
    kept = [edits.of(one.path) for one in recorded.values() if one.has_edit or edits.origin is None]
    return [data for edit in kept for data in (edit.data, edits.original(edit)) if data is not None]


def _size(one: Recorded) -> str:
    lines = one.diff.split("\n")[2:]
    plus, minus = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{plus} -{minus}" if one.diff else "no diff at hand"


def _next(report: GuardReport) -> str:
    if report.state == "unrecorded":
        return "next: mlapatch guard record"
    return "next: restore what is lost (docs/guard.md), or, if this is as it should be: mlapatch guard record --replace"
