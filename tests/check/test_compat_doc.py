"""docs/compat.md is generated, and must not differ from what the catalogue of today gives."""

from __future__ import annotations

import re
from pathlib import Path

from mlapatch.commands.check import check
from mlapatch.outcome import Text
from tests.corpus import ALL_RELEASES

DOC = Path(__file__).parents[2] / "docs" / "compat.md"
AGAIN = "write it anew: mlapatch check --all-releases --markdown > docs/compat.md"


def test_the_compat_table_is_todays() -> None:
    text = DOC.read_text(encoding="utf-8")
    releases = re.findall(r"^\| (\d\S*) \|", text, re.MULTILINE)
    assert set(releases) >= {release for release in ALL_RELEASES if "rc" not in release}
    outcome = check(releases=releases, as_markdown=True)
    lines = [line for block in outcome.blocks if isinstance(block, Text) for line in block.lines]
    assert _without_date(lines) == _without_date(text.splitlines()), AGAIN


def _without_date(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("Written on ")]
