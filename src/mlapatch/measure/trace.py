"""The KV-pool cast in a trace: found by count, size and duration, and what a step would be without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import steps as stepping
from mlapatch.measure.kernels import Group, family
from mlapatch.measure.timeline import Timing, measure
from mlapatch.measure.tracefile import BIG, Copy, TraceFile, Track

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONG = 30.0  # us: a copy of a decode step's activations takes 2 to 6
_SLOWEST, _FASTEST = 2e10, 1.6e13  # bytes/s that a copy of that size can plausibly move
_LEAST, _LEAST_UNCLEAR = 0.01, 0.1  # share of all GPU time; larger where a name does not say that a dtype changes
_WATCHED = 6


@dataclass(frozen=True)
class Hints:
    """What the user or the server says, where a trace does not."""

    layers: int | None = None
    steps: int | None = None
    tokens: int | None = None
    width: int = 576


@dataclass(frozen=True)
class Cast:
    """The cast on one GPU; times in us. `shape` is None where the trace records none."""

    group: Group
    layers: int
    calls: int
    elements: int
    shape: tuple[int, ...] | None
    sure: bool

    @property
    def bytes(self) -> int:
        """FP8 read and BF16 written by one call."""
        return 3 * self.elements

    @property
    def rate(self) -> float:
        """Bytes a second of one call."""
        return self.bytes / (self.group.total / self.group.count * 1e-6) if self.group.total else 0.0


@dataclass(frozen=True)
class RankTrace:
    """One GPU's decode steps."""

    file: TraceFile
    track: Track
    rank: str
    gpu: str
    sm: int
    steps: stepping.Steps
    timing: Timing
    cast: Cast | None
    notes: tuple[str, ...]

    @property
    def share(self) -> float:
        """The cast's share of a step's wall time."""
        return min(self.timing.cast / self.timing.wall, 1.0) if self.timing.wall else 0.0

    @property
    def idle(self) -> float:
        """Share of a step in which the GPU does nothing."""
        return max(1 - self.timing.busy / self.timing.wall, 0.0) if self.timing.wall else 0.0

    @property
    def remaining(self) -> float:
        """A step without the cast, us: what overlaps with the cast stays."""
        return self.timing.wall - self.timing.exclusive


def analyse(file: TraceFile, hints: Hints) -> list[RankTrace]:
    """Each GPU of a file.

    Raises:
        MlapatchError: the file holds no GPU activity (exit 2).
    """
    tracks = [track for track in file.tracks.values() if track.spool.count]
    if not tracks:
        raise MlapatchError(
            Exit.USAGE,
            "the trace holds no GPU activity",
            where=str(file.path),
            expected='events of category "kernel"',
            found=f"{file.events:,} events, none of them" + ("; the file is cut off" if file.partial else ""),
            next='profile with activities ["CPU", "GPU"] while requests run: mlapatch profile',
        )
    return [_analyse(file, track, hints) for track in tracks]


def _analyse(file: TraceFile, track: Track, hints: Hints) -> RankTrace:
    copies = candidates(track, file.copies)
    steps = _steps(track, copies, hints)
    notes: list[str] = []
    cast, chosen = None, _chosen(track, steps, copies, file.copies)
    if chosen is not None:
        group = track.groups[chosen]
        cast = _cast(group, steps, _recorded(group, file.copies), hints)
        if not steps.layers:
            notes.append("the steps could not be told apart: give --steps or --layers")
        if hints.tokens and abs(cast.elements / hints.width / hints.tokens - 1) > 0.02:
            notes.append(
                f"the copy covers about {cast.elements // hints.width:,} rows of {hints.width}, "
                f"not the {hints.tokens:,} tokens of the pool"
            )
    elif copies:
        big = track.groups[copies[0]]
        notes.append(f"{big.count:,} large copies of {big.total / big.count:.0f} us, but not a fixed number a step")
    timing = measure(track.spool, track.groups, steps.windows, chosen)
    track.spool.close()
    if hints.steps and steps.count != hints.steps:
        notes.append(f"{steps.count} decode steps found where {hints.steps} were expected")
    name, sm = file.gpu(track)
    return RankTrace(file, track, file.rank(track), name, sm, steps, timing, cast, tuple(notes))


