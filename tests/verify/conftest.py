"""Fixtures that run the harness: an interpreter with torch, whole wheels, and sabotaged patch folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import libcst as cst
import pytest
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.engine.edit import Patched, apply_edits
from mlapatch.verify import Job, ScenarioResult, run_job
from tests.ready import started

SABOTAGED = Path(__file__).parent / "sabotaged"
BACKEND = Path("srt/layers/attention/flashinfer_mla_backend.py")

Verify: TypeAlias = Callable[..., dict[str, ScenarioResult]]


@pytest.fixture(scope="session")
def torch_python() -> str:
    """`MLAPATCH_TEST_TORCH_PYTHON`, else this interpreter, if it has torch and Triton."""
    python = os.environ.get("MLAPATCH_TEST_TORCH_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import torch, triton"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"torch and Triton are not importable in {python}")
    return python


@pytest.fixture(scope="session")
def ready_python(torch_python: str) -> Iterator[str]:
    """Does what `torch_python` does, in a fork of one that has torch and Triton loaded."""
    with started(torch_python, "import torch, triton", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="") as python:
        yield python


@pytest.fixture
def package(wheel_dir: Callable[[str], Path]) -> Callable[[str], Path]:
    """`package("0.5.9")` -> the whole folder `sglang`, from `MLAPATCH_TEST_WHEELS/0.5.9/sglang` where that exists."""

    def find(version: str) -> Path:
        own = Path(os.environ.get("MLAPATCH_TEST_WHEELS", "/nonexistent"), version, "sglang")
        return own if own.is_dir() else wheel_dir(version) / "sglang"

    return find


@pytest.fixture
def verify(ready_python: str, package: Callable[[str], Path], tmp_path: Path) -> Verify:
    """`verify(patch, version, *scenarios)` -> results by scenario; patch None: stock against itself."""

    def run(patch: str | None, version: str, *scenarios: str, exact: bool = True) -> dict[str, ScenarioResult]:
        folder = package(version)
        stock = folder / BACKEND
        target = stock
        if patch is not None:
            target = tmp_path / f"{patch}.py"
            target.write_text(patched_text(patch, version, stock.read_bytes()))
        job = Job(stock, target, folder, version, patch or "stock", only=scenarios, exact=exact)
        return {r.scenario: r for r in run_job(job, python=ready_python, timeout_s=300).results}

    return run


def patched_text(name: str, version: str, source: bytes) -> str:
    """The file as the patch of that name leaves it: a sabotaged one, or one of the catalogue."""
    patch = load_catalogue([SABOTAGED]).get(name)
    result = apply_edits(cst.parse_module(source), patch, Version(version))
    assert isinstance(result, Patched), result
    return result.module.code
