"""`mlapatch diff NAME`: the unified diff of a patch against this SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlapatch.assess import assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.textdiff import unified
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.target import find_target
from mlapatch.outcome import Diff, Outcome, Text, Warn


def diff(
    name: str, *, sglang: Path | None = None, python: str | None = None, patches: Sequence[Path] | None = None
) -> Outcome:
    """What applying the patch changes, or, where it is applied, what it changed."""
    from mlapatch.engine.verdict import apply
    from mlapatch.rebase import change_to, misfit_error, unpatched

    catalogue = load_catalogue(patches)
    patch = catalogue.get(name)
    target = find_target(sglang, python)
    found = assess(target, catalogue, machine_of(target, sm=1))
    judgement = found.judgements[name]
    file = found.files.get(patch.target)
    if file is None:
        raise MlapatchError(
            Exit.DOES_NOT_FIT,
            judgement.reason,
            where=str(target.file(patch.target)),
            next=judgement.next or f"mlapatch check {name}",
        )
    if judgement.verdict in (Verdict.APPLIED, Verdict.EDITED):
        clean = unpatched(found, file)
        stay = [other for other in clean.patches.values() if other.name != name]
        old, new = change_to(found, file, clean, stay).new, file.data
    else:
        outcome = apply(file.data, patch, target.version)
        if isinstance(outcome, Judgement):
            raise misfit_error(judgement if judgement.verdict is not Verdict.UNSUPPORTED else outcome)
        old, new = file.data, outcome.source
    text = unified(old, new, file.relative)
    data: dict[str, object] = {"name": name, "verdict": str(judgement.verdict), "path": file.relative, "diff": text}
    note = f"# {name}: {judgement.verdict}; {judgement.reason}"
    return Outcome(data=data, blocks=[*(Warn(n) for n in target.notes), Text((note,)), Diff(text)])
