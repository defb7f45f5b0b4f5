"""Three-way merge of one file: what a user changed since a patch was applied, and what reverting it changes."""

from __future__ import annotations

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
    blocks = []
    for group in conflicts:
        _, _, theirs, mine = group
        blocks += [b"<<<<<<< your file\n", *theirs, b"=======\n", *mine, b">>>>>>> mlapatch\n"]
    return Conflict(b"".join(blocks).decode("utf-8", "replace"), len(conflicts))


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
    opcodes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(i1, i2, new[j1:j2]) for kind, i1, i2, j1, j2 in opcodes if kind != "equal"]
