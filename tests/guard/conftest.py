from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus import Corpus
from tests.guard.trees import Tree, checkout, install


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of its own: the default baseline is in the working folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["wheel", "checkout"])
def tree(request: pytest.FixtureRequest, corpus: Corpus, tmp_path: Path) -> Tree:
    return install(request.param, corpus, tmp_path / "install")


@pytest.fixture
def repo(corpus: Corpus, tmp_path: Path) -> Tree:
    (tmp_path / "install").mkdir()
    return checkout(corpus, tmp_path / "install")
