"""The child process: reads a job, runs each scenario on both sides, and appends one JSON line a result.

python -c "import sys; sys.path.insert(0, FOLDER); from harness.worker import main; main(JOB, RESULTS)"
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import batch, compare, device, graph, reads, reference, standins
from .drive import Side, Skip, Taken
from .record import Recorder
from .scenarios import SCENARIOS, Scenario

KEEPS_STOCK = re.compile(r"\bkeep\w* (SGLang's|stock)", re.IGNORECASE)
"""A log line of the patched module like this says that it keeps stock behaviour in this scenario."""
FLAGS = (re.compile(r"--(nsa|dsa)-prefill-backend"), re.compile(r"--(nsa|dsa)-decode-backend"))
"""What a refusal of the packed pool must name."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """The job file, see `runner.Job`."""

    stock: Path
    patched: Path
    package: Path
    device: str
    seed: int
    exact: bool
    flashinfer: str
    only: list[str]


class Raised(Exception):
    """The code under test raised; where, and what."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(f"{where}: {type(error).__name__}: {error}")
        self.where, self.error = where, error
        self.trace = "".join(traceback.format_exception(error))


def main(job_file: str, results_file: str) -> None:
    """Runs the job and writes the results as they come, so that a crash leaves what was done and the name of what was not."""
    raw = json.loads(Path(job_file).read_text(encoding="utf-8"))
    job = Job(
        Path(raw["stock"]), Path(raw["patched"]), Path(raw["package"]), raw["device"], raw["seed"], raw["exact"],
        raw["flashinfer"], raw["only"],
    )  # fmt: skip
    torch.set_num_threads(1)
    os.environ.setdefault("SGLANG_ENABLE_TORCH_COMPILE", "0")  # 0.4.6 reads it at import
    device.install(job.device)
    standins.install(job.flashinfer if job.device == "cpu" else None)
    if job.device == "cpu":
        graph.log_triton_launches()
        reads.trace_interpreter()
    with Path(results_file).open("a", encoding="utf-8") as out:
        for scenario in SCENARIOS:
            if job.only and scenario.name not in job.only:
                continue
            out.write(json.dumps({"started": scenario.name}) + "\n")
            out.flush()
            started = time.perf_counter()
            result = judge(job, scenario)
            result.update(scenario=scenario.name, seconds=round(time.perf_counter() - started, 3))
            out.write(json.dumps(result) + "\n")
            out.flush()


def judge(job: Job, scenario: Scenario) -> dict[str, Any]:
    """One scenario on both sides: `result`, `max_abs_diff` and a line of `detail`."""
    if scenario.cuda_only and job.device == "cpu":
        return _result("skip", "needs a GPU")
    try:
        if scenario.must_refuse:
            return _refusal(job, scenario)
        stock_side, stock = _drive(job, scenario, job.stock, None)
    except (Skip, standins.StandInMissing) as reason:
        return _result("skip", str(reason))
    except Raised as raised:
        if isinstance(raised.error, standins.StandInMissing):
            return _result("skip", str(raised.error))
        return _result(
            "fail", f"stock cannot run this scenario, so nothing can be said of the patch: {raised}", trace=raised.trace
        )
    names = {key: set(vars(value)) for key, value in stock_side.objects().items()}
    try:
        patched_side, patched = _drive(job, scenario, job.patched, names)
    except Raised as raised:
        text = str(raised.error)
        if any(word in text for word in scenario.may_refuse):
            return _result("refused", text)
        return _result("fail", f"patched code raised where stock does not: {raised}", trace=raised.trace)
    return _compare(job, scenario, stock_side, patched_side, stock, patched)


def _drive(job: Job, scenario: Scenario, path: Path, names: dict[str, set[str]] | None) -> tuple[Side, list[Taken]]:
    recorder = Recorder()
    side = _guard("loading the module", lambda: _side(job, scenario, path, recorder))
    side.stock_names = names
    _guard("construction and capture", side.build)
    taken = [_guard(f"step {i + 1}", lambda i=i: side.run(i)) for i in range(len(scenario.steps))]  # type: ignore[misc]
    return side, taken


def _side(job: Job, scenario: Scenario, path: Path, recorder: Recorder) -> Side:
    from . import wrappers

    return Side(
        scenario,
        path,
        job.package,
        job.device,
        job.seed,
        wrappers.classes(recorder, job.device, job.flashinfer),
        recorder,
    )


def _guard(where: str, action: Callable[[], Result]) -> Result:
    try:
        return action()
    except (Skip, KeyboardInterrupt):
        raise
    except Exception as error:
        raise Raised(where, error) from error


def _compare(
    job: Job, scenario: Scenario, stock_side: Side, patched_side: Side, stock: list[Taken], patched: list[Taken]
) -> dict[str, Any]:
    largest = 0.0
    for i, (want, got) in enumerate(zip(stock, patched)):
        expected = None
        if not job.exact and scenario.flags.get("dcp_size", 1) == 1:
            plan = batch.make(scenario, i, stock_side.slots, job.seed, "cpu")
            expected = reference.expected(plan, stock_side.slots, stock_side.pool.slots, stock_side.pool.dtype)
        most, wrong = compare.steps(want, got, job.exact, scenario.cache == "bf16", expected)
        largest = max(largest, most)
        if wrong is not None:
            return _result("fail", wrong.detail, largest)
    said = [line for line in patched_side.messages.lines if KEEPS_STOCK.search(line)]
    if said:
        return _result("stock", said[0], largest)
    return _result("pass", "", largest)


def _refusal(job: Job, scenario: Scenario) -> dict[str, Any]:
    """The packed pool: the patched code must raise when it is constructed, and name both flags."""
    try:
        _drive(job, scenario, job.patched, {})
    except Raised as raised:
        text = str(raised.error)
        missing = [flag.pattern for flag in FLAGS if not flag.search(text)]
        if missing:
            return _result(
                "fail", f"expected a refusal that names {' and '.join(missing)}, found {raised}", trace=raised.trace
            )
        if not raised.where.startswith("construction"):
            return _result("fail", f"refused only at {raised.where}, expected at start: {text}")
        return _result("refused", text)
    return _result(
        "fail", "read a pool of 656-byte packed rows, expected a refusal at start that names both flags to change"
    )


def _result(result: str, detail: str, largest: float | None = None, trace: str = "") -> dict[str, Any]:
    line = " ".join(detail.split())
    if largest is not None and largest == float("inf"):
        largest = 1e300
    found: dict[str, Any] = {"result": result, "max_abs_diff": largest, "detail": line}
    if trace:
        found["trace"] = trace
    return found
