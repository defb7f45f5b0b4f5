"""The three-way merge: both changes where they do not overlap, also where they touch; else both sides, shown."""

from __future__ import annotations

import pytest

from mlapatch.engine.merge import Conflict, Merged, merge

BASE = b"a\nP\nb\nc\nd\n"  # with a patch's line, P
OURS = b"a\nb\nc\nd\n"  # without it


@pytest.mark.parametrize(
    ("yours", "expected"),
    [
        (BASE, OURS),
        (b"a\nP\nb\nc\nD\n", b"a\nb\nc\nD\n"),
        (b"A\nP\nb\nc\nd\n", b"A\nb\nc\nd\n"),  # the line before the patch's
        (b"a\nP\nB\nc\nd\n", b"a\nB\nc\nd\n"),  # the line after it
        (b"a\nnew\nP\nb\nc\nd\n", b"a\nnew\nb\nc\nd\n"),  # inserted right before it
        (b"a\nP\nnew\nb\nc\nd\n", b"a\nnew\nb\nc\nd\n"),  # inserted right after it
        (b"a\nP\nb\nc\n", b"a\nb\nc\n"),
        (b"a\nb\nc\nd\n", OURS),  # reverted by hand
        (b"a\nP\nb\nc\nd", b"a\nb\nc\nd"),
        (b"a\nP\nb\nc\nd\n\x0c\n", b"a\nb\nc\nd\n\x0c\n"),
    ],
)
def test_merged(yours: bytes, expected: bytes) -> None:
    assert merge(BASE, yours, OURS) == Merged(expected)


@pytest.mark.parametrize("yours", [b"a\nQ\nb\nc\nd\n", b"a\nP # mine\nb\nc\nd\n", b"A\nQ\nb\nc\nd\n"])
def test_conflict(yours: bytes) -> None:
    found = merge(BASE, yours, OURS)
    assert isinstance(found, Conflict)
    assert found.count == 1
    assert found.text.startswith("<<<<<<< your file, from line ")
    assert yours.splitlines()[1].decode() in found.text
    assert found.text.endswith(">>>>>>> mlapatch")


def test_a_conflict_names_the_changed_line_and_cuts_a_long_side() -> None:
    block = [b"line %d\n" % number for number in range(300)]
    patched = b"".join([b"a\n", *block, b"z\n"])
    yours = patched.replace(b"line 150\n", b"line 150  # mine\n")
    found = merge(patched, yours, b"a\nz\n")
    assert isinstance(found, Conflict)
    lines = found.text.splitlines()
    assert "+ 152: line 150  # mine" in lines
    assert "  ... 288 more lines ..." in lines
    assert len(lines) < 30


def test_two_insertions_at_one_place_are_a_conflict() -> None:
    assert isinstance(merge(b"a\nb\n", b"a\nyours\nb\n", b"a\nours\nb\n"), Conflict)
