"""Unified diffs of bytes: made, taken apart into edits, and applied again without any fuzz."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

Hunk: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""One edit: the lines that go and the lines that come; where it stands does not count."""

_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_UNENDED = "\\ No newline at end of file\n"


def unified(old: bytes, new: bytes, relative: str) -> str:
    """A unified diff with the package's own path, as `git apply` and `patch -p1` take it from the site folder.

    Bytes that are not UTF-8 are shown as escapes.
    """
    before, after = (_lines(data.decode("utf-8", "backslashreplace")) for data in (old, new))
    lines = difflib.unified_diff(before, after, f"a/sglang/{relative}", f"b/sglang/{relative}")
    return "".join(line if line.endswith("\n") else f"{line}\n{_UNENDED}" for line in lines)


def hunks(diff: str) -> Counter[Hunk]:
    """The edits of a unified diff, without context and place: equal for the same edits of a file that moved on."""
    found: Counter[Hunk] = Counter()
    gone: list[str] = []
    come: list[str] = []
    for line in [*_body(diff), " "]:
        if line[0] == "-":
            gone.append(line[1:])
        elif line[0] == "+":
            come.append(line[1:])
        elif line != _UNENDED and (gone or come):
            found[tuple(gone), tuple(come)] += 1
            gone, come = [], []
    return found


def patched(old: bytes, diff: str) -> bytes | None:
    """The new bytes, from the old ones and their diff; None where the diff is of other bytes."""
    try:
        source = _lines(old.decode("utf-8"))
    except UnicodeDecodeError:
        return None
    new: list[str] = []
    at, last = 0, ""
    for line in _body(diff):
        if header := _HEADER.match(line):
            start = int(header[1]) - (header[2] != "0")
            new += source[at:start]
            at = start
        elif line == _UNENDED:
            if last != "-":
                new[-1] = new[-1].removesuffix("\n")
        elif line[0] == "+":
            new.append(line[1:])
        else:
            if at >= len(source) or source[at].removesuffix("\n") != line[1:].removesuffix("\n"):
                return None
            if line[0] == " ":
                new.append(line[1:])
            at += 1
        last = line[0]
    return "".join([*new, *source[at:]]).encode()


def _lines(text: str) -> list[str]:
    """Lines as git counts them: a form feed or a lone carriage return ends none."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _body(diff: str) -> Iterator[str]:
    """The lines after the two that name the file."""
    return iter(_lines(diff)[2:])
