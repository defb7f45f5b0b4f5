"""doctor: only what is wrong is called a problem, and what SGLang asks for and has not got is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlapatch.commands.doctor import doctor
from mlapatch.exits import Exit
from mlapatch.serve.gpu_state import GpuState

GPU = GpuState(0, "GPU-0aa", "H200", 90, 0, 96 << 30, 0, ())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing is wrong: a GPU, ninja, nvcc, and an SGLang."""
    tools, site = tmp_path / "bin", tmp_path / "site-packages"
    tools.mkdir()
    for name in ("ninja", "nvcc"):
        (tools / name).write_text("#!/bin/sh\necho release 1\n")
        (tools / name).chmod(0o755)
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("mlapatch.serve.gpu_state.look", lambda _: [GPU])
    return site


def test_where_nothing_is_wrong_there_is_no_problem(site: Path) -> None:
    found = doctor(sglang=site)
    assert found.exit is Exit.OK
    assert found.data["problems"] == []
    assert "nothing looks wrong" in str(found.blocks)
