"""`mlapatch compare A B`: what differs between two runs' set-ups, and what changed in their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlapatch.measure import metrics
from mlapatch.measure.runs import Run, Store
from mlapatch.outcome import Block, Outcome, Table, Text, Warn

if TYPE_CHECKING:
    from pathlib import Path


def compare(*, a: str, b: str, db: Path | None = None) -> Outcome:
    """Compare two runs; A is the one before. Noise is the spread of the repeats."""
    with Store(db) as store:
        left, right = store.get(a), store.get(b)
    obstacles = metrics.obstacles(left.setup, right.setup)
    if left.kind != right.kind:
        obstacles.append(f"a {left.kind} against a {right.kind}")
    different = differences(left, right)
    changed = metrics.changes(metrics.of(left.result), metrics.of(right.result))
    data: dict[str, object] = {
        "a": left.id,
        "b": right.id,
        "comparable": not obstacles,
        "obstacles": obstacles,
        "setup": [{"key": key, "a": old, "b": new} for key, old, new in different],
        "changes": [
            {"case": c.a.case, "name": c.a.name, "unit": c.a.unit, "a": c.a.middle, "b": c.b.middle,
             "ratio": c.ratio, "verdict": c.verdict} for c in changed
        ],
    }  # fmt: skip
    blocks: list[Block] = [Warn(f"not comparable: {why}") for why in obstacles]
    if different:
        blocks.append(Table(["set-up", f"A: {left.title}", f"B: {right.title}"], different, "What differs"))
    else:
        blocks.append(Text(["The set-ups are the same."]))
    rows = [[c.a.case, c.a.name, c.a.text(), c.b.text(), metrics.factor(c.ratio), _word(c)] for c in changed]
    blocks.append(Table(["case", "figure", "A", "B", "B / A", ""], rows, "What changed"))
    if not rows:
        blocks.append(Text(["The two runs have no case in common."]))
    alone = [metric for run in (left, right) for metric in metrics.of(run.result) if len(metric.values) < 2]
    if alone and rows:
        blocks.append(Text(["Figures measured once count as changed from 2 %; repeat them to see their noise."]))
    return Outcome(data=data, blocks=blocks)


def differences(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """Set-up keys whose values differ; `-` where a run does not have one."""
    left, right = metrics.flatten(a.setup), metrics.flatten(b.setup)
    left |= {"host": a.host, "mlapatch": a.mlapatch}
    right |= {"host": b.host, "mlapatch": b.mlapatch}
    keys = sorted({*left, *right})
    return [(key, left.get(key, "-"), right.get(key, "-")) for key in keys if left.get(key) != right.get(key)]


def _word(change: metrics.Change) -> str:
    return "within noise" if change.verdict == "noise" else change.verdict
