"""Time inside decode steps: the union of what runs on the GPU, with and without one kernel, and sums by family."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from mlapatch.measure.kernels import CAST, family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlapatch.measure.kernels import Group
    from mlapatch.measure.spool import Record, Spool

_MOST_WINDOWS = 400


@dataclass
class Window:
    """One decode step; times in us. `rest` is the busy time there would be without the cast."""

    start: float
    end: float
    busy: float = 0.0
    rest: float = 0.0
    cast: float = 0.0
    cast_calls: int = 0
    by_group: dict[int, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        """From its start to the next step's."""
        return self.end - self.start


@dataclass(frozen=True)
class Timing:
    """Means over the steady steps, in us a step. `exclusive` is the cast's time during which nothing else ran."""

    wall: float
    busy: float
    cast: float
    exclusive: float
    steady: int
    families: list[tuple[str, float, int]]
    kernels: list[tuple[int, float]]


def measure(spool: Spool, groups: Sequence[Group], windows: Sequence[tuple[float, float]], cast: int | None) -> Timing:
    """Walk the timeline once; of many steps only the first 400 are looked at."""
    steps = [Window(*window) for window in windows[:_MOST_WINDOWS]]
    _walk(spool, steps, cast)
    steady = _steady(steps)
    count = len(steady)
    totals: dict[int, float] = {}
    for step in steady:
        for group, dur in step.by_group.items():
            totals[group] = totals.get(group, 0.0) + dur
    families: dict[str, tuple[float, set[int]]] = {}
    for group, dur in totals.items():
        label = CAST if group == cast else family(groups[group].name)
        held = families.setdefault(label, (0.0, set()))
        families[label] = (held[0] + dur, held[1] | {group})
    return Timing(
        wall=median(step.wall for step in steady),
        busy=sum(step.busy for step in steady) / count,
        cast=sum(step.cast for step in steady) / count,
        exclusive=sum(step.busy - step.rest for step in steady) / count,
        steady=count,
        families=sorted(
            ((label, dur / count, len(members)) for label, (dur, members) in families.items()), key=lambda f: -f[1]
        ),
        kernels=sorted(((group, dur / count) for group, dur in totals.items()), key=lambda k: -k[1]),
    )


def _steady(steps: list[Window]) -> list[Window]:
    """Leave out the last step, whose end is not the next one's start, and those with a prefill or a pause in them."""
    whole = steps[:-1] or steps
    usual = median(step.wall for step in whole)
    return [step for step in whole if step.wall <= 1.5 * usual] or whole


def _walk(records: Spool | list[Record], steps: list[Window], cast: int | None) -> None:
    at, last = 0, len(steps) - 1
    step = steps[0]
    busy_to = rest_to = cast_to = step.start
    for ts, dur, group, _ in records:
        if ts < step.start:
            continue
        if ts >= step.end:
            while at < last and ts >= steps[at].end:
                at += 1
            step = steps[at]
            if ts >= step.end:
                break
            busy_to = rest_to = cast_to = step.start
            if ts < step.start:
                continue
        end = ts + dur
        if end > busy_to:
            step.busy += end - max(ts, busy_to)
            busy_to = end
        step.by_group[group] = step.by_group.get(group, 0.0) + dur
        if group == cast:
            step.cast_calls += 1
            if end > cast_to:
                step.cast += end - max(ts, cast_to)
                cast_to = end
        elif end > rest_to:
            step.rest += end - max(ts, rest_to)
            rest_to = end
