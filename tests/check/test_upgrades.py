"""Real upgrades, by pip and by git: a patch is never lost in silence, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.apply import apply
from mlapatch.commands.check import check
from mlapatch.commands.revert import revert
from mlapatch.commands.status import status
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome
from tests.corpus import BACKEND, RUNNER, Corpus
from tests.install.local_index import LocalIndex, make_wheel

OLD, NEW = "0.5.9", "0.5.23"


@pytest.fixture
def venv(local_index: LocalIndex, corpus: Corpus, tmp_path: Path) -> Path:
    """An environment of its own, and an index with two releases that have real files."""
    for version in (OLD, NEW):
        files = {
            "sglang/__init__.py": b"",
            "sglang/srt/__init__.py": b"",
            BACKEND: corpus.text(version),
            RUNNER: corpus.text(version, RUNNER),
        }
        make_wheel(local_index.folder, version, files, requires=())
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return place


def pip(venv: Path, *args: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "--disable-pip-version-check", *args]
    subprocess.run(command, check=True, capture_output=True)


def backend(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages")) / BACKEND


def verdict(outcome: Outcome, name: str = "active-cast") -> dict[str, str]:
    patches: Any = outcome.data["patches"]
    return next(item for item in patches if item["name"] == name)


def importable(venv: Path) -> str:
    code = "import importlib.util as u; s = u.find_spec('sglang'); print(s and (s.origin or 'namespace'))"
    done = subprocess.run([str(venv / "bin/python"), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_pip_upgrade(venv: Path, corpus: Corpus) -> None:
    python = str(venv / "bin/python")
    pip(venv, "install", f"sglang=={OLD}")
    assert apply(["active-cast"], python=python, sm=120).exit is Exit.OK
    assert status(python=python, sm=120, require=["active-cast"]).exit is Exit.OK

    pip(venv, "install", "--upgrade", "sglang")
    after = status(python=python, sm=120, require=["active-cast"])
    assert after.exit is Exit.FOUND
    assert verdict(after)["verdict"] == "lost"
    assert OLD in verdict(after)["reason"]
    assert NEW in verdict(after)["reason"]
    assert verdict(after)["next"] == "mlapatch apply active-cast"
    assert check(python=python, sm=120).exit is Exit.FOUND

    assert apply(["active-cast"], python=python, sm=120).exit is Exit.OK
    assert verdict(status(python=python, sm=120))["verdict"] == "applied"
    assert revert(python=python).exit is Exit.OK
    assert backend(venv).read_bytes() == corpus.text(NEW)
    assert verdict(status(python=python, sm=120))["verdict"] == "applicable"


def test_pip_uninstall_leaves_nothing_that_python_would_import(venv: Path) -> None:
    python = str(venv / "bin/python")
    pip(venv, "install", f"sglang=={OLD}")
    apply(["active-cast"], python=python, sm=120)
    subprocess.run([python, "-m", "compileall", "-q", str(backend(venv))], check=True)
    pip(venv, "uninstall", "--yes", "sglang")
    assert importable(venv) == "None"
    pip(venv, "install", f"sglang=={OLD}")
    again = status(python=python, sm=120)
    assert verdict(again)["verdict"] == "lost"
    targets: Any = again.data["targets"]
    assert {target["state"] for target in targets} == {"pristine"}


def test_a_half_upgraded_tree_is_not_called_fine(venv: Path, corpus: Corpus) -> None:
    python = str(venv / "bin/python")
    pip(venv, "install", f"sglang=={NEW}")
    backend(venv).write_bytes(corpus.text(OLD))
    outcome = status(python=python, sm=120)
    targets: Any = outcome.data["targets"]
    assert {target["path"]: target["state"] for target in targets}[BACKEND.removeprefix("sglang/")] == "edited"


@pytest.fixture
def checkout(corpus: Corpus, tmp_path: Path) -> tuple[Path, Callable[..., None]]:
    tree = tmp_path / "sglang"
    package = tree / "python" / "sglang"
    (package / "srt/layers/attention").mkdir(parents=True)
    (package / "srt/model_executor").mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def git(*args: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *who, *args], cwd=tree, check=True, capture_output=True)

    git("init")
    for branch in ("0.5.9", "0.5.23"):
        (tree / "python" / BACKEND).write_bytes(corpus.text(branch))
        (tree / "python" / RUNNER).write_bytes(corpus.text(branch, RUNNER))
        (package / "version.py").write_text(f'__version__ = "{branch}"\n')
        git("checkout", "-b", branch)
        git("add", ".")
        git("commit", "-m", branch)
    git("checkout", "0.5.9")
    return tree, git


@pytest.mark.parametrize(
    "how", [("checkout", "--", "."), ("stash",), ("reset", "--hard"), ("checkout", "--force", "0.5.23")], ids=" ".join
)
def test_git_takes_a_patch_away(checkout: tuple[Path, Callable[..., None]], how: tuple[str, ...]) -> None:
    tree, git = checkout
    apply(["active-cast"], sglang=tree, sm=120)
    assert verdict(status(sglang=tree, sm=120))["verdict"] == "applied"
    git(*how)
    after = status(sglang=tree, sm=120, require=["active-cast"])
    assert after.exit is Exit.FOUND
    assert verdict(after)["verdict"] == "lost"
    assert apply(["active-cast"], sglang=tree, sm=120).exit is Exit.OK
    assert verdict(status(sglang=tree, sm=120))["verdict"] == "applied"
    git("diff", "--quiet", "HEAD", "--", "python/sglang/version.py")


def test_stash_pop_brings_it_back(checkout: tuple[Path, Callable[..., None]]) -> None:
    tree, git = checkout
    apply(["active-cast"], sglang=tree, sm=120)
    git("stash")
    git("stash", "pop")
    assert verdict(status(sglang=tree, sm=120))["verdict"] == "applied"
