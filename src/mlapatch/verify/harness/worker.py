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

from . import batch, census, compare, device, facts, graph, interpreter, reads, reference, standins, wrappers
from .drive import Side, Skip, Taken
from .needs import missing
from .record import Recorder
from .scenarios import SCENARIOS, Scenario

KEEPS_STOCK = re.compile(r"\bkeep\w* (SGLang's|stock)", re.IGNORECASE)
"""A log line of the patched module like this says that it keeps stock behaviour in this scenario."""
FLAGS = (re.compile(r"--(nsa|dsa)-prefill-backend"), re.compile(r"--(nsa|dsa)-decode-backend"))
"""What a refusal of the packed pool must name."""

Value = TypeVar("Value")


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
    only: tuple[str, ...]


class Raised(Exception):
    """The code under test raised; where, and what."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(f"{where}: {type(error).__name__}: {error}")
        self.where, self.error = where, error
        self.trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))


def read_job(path: Path) -> Job:
    """The job that `runner` wrote."""
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    raw.update({name: Path(raw[name]) for name in ("stock", "patched", "package")}, only=tuple(raw["only"]))
    return Job(**raw)


def main(job_file: str, results_file: str) -> None:
    """Runs the job and writes results as they come, so that a crash leaves what was done and the name of what was
    not."""
    job = read_job(Path(job_file))
    ran_with = facts.facts(job.device, job.flashinfer)
    prepare(job)
    with Path(results_file).open("a", encoding="utf-8") as out:

        def write(entry: dict[str, Any]) -> None:
            out.write(json.dumps(entry) + "\n")
            out.flush()

        write({"facts": ran_with})
        for scenario in SCENARIOS:
            if not job.only or scenario.name in job.only:
                write({"started": scenario.name})
                started = time.perf_counter()
                found = judge(job, scenario)
                write({**found, "scenario": scenario.name, "seconds": round(time.perf_counter() - started, 3)})


def prepare(job: Job) -> None:
    """Makes this process one in which SGLang's source loads."""
    torch.set_num_threads(1)
    os.environ.setdefault("SGLANG_ENABLE_TORCH_COMPILE", "0")  # 0.4.6 to 0.5.1 read it at import
    device.install(job.device)
    standins.install(job.flashinfer if job.device == "cpu" else None)
    if job.device == "cpu":
        graph.log_triton_launches()
        reads.trace_interpreter()
        interpreter.prepare_once_a_launch()


def judge(job: Job, scenario: Scenario) -> dict[str, Any]:
    """One scenario on both sides: `result`, `max_abs_diff`, `stock_error` and a line of `detail`."""
    if scenario.cuda_only and job.device == "cpu":
        return _result("skip", "needs a GPU")
    try:
        if scenario.must_refuse:
            return _refusal(job, scenario)
        stock_side, stock = _drive(job, scenario, job.stock, None)
    except Skip as reason:
        return _result("skip", str(reason))
    except Raised as raised:
        if isinstance(raised.error, standins.StandInMissing) or scenario.stock_may_raise:
            return _result("skip", f"stock does not run it: {raised}")
        detail = f"stock cannot run this scenario, so nothing can be said of the patch: {raised}"
        return _result("fail", detail, trace=raised.trace)
    names = {key: set(vars(value)) for key, value in stock_side.objects().items()}
    try:
        patched_side, patched = _drive(job, scenario, job.patched, names)
    except Raised as raised:
        if any(word in str(raised.error) for word in scenario.may_refuse):
            return _result("refused", str(raised.error))
        return _result("fail", f"patched code raised where stock does not: {raised}", trace=raised.trace)
    return _compare(job, scenario, stock_side, patched_side, stock, patched)


def _drive(job: Job, scenario: Scenario, path: Path, names: dict[str, set[str]] | None) -> tuple[Side, list[Taken]]:
    recorder = Recorder()
    classes = wrappers.classes(recorder, job.device, job.flashinfer)
    side = _guard(
        "loading the module",
        lambda: Side(scenario, path, job.package, job.device, job.seed, classes, recorder),
    )
    reason = missing(scenario, side) if names is None else ""
    if reason:
        raise Skip(reason)
    side.stock_names = names
    _guard("construction", side.build)
    _guard("capture", side.capture)
    return side, [_guard(f"step {i + 1}", lambda i=i: side.run(i)) for i in range(len(scenario.steps))]  # type: ignore[misc]


def _guard(where: str, action: Callable[[], Value]) -> Value:
    try:
        return action()
    except Skip:
        raise
    except Exception as error:
        raise Raised(where, error) from error


def _compare(
    job: Job, scenario: Scenario, stock_side: Side, patched_side: Side, stock: list[Taken], patched: list[Taken]
) -> dict[str, Any]:
    largest, stock_error = 0.0, 0.0
    plain = scenario.cache == "bf16"
    held: set[str] = set()
    for i, (want, got) in enumerate(zip(stock, patched, strict=True)):
        expected = None
        if scenario.steps[i].mode != "idle":
            plan = batch.make(scenario, i, stock_side.slots, job.seed, "cpu")
            pool = stock_side.pool
            expected = reference.expected(plan, stock_side.slots, pool.slots, pool.dtype, scenario.share)
            stock_error = max(stock_error, compare.error(want, expected))
        rules = compare.Rules(job.exact or plain, plain, job.device, expected)
        most, wrong = compare.step(want, got, rules)
        largest = max(largest, most)
        basis, counts = _census(scenario, i, stock_side, want, got, job.seed)
        held.add(basis)
        if wrong is not None or counts:
            detail = wrong.detail if wrong else f"step {i + 1}: {counts}"
            return _result("fail", detail, largest, stock_error, census=basis)
    said = [line for line in patched_side.messages.lines if KEEPS_STOCK.search(line)]
    basis = next((one for one in ("stock", "page table") if one in held), "")
    return _result("stock" if said else "pass", said[0] if said else "", largest, stock_error, census=basis)


def _census(
    scenario: Scenario, step: int, side: Side, stock: Taken, patched: Taken, seed: int
) -> tuple[census.Basis, str]:
    if not stock.census:
        return "", ""
    plan = batch.make(scenario, step, side.slots, seed, "cpu")
    table = census.by_table(plan, side.slots, scenario.share)
    return census.judge(stock.census, patched.census, table)


def _refusal(job: Job, scenario: Scenario) -> dict[str, Any]:
    """The packed pool: the patched code must raise when it is constructed, and name both flags."""
    try:
        _drive(job, scenario, job.patched, {})
    except Raised as raised:
        text = str(raised.error)
        missing = [flag.pattern for flag in FLAGS if not flag.search(text)]
        if missing:
            wanted = " and ".join(missing)
            return _result("fail", f"expected a refusal that names {wanted}, found {raised}", trace=raised.trace)
        if raised.where != "construction":
            return _result("fail", f"refused only at {raised.where}, expected at construction: {text}")
        return _result("refused", text)
    return _result("fail", "read a pool of 656-byte packed rows, expected a refusal at start that names both flags")


def _result(
    result: str,
    detail: str,
    largest: float | None = None,
    stock_error: float | None = None,
    trace: str = "",
    census: str = "",
) -> dict[str, Any]:
    found: dict[str, Any] = {"result": result, "detail": " ".join(detail.split()), "census": census}
    for name, value in (("max_abs_diff", largest), ("stock_error", stock_error)):
        found[name] = "inf" if value == float("inf") else value  # JSON has no infinity
    return {**found, "trace": trace} if trace else found
