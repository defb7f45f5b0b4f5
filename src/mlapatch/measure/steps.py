"""Where decode steps begin and end on a GPU's timeline.

Three kinds of evidence, best first: CUDA-graph launches (all kernels of a replay carry the correlation id of its
launch), SGLang's own `step[DECODE ...]` spans (0.5.15 and later, with CPU activity recorded), and else a kernel that
runs once a step: the number of per-layer kernels between two of its launches is the number of layers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlapatch.measure.kernels import Group
    from mlapatch.measure.spool import Record
    from mlapatch.measure.tracefile import Track

_SMALLEST_GRAPH = 20  # kernels: the graph of a decode step has hundreds
_OPEN = 4096
_MARKERS = 48
_MOST_MARKS = 20_000


@dataclass
class Launch:
    """The kernels of one CUDA-graph replay: span in us, and how many calls of each watched group it holds."""

    start: float
    end: float
    kernels: int = 0
    calls: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Steps:
    """Decode steps as (start, end) in us, how they were found, and calls of the watched kernel in each (0: unknown)."""

    windows: Sequence[tuple[float, float]]
    found_by: str
    group: int | None = None
    layers: int = 0
    graphs: bool = False
    count: int = 0


def launches(records: Iterable[Record], watched: set[int]) -> list[Launch]:
    """Graph replays with at least 20 kernels, in order; memory does not grow with eager launches."""
    opened: dict[int, Launch] = {}
    done: list[Launch] = []
    current, launch = None, None
    for ts, dur, group, correlation in records:
        if correlation != current:
            current, launch = correlation, opened.get(correlation)
        if launch is None:
            if len(opened) >= _OPEN:
                for old in list(opened)[: _OPEN // 2]:
                    closed = opened.pop(old)
                    if closed.kernels >= _SMALLEST_GRAPH:
                        done.append(closed)
            opened[correlation] = launch = Launch(ts, ts)
        launch.kernels += 1
        if ts + dur > launch.end:
            launch.end = ts + dur
        if group in watched:
            launch.calls[group] += 1
    opened.pop(0, None)  # no correlation recorded
    return done + [launch for launch in opened.values() if launch.kernels >= _SMALLEST_GRAPH]


def _mode(counts: Iterable[int]) -> tuple[int, float]:
    """The commonest count, and the share of counts that are equal to it."""
    tally = Counter(counts)
    if not tally:
        return 0, 0.0
    value, times = max(tally.items(), key=lambda item: (item[1], item[0]))
    return value, times / sum(tally.values())


def by_graph(found: Sequence[Launch], watched: Sequence[int]) -> Steps | None:
    """Steps from graph replays: the large ones, and among them those with the same number (> 1) of watched calls."""
    if not found:
        return None
    most = max(launch.kernels for launch in found)
    large = sorted((launch for launch in found if 2 * launch.kernels >= most), key=lambda launch: launch.start)
    for group in watched:
        layers, share = _mode(launch.calls[group] for launch in large)
        if layers > 1 and share >= 0.5:
            chosen = [launch for launch in large if launch.calls[group] == layers]
            return Steps(_windows(chosen), "CUDA-graph replays", group, layers, graphs=True, count=len(chosen))
    return Steps(_windows(large), "CUDA-graph replays", graphs=True, count=len(large))


def _windows(chosen: Sequence[Launch]) -> list[tuple[float, float]]:
    """From the start of each replay to the start of the next; the last ends with its own kernels."""
    ends = [launch.start for launch in chosen[1:]] + [chosen[-1].end]
    return [(launch.start, end) for launch, end in zip(chosen, ends, strict=True)]


def by_span(track: Track, watched: Sequence[int]) -> Steps | None:
    """Steps from SGLang's spans on the GPU timeline. A step lasts until the next begins, whatever its mode."""
    spans = sorted(track.steps)
    windows = []
    for index, (start, end, mode, _) in enumerate(spans):
        if mode in ("DECODE", "TARGET_VERIFY"):
            windows.append((start, spans[index + 1][0] if index + 1 < len(spans) else end))
    if not windows:
        return None
    tallies: dict[int, list[int]] = {group: [0] * len(windows) for group in watched}
    at = 0
    for ts, _, group, _ in track.spool:
        while at < len(windows) and ts >= windows[at][1]:
            at += 1
        if at == len(windows):
            break
        if group in tallies and ts >= windows[at][0]:
            tallies[group][at] += 1
    for group in watched:
        layers, share = _mode(tallies[group])
        if layers > 1 and share >= 0.5:
            return Steps(windows, "SGLang's step spans", group, layers, count=len(windows))
    return Steps(windows, "SGLang's step spans", count=len(windows))


def by_marker(track: Track, watched: Sequence[int], layers: int | None = None) -> Steps | None:
    """Steps from kernels that run once a step: each votes for the number of watched calls between its launches."""
    for group in watched:
        steps = _vote(track, group, layers)
        if steps is not None:
            return steps
    return None


def _markers(groups: Sequence[Group], calls: int) -> set[int]:
    fit = [i for i, group in enumerate(groups) if 2 <= group.count <= min(calls // 2, _MOST_MARKS)]
    popular = Counter(groups[i].count for i in fit)
    fit.sort(key=lambda i: (-popular[groups[i].count], groups[i].count))
    return set(fit[:_MARKERS])


def _vote(track: Track, watched: int, layers: int | None) -> Steps | None:
    marks: dict[int, list[tuple[int, float]]] = {
        marker: [] for marker in _markers(track.groups, track.groups[watched].count)
    }
    calls, begin, end = 0, None, 0.0
    for ts, dur, group, _ in track.spool:
        begin = ts if begin is None else begin
        if group == watched:
            calls += 1
        elif group in marks:
            marks[group].append((calls, ts))
        end = max(end, ts + dur)
    votes: Counter[int] = Counter()
    ballots: dict[int, tuple[int, int]] = {}
    for marker, places in marks.items():
        places.insert(0, (0, begin or 0.0))
        places.append((calls, end))
        between = [b[0] - a[0] for a, b in itertools.pairwise(places) if b[0] > a[0]]
        value, share = _mode(between)
        if value > 1 and share >= 0.8 and (layers is None or value == layers):
            votes[value] += 1
            ballots[marker] = value, len(between)
    repeated = {value for value, times in ballots.values() if times > 1}
    votes = Counter({value: n for value, n in votes.items() if value in repeated}) or votes  # prefill-only kernels
    if not votes:
        return None
    winner = max(votes, key=lambda value: (votes[value], value))
    best = max((m for m, (value, _) in ballots.items() if value == winner), key=lambda m: ballots[m][1])
    places = marks[best]
    windows = [(a[1], b[1]) for a, b in itertools.pairwise(places) if b[0] - a[0] == winner]
    return Steps(windows, "a kernel that runs once a step", watched, winner, count=len(windows))
