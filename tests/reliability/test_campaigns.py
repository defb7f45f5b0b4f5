"""A small run of every campaign: nothing is lost. `python -m tests.reliability` is the long one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.corpus import Corpus
from tests.reliability.__main__ import parts
from tests.reliability.figures import Setting


@pytest.mark.parametrize("part", parts())
def test_nothing_is_lost(corpus: Corpus, tmp_path: Path, part: str) -> None:
    figures = list(importlib.import_module(f"tests.reliability.{part}").campaign(Setting(corpus, tmp_path, 1, False)))
    assert figures
    for figure in figures:
        assert figure.tried > 0, figure
        assert figure.survived == figure.tried, figure
