"""Decode context parallelism: a rank reads its share of the tokens and returns the log-sum-exp that ranks merge by."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not importable")

from tests.conftest import TreeFactory
from tests.verify.fused_tunings import ROOT

pytestmark = pytest.mark.verify
VERSION = "0.5.15.post1"


def dcp(python: str, patch: str, sglang: Path, patches: Path = ROOT / "patches") -> dict[str, Any]:
    """What verify says of the scenario."""
    command = [python, "-m", "mlapatch", "verify", patch, "--sglang", str(sglang), "--patches", str(patches)]
    done = subprocess.run([*command, "--scenario=dcp", "--json"], capture_output=True, text=True, check=False)
    (found,) = json.loads(done.stdout)["patches"]
    (one,) = (scenario for scenario in found["scenarios"] if scenario["scenario"] == "dcp")
    return dict(one)


@pytest.mark.parametrize(
    ("patch", "result"), [("active-cast", "pass"), ("fused-decode", "pass"), ("gather-cast", "stock")]
)
def test_a_decode_step_needs_no_cast_of_the_pool(
    torch_python: str, wheel_dir: TreeFactory, patch: str, result: str
) -> None:
    """active-cast and fused-decode take the share as any plan; gather-cast, which plans anew, keeps SGLang's cast."""
    found = dcp(torch_python, patch, wheel_dir(VERSION))
    assert (found["result"], found["census"]) == (result, "page table")
    assert ("decode context parallelism" in found["detail"]) == (result == "stock")


def test_a_log_sum_exp_of_another_base_fails(torch_python: str, wheel_dir: TreeFactory, tmp_path: Path) -> None:
    patches = Path(shutil.copytree(ROOT / "patches", tmp_path / "patches"))
    kernel = patches / "fused-decode" / "fused_kernel.py"
    text = kernel.read_text(encoding="utf-8")
    assert text.count("tl.log2(weights)") == 1
    kernel.write_text(text.replace("tl.log2(weights)", "tl.log(weights)"), encoding="utf-8")
    found = dcp(torch_python, "fused-decode", wheel_dir(VERSION), patches)
    assert found["result"] == "fail"
    assert "found a log-sum-exp " in found["detail"]
