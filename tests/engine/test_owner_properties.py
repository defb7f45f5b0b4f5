"""Properties over real patches: a user's edits before and after apply, near the anchors or far, outlive revert."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from itertools import combinations, permutations
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.engine.judgement import Judgement
from mlapatch.engine.merge import Conflict, Merged, merge
from mlapatch.engine.patch import Patch
from mlapatch.engine.verdict import Fits, apply, judge
from tests.corpus import Corpus, cache_root

VERSIONS = ("0.5.9", "0.5.23")
CASTS = ("active-cast", "gather-cast", "fp8-plan", "fused-decode")
LINES = st.sampled_from(
    ["# by hand", "#", "", "x_by_hand = 1", "print('{pool}', \"é\")", "assert True, 'by hand'", "pass"]
)
ANCHOR = re.compile(
    rb"get_key_buffer|\.plan\(|\.run\(|^class |def forward_(decode|extend)|def call_begin_forward", re.M
)


@lru_cache
def source(version: str, target: str) -> bytes:
    return Corpus(cache_root()).text(version, f"sglang/{target}")


@lru_cache
def patches() -> dict[str, Patch]:
    return load_catalogue().patches


class Insertion(NamedTuple):
    """One line by hand: `place` counts anchors, `offset` lines from it; far ones count from the start of the file."""

    near: bool
    place: int
    offset: int
    text: str


INSERTIONS = st.lists(
    st.builds(Insertion, st.booleans(), st.integers(0, 30), st.integers(-4, 4), LINES), min_size=0, max_size=4
)


def edited(data: bytes, insertions: list[Insertion]) -> bytes:
    """Whole lines put between others, at the depth of the line that follows; those that make no Python are left out."""
    for one in insertions:
        lines = data.splitlines(keepends=True)
        found = [data.count(b"\n", 0, match.start()) for match in ANCHOR.finditer(data)]
        at = found[one.place % len(found)] + one.offset if one.near else (one.place * 7919) % len(lines)
        at = min(max(at, 0), len(lines) - 1)
        indent = re.match(rb"[ \t]*", lines[at])
        assert indent is not None
        line = (indent[0] if one.text else b"") + one.text.encode() + b"\n"
        candidate = b"".join([*lines[:at], line, *lines[at:]])
        try:
            ast.parse(candidate)
        except SyntaxError:
            continue
        data = candidate
    return data


@settings(max_examples=12, deadline=None)
@given(version=st.sampled_from(VERSIONS), name=st.sampled_from(CASTS), before=INSERTIONS, after=INSERTIONS)
def test_edits_by_hand_outlive_apply_and_revert(
    version: str, name: str, before: list[Insertion], after: list[Insertion]
) -> None:
    patch = patches()[name]
    base = edited(source(version, patch.target), before)
    outcome = apply(base, patch, Version(version))
    assert isinstance(outcome, (Fits, Judgement))
    if isinstance(outcome, Judgement):
        assert str(outcome.verdict) in ("drifted", "unsupported"), outcome
        return
    untouched = merge(outcome.source, outcome.source, base)
    assert isinstance(untouched, Merged)
    assert untouched.source == base, "apply then revert is the identity"
    mine = edited(outcome.source, after)
    reverted = merge(outcome.source, mine, base)
    if isinstance(reverted, Conflict):  # a line by hand inside the patch's own; revert refuses
        assert mine != outcome.source
        return
    assert ast.parse(reverted.source)
    assert _kept(base, reverted.source), "a line of the file is gone"
    added = len(mine.splitlines()) - len(outcome.source.splitlines())
    assert len(reverted.source.splitlines()) - len(base.splitlines()) == added, "every line by hand is there, once"
    if str(judge(reverted.source, patch, Version(version)).verdict) not in ("drifted", "ambiguous"):
        assert str(judge(reverted.source, patch, Version(version)).verdict) == "applicable"


def _kept(before: bytes, after: bytes) -> bool:
    """Whether every line is still there, in order."""
    rest = iter(after.splitlines())
    return all(line in rest for line in before.splitlines())


@settings(max_examples=2, deadline=None)
@given(version=st.sampled_from(VERSIONS), insertions=INSERTIONS)
def test_the_order_of_compatible_patches_does_not_matter_with_edits_by_hand(
    version: str, insertions: list[Insertion]
) -> None:
    """Every pair of real patches that do not exclude each other; those of different files never meet."""
    for pair in combinations(patches().values(), 2):
        if pair[0].name in pair[1].excludes or pair[1].name in pair[0].excludes:
            continue
        results = set()
        for order in permutations(pair):
            files = {one.target: edited(source(version, one.target), insertions) for one in pair}
            verdicts = []
            for patch in order:
                outcome = apply(files[patch.target], patch, Version(version))
                verdicts.append((patch.name, isinstance(outcome, Fits)))
                files[patch.target] = outcome.source if isinstance(outcome, Fits) else files[patch.target]
            results.add((tuple(sorted(files.items())), tuple(sorted(verdicts))))
        assert len(results) == 1, [patch.name for patch in pair]
