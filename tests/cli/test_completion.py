"""The shell's completion: scripts that a real bash runs, patch names by their folders, nothing heavy loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SRC

PATCHES = ["active-cast", "fp8-plan", "fused-decode", "gather-cast", "profile-decode"]
HEAVY = {"libcst", "git", "torch", "sglang", "httpx", "rich", "psutil", "numpy", "orjson", "mlapatch.engine.verdict"}

LOADED = """
import json, sys
sys.argv = ["mlapatch"]
from mlapatch.cli import main
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(json.dumps(sorted(sys.modules)))
"""


def complete(line: str, cwd: Path, code: str = "from mlapatch.cli import main; main()") -> list[str]:
    """What bash would offer after a line; it ends in the word that is being typed."""
    words = line.split(" ")
    environment = {**os.environ, "PYTHONPATH": str(SRC), "_MLAPATCH_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", code, "mlapatch"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines() if done.stdout.strip() else []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mlapatch apply ", [*PATCHES, "auto"]),
        ("mlapatch apply f", ["fp8-plan", "fused-decode"]),
        ("mlapatch apply gather-cast g", []),
        ("mlapatch revert p", ["profile-decode"]),
        ("mlapatch diff a", ["active-cast"]),
        ("mlapatch verify g", ["gather-cast"]),
        ("mlapatch check a", ["active-cast"]),
        ("mlapatch status --require a", ["active-cast"]),
        ("mlapatch launch --require a", ["active-cast"]),
        ("mlapatch apply auto --gpu rtx", ["rtx-pro-6000", "rtx-4090", "rtx-5090"]),
        ("mlapatch rev", ["revert"]),
        ("mlapatch guard r", ["record"]),
        ("mlapatch status --exp", ["--expect"]),
    ],
)
def test_what_is_offered(line: str, offered: list[str], tmp_path: Path) -> None:
    assert complete(line, tmp_path) == offered


def test_a_folder_of_patches_is_offered_too(tmp_path: Path) -> None:
    (tmp_path / "mine" / "our-patch").mkdir(parents=True)
    (tmp_path / "mine" / "our-patch" / "patch.toml").write_text("not even TOML [[[")
    assert complete("mlapatch apply --patches mine o", tmp_path) == ["our-patch"]
    assert complete("mlapatch apply --patches none o", tmp_path) == []


def test_runs_are_offered(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    record = {"name": "stock", "pid": 1, "created": 1.0, "session": 1, "started": "", "log": "x", "command": []}
    (tmp_path / "logs" / "stock.json").write_text(json.dumps(record))
    assert complete("mlapatch stop s", tmp_path) == ["stock"]
    assert complete("mlapatch logs --logs elsewhere s", tmp_path) == []


@pytest.mark.parametrize("line", ["mlapatch apply a", "mlapatch status --require a", "mlapatch "])
def test_nothing_heavy_is_loaded(line: str, tmp_path: Path) -> None:
    loaded = set(json.loads(complete(line, tmp_path, LOADED)[-1]))
    assert "mlapatch.cli" in loaded
    assert not HEAVY & loaded


BASH = shutil.which("bash")


def in_bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A real bash with `mlapatch` on its PATH and a home of its own."""
    shim = folder / "bin" / "mlapatch"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlapatch "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(SRC), "HOME": str(folder), "PATH": path}
    command = [str(BASH), "--norc", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


TYPED = 'COMP_WORDS=(mlapatch apply a); COMP_CWORD=2; _mlapatch_completion mlapatch; echo "<${COMPREPLY[*]}>"'


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_show_completion_in_a_real_bash(tmp_path: Path) -> None:
    done = in_bash(f'script="$(mlapatch --show-completion)"; eval "$script"; {TYPED}', tmp_path)
    assert done.stdout.split() == ["<active-cast", "auto>"], done


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_install_completion_in_a_real_bash(tmp_path: Path) -> None:
    done = in_bash(f'mlapatch --install-completion >&2; . "$HOME/.bashrc"; {TYPED}', tmp_path)
    assert done.stdout.split() == ["<active-cast", "auto>"], done
    assert "bash completion installed" in done.stderr
