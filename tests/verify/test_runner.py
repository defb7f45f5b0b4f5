"""The host's side: crashes, time limits and broken output become results. No torch is needed."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest

from mlapatch.verify import Job, Report, ScenarioResult, run_job, scenario_names

FIRST, SECOND, THIRD = scenario_names()[:3]

WORKER = """#!{python}
import json, os, sys, time
job = json.load(open(sys.argv[4]))
out = open(sys.argv[5], "a")
def write(entry):
    out.write(json.dumps(entry) + "\\n")
    out.flush()
write({{"facts": {{"torch": "2.13.0"}}}})
for name in job["only"]:
    write({{"started": name}})
    {action}
    found = {{"result": "pass", "max_abs_diff": "inf", "detail": "", "seconds": 0.5, "census": "stock"}}
    write({{"scenario": name, **found}})
"""


def fake_python(folder: Path, action: str) -> str:
    """An executable that stands in for the target's interpreter: it writes results as the worker does."""
    path = folder / "python"
    path.write_text(WORKER.format(python=sys.executable, action=action))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def report(folder: Path, action: str, timeout_s: float = 30, workers: int = 1, **fields: object) -> Report:
    names = (FIRST, SECOND, THIRD)
    job = Job(folder / "a.py", folder / "b.py", folder, "0.5.9", "some", only=names, **fields)  # type: ignore[arg-type]
    return run_job(job, python=fake_python(folder, action), timeout_s=timeout_s, workers=workers)


def run(folder: Path, action: str, timeout_s: float = 30, workers: int = 1) -> list[ScenarioResult]:
    return report(folder, action, timeout_s, workers).results


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_order(tmp_path: Path, workers: int) -> None:
    found = run(tmp_path, "pass", workers=workers)
    assert [(r.scenario, r.result) for r in found] == [(FIRST, "pass"), (SECOND, "pass"), (THIRD, "pass")]
    assert found[0].max_abs_diff == float("inf")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_it_ran_with_comes_from_the_process(tmp_path: Path, workers: int) -> None:
    found = report(tmp_path, f"if name == {FIRST!r}: sys.exit('crash')", workers=workers)
    assert found.facts == {"torch": "2.13.0"}
    assert [r.census for r in found.results] == ["", "stock", "stock"]


def test_a_crash_costs_one_scenario(tmp_path: Path) -> None:
    found = run(tmp_path, f"if name == {SECOND!r}: sys.exit('segmentation fault, say')")
    assert [r.result for r in found] == ["pass", "fail", "pass"]
    assert found[1].detail == "the process ended with exit code 1: segmentation fault, say"


def test_a_time_limit_fails_what_ran_and_what_did_not(tmp_path: Path) -> None:
    found = run(tmp_path, f"if name == {SECOND!r}: time.sleep(60)", timeout_s=2)
    assert [r.result for r in found] == ["pass", "fail", "fail"]
    assert found[1].detail == "ran past the time limit"
    assert found[2].detail == "did not run: the time limit was reached"


@pytest.mark.parametrize("workers", [1, 2])
def test_each_scenario_is_told_while_the_others_run(tmp_path: Path, workers: int) -> None:
    told: list[tuple[str, float]] = []
    job = Job(tmp_path / "a.py", tmp_path / "b.py", tmp_path, "0.5.9", "some", only=(FIRST, SECOND, THIRD))
    crash = f"time.sleep(0.5)\n    if name == {SECOND!r}: sys.exit('crash')"
    python = fake_python(tmp_path, crash)
    run_job(
        job,
        python=python,
        timeout_s=30,
        workers=workers,
        done=lambda name: told.append((name, time.monotonic())),
    )
    assert sorted(name for name, _ in told) == sorted([FIRST, SECOND, THIRD]), "each once, what crashed too"
    assert max(at for _, at in told) - min(at for _, at in told) > 0.3


def test_a_process_that_cannot_start_fails_everything(tmp_path: Path) -> None:
    job = Job(tmp_path / "a.py", tmp_path / "b.py", tmp_path, "0.5.9", "some")
    found = run_job(job, python=str(tmp_path / "absent"), timeout_s=5).results
    assert len(found) == len(scenario_names())
    assert {r.detail for r in found} == {f"{tmp_path / 'absent'} cannot be run: No such file or directory"}


def test_an_interpreter_without_torch_says_so(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    job = Job(tmp_path / "a.py", tmp_path / "b.py", tmp_path, "0.5.9", "some", only=(FIRST,))
    (found,) = run_job(job, python=str(python), timeout_s=5).results
    assert found.failed
    assert found.detail.endswith("No module named 'torch'")


def test_an_unknown_scenario_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "a.py", tmp_path / "b.py", tmp_path, "0.5.9", "some", only=("decode-eagre",))
    (found,) = run_job(job, python=sys.executable, timeout_s=5).results
    assert (found.scenario, found.detail) == ("decode-eagre", "there is no such scenario")
