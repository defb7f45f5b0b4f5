"""`mlapatch compare A B`: what differs between two runs' set-ups, and what changed in their results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import metrics, outcomes
from mlapatch.measure.runs import Run, Store
from mlapatch.outcome import Block, Outcome, Table, Text, Warn

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def compare(*, a: str, b: str, db: Path | None = None) -> Outcome:
    """Compare two runs, or all kinds of runs of two labels; A is the one before. Noise is the spread of the repeats."""
    with Store(db) as store:
        pairs = _pairs(store.named(a), store.named(b), a, b)
    blocks: list[Block] = []
    data = []
    for left, right in pairs:
        facts, shown = _compare(left, right)
        data.append(facts)
        blocks += shown
    return Outcome(data={"comparable": all(pair["comparable"] for pair in data), "pairs": data}, blocks=blocks)


def _pairs(left: list[Run], right: list[Run], a: str, b: str) -> list[tuple[Run, Run]]:
    if len(left) == len(right) == 1:
        return [(left[0], right[0])]
    kinds = {run.kind: run for run in right}
    pairs = [(run, kinds[run.kind]) for run in left if run.kind in kinds]
    if not pairs:
        raise MlapatchError(
            Exit.USAGE,
            f"{a} and {b} have no kind of run in common",
            found=f"{', '.join(run.kind for run in left)} against {', '.join(run.kind for run in right)}",
            next="mlapatch runs, and give their numbers",
        )
    return pairs


def _compare(left: Run, right: Run) -> tuple[dict[str, object], list[Block]]:
    obstacles = metrics.obstacles(left.setup, right.setup)
    if left.kind != right.kind:
        obstacles.append(f"a {left.kind} against a {right.kind}")
    different = differences(left, right)
    ends = [{"state": run.state} | outcomes.flat(run.result) for run in (left, right)]
    became = _differing(*ends)
    changed = metrics.changes(_figures(left), _figures(right))
    data: dict[str, object] = {
        "a": left.id,
        "b": right.id,
        "kind": left.kind,
        "comparable": not obstacles,
        "obstacles": obstacles,
        "setup": [{"key": key, "a": old, "b": new} for key, old, new in different],
        "outcome": [{"key": key, "a": old, "b": new} for key, old, new in became],
        "changes": [
            {"case": c.a.case, "name": c.a.name, "unit": c.a.unit, "a": c.a.middle, "b": c.b.middle,
             "ratio": c.ratio, "verdict": c.verdict} for c in changed
        ],
    }  # fmt: skip
    blocks: list[Block] = [Warn(f"not comparable: {why}") for why in obstacles]
    if different:
        columns = ["set-up", f"A: {left.title}", f"B: {right.title}"]
        blocks.append(Table(columns, different, f"{left.kind}: what differs"))
    else:
        blocks.append(Text([f"{left.kind}: the set-ups are the same."]))
    if became:
        columns = ["what came out", f"A: {left.title}", f"B: {right.title}"]
        blocks.append(Table(columns, became, f"{left.kind}: what came out"))
    elif outcomes.flat(left.result):
        blocks.append(Text([f"{left.kind}: the same came out."]))
    rows = [[c.a.case, c.a.name, c.a.text(), c.b.text(), metrics.factor(c.ratio), _word(c)] for c in changed]
    if rows:
        blocks.append(Table(["case", "figure", "A", "B", "B to A", "verdict"], rows, f"{left.kind}: what changed"))
    else:
        blocks.append(Text(["The two runs have no case in common."]))
    if any(len(values) < 2 for c in changed for values in (c.a.values, c.b.values)):
        blocks.append(Text(["Figures measured once count as changed from 2 %; repeat them to see their noise."]))
    return data, blocks


def _figures(run: Run) -> list[metrics.Metric]:
    """Its figures. How long a verify ran says nothing of what it found: neither better nor worse."""
    found = metrics.of(run.result)
    return [replace(metric, better="") for metric in found] if run.kind == "verify" else found


def differences(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """Set-up keys whose values differ; `-` where a run does not have one."""
    left, right = metrics.flatten(a.setup), metrics.flatten(b.setup)
    return _differing(left | {"host": a.host, "mlapatch": a.mlapatch}, right | {"host": b.host, "mlapatch": b.mlapatch})


def _differing(left: Mapping[str, str], right: Mapping[str, str]) -> list[tuple[str, str, str]]:
    keys = sorted({*left, *right})
    return [(key, left.get(key, "-"), right.get(key, "-")) for key in keys if left.get(key) != right.get(key)]


def _word(change: metrics.Change) -> str:
    return "within noise" if change.verdict == "noise" else change.verdict
