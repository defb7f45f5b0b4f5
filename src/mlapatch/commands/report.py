"""`mlapatch report`: kept runs as one HTML page to send to a colleague."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlapatch.disk import environment_errors, write_output
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import page
from mlapatch.measure.runs import Run, Store
from mlapatch.outcome import Outcome, Text, Warn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KINDS = ("bench", "profile", "trace")


def report(*, runs: Sequence[str] = (), output: Path, title: str = "", db: Path | None = None) -> Outcome:
    """Write the page. Without `runs`: the newest of each label and kind, or else the last two of each kind."""
    with Store(db) as store:
        listed = [run for name in runs for run in store.named(name)] if runs else store.all()
        where = store.path
    chosen = listed if runs else pick(listed)
    usable = [run for run in chosen if run.kind in KINDS and run.status == "done"]
    if not usable:
        raise MlapatchError(
            Exit.USAGE,
            "no run to report on",
            where=str(where),
            expected="a finished bench, profile or trace",
            found=_none_of(listed),
            next="mlapatch bench --label stock, then again after a patch",
        )
    text = page.render(
        usable, title or "mlapatch: " + " against ".join(dict.fromkeys(page.name(run) for run in usable))
    )
    then = "no new report is there, or a whole one"
    with environment_errors(output.parent, then, elsewhere="name a file in a folder of yours: --output FILE"):
        write_output(output, text.encode())
    left_out = [run for run in chosen if run not in usable]
    return Outcome(
        data={"file": str(output), "runs": [run.id for run in usable], "bytes": len(text.encode())},
        blocks=[
            *(Warn(f"run {run.title} is a {run.kind} ({run.state}) and was left out") for run in left_out),
            Text([f"{output}: {len(usable)} runs ({', '.join(run.title for run in usable)})"]),
        ],
    )


def _none_of(found: Sequence[Run]) -> str:
    if not found:
        return "no runs"
    shown = ", ".join(f"{run.kind} {run.title} ({run.state})" for run in found[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"none of these is one: {shown}{more}"


def pick(found: Sequence[Run]) -> list[Run]:
    """Of all runs, newest first: the newest of each label and kind; without labels the last two of each kind."""
    done = [run for run in found if run.kind in KINDS and run.status == "done"]
    labelled: dict[tuple[str, str], Run] = {}
    for run in done:
        if run.label:
            labelled.setdefault((run.kind, run.label), run)
    chosen = list(labelled.values())
    if not chosen:
        for kind in KINDS:
            chosen += [run for run in done if run.kind == kind][:2]
    return sorted(chosen, key=lambda run: run.id)
