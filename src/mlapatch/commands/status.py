"""`mlapatch status`: which SGLang, pristine or not, a verdict per patch, the guard, a digest to compare nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlapatch.assess import Assessment, as_json, assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.engine.judgement import Verdict
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.guard import GuardReport, guard_state
from mlapatch.install.target import find_target
from mlapatch.local_edits import inside_patches
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text, Warn


def status(
    *,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
    gpu: str | None = None,
    sm: int | None = None,
    require: Sequence[str] | None = None,
    expect: str | None = None,
) -> Outcome:
    """Exit 1 unless every patch of `require` is applied and the digest is the one of `expect`; else 0.

    `expect`: a digest, a file with another node's `status --json`, or `-` for that on standard input.
    """
    catalogue = load_catalogue(patches)
    required = [catalogue.get(name).name for name in require or ()]
    target = find_target(sglang, python)
    found = assess(target, catalogue, machine_of(target, gpu=gpu, sm=sm))
    guard = _guard(found)
    missing = [name for name in required if found.judgements[name].verdict is not Verdict.APPLIED]
    inside = {file.relative: inside_patches(found, file) for file in found.files.values()}
    data = as_json(found, guard.as_json(), inside)
    if required:
        data["required"] = {"patches": required, "missing": missing}
    blocks: list[Block] = [Warn(note) for note in target.notes]
    blocks += [_head(found, guard), _table(found)]
    blocks += [Text((f"next for {j.patch}: {j.next}",)) for j in found.judgements.values() if _wants_a_word(j.verdict)]
    blocks += [Text((_inside(found, relative, count),)) for relative, count in inside.items() if count]
    differs = False
    if expect is not None:
        shown, compared, differs = _compared(found, expect)
        blocks += shown
        data["expected"] = compared
    if missing:
        judged = ((name, found.judgements[name]) for name in missing)
        lines = ["required and not applied: " + ", ".join(f"{name} ({j.verdict}: {j.reason})" for name, j in judged)]
        lines += [f"  next for {name}: {found.judgements[name].next or f'mlapatch apply {name}'}" for name in missing]
        blocks.append(Text(lines, style="bold red"))
    return Outcome(Exit.FOUND if missing or differs else Exit.OK, data, blocks)


def _compared(found: Assessment, expect: str) -> tuple[list[Block], dict[str, object], bool]:
    from mlapatch.nodes import compare, read_expected

    told = compare(found, read_expected(expect))
    blocks: list[Block] = [Warn(note) for note in told.notes]
    if told.difference:
        lines = [f"not the expected digest: {told.found} here, {told.expected} expected"]
        lines += [f"  {line}" for line in told.difference] + [f"  next: {told.next}"]
        blocks.append(Text(lines, style="bold red"))
    else:
        blocks.append(Text(("the digest is the expected one",), style="green"))
    return blocks, told.as_dict(), bool(told.difference)


def _inside(found: Assessment, relative: str, count: int) -> str:
    names = ", ".join(found.applied(relative))
    return (
        f"lines inside the edits of {names} were changed by hand in {count} place(s) of {relative}: the postconditions "
        "hold, and revert and diff will refuse; mlapatch revert --dry-run shows the lines"
    )


def _wants_a_word(verdict: Verdict) -> bool:
    return verdict in (Verdict.LOST, Verdict.EDITED)


def _guard(found: Assessment) -> GuardReport:
    try:
        return guard_state(found, scan=False)
    except MlapatchError as error:
        return GuardReport("violated", False, (), trouble=f"{error.what} ({error.where})")


def _head(found: Assessment, guard: GuardReport) -> Pairs:
    target, flashinfer = found.target, found.machine.flashinfer
    rows = [
        ("sglang", f"{target.version or 'unknown version'} ({target.install}) in {target.package}"),
        ("flashinfer", f"{flashinfer.version} ({flashinfer.source})" if flashinfer else "unknown"),
    ]
    for file in found.files.values():
        state = file.state(bool(found.applied(file.relative)))
        rows.append((file.relative, f"{state}, sha256 {file.sha256}"))
    rows += [("guard", guard.text), ("digest", found.digest)]
    return Pairs(rows)


def _table(found: Assessment) -> Table:
    """A line a patch; those that conflict for one and the same reason share one."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for j in found.judgements.values():
        alone = "" if j.verdict is Verdict.CONFLICTS else j.patch
        rows.setdefault((alone, str(j.verdict), j.reason), []).append(j.patch)
    return Table(
        ("patch", "verdict", "reason"),
        [(", ".join(names), verdict, reason) for (_, verdict, reason), names in rows.items()],
    )
