"""Runs the harness on a stock and a patched file of one SGLang release, in processes of the target's interpreter.

Both files are executed there, never here, and neither is imported from where it is installed. Trouble of any kind comes
back as a failing result with one line, never as a traceback.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from mlapatch.verify.harness.scenarios import SCENARIOS

Result = Literal["pass", "fail", "skip", "stock", "refused"]
HARNESS = Path(__file__).parent
"""The folder that holds the package `harness`; it goes on the path of the target's interpreter."""
WORKERS = 2
"""Processes on a CPU: what a small CI machine has cores for. A GPU is used by one."""
_LOOK_SECONDS = 0.2

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from harness.worker import main; main(sys.argv[2], sys.argv[3])"
)


@dataclass(frozen=True)
class Job:
    """What to verify.

    `stock` and `patched` are files with the two texts; `package` is the target's folder `sglang`, which supplies enums,
    index arguments and the backends that subclass the patched one. `exact`: the patch keeps stock's arithmetic, so
    outputs must be equal bit for bit; without it they are judged against float64. `only` names scenarios; empty means
    all. `flashinfer` is the version that the CPU's stand-in answers for: by default 0.7.2 from SGLang 0.5.22 on and
    0.6.18 before, which every patch can run with.
    """

    stock: Path
    patched: Path
    package: Path
    version: str
    patch: str
    device: Literal["cpu", "cuda"] = "cpu"
    only: tuple[str, ...] = ()
    seed: int = 0
    exact: bool = True
    flashinfer: str = ""


@dataclass(frozen=True)
class ScenarioResult:
    """What one scenario found.

    `stock`: the patch says that it keeps stock behaviour there, and outputs agree. `refused`: it refuses what it must,
    or may, refuse. `max_abs_diff` is the largest difference between the outputs (inf where one has a NaN, None where
    nothing was compared), `stock_error` the largest relative error of stock's own against float64. `detail` is one
    line; `trace` is the traceback of the code under test, where it raised. `census`: what the slots read, as counted
    from outputs, were held against: the page table, stock where that reads other slots, '' where none was taken.
    """

    scenario: str
    result: Result
    max_abs_diff: float | None
    detail: str
    seconds: float
    stock_error: float | None = None
    trace: str = field(default="", repr=False)
    census: Literal["", "page table", "stock"] = ""

    @property
    def failed(self) -> bool:
        """Whether this makes `verify` exit 1."""
        return self.result == "fail"


@dataclass(frozen=True)
class Report:
    """Every scenario's result, in order, and `facts`: what the processes said that they ran with, see
    `harness/facts.py`; empty if none got so far."""

    results: list[ScenarioResult]
    facts: dict[str, Any]


def scenario_names() -> tuple[str, ...]:
    """Every scenario, in order."""
    return tuple(scenario.name for scenario in SCENARIOS)


def run_job(
    job: Job,
    *,
    python: str,
    timeout_s: float,
    workers: int | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> Report:
    """Runs the scenarios. A crash or a timeout is a failing result of the scenario that was running.

    `done` is called with each scenario's name soon after it ended, from several threads.
    """
    names = scenario_names()
    unknown = [name for name in job.only if name not in names]
    chosen = [name for name in names if not job.only or name in job.only]
    deadline = time.monotonic() + timeout_s
    count = max(1, min(workers or (WORKERS if job.device == "cpu" else 1), len(chosen), os.cpu_count() or 1))
    shares = [chosen[i::count] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda share: _run_share(job, share, python, deadline, done), shares))
    found = {result.scenario: result for part in parts for result in part.results}
    missing = [_failure(name, "there is no such scenario") for name in unknown]
    facts = next((part.facts for part in parts if part.facts), {})
    return Report([*missing, *(found[name] for name in chosen if name in found)], facts)


def _failure(scenario: str, detail: str, trace: str = "") -> ScenarioResult:
    return ScenarioResult(scenario, "fail", None, detail, 0.0, trace=trace)


