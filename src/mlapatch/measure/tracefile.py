"""One pass over one trace file: GPU activity by device, and the few host events that explain it."""

from __future__ import annotations

import gc
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from mlapatch.measure.bytesource import ByteSource
from mlapatch.measure.events import Event, EventReader
from mlapatch.measure.kernels import Group
from mlapatch.measure.spool import Record, Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_GPU = {"kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}
_STEP = re.compile(r"step\[(\w+)(?: bs=(\d{1,9}))?")
_RANK = re.compile(r"TP-?(\d{1,9})")
_SAMPLED = 8
_MOST_GROUPS = 20_000
_MOST_OPS = 200_000
_MOST_STEPS = 200_000
_LATEST = 1e17  # us; times since 1970 are below 2e15, and beyond it a float is too coarse
_LARGEST = 2**63 - 1
_LONGEST_NAME = 4096
BIG = 4_000_000  # elements: no copy of activations in a decode step comes near


@dataclass
class Track:
    """The activity of one GPU. `steps` are SGLang's own step spans on it: (start, end, mode, batch size)."""

    device: str
    groups: list[Group] = field(default_factory=list)
    spool: Spool = field(default_factory=Spool)
    steps: list[tuple[float, float, str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Copy:
    """An ATen copy whose input dims were recorded."""

    shape: tuple[int, ...]
    fp8: bool


@dataclass
class TraceFile:
    """What one file holds. Times in us; `launch_us` is host time spent launching, without waits."""

    path: Path
    tracks: dict[str, Track] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    copies: dict[int, Copy] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    graph_launches: int = 0
    launches: int = 0
    launch_us: float = 0.0
    events: int = 0
    bytes: int = 0
    partial: bool = False

    def rank(self, track: Track) -> str:
        """The TP rank, from the device label of a merged trace, the file's name, or torch's distributedInfo."""
        for text in (track.device, self.path.name):
            if (match := _RANK.search(text)) is not None:
                return str(int(match.group(1)))
        info = self.meta.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return str(rank) if isinstance(rank, int) else track.device

    def gpu(self, track: Track) -> tuple[str, int]:
        """GPU name and SM of a track, or ("", 0)."""
        devices = self.meta.get("deviceProperties")
        known = [d for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
        number = track.device.rsplit(" ", 1)[-1]
        device = next((d for d in known if str(d.get("id")) == number), known[0] if known else {})
        major, minor = device.get("computeMajor"), device.get("computeMinor")
        sm = 10 * major + minor if isinstance(major, int) and isinstance(minor, int) else 0
        return str(device.get("name", "")), sm


def read(path: Path, progress: Callable[[int], None] | None = None) -> TraceFile:
    """Read one trace in bounded memory.

    Raises:
        MlapatchError: the file cannot be read, is no Chrome trace, or is damaged beyond reading on (exit 2).
    """
    source = ByteSource(path, progress)
    reader = EventReader(source, str(path))
    result = TraceFile(path)
    collect = _Collector(result)
    with _no_cycles():
        for batch in reader:
            collect.batch(batch)
    result.meta = reader.meta
    result.notes = [*([source.damage] if source.damage else []), *reader.notes, *collect.notes()]
    result.events = reader.events
    result.bytes = source.bytes_out
    result.partial = not reader.complete or bool(source.damage)
    return result


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Parsed events hold no cycles; the collector would only walk millions of dicts in vain."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _time(event: Event) -> tuple[float, float] | None:
    """Start and duration in us, or None where one is missing or no time: NaN, negative, beyond all clocks."""
    ts, dur = event.get("ts"), event.get("dur")
    if isinstance(ts, (int, float)) and isinstance(dur, (int, float)) and -_LATEST < ts < _LATEST > dur >= 0:
        return ts, dur
    return None


def _size(listed: object) -> tuple[int, ...]:
    """A launch's grid or block; () where it is none that CUDA allows."""
    fits = isinstance(listed, list) and len(listed) <= 3 and all(type(n) is int and 0 <= n < 2**31 for n in listed)
    return tuple(listed) if isinstance(listed, list) and fits else ()


def _is_number(correlation: object) -> TypeGuard[int]:
    return type(correlation) is int and 0 <= correlation <= _LARGEST


_Entry = tuple[list[Record], int, Group]  # rows not yet spooled, number of the group, the group


class _Collector:
    """Sorts events into a TraceFile; the hot loop of `trace`."""

    def __init__(self, result: TraceFile) -> None:
        self._result = result
        self._index: dict[tuple[Any, ...], _Entry] = {}
        self._pending: dict[str, list[Record]] = {}
        self._last_end: dict[str, float] = {}
        self._odd = 0
        self._lumped = 0

    def notes(self) -> list[str]:
        """What was left out."""
        notes = []
        if self._odd:
            notes.append(f"{self._odd:,} GPU events have no usable time and were left out")
        if self._lumped:
            notes.append(f"{self._lumped:,} launches of rare kernels were counted as one group")
        return notes

    def batch(self, events: list[Event]) -> None:
        """Take in one batch."""
        index = self._index
        for event in events:
            category = event.get("cat")
            if category == "kernel":
                try:  # the usual case, written for speed: dense traces hold little else
                    ts, dur, args = event["ts"], event["dur"], event["args"]
                    x, y, z = args["grid"]
                    rows, number, group = index[event["name"], event["pid"], x, y, z]
                    correlation = args["correlation"]
                    usual = -_LATEST < ts < _LATEST > dur >= 0 and correlation & _LARGEST == correlation
                    usual = usual and group.count >= _SAMPLED
                except (KeyError, TypeError, ValueError):
                    usual = False
                if usual:
                    rows.append((ts, dur, number, correlation))
                    group.count += 1
                    group.total += dur
                else:
                    self._activity(event)
            elif not isinstance(category, str):
                continue
            elif category in _GPU:
                self._activity(event)
            elif category == "cpu_op":
                if str(event.get("name")) in _COPIES:
                    self._copy(event)
            elif category in ("cuda_runtime", "cuda_driver"):
                self._launch(event)
            elif category in ("gpu_user_annotation", "user_annotation"):
                self._step(event, on_gpu=category == "gpu_user_annotation")
        for device, rows in self._pending.items():
            self._result.tracks[device].spool.extend(rows)
            rows.clear()

    def _activity(self, event: Event) -> None:
        time = _time(event)
        if time is None:
            self._odd += 1
            return
        ts, dur = time
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        grid, block = _size(args.get("grid")), _size(args.get("block"))
        name, pid = str(event.get("name"))[:_LONGEST_NAME], event.get("pid")
        pid = pid if isinstance(pid, (int, str)) else str(pid)
        rows, number, group = self._known((name, pid, *grid), grid, block)
        group.count += 1
        group.total += dur
        correlation = args.get("correlation")
        rows.append((ts, dur, number, correlation if _is_number(correlation) else 0))
        if len(group.ops) < _SAMPLED and type(op := args.get("External id")) is int:
            group.ops.append(op)

    def _known(self, key: tuple[Any, ...], grid: tuple[int, ...], block: tuple[int, ...]) -> _Entry:
        entry = self._index.get(key)
        if entry is not None:
            return entry
        name, pid = key[:2]
        device = str(pid)
        if device not in self._pending:
            self._pending[device] = []
        track = self._result.tracks.setdefault(device, Track(device))
        if len(track.groups) >= _MOST_GROUPS:
            self._lumped += 1
            rare = ("other kernels", pid)
            if key != rare:
                return self._known(rare, (), ()) if rare not in self._index else self._index[rare]
        group = Group(str(name), grid, block)
        track.groups.append(group)
        self._index[key] = entry = (self._pending[device], len(track.groups) - 1, group)
        return entry

    def _copy(self, event: Event) -> None:
        args = event.get("args")
        if not isinstance(args, dict) or len(self._result.copies) >= _MOST_OPS:
            return
        dims, types, op = args.get("Input Dims"), args.get("Input type"), args.get("External id")
        if type(op) is not int or not isinstance(dims, list) or not isinstance(types, list):
            return
        for shape, kind in zip(dims, types, strict=False):
            size = 1
            if not isinstance(shape, list) or not shape or not all(type(n) is int for n in shape):
                continue
            for n in shape:
                size *= n
            fp8 = "Float8" in str(kind)
            if size >= BIG and (fp8 or op not in self._result.copies):
                self._result.copies[op] = Copy(tuple(shape), fp8)

    def _launch(self, event: Event) -> None:
        name = str(event.get("name", ""))
        if "Launch" not in name:
            return
        self._result.launches += 1
        if "GraphLaunch" in name:
            self._result.graph_launches += 1
        time, thread = _time(event), str(event.get("tid"))
        if time is None:
            return
        ts, dur = time
        gap = ts - self._last_end.get(thread, ts)
        if 0 <= gap < 500 and dur < 500:  # longer ones wait for the GPU or for a request
            self._result.launch_us += gap + dur
        self._last_end[thread] = ts + dur

    def _step(self, event: Event, *, on_gpu: bool) -> None:
        match = _STEP.match(str(event.get("name", "")))
        if match is None:
            return
        mode, size = match.group(1), int(match.group(2) or 0)
        if not on_gpu:
            if mode == "DECODE":
                self._result.batches[size] = self._result.batches.get(size, 0) + 1
            return
        time = _time(event)
        if time is not None:
            ts, dur = time
            device = str(event.get("pid"))
            track = self._result.tracks.setdefault(device, Track(device))
            if len(track.steps) < _MOST_STEPS:
                track.steps.append((ts, ts + dur, mode, size))
