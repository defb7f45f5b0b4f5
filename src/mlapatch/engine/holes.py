"""The notation of patterns and templates: Python with `{name}` for one expression and `{name...}` for arguments."""

from __future__ import annotations

import re

_HOLE = re.compile(r"\{\{|\}\}|\{([a-z_][a-z0-9_]*)(\.\.\.)?\}")
ONE, MANY = "__mlapatch_one_", "__mlapatch_many_"
#: The patterns for a definition by its name.
HEADER = re.compile(r"(class|def)\s+([A-Za-z_]\w*)")


def with_stand_ins(text: str) -> tuple[str, list[str]]:
    """Python with a name in the place of each hole, doubled braces single; and the stand-ins in order."""
    names: list[str] = []

    def stand_in(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0][0]  # a doubled brace
        names.append(f"{MANY if match[2] else ONE}{match[1]}")
        return f"*{names[-1]}" if match[2] else names[-1]

    return _HOLE.sub(stand_in, text), names
