"""`mlapatch(...)` runs the command line in this process; `Site` is a small real site-packages to run it on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

import mlapatch.cli
from tests.conftest import TreeFactory
from tests.corpus import BACKEND

SRC = Path(mlapatch.cli.__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """How one command line ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def verdicts(self) -> dict[str, str]:
        return {patch["name"]: patch["verdict"] for patch in self.json["patches"]}

    def reason(self, name: str) -> str:
        return str(next(patch["reason"] for patch in self.json["patches"] if patch["name"] == name))


Command: TypeAlias = Callable[..., Done]


def _registered() -> bool:
    """The verbs are added to the app when the program starts; once is enough."""
    if not mlapatch.cli.app.registered_commands:
        mlapatch.cli._register()
    return True


@pytest.fixture
def mlapatch_() -> Command:
    """Run a command line in this process; a traceback is a failure of the test."""
    assert _registered()
    runner = CliRunner()

    def call(*arguments: str | Path) -> Done:
        result = runner.invoke(mlapatch.cli.app, [str(a) for a in arguments], catch_exceptions=False)
        return Done(result.exit_code, result.stdout, result.stderr)

    return call


def process(
    *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, python: str = sys.executable
) -> Done:
    """The same in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), **(env or {})}
    command = [python, "-m", "mlapatch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Site:
    """A site-packages with one SGLang, and the command line aimed at it."""

    folder: Path
    run: Command

    @property
    def backend(self) -> Path:
        return self.folder / BACKEND

    @property
    def bytes(self) -> bytes:
        return self.backend.read_bytes()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.bytes).hexdigest()

    def __call__(self, verb: str, *arguments: str | Path) -> Done:
        return self.run(verb, *arguments, "--sglang", self.folder)

    def ok(self, verb: str, *arguments: str | Path) -> Done:
        done = self(verb, *arguments)
        assert done.code == 0, done
        return done

    def verdicts(self, *arguments: str | Path) -> dict[str, str]:
        return self.ok("status", "--json", *arguments).verdicts

    def edit(self, old: str, new: str, count: int = 1) -> None:
        """Change the backend's text by hand, as its owner would."""
        text = self.bytes.decode()
        assert text.count(old) >= 1, old
        self.backend.write_bytes(text.replace(old, new, count).encode())

    def snapshot(self) -> dict[str, tuple[str, int, int]]:
        """Every file below: content, time and inode."""
        return snapshot(self.folder)


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.lstat().st_mtime_ns,
            path.lstat().st_ino,
        )
        for path in files
    }


def contents(folder: Path) -> dict[str, str]:
    """Every file below by content, without the state folder."""
    return {path: digest for path, (digest, _, _) in snapshot(folder).items() if not path.startswith(".mlapatch/")}


@pytest.fixture
def site(install_tree: TreeFactory, mlapatch_: Command) -> Callable[[str], Site]:
    return lambda version: Site(install_tree(version), mlapatch_)


SiteFactory: TypeAlias = Callable[[str], Site]
