"""What a command returns: an exit code, data for `--json`, and blocks for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mlapatch.exits import Exit


@dataclass(frozen=True)
class Text:
    """Lines printed as they are; style is a rich style used on a terminal only."""

    lines: Sequence[str]
    style: str = ""


@dataclass(frozen=True)
class Pairs:
    """`key: value` lines."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table on a terminal; tab-separated `key: value` lines, never cut, in a pipe."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Diff:
    """A unified diff."""

    text: str


@dataclass(frozen=True)
class Warn:
    """One warning line, printed to stderr."""

    text: str


Block: TypeAlias = Text | Pairs | Table | Diff | Warn


@dataclass(frozen=True)
class Outcome:
    """The result of one verb."""

    exit: Exit = Exit.OK
    data: dict[str, object] = field(default_factory=dict)
    blocks: Sequence[Block] = ()
