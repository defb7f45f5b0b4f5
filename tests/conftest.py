"""Fixtures for all tests.

`corpus`            real SGLang files: `corpus.text("0.5.9")`, `corpus.release("0.5.9").record` (see tests/corpus.py)
`install_tree`      `install_tree("0.5.9")` -> a fresh, small site-packages in this test's tmp_path, all bytes real
`unpacked`          `unpacked("0.5.9")` -> a fresh site-packages with the whole wheel, slower
`wheel_dir`         `wheel_dir("0.5.9")` -> the whole wheel unpacked, shared: read only
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.corpus import Corpus, cache_root

TreeFactory: TypeAlias = Callable[[str], Path]


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return Corpus(cache_root())


@pytest.fixture
def install_tree(corpus: Corpus, tmp_path: Path) -> TreeFactory:
    def make(version: str) -> Path:
        return corpus.install_tree(version, _fresh(tmp_path / f"sp-{version}"))

    return make


@pytest.fixture
def unpacked(corpus: Corpus, tmp_path: Path) -> TreeFactory:
    def make(version: str) -> Path:
        return Path(shutil.copytree(corpus.wheel_dir(version), _fresh(tmp_path / f"whole-{version}")))

    return make


@pytest.fixture
def wheel_dir(corpus: Corpus) -> TreeFactory:
    return corpus.wheel_dir


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the developer's own settings reaches a test; fetched wheels are shared with the corpus."""
    for name in ("MLAPATCH_SGLANG", "MLAPATCH_PATCHES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLAPATCH_CACHE", str(cache_root()))


def _fresh(folder: Path) -> Path:
    """`folder`, or the first `folder-2`, `folder-3`, ... that does not exist yet."""
    number, fresh = 1, folder
    while fresh.exists():
        number += 1
        fresh = folder.with_name(f"{folder.name}-{number}")
    return fresh
