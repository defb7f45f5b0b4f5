"""Fixtures for all tests.

`corpus`            real SGLang files: `corpus.text("0.5.9")`, `corpus.release("0.5.9").record` (see tests/corpus.py)
`install_tree`      `install_tree("0.5.9")` -> a fresh, small site-packages in this test's tmp_path, all bytes real
`unpacked`          `unpacked("0.5.9")` -> a fresh site-packages with the whole wheel, slower
`wheel_dir`         `wheel_dir("0.5.9")` -> the whole wheel unpacked, shared: read only
`local_index`       a package index of small wheels on the loopback interface, which can misbehave; pip is set up for it
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.corpus import Corpus, cache_root
from tests.install.local_index import LocalIndex, serving
from tests.quicker import collect_less, remember_answers

remember_answers()
collect_less()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; commands are to be interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    monkeypatch.setenv("PIP_RETRIES", "0")
    folder = tmp_path / "index"
    folder.mkdir()
    with serving(folder) as served:
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        yield served


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the developer reaches a test, and no test their kept runs; fetched wheels are shared."""
    for name in ("MLAPATCH_SGLANG", "MLAPATCH_PATCHES", "MLAPATCH_DB", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "data"))
    monkeypatch.setenv("MLAPATCH_CACHE", str(cache_root()))


def _fresh(folder: Path) -> Path:
    """`folder`, or the first `folder-2`, `folder-3`, ... that does not exist yet."""
    number, fresh = 1, folder
    while fresh.exists():
        number += 1
        fresh = folder.with_name(f"{folder.name}-{number}")
    return fresh
