"""`mlapatch revert`: take patches out and keep every other edit; byte-identical where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlapatch.assess import Assessment, File, assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.engine.textdiff import unified
from mlapatch.exits import Exit
from mlapatch.install.journal import Change, Journal
from mlapatch.install.target import find_target
from mlapatch.install.write import sha256
from mlapatch.outcome import Block, Diff, Outcome, Text, Warn
from mlapatch.rebase import before_writing, change_to, unpatched


def revert(
    names: Sequence[str] | None = None,
    *,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
    dry_run: bool = False,
) -> Outcome:
    """Revert the named patches, by default every one that mlapatch applied."""
    catalogue = load_catalogue(patches)
    target = find_target(sglang, python)
    machine = machine_of(target, sm=1)  # no GPU matters to a revert
    journal = Journal(target.state_folder)
    known = set(catalogue.patches) | {n for e in journal.entries().values() for n in e.patches}
    for name in names or ():
        if name not in known:
            catalogue.get(name)
    found = assess(target, catalogue, machine)
    if dry_run:
        return _run(found, names, dry_run=True)
    if not _changes(found, names):
        journal.repair()
        return _run(found, names, dry_run=False)
    with journal.locked():
        return _run(assess(target, catalogue, machine), names, dry_run=False)


def _run(found: Assessment, names: Sequence[str] | None, *, dry_run: bool) -> Outcome:
    changes = _changes(found, names)
    if changes and not dry_run:
        Journal(found.target.state_folder).commit([change for change, _, _ in changes])
    blocks: list[Block] = [Warn(note) for note in found.target.notes]
    reverted: list[str] = []
    for change, gone, file in changes:
        reverted += gone
        if dry_run and change.new != change.old:
            blocks.append(Diff(unified(change.old, change.new, change.relative)))
        blocks.append(Text(_told(change, gone, file, dry_run=dry_run)))
    for name in names or ():
        if name not in reverted:
            blocks.append(Text((f"{name}: not applied, nothing to revert",)))
    if not changes and not names:
        blocks.append(Text(("nothing to revert: no patch of mlapatch is in this SGLang",)))
    data: dict[str, object] = {
        "reverted": reverted,
        "dry_run": dry_run,
        "changes": [
            {
                "path": c.relative,
                "before": sha256(c.old),
                "after": sha256(c.new),
                "remaining": list(c.entry.patches) if c.entry else [],
            }
            for c, _, _ in changes
        ],
    }
    return Outcome(Exit.OK, data, blocks)


def _changes(found: Assessment, names: Sequence[str] | None) -> list[tuple[Change, list[str], File]]:
    """Per file: the change, the patches that go, and the file as it was."""
    changes = []
    for file in found.files.values():
        with before_writing():
            clean = unpatched(found, file)
        gone = [name for name in clean.patches if not names or name in names]
        lost = [name for name in (file.entry.patches if file.entry else ()) if name not in clean.patches]
        if gone or (lost and (not names or set(lost) & set(names))):
            stay = [patch for name, patch in clean.patches.items() if name not in gone]
            changes.append((change_to(found, file, clean, stay), gone or lost, file))
    return changes


def _told(change: Change, gone: Sequence[str], file: File, *, dry_run: bool) -> list[str]:
    names, after = ", ".join(gone), sha256(change.new)
    if change.new == change.old:
        return [f"{names}: the file was replaced since, nothing of it is left in {change.path}; forgotten"]
    verb = "would be reverted in" if dry_run else "reverted in"
    if change.entry is not None:
        kind = f"{', '.join(change.entry.patches)} stays applied"
    elif after == file.original_sha256:
        kind = "byte-identical to the release" if change.path else ""
    elif file.entry and after == file.entry.base:
        kind = "byte-identical to the file before mlapatch"
    else:
        kind = "your other edits are kept"
    return [f"{names}: {verb} {change.path}", f"  sha256 {sha256(change.old)[:16]} -> {after[:16]}, {kind}"]
