"""Extreme logits and queries beyond FP16: the data says one thing only, and kernels that cannot take it fail."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not importable")

from mlapatch.exits import Exit  # noqa: E402 - needs torch
from mlapatch.verify.harness import batch  # noqa: E402
from mlapatch.verify.harness.scenarios import SCENARIOS  # noqa: E402
from tests.conftest import TreeFactory  # noqa: E402
from tests.verify.fused_tunings import ROOT  # noqa: E402

pytestmark = pytest.mark.verify

EXTREME, BEYOND = "decode-extreme-logits", "decode-query-beyond-fp16"
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
FP16_MOST, FP16_LEAST = 65504.0, 2.0**-24
UNROUNDED = 2.0**-14
"""How far apart, against the largest, two logits must be so that float32 (2**-24, over 576 terms) cannot swap them."""

FAULTS = (
    pytest.param(
        "exponent = tl.minimum(268 - (largest >> 23), 254)",
        "exponent = tl.full((PREPARED,), 127, tl.int32)",
        [BEYOND],
        id="queries-to-float16-without-a-scale",
    ),
    pytest.param(
        "new_peak = tl.maximum(peak, tl.max(score, 1))",
        "new_peak = tl.maximum(peak, 20.0 / gain)",  # ordinary weights stay within float16
        [EXTREME, BEYOND],
        id="the-same-peak-for-all",
    ),
)


@pytest.mark.parametrize(("right", "wrong", "fails"), FAULTS)
def test_a_kernel_that_overflows_fails(
    torch_python: str, wheel_dir: TreeFactory, tmp_path: Path, right: str, wrong: str, fails: list[str]
) -> None:
    """fused-decode with one line wrong computes ordinary decodes as ever, and verify exits 1 and names what differs."""
    patches = Path(shutil.copytree(ROOT / "patches", tmp_path / "patches"))
    kernel = patches / "fused-decode" / "fused_kernel.py"
    text = kernel.read_text(encoding="utf-8")
    assert text.count(right) == 1
    kernel.write_text(text.replace(right, wrong), encoding="utf-8")
    command = ["verify", "fused-decode", "--patches", str(patches), "--sglang", str(wheel_dir("0.5.9")), "--json"]
    command += [f"--scenario={name}" for name in ("decode-first-token", EXTREME, BEYOND)]
    done = subprocess.run([torch_python, "-m", "mlapatch", *command], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.FOUND, done.stderr
    (found,) = json.loads(done.stdout)["patches"]
    results = {one["scenario"]: one for one in found["scenarios"]}
    assert found["failed"] == fails
    assert all("found a relative error of " in results[name]["detail"] for name in fails)


def heads(name: str) -> list[tuple[float, Any, Any]]:
    """For each step, token and head of a scenario: the factor, the query [576] and the logits of what it sees."""
    found, scenario = [], BY_NAME[name]
    slots = batch.table(scenario, 0)
    for index in range(len(scenario.steps)):
        plan = batch.make(scenario, index, slots, 0, "cpu")
        (one,) = plan.inputs[0]
        keys = torch.full((scenario.slots + 1, 576), float("nan"), dtype=torch.float64)
        keys[plan.live] = plan.content[0].to(torch.float8_e4m3fn).double()
        keys[plan.out_loc] = one.key()[:, 0].to(torch.float8_e4m3fn).double()
        for token, (_, row, visible) in enumerate(plan.seen(0)):
            for head, factor in enumerate(plan.step.query):
                query = one.query()[token, head].double()
                logits = keys[slots[row, :visible].long()] @ query * batch.SCALING
                found.append((factor, query, logits))
    assert found
    return found


@pytest.mark.parametrize("name", [EXTREME, BEYOND])
def test_the_largest_logits_are_apart(name: str) -> None:
    """One token has all the weight, whoever computes it: else stock and float64 could each be right in their way."""
    for factor, _, logits in heads(name):
        if abs(factor) <= 1.0:
            continue
        second, first = logits.sort().values[-2:].tolist()
        assert first - second > 20.0
        assert first - second > UNROUNDED * logits.abs().max()


def test_queries_lie_outside_of_fp16() -> None:
    found = heads(BEYOND)
    assert {factor for factor, _, _ in found} == {2.0**20, -(2.0**20), 1.0, 1e-36}
    for factor, query, logits in found:
        if abs(factor) > 1.0:
            assert query.abs().median() > FP16_MOST
            assert logits.abs().max() < 2.0**24
        elif factor < 1.0:
            assert 0.0 < query.abs().max() < FP16_LEAST
            assert logits.abs().max() < 1e-20


def test_extreme_logits_need_no_larger_query_than_fp16_has() -> None:
    for factor, query, logits in heads(EXTREME):
        assert query.abs().max() < FP16_MOST
        if abs(factor) > 1.0:
            assert logits.max() / math.log(2.0) > 128.0, "float32's exp must overflow without its peak taken off"
