"""Three-way merge of one file: what a user changed since a patch was applied, and what reverting it changes."""

from __future__ import annotations

from dataclasses import dataclass
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
    three = Merge3(base.splitlines(True), yours.splitlines(True), ours.splitlines(True))
    groups = list(three.merge_groups())
    conflicts = [group for group in groups if group[0] == "conflict"]
    if not conflicts:
        return Merged(b"".join(line for group in groups for line in group[1]))
    blocks = []
    for group in conflicts:
        _, _, theirs, mine = group
        blocks += [b"<<<<<<< your file\n", *theirs, b"=======\n", *mine, b">>>>>>> mlapatch\n"]
    return Conflict(b"".join(blocks).decode("utf-8", "replace"), len(conflicts))
