"""doctor: only what is wrong is called a problem, and what SGLang asks for and has not got is one."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.doctor import doctor
from mlapatch.commands.launch import launch
from mlapatch.exits import Exit
from mlapatch.serve.gpu_state import GpuState
from mlapatch.serve.libraries import missing

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


# ------------------------------------------------------------------------------------------------ what is not there
ASKS = """Metadata-Version: 2.1
Name: sglang
Version: 0.5.9
Requires-Dist: numpy
Requires-Dist: torch==2.9.1
Requires-Dist: flashinfer_python[cu13]==0.6.3
Requires-Dist: transformers==4.57.1; python_version < "3"
Requires-Dist: sgl-kernel==0.3.21; extra == "all"
Requires-Dist: not a requirement
"""
FLASHINFER = "flashinfer-python is not installed in {}; SGLang asks for 0.6.3"
PINNED = "SGLang asks for flashinfer 0.6.3; which one its Python has is not known"


@pytest.fixture
def venv(tmp_path: Path, site: Path) -> Callable[..., Path]:
    """`venv(*packages)`: the Python of a venv with SGLang 0.5.9 as `pip install --no-deps` leaves it, and packages."""

    def make(*packages: str) -> Path:
        home = tmp_path / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        place = next(home.glob("lib/python3*/site-packages"))
        for name in (*packages, "sglang==0.5.9"):
            name, _, version = name.partition("==")
            (place / name).mkdir()
            (place / name / "__init__.py").touch()
            if version:
                info = place / f"{name}-{version}.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (place / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
        (place / "sglang-0.5.9.dist-info" / "METADATA").write_text(ASKS)
        (place / "sglang-0.5.9.dist-info" / "RECORD").write_text("sglang/__init__.py,,\n")
        return home / "bin" / "python"

    return make


def checked(python: Path, *options: str) -> list[dict[str, Any]]:
    """What the preflight says of the libraries."""
    command = [str(python), "-m", "sglang.launch_server", *options]
    found: Any = launch(command=command, dry_run=True, tell=lambda _: None).data["preflight"]
    return [finding for finding in found if finding["check"] == "libraries"]


def test_doctor_names_what_sglang_asks_for_and_has_not_got(venv: Callable[..., Path]) -> None:
    python = venv()
    for found in (doctor(python=str(python)), doctor(sglang=python.parents[1])):
        assert found.data["packages"] == {}
        assert found.data["missing"] == {"numpy": "", "torch": "==2.9.1", "flashinfer-python": "==0.6.3"}
        assert found.data["problems"] == [
            f"numpy is not installed in {python}; SGLang imports it; next: {python} -m pip install 'numpy'",
            f"torch is not installed in {python}; SGLang asks for 2.9.1; next: {python} -m pip install 'torch==2.9.1'",
            f"{FLASHINFER.format(python)}; next: {python} -m pip install 'flashinfer-python==0.6.3'",
        ]
        assert found.exit is Exit.OK


def test_a_package_without_metadata_is_there(venv: Callable[..., Path]) -> None:
    assert doctor(python=str(venv("torch", "numpy", "flashinfer==0.6.3"))).data["missing"] == {}


def test_the_next_command_can_be_pasted() -> None:
    """A venv's path may have spaces, and a requirement a URL, which PyPI's package of that name is not."""
    url = "git+https://github.com/sgl-project/torch@v2#subdirectory=x"
    (gone,) = missing("/my venv/bin/python", ["/none"], [f"torch @ {url} ; python_version > '3'"], {})
    assert gone.text == f"torch is not installed in /my venv/bin/python; SGLang asks for {url}"
    assert shlex.split(gone.next) == ["/my venv/bin/python", "-m", "pip", "install", f"torch @ {url}"]
    (ranged,) = missing("python", ["/none"], ["numpy<2"], {})
    assert shlex.split(ranged.next) == ["python", "-m", "pip", "install", "numpy<2"]


@pytest.mark.parametrize("beside", [True, False])
def test_a_package_with_metadata_that_is_no_utf8_is_passed_over(venv: Callable[..., Path], beside: bool) -> None:
    """An old egg of another package ended doctor and launch with exit 70."""
    python = venv("torch==2.9.1", "numpy==2.1")
    place = next(python.parents[1].glob("lib/python3*/site-packages"))
    eggs = place if beside else python.parents[2] / "eggs"
    (eggs / "old.egg-info").mkdir(parents=True)
    (eggs / "old.egg-info" / "PKG-INFO").write_bytes(b"Metadata-Version: 1.0\nName: old\nVersion: 1\nAuthor: Ren\xe9\n")
    (place / "eggs.pth").write_text(f"{eggs}\n")
    found = doctor(python=str(python))
    assert (found.exit, found.data["packages"]) == (Exit.OK, {"torch": "2.9.1", "numpy": "2.1"})
    assert [finding["state"] for finding in checked(python)] == ["warn"]


def test_an_sglang_without_metadata_asks_for_what_every_release_imports(venv: Callable[..., Path]) -> None:
    python = venv()
    for file in next(python.parents[1].glob("lib/*/site-packages/sglang-0.5.9.dist-info")).iterdir():
        file.unlink()
    assert doctor(python=str(python)).data["missing"] == {"torch": "", "numpy": ""}


def test_of_an_sglang_without_a_python_nothing_is_called_missing(site: Path) -> None:
    """A folder named by its path: another Python than this one may start it."""
    assert doctor(sglang=site).data["missing"] == {}


@pytest.mark.parametrize(
    ("options", "state"),
    [
        (["--attention-backend", "flashinfer"], "fail"),
        (["--attention-backend", "triton", "--decode-attention-backend", "flashinfer"], "fail"),
        (["--attention-backend", "triton"], "warn"),
        ([], "warn"),
    ],
)
def test_a_start_without_flashinfer(venv: Callable[..., Path], options: list[str], state: str) -> None:
    """`ok flashinfer 0.6.3 (pinned)` was said: that is what SGLang asks for, not what is there."""
    python = venv("torch==2.9.1", "numpy==2.1")
    assert checked(python, *options) == [
        {
            "check": "libraries",
            "state": state,
            "text": FLASHINFER.format(python),
            "next": f"{python} -m pip install 'flashinfer-python==0.6.3'",
        }
        | ({"exit": 5} if state == "fail" else {})
    ]


def test_a_start_without_torch_and_numpy_is_refused(venv: Callable[..., Path]) -> None:
    found = checked(venv("flashinfer_python==0.6.3"))
    assert [(f["state"], f["text"].split()[0]) for f in found] == [("fail", "numpy"), ("fail", "torch")]


@pytest.mark.parametrize(
    "words", [["w.py"], ["-m", "torch.distributed.run", "x"], ["-m", "sglang_router.launch_server"]]
)
def test_what_may_start_no_sglang_with_this_python_is_warned(venv: Callable[..., Path], words: list[str]) -> None:
    found = launch(command=[str(venv()), *words, "--attention-backend", "flashinfer"], dry_run=True, tell=print)
    listed: Any = found.data["preflight"]
    assert {f["state"] for f in listed if f["check"] == "libraries"} == {"warn"}
    assert found.exit is Exit.OK


def test_a_pin_is_no_installed_flashinfer(venv: Callable[..., Path]) -> None:
    (found,) = checked(venv("torch", "numpy", "flashinfer"))
    assert (found["state"], found["text"]) == ("skip", PINNED)
