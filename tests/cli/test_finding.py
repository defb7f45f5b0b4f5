"""Which SGLang a server would import: by interpreter, by path, and every way in which there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Done, Site, process
from tests.cli.test_install_kinds import checkout
from tests.conftest import TreeFactory
from tests.corpus import BACKEND

__all__ = ["checkout"]  # a fixture


class Venv:
    """A real virtual environment with an SGLang that must never be imported."""

    def __init__(self, folder: Path, tree: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python3*/site-packages"))
        shutil.copytree(tree, self.site, dirs_exist_ok=True)
        for package in ("sglang", "torch"):
            (self.site / package).mkdir(exist_ok=True)
            poison(self.site / package)


def poison(package: Path) -> None:
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")


def sglang_of(done: Done) -> dict[str, object]:
    assert done.code == 0, done
    return dict(done.json["sglang"])


def test_python_exe_with_a_real_venv(install_tree: TreeFactory, tmp_path: Path, mlapatch_: Command) -> None:
    venv = Venv(tmp_path / "venv", install_tree("0.5.9"))
    before = (venv.site / BACKEND).read_bytes()
    status = sglang_of(mlapatch_("status", "--json", "--python", venv.python))
    assert (status["path"], status["install"]) == (str(venv.site / "sglang"), "wheel")
    assert status["python"] == str(venv.python)
    assert mlapatch_("apply", "gather-cast", "--python", venv.python).code == 0
    assert (venv.site / BACKEND).read_bytes() != before
    assert mlapatch_("revert", "--python", venv.python).code == 0
    assert (venv.site / BACKEND).read_bytes() == before


def test_the_running_interpreters_sglang_is_found_and_not_imported(install_tree: TreeFactory) -> None:
    tree = install_tree("0.5.9")
    poison(tree / "sglang")
    (tree / "torch").mkdir()
    poison(tree / "torch")
    path = os.pathsep.join([str(tree), str(Path(__file__).parents[2] / "src")])
    for verb in (
        ("status", "--json"),
        ("apply", "gather-cast", "--json"),
        ("diff", "gather-cast"),
        ("revert", "--json"),
    ):
        done = process(*verb, env={"PYTHONPATH": path})
        assert (done.code, "imported" in done.out + done.err) == (0, False), done


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH")
def test_two_copies(install_tree: TreeFactory, tmp_path: Path) -> None:
    first, second = install_tree("0.5.9"), install_tree("0.5.23")
    src = str(Path(__file__).parents[2] / "src")
    env = {"PYTHONPATH": os.pathsep.join([str(first), str(second), src]), "PYTHONSAFEPATH": "1"}
    done = process("status", "--json", env=env, cwd=tmp_path)
    assert (sglang_of(done)["version"], sglang_of(done)["others"]) == ("0.5.9", [str(second / "sglang")])
    words = f"another SGLang could be imported from {second / 'sglang'}; a server uses {first / 'sglang'}"
    assert f"warning: {words}" in done.err
    inside = process("status", "--json", env=env, cwd=second)
    assert f"a server started in {second} with 'python -m' would import {second / 'sglang'}" in inside.err


def test_a_namespace_leftover(tmp_path: Path) -> None:
    (tmp_path / "left" / "sglang" / "srt").mkdir(parents=True)
    src = str(Path(__file__).parents[2] / "src")
    done = process("status", env={"PYTHONPATH": os.pathsep.join([src, str(tmp_path / "left")])}, cwd=tmp_path)
    assert done.code == 5
    assert "sglang is a leftover folder without __init__.py (a namespace package)" in done.err
    assert str(tmp_path / "left" / "sglang") in done.err


def test_an_sglang_inside_a_zip(install_tree: TreeFactory, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", install_tree("0.5.9"))
    src = str(Path(__file__).parents[2] / "src")
    done = process("status", env={"PYTHONPATH": os.pathsep.join([src, archive])}, cwd=tmp_path)
    assert done.code == 5, done
    assert "sglang is not a folder on disk" in done.err


@pytest.mark.parametrize("verb", [("status",), ("apply", "gather-cast"), ("revert",), ("diff", "gather-cast")])
def test_no_target(mlapatch_: Command, tmp_path: Path, verb: tuple[str, ...]) -> None:
    for options in (("--sglang", tmp_path), ("--sglang", tmp_path / "absent"), ("--python", "/absent/python")):
        done = mlapatch_(*verb, *options)
        assert done.code == 5, done
        assert done.err.startswith("error: ")
        assert str(options[1]) in done.err
    done = process(*verb, cwd=tmp_path, env={"PYTHONNOUSERSITE": "1"})
    assert done.code == 5
    assert "error: no SGLang found" in done.err
    assert "next: mlapatch status --sglang PATH, or --python" in done.err
    assert not list(tmp_path.iterdir())


def test_an_interpreter_that_fails_says_what_it_said(mlapatch_: Command, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'no such runtime' >&2\nexit 3\n")
    script.chmod(0o755)
    done = mlapatch_("status", "--python", script)
    assert done.code == 5
    assert "no such runtime" in done.err


def test_an_editable_install(checkout: Site, tmp_path: Path) -> None:
    """As `pip install -e python` leaves it: a .pth file and a dist-info with direct_url.json."""
    site_packages = tmp_path / "site"
    info = site_packages / "sglang-0.5.10.dist-info"
    info.mkdir(parents=True)
    url = (checkout.folder).as_uri()
    assert "%20" in url, "pip quotes the address"
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nRequires-Dist: flashinfer_python==0.6.12\n\n")
    path = os.pathsep.join([str(checkout.folder), str(site_packages), str(Path(__file__).parents[2] / "src")])
    done = process("status", "--json", env={"PYTHONPATH": path}, cwd=tmp_path)
    found = sglang_of(done)
    assert (found["install"], found["version"], found["flashinfer"]) == ("editable", "0.5.10", "0.6.12")
    assert {target["state"] for target in done.json["targets"]} == {"pristine"}


def test_a_program_that_is_no_python(mlapatch_: Command, tmp_path: Path) -> None:
    done = mlapatch_("status", "--python", "/bin/true")
    assert done.code == 5
    assert "found: a program that does not answer as Python does" in done.err
    for said in ("1", "{}"):
        shim = tmp_path / "python3"
        shim.write_text(f"#!/bin/sh\necho '{said}'\n")
        shim.chmod(0o755)
        done = mlapatch_("status", "--python", shim)
        assert (done.code, "found: a program that does not answer as Python does" in done.err) == (5, True), said
    done = mlapatch_("status", "--python", tmp_path)
    assert done.code == 5
    assert "found: a folder: --sglang takes folders" in done.err


def test_a_wheel_is_to_be_unpacked(mlapatch_: Command, tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-0.5.9-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    done = mlapatch_("status", "--sglang", wheel)
    assert done.code == 5
    assert "found: a wheel, not unpacked" in done.err
    assert f"next: unpack it: python -m zipfile -e {wheel} DIR, then mlapatch status --sglang DIR" in done.err


def test_a_path_from_the_variable_is_said_to_be(mlapatch_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MLAPATCH_SGLANG" not in mlapatch_("status", "--sglang", "/bad").err
    monkeypatch.setenv("MLAPATCH_SGLANG", "/bad")
    done = mlapatch_("status")
    assert done.code == 5
    assert "found: nothing there; the variable MLAPATCH_SGLANG names it" in done.err
    assert "unset MLAPATCH_SGLANG" in done.err
