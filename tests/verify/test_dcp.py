"""Decode context parallelism: a rank reads its share of the tokens and returns the log-sum-exp that ranks merge by."""

from __future__ import annotations

import json
import os
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
KERNELS = {VERSION: "srt/layers/dcp/kernels.py", "0.5.23": "kernels/ops/attention/dcp_kernels.py"}


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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("version", KERNELS)
def test_the_ranks_make_up_the_whole(torch_python: str, wheel_dir: TreeFactory, version: str, ranks: int) -> None:
    """With the kernels by which this SGLang shares tokens out and merges results; some ranks have none of a request."""
    kernels = wheel_dir(version) / "sglang" / KERNELS[version]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [torch_python, "-m", "tests.verify.dcp_ranks", str(kernels), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["error"] < 3e-3  # BF16 rounding of the result alone is 1.7e-3
    assert found["lse_error"] < 1e-5
    assert found["empty"]
