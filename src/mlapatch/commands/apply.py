"""`mlapatch apply`: all or nothing, proven before anything is written; applying twice changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlapatch.assess import Assessment, assess, machine_of
from mlapatch.catalogue import Catalogue, load_catalogue
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.patch import Patch
from mlapatch.engine.textdiff import unified
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.journal import Change, Journal
from mlapatch.install.target import Target, find_target
from mlapatch.install.write import sha256
from mlapatch.outcome import Block, Diff, Outcome, Text, Warn
from mlapatch.rebase import before_writing, change_to, misfit_error, unpatched
from mlapatch.selection import choose


def apply(
    names: Sequence[str],
    *,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
    gpu: str | None = None,
    sm: int | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Outcome:
    """Apply patches by name (`auto` picks one)."""
    catalogue = load_catalogue(patches)
    for name in names:
        if name != "auto":
            catalogue.get(name)
    target = find_target(sglang, python)
    machine = machine_of(target, gpu=gpu, sm=sm)
    if dry_run:
        return _run(names, assess(target, catalogue, machine), dry_run=True, force=force)
    first = assess(target, catalogue, machine)
    wanted, _ = _plan(names, first, force)
    journal = Journal(target.state_folder)
    if not wanted or not _changes(first, wanted):  # nothing to write, or a refusal: no lock, no state folder
        journal.repair()
        return _run(names, first, dry_run=False, force=force)
    with journal.locked():
        return _run(names, assess(target, catalogue, machine), dry_run=False, force=force)


def _run(names: Sequence[str], found: Assessment, *, dry_run: bool, force: bool) -> Outcome:
    wanted, said = _plan(names, found, force)
    changes = _changes(found, wanted)
    written = [change for change in changes if change.new != change.old]
    if changes and not dry_run:
        Journal(found.target.state_folder).commit(changes)
    blocks: list[Block] = [Warn(note) for note in found.target.notes]
    blocks += said
    if dry_run:
        blocks += [Diff(unified(c.old, c.new, c.relative)) for c in written]
    blocks += [_summary(c, wanted, found.target, dry_run=dry_run) for c in written]
    if written and not dry_run:
        blocks.append(Text(("a running server keeps the old code: restart it; to undo: mlapatch revert",)))
    if not wanted:
        blocks.append(Text(("nothing to do",)))
    data: dict[str, object] = {
        "applied": [patch.name for patch in wanted],
        "dry_run": dry_run,
        "changes": [
            {
                "path": c.relative,
                "before": sha256(c.old),
                "after": sha256(c.new),
                "diff": unified(c.old, c.new, c.relative),
            }
            for c in written
        ],
        "said": [block.lines[0] if isinstance(block, Text) else block.text for block in said],
    }
    return Outcome(Exit.OK, data, blocks)


def _plan(names: Sequence[str], found: Assessment, force: bool) -> tuple[list[Patch], list[Text | Warn]]:
    """The patches to write, and what to say about each; MlapatchError where one does not fit."""
    said: list[Text | Warn] = []
    chosen: list[str] = []
    for name in dict.fromkeys(names):
        if name == "auto":
            pick = choose(found)
            said.append(Text((pick.why,)))
            chosen.append(pick.name)
        else:
            chosen.append(name)
    _exclude_each_other(list(dict.fromkeys(chosen)), found.catalogue)
    wanted = []
    for name in dict.fromkeys(chosen):
        judgement = found.judgements[name]
        if judgement.verdict is Verdict.APPLIED and not judgement.next:
            said.append(Text((f"{name}: already applied, nothing to do",)))
        elif judgement.verdict is Verdict.SUPERSEDED:
            said.append(Text((f"{name}: superseded, nothing to do: {judgement.reason}",)))
        elif judgement.verdict in (Verdict.APPLICABLE, Verdict.LOST, Verdict.APPLIED):
            wanted.append(found.catalogue.patches[name])
        elif judgement.verdict is Verdict.UNSUPPORTED and force:
            said.append(Warn(f"{name} is forced although it is unsupported here: {judgement.reason}"))
            wanted.append(replace(found.catalogue.patches[name], sglang=""))
        else:
            raise _stop(judgement)
    return wanted, said


def _stop(judgement: Judgement) -> MlapatchError:
    error = misfit_error(judgement)
    if judgement.verdict is Verdict.UNSUPPORTED:
        error.next = "mlapatch apply auto picks a patch that fits; --force overrides this refusal"
    return error


def _exclude_each_other(names: Sequence[str], catalogue: Catalogue) -> None:
    for name in names:
        for other in names:
            if other in catalogue.patches[name].excludes:
                raise MlapatchError(
                    Exit.DOES_NOT_FIT,
                    f"{name} and {other} exclude each other; nothing was written",
                    expected="one of them",
                    found="both",
                    next=f"mlapatch apply {name}",
                )


def _changes(found: Assessment, wanted: Sequence[Patch]) -> list[Change]:
    changes = []
    for relative in dict.fromkeys(patch.target for patch in wanted):
        file = found.files[relative]
        with before_writing():
            clean = unpatched(found, file)
        together = {**clean.patches, **{patch.name: patch for patch in wanted if patch.target == relative}}
        changes.append(change_to(found, file, clean, list(together.values())))
    return changes


def _summary(change: Change, wanted: Sequence[Patch], target: Target, *, dry_run: bool) -> Text:
    names = ", ".join(patch.name for patch in wanted if patch.target == change.relative)
    verb = "would be applied to" if dry_run else "applied to"
    return Text(
        (
            f"{names}: {verb} {target.file(change.relative)}",
            f"  sha256 {sha256(change.old)[:16]} -> {sha256(change.new)[:16]}, compiled, all postconditions hold",
        )
    )
