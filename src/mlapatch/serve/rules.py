"""`rules.toml` as frozen values: phases, facts, rules, silences and the texts that no single line decides."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNKNOWN = "unknown"
"""The phase of a rank of which the log shows no phase line."""

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")


@dataclass(frozen=True)
class Matcher:
    """A regex and the lower-case text that a line must hold before the regex is tried."""

    contains: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Phase:
    """One phase of a start, in order; `patience` in seconds without a new line, 0 for no limit."""

    id: str
    title: str
    patience: float
    begins: tuple[Matcher, ...]


@dataclass(frozen=True)
class Fact:
    """Values to keep from a line, for the whole log or for each rank."""

    contains: str
    patterns: tuple[re.Pattern[str], ...]
    per_rank: bool
    keep_first: bool


@dataclass(frozen=True)
class Rule:
    """One failure that can be recognised on a line; see the head of rules.toml for the fields."""

    order: int
    id: str
    match: Matcher
    cause: str
    advice: str
    source: str
    tag: str
    case: int | None = None
    captures: tuple[re.Pattern[str], ...] = ()
    when: frozenset[str] = frozenset()
    phase: str | None = None
    fatal: bool = False
    ending: bool = False
    secondary: bool = False
    advice_for: Mapping[str, str] = field(default_factory=dict)
    value: Mapping[str, re.Pattern[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    """A cause and an advice that a whole log, or a silence, decides."""

    cause: str
    advice: str
    source: str = ""
    case: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    suspicion: str = ""


@dataclass(frozen=True)
class RuleBook:
    """Everything in rules.toml."""

    phases: tuple[Phase, ...]
    facts: tuple[Fact, ...]
    rules: tuple[Rule, ...]
    silences: Mapping[str, Template]
    specials: Mapping[str, Template]
    architectures: Mapping[str, str]

    def title(self, phase: str) -> str:
        """The phase's name for people."""
        return next((p.title for p in self.phases if p.id == phase), phase)

    def rank_of(self, phase: str) -> int:
        """Position of a phase in a start, -1 for the unknown one."""
        return next((i for i, p in enumerate(self.phases) if p.id == phase), -1)


def _regex(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


def _rule(order: int, row: dict[str, Any]) -> Rule:
    return Rule(
        order=order,
        id=row["id"],
        match=Matcher(row["contains"], _regex(row["pattern"])),
        cause=row["cause"],
        advice=row["advice"],
        source=row["source"],
        tag=row["tag"],
        case=row.get("case"),
        captures=tuple(_regex(c) for c in row.get("captures", ())),
        when=frozenset(row.get("when", ())),
        phase=row.get("phase"),
        fatal=row.get("fatal", False),
        ending=row.get("ending", False),
        secondary=row.get("secondary", False),
        advice_for=row.get("advice-for", {}),
        value={group: _regex(text) for group, text in row.get("value", {}).items()},
    )


def _template(row: dict[str, Any]) -> Template:
    return Template(
        row["cause"],
        row["advice"],
        row.get("source", ""),
        row.get("case"),
        row.get("packages", {}),
        row.get("suspicion", ""),
    )


@cache
def load() -> RuleBook:
    """Read the rules that ship with mlapatch, once."""
    data = tomllib.loads(resources.files("mlapatch.serve").joinpath("rules.toml").read_text("utf-8"))
    return RuleBook(
        phases=tuple(
            Phase(
                row["id"],
                row["title"],
                row["patience"],
                tuple(Matcher(begin["contains"], _regex(begin["pattern"])) for begin in row["begins"]),
            )
            for row in data["phase"]
        ),
        facts=tuple(
            Fact(
                row["contains"],
                tuple(_regex(p) for p in row["patterns"]),
                row.get("per-rank", False),
                row.get("keep") == "first",
            )
            for row in data["fact"]
        ),
        rules=tuple(_rule(order, row) for order, row in enumerate(data["rule"])),
        silences={row["phase"]: _template(row) for row in data["silence"]},
        specials={name: _template(row) for name, row in data["special"].items()},
        architectures=data["architectures"],
    )


class _Known(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return f"<{key} not in the log>"


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text with its values; a part in `[[ ]]` is dropped where one of its values is not known."""

    def part(match: re.Match[str]) -> str:
        try:
            return match[1].format_map(dict(values))
        except KeyError:
            return ""

    kept = _OPTIONAL.sub(lambda m: part(m).replace("{", "{{").replace("}", "}}"), text)
    return " ".join(kept.format_map(_Known(values)).split())
