"""Runs the harness on a stock and a patched file of one SGLang release, in a process of the target's interpreter.

Both files are executed there, never here, and neither is imported from where it is installed. Trouble of any kind comes back as a
failing result with one line, never as a traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Result = Literal["pass", "fail", "skip", "stock", "refused"]
HARNESS = Path(__file__).parent
"""The folder that holds the package `harness`; it goes on the path of the target's interpreter."""

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from harness.worker import main; main(sys.argv[2], sys.argv[3])"
)


@dataclass(frozen=True)
class Job:
    """What to verify.

    `stock` and `patched` are files with the two texts; `package` is the target's folder `sglang`, which supplies enums, index
    arguments and the backends that subclass the patched one. `exact`: the patch keeps stock's arithmetic, so outputs must be equal
    bit for bit; without it they are judged against float64. `only` names scenarios; empty means all.
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
    """Which flashinfer the CPU stand-in answers for; by default 0.7.2 from SGLang 0.5.22, 0.6.18 before."""


@dataclass(frozen=True)
class ScenarioResult:
    """What one scenario found. `stock`: the patch says that it keeps stock behaviour there, and outputs agree. `refused`: it refuses
    what it must, or may, refuse. `max_abs_diff` is that of the outputs, None where nothing was compared. `detail` is one line."""

    scenario: str
    result: Result
    max_abs_diff: float | None
    detail: str
    seconds: float
    trace: str = field(default="", repr=False)

    @property
    def failed(self) -> bool:
        """Whether this makes `verify` exit 1."""
        return self.result == "fail"


def run_job(job: Job, *, python: str, timeout_s: float) -> list[ScenarioResult]:
    """Every scenario's result, in order. A crash or a timeout is a failing result of the scenario that was running."""
    with tempfile.TemporaryDirectory(prefix="mlapatch-verify-") as folder:
        results = Path(folder, "results.jsonl")
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(_content(job)), encoding="utf-8")
        results.touch()
        command = [python, "-c", _PROGRAM, str(HARNESS), str(job_file), str(results)]
        ended = _run(command, _environment(job), timeout_s)
        return _read(results, ended, timeout_s)


def _content(job: Job) -> dict[str, object]:
    return {
        "stock": str(job.stock.resolve()),
        "patched": str(job.patched.resolve()),
        "package": str(job.package.resolve()),
        "device": job.device,
        "only": list(job.only),
        "seed": job.seed,
        "exact": job.exact,
        "flashinfer": job.flashinfer or _flashinfer(job.version),
    }


def _flashinfer(version: str) -> str:
    from packaging.version import Version

    return "0.7.2" if Version(version) >= Version("0.5.22") else "0.6.18"


def _environment(job: Job) -> dict[str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if job.device == "cpu":
        environment.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    return environment


@dataclass(frozen=True)
class _Ended:
    code: int | None
    errors: str


def _run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> _Ended:
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout_s, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        errors = error.stderr or ""
        return _Ended(None, errors.decode(errors="replace") if isinstance(errors, bytes) else errors)
    except OSError as error:
        return _Ended(-1, f"{command[0]}: {error.strerror}")
    return _Ended(done.returncode, done.stderr)


def _read(path: Path, ended: _Ended, timeout_s: float) -> list[ScenarioResult]:
    found: list[ScenarioResult] = []
    running = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "started" in entry:
            running = entry["started"]
            continue
        running = ""
        found.append(
            ScenarioResult(
                entry["scenario"],
                entry["result"],
                entry["max_abs_diff"],
                entry["detail"],
                entry["seconds"],
                entry.get("trace", ""),
            )
        )
    if ended.code is None:
        found.append(
            ScenarioResult(running or "start", "fail", None, f"ran past {timeout_s:.0f} s, expected to end", timeout_s)
        )
    elif ended.code != 0:
        last = next((line.strip() for line in reversed(ended.errors.splitlines()) if line.strip()), "no message")
        detail = f"the process ended with exit code {ended.code}, expected 0: {last}"
        found.append(ScenarioResult(running or "start", "fail", None, detail, 0.0, ended.errors))
    elif not found:
        found.append(ScenarioResult("start", "fail", None, "no scenario ran, expected at least one", 0.0))
    return found
