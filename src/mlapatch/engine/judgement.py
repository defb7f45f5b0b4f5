"""The closed set of verdicts, and a verdict with its reason. (Imports no parser: a warm `status` needs only this.)"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """What a patch is to a file."""

    APPLIED = "applied"
    APPLICABLE = "applicable"
    SUPERSEDED = "superseded"
    DRIFTED = "drifted"
    AMBIGUOUS = "ambiguous"
    EDITED = "edited"
    LOST = "lost"
    CONFLICTS = "conflicts"
    UNSUPPORTED = "unsupported"

    def __str__(self) -> str:
        return self.value


_TEXTS = ("scope", "expected", "found", "nearest", "next")


@dataclass(frozen=True)
class Judgement:
    """A verdict and its reason: scope, expected and found, nearest candidate with its line, next command.

    `traces` counts the signs of the patch in the file, `troubles` what is not as it left it: they tell two patches
    that share helpers apart.
    """

    patch: str
    verdict: Verdict
    reason: str
    scope: str = ""
    expected: str = ""
    found: str = ""
    nearest: str = ""
    next: str = ""
    traces: int = 0
    troubles: int = 0

    def but(self, verdict: Verdict, reason: str, next_command: str = "") -> Judgement:
        """Another verdict, for a reason that the file alone does not show."""
        return Judgement(self.patch, verdict, reason, next=next_command, traces=self.traces, troubles=self.troubles)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: name, verdict, reason, and whatever else is known."""
        extra = {key: getattr(self, key) for key in _TEXTS if getattr(self, key)}
        return {"name": self.patch, "verdict": str(self.verdict), "reason": self.reason, **extra}

    def to_cache(self) -> dict[str, Any]:
        """Everything, for the verdict cache."""
        return {**self.as_dict(), "traces": self.traces, "troubles": self.troubles}

    @classmethod
    def from_cache(cls, kept: dict[str, Any]) -> Judgement:
        """The inverse of `to_cache`."""
        texts = {key: str(kept.get(key, "")) for key in _TEXTS}
        verdict, traces, troubles = Verdict(kept["verdict"]), int(kept["traces"]), int(kept["troubles"])
        return cls(str(kept["name"]), verdict, str(kept["reason"]), traces=traces, troubles=troubles, **texts)
