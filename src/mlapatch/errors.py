"""The one exception that a command raises when it cannot go on; the CLI renders it late."""

from __future__ import annotations

from dataclasses import dataclass

from mlapatch.exits import Exit


@dataclass
class MlapatchError(Exception):
    """What went wrong, where, what was expected and found, and the next command to type."""

    exit: Exit
    what: str
    where: str = ""
    expected: str = ""
    found: str = ""
    next: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return self.what

    def as_dict(self) -> dict[str, object]:
        """The error as JSON for `--json`."""
        fields = ("what", "where", "expected", "found", "next", "detail")
        return {"error": {name: getattr(self, name) for name in fields if getattr(self, name)}, "exit": int(self.exit)}


class NoSglangError(MlapatchError):
    """A Python that certainly has no SGLang, as against one that cannot be asked or names files that are not here."""