def _chosen(track: Track, steps: stepping.Steps, copies: Sequence[int], recorded: dict[int, Copy]) -> int | None:
    """The cast: a large copy that runs equally often in each step, or, where steps are unknown, one that dominates."""
    if steps.group in copies:
        return steps.group
    if steps.count or not copies:
        return None
    best, everything = track.groups[copies[0]], sum(group.total for group in track.groups)
    copy = _recorded(best, recorded)
    convincing = best.converts or (copy is not None and copy.fp8)
    return copies[0] if convincing and best.total > 0.2 * everything else None


def candidates(track: Track, recorded: dict[int, Copy]) -> list[int]:
    """Groups that can be the cast, the likeliest first: large copies that run often, by their total time."""
    fit = []
    everything = sum(group.total for group in track.groups)
    for index, group in enumerate(track.groups):
        shape = _recorded(group, recorded)
        sure = shape is not None and shape.fp8
        if group.count < 2 or not (group.is_copy or sure):
            continue
        mean, elements = group.total / group.count, group.elements
        if not sure:
            if group.total < (_LEAST if group.converts else _LEAST_UNCLEAR) * everything:
                continue
            if (elements and elements < BIG) or (not elements and mean < _LONG) or mean < _LONG / 10:
                continue
            if elements and mean and not _SLOWEST < 3 * elements / (mean * 1e-6) < _FASTEST:
                continue
        fit.append(((sure, group.converts, group.total), index))
    return [index for _, index in sorted(fit, reverse=True)][:_WATCHED]


def _recorded(group: Group, copies: dict[int, Copy]) -> Copy | None:
    found = [copies[op] for op in group.ops if op in copies]
    return next((copy for copy in found if copy.fp8), found[0] if found else None)


def _steps(track: Track, copies: Sequence[int], hints: Hints) -> stepping.Steps:
    anchors = _anchors(track)
    found = stepping.by_graph(stepping.launches(track.spool, {*copies}), copies)
    if found is None or (copies and found.group is None):
        eager = stepping.by_span(track, copies or anchors) or stepping.by_marker(track, copies, hints.layers)
        if eager is None and found is None:
            eager = stepping.by_marker(track, anchors, hints.layers)
        if eager is not None and (found is None or eager.group in copies):
            return eager
    if found is not None:
        return found
    first = last = 0.0
    for index, (ts, dur, _, _) in enumerate(track.spool):
        first = ts if index == 0 else first
        last = max(last, ts + dur)
    if hints.steps:
        width = (last - first) / hints.steps
        even = [(first + i * width, first + (i + 1) * width) for i in range(hints.steps)]
        return stepping.Steps(even, "--steps, taken as equally long", count=hints.steps)
    return stepping.Steps([(first, last)], "", count=0)


def _anchors(track: Track) -> list[int]:
    """Kernels that run in each layer of a step without a cast: attention first, then what takes longest."""
    order = sorted(range(len(track.groups)), key=lambda i: -track.groups[i].total)
    often = [i for i in order if track.groups[i].count >= 8]
    attention = [i for i in often if family(track.groups[i].name) in ("attention", "mlapatch")]
    return (attention + often)[:_WATCHED]


def _cast(group: Group, steps: stepping.Steps, copy: Copy | None, hints: Hints) -> Cast:
    elements, shape = group.elements, None
    if copy is not None:
        shape, elements = copy.shape, 1
        for n in copy.shape:
            elements *= n
    elif hints.tokens and (not elements or _power_of_two(elements / (hints.tokens * hints.width))):
        elements = hints.tokens * hints.width  # how many elements a thread copies is PyTorch's secret
    sure = copy is not None and copy.fp8
    return Cast(group, steps.layers, steps.layers * steps.count, elements, shape, sure)


def _power_of_two(ratio: float) -> bool:
    """A ratio of 1/8 to 8 that is one, within 2 %."""
    return any(abs(ratio / 2.0**power - 1) < 0.02 for power in range(-3, 4))
