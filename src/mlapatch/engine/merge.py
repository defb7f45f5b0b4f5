"""Three-way merge of one file: what a user changed since a patch was applied, and what reverting it changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TypeAlias

from merge3 import Merge3


@dataclass(frozen=True)
class Merged:
    """Both changes, without overlap."""

    source: bytes


@dataclass(frozen=True)
class Conflict:
    """Both sides changed the same lines; `text` shows them between conflict markers."""

    text: str
    count: int


Merge: TypeAlias = Merged | Conflict


def merge(base: bytes, yours: bytes, ours: bytes) -> Merge:
    """Merge a user's file (`yours`) and mlapatch's (`ours`), which both come from `base`."""
    if yours in (base, ours):
        return Merged(ours)
    if ours == base:
        return Merged(yours)
    lines = base.splitlines(True), yours.splitlines(True), ours.splitlines(True)
    groups = list(Merge3(*lines).merge_groups())
    conflicts = [group for group in groups if group[0] == "conflict"]
    if not conflicts:
        return Merged(b"".join(line for group in groups for line in group[1]))
    beside = _side_by_side(*lines)
    if beside is not None:
        return Merged(beside)
    return Conflict("\n".join(_shown(lines[0], *lines[1:])), len(conflicts))


LONGEST = 12
"""Lines of one side that a conflict shows; the block that a patch inserts can be hundreds."""


def _shown(base: list[bytes], yours: list[bytes], ours: list[bytes]) -> Iterator[str]:
    """Each conflict: what you changed in the patched file, by line, and what mlapatch would change there."""
    for region in Merge3(base, yours, ours).merge_regions():
        if region[0] != "conflict":
            continue
        _, base_start, base_end, yours_start, yours_end, ours_start, ours_end = region
        yield f"<<<<<<< your file, from line {yours_start + 1}"
        yield from _changes(base[base_start:base_end], yours[yours_start:yours_end], yours_start)
        yield "======="
        yield from _changes(base[base_start:base_end], ours[ours_start:ours_end], None)
        yield ">>>>>>> mlapatch"


def _changes(old: list[bytes], new: list[bytes], start: int | None) -> Iterator[str]:
    """The lines that differ, `-` and `+`, the new ones with their number; a long side is cut in the middle."""
    said: list[str] = []
    for first, last, lines, at in _numbered(old, new):
        said += [f"- {_text(line)}" for line in old[first:last]]
        said += [
            f"+ {_text(line)}" if start is None else f"+ {start + at + number + 1}: {_text(line)}"
            for number, line in enumerate(lines)
        ]
    if len(said) > LONGEST:
        half = LONGEST // 2
        said = [*said[:half], f"  ... {len(said) - 2 * half} more lines ...", *said[-half:]]
    yield from said


def _numbered(old: list[bytes], new: list[bytes]) -> list[tuple[int, int, list[bytes], int]]:
    opcodes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(i1, i2, new[j1:j2], j1) for kind, i1, i2, j1, j2 in opcodes if kind != "equal"]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


Hunk: TypeAlias = tuple[int, int, list[bytes]]


def _side_by_side(base: list[bytes], yours: list[bytes], ours: list[bytes]) -> bytes | None:
    """Both changes where they touch and do not overlap, which a plain three-way merge calls a conflict."""
    hunks = sorted(_hunks(base, yours) + _hunks(base, ours), key=lambda hunk: hunk[:2])
    out: list[bytes] = []
    at = 0
    for index, (first, last, new) in enumerate(hunks):
        if first < at or (index and hunks[index - 1][:2] == (first, last)):
            return None
        out += [*base[at:first], *new]
        at = last
    return b"".join([*out, *base[at:]])


def _hunks(old: list[bytes], new: list[bytes]) -> list[Hunk]:
    """What changed, as ranges of old lines and the lines that take their place."""
    return [(first, last, lines) for first, last, lines, _ in _numbered(old, new)]
