"""A kill or an error at each step of apply and revert: every file is old or new, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TreeFactory

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("action", "modes"),
    [("apply two", ("kill", "once")), ("revert one", ("kill", "ever")), ("revert", ("kill", "once"))],
    ids=["apply two", "revert one", "revert"],
)
def test_every_step_cut_short(install_tree: TreeFactory, tmp_path: Path, action: str, modes: tuple[str, ...]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.install.faulty", str(install_tree("0.5.9")), str(work), action, *modes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    steps: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [step for step in steps if "raw" in step], "an error that is no exit 5"
    for mode in modes:
        here = [step for step in steps if step["mode"] == mode]
        assert len(here) >= 12, (mode, len(here))
        for step in here:
            check(step)


def check(step: dict[str, Any]) -> None:
    assert step["exit"] == (99 if step["mode"] == "kill" else 5) or (step["exit"] == 0 and step["mode"] != "kill"), step
    assert "neither" not in step["sides"], step
    if step["mode"] == "once" and step["exit"] == 5:
        assert set(step["sides"]) <= {"old", "same"}, f"an error undoes everything: {step}"
    assert step["again"], f"the same command finishes: {step}"
    assert step["reverted"], f"the original bytes are there: {step}"
    assert not set(step["verdicts"]) & {"edited", "drifted"}, step
    assert not step["leftovers"], step