def _run_share(job: Job, names: Sequence[str], python: str, deadline: float, done: Callable[[str], None]) -> Report:
    """One process after another until each scenario has a result: a crash costs the scenario that it happened in."""
    found: list[ScenarioResult] = []
    facts: dict[str, Any] = {}
    pending = list(names)
    while pending and time.monotonic() < deadline:
        once = _run_once(job, pending, python, deadline - time.monotonic(), done)
        found.extend(once.results)
        facts = facts or once.facts
        judged = {result.scenario for result in once.results}
        pending = [name for name in pending if name not in judged]
        if not pending:
            break
        broken = once.running or pending[0]
        pending.remove(broken)
        done(broken)
        found.append(_failure(broken, once.trouble, once.errors))
        if not once.running:  # it died before any scenario: it would again
            found.extend(_failure(name, once.trouble) for name in pending)
            pending = []
    found.extend(_failure(name, "did not run: the time limit was reached") for name in pending)
    return Report(found, facts)


@dataclass(frozen=True)
class _Once:
    """What one process left: results, what it ran with, the scenario it was in when it ended, and what went wrong."""

    results: list[ScenarioResult]
    facts: dict[str, Any]
    running: str
    trouble: str
    errors: str


def _run_once(job: Job, names: Sequence[str], python: str, timeout_s: float, done: Callable[[str], None]) -> _Once:
    with tempfile.TemporaryDirectory(prefix="mlapatch-verify-") as folder:
        results, job_file = Path(folder, "results.jsonl"), Path(folder, "job.json")
        results.touch()
        job_file.write_text(json.dumps(_content(job, names)), encoding="utf-8")
        command = [python, "-c", _PROGRAM, str(HARNESS), str(job_file), str(results)]
        told: set[str] = set()

        def look() -> None:
            ended = [result.scenario for result in _read(results)[0] if result.scenario not in told]
            told.update(ended)
            for name in ended:
                done(name)

        trouble, errors = _spawn(command, _environment(job), timeout_s, look)
        look()
        found, facts, running = _read(results)
        return _Once(found, facts, running, trouble, errors)


def _content(job: Job, names: Sequence[str]) -> dict[str, object]:
    return {
        "stock": str(job.stock.resolve()),
        "patched": str(job.patched.resolve()),
        "package": str(job.package.resolve()),
        "device": job.device,
        "only": list(names),
        "seed": job.seed,
        "exact": job.exact,
        "flashinfer": job.flashinfer or ("0.7.2" if Version(job.version) >= Version("0.5.22") else "0.6.18"),
    }


def _environment(job: Job) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if job.device == "cpu":
        environment.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    return environment


def _spawn(
    command: Sequence[str], environment: dict[str, str], timeout_s: float, look: Callable[[], None]
) -> tuple[str, str]:
    """Runs the process; says in one line what went wrong, should a scenario have no result, and what it printed.

    `look` is called now and then while it runs.
    """
    deadline = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}", ""
    with process:
        errors = None
        while errors is None:
            try:
                _, errors = process.communicate(timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                look()
                if time.monotonic() >= deadline:
                    process.kill()
                    return "ran past the time limit", ""
            except BaseException:
                process.kill()
                raise
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no message")
    return f"the process ended with exit code {process.returncode}: {last}", errors


def _read(path: Path) -> tuple[list[ScenarioResult], dict[str, Any], str]:
    found: list[ScenarioResult] = []
    facts: dict[str, Any] = {}
    running = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by a crash
            continue
        if "facts" in entry:
            facts = entry["facts"]
            continue
        running = entry.get("started", "")
        if not running:
            found.append(_result(entry))
    return found, facts, running


def _result(entry: dict[str, Any]) -> ScenarioResult:
    def number(key: str) -> float | None:
        value = entry.get(key)
        return math.inf if value == "inf" else value

    return ScenarioResult(
        entry["scenario"],
        entry["result"],
        number("max_abs_diff"),
        entry["detail"],
        entry["seconds"],
        number("stock_error"),
        entry.get("trace", ""),
        entry.get("census", ""),
    )
