"""The golden tables: what a patch rewrites to the byte, and what it must leave alone."""

from __future__ import annotations

import pytest

from mlapatch.engine.judgement import Judgement
from mlapatch.engine.verdict import Fits, apply, judge, presence
from tests.engine.fixtures import Case, load_cases

REWRITES, NOOPS = load_cases("rewrite"), load_cases("noop")


def test_the_noop_table_is_as_long_as_the_rewrite_table() -> None:
    assert len(NOOPS) >= len(REWRITES) >= 30
    names = [case.name for case in [*REWRITES, *NOOPS]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", REWRITES, ids=lambda case: case.name)
def test_rewrite(case: Case) -> None:
    outcome = apply(case.before, case.patch, None)
    assert isinstance(outcome, Fits), outcome
    assert outcome.source == case.after
    assert judge(case.before, case.patch, None).verdict == "applicable"
    again = judge(outcome.source, case.patch, None)
    assert again.verdict == "applied", again


def test_the_same_question_has_the_same_answer() -> None:
    """The engine itself, not what quicker.py remembers of it."""
    case = REWRITES[0]
    for function in (apply, judge, presence):
        plain = getattr(function, "__wrapped__", function)
        assert plain(case.before, case.patch, None) == plain(case.before, case.patch, None)


@pytest.mark.parametrize("case", NOOPS, ids=lambda case: case.name)
def test_noop(case: Case) -> None:
    judgement = judge(case.before, case.patch, None)
    assert judgement.verdict == case.verdict, judgement
    assert case.reason in judgement.reason
    if case.verdict != "applied":
        outcome = apply(case.before, case.patch, None)
        assert isinstance(outcome, Judgement), outcome
        assert outcome.verdict == case.verdict
