"""What a campaign hands back: how often something bad was tried, and what was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.corpus import Corpus


@dataclass(frozen=True)
class Figure:
    """One row of docs/reliability.md: `tried` bad things of one kind, `survived` of them as promised.

    `failures` says what went wrong in the others, one sentence each (at most ten are kept).
    """

    part: str
    kind: str
    tried: int
    survived: int
    failures: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Setting:
    """What a campaign needs: real SGLang files, a folder of its own, a seed, and how much may be tried."""

    corpus: Corpus
    work: Path
    seed: int
    thorough: bool


Campaign = Callable[[Setting], Iterable[Figure]]
