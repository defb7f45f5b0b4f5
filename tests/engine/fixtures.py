"""Single-file golden cases: a patch, a file before, and the file after or the verdict; see cases/README.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from mlapatch.engine.patch import Patch, load_patch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = Path(__file__).parent / "cases"
_FORM = {"crlf": ("\n", "\r\n"), "tabs": ("    ", "\t"), "formfeed": ("^L", "\f"), "cr": ("^M", "\r")}


@dataclass(frozen=True)
class Case:
    """One case, its texts in the bytes that its flags say."""

    name: str
    patch: Patch
    before: bytes
    after: bytes | None  # None: a noop case
    verdict: str
    reason: str


def load_cases(kind: str) -> list[Case]:
    """The cases of `rewrite.txt` or `noop.txt`, in order."""
    text = (CASES / f"{kind}.txt").read_text(encoding="utf-8")
    return [_case(block) for block in text.split("\n=== ")[1:]]


def _case(block: str) -> Case:
    title, _, rest = block.partition("\n")
    name, _, flags = title.partition(" | ")
    toml, _, rest = rest.partition("--- before\n")
    before, _, after = rest.partition("--- after\n")
    table = {"name": "case", "summary": name, "target": "case.py", **tomllib.loads(toml)}
    expected = table.pop("verdict", "applicable"), table.pop("reason", "")
    for edit in table["edit"]:
        edit.setdefault("scope", "f")
    table.setdefault("post", [{"scope": "f", "present": "repr({a...})"}])
    for post in table["post"]:
        post.setdefault("scope", "f")
    patch = load_patch(table, {})
    chosen = flags.split()
    return Case(name, patch, _bytes(before, chosen), _bytes(after, chosen) if after else None, *expected)


def _bytes(text: str, flags: list[str]) -> bytes:
    for flag in flags:
        if flag in _FORM:
            text = text.replace(*_FORM[flag])
    if "no-newline" in flags:
        text = text.rstrip("\r\n")
    data = text.encode("latin-1" if "latin-1" in flags else "utf-8")
    return b"\xef\xbb\xbf" + data if "bom" in flags else data
