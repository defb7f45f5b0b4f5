"""What a command says of its program, its Python and its module, and what the preflight makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.launch import launch
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.serve.command import Command, is_python

SERVER = ("-m", "sglang.launch_server", "--model-path", "zai-org/GLM-5")


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("python -m sglang.launch_server --tp 8", "sglang.launch_server"),
        ("python3 -u -X dev -W error -m sglang.launch_server -m x", "sglang.launch_server"),
        ("/opt/venv/bin/python3.12 -m sglang", "sglang"),
        ("python start.py -m sglang.launch_server", ""),
        ("python -c pass -m sglang.launch_server", ""),
        ("python - -m sglang.launch_server", ""),
        ("python -msglang.launch_server --tp 8", "sglang.launch_server"),
        ("python3 -um sglang.launch_server", "sglang.launch_server"),
        ("python3 -uBmsglang.launch_server", "sglang.launch_server"),
        ("python -Xdev -uWerror -uX dev --check-hash-based-pycs never -m sglang", "sglang"),
        ("python -uc pass -m sglang.launch_server", ""),
        ("python -- start.py -m sglang.launch_server", ""),
        ("python -X", ""),
        ("python -m", ""),
        ("python", ""),
        ("docker run image python -m sglang.launch_server", ""),
    ],
)
def test_the_module_of_a_python(words: str, module: str) -> None:
    said = Command.of(words.split(), os.environ)
    assert (said.module, said.starts_sglang, said.whole) == (module, module != "", module != "")


def test_a_joined_module_ends_pythons_options() -> None:
    """What follows is the module's own: `-m sglang.nope` was looked for."""
    for words in ("python -mx -m sglang.nope", "python -um x -m sglang.nope"):
        said = Command.of(words.split(), os.environ)
        assert (said.module, said.starts_sglang, said.whole) == ("x", False, False)


@pytest.mark.parametrize(("word", "whole"), [("sglang", True), ("/opt/venv/bin/sglang", True), ("./sglang.sh", False)])
def test_whose_options_are_all_there(word: str, whole: bool) -> None:
    assert Command.of([word, "serve", "--tp", "8"], os.environ).whole is whole


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("python", True),
        ("python3", True),
        ("python3.12", True),
        ("venv/bin/python", True),
        ("python.sh", False),
        ("python-in-docker", False),
        ("pythonw", False),
        ("bash", False),
    ],
)
def test_what_names_a_python(word: str, names: bool) -> None:
    assert is_python(word) is names


def test_a_module_is_looked_for_in_the_package(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    (package / "cli").mkdir(parents=True)
    for file in ("launch_server.py", "fast.cpython-312-x86_64-linux-gnu.so", "cli/__main__.py", "cli/__init__.py"):
        (package / file).touch()
    names = ("sglang.launch_server", "sglang.fast", "sglang.cli", "sglang.launch_serve", "sglang", "sglang.x.y")

    def there(folder: Path) -> list[str]:
        return [name for name in names if Command("python", "/usr/bin/python", name).is_in(folder)]

    assert there(package) == ["sglang.launch_server", "sglang.fast", "sglang.cli"]
    (package / "__main__.py").touch()
    moved = package.rename(tmp_path / "sglang-0.5.9 [mine]")
    assert there(moved) == ["sglang.launch_server", "sglang.fast", "sglang.cli", "sglang"]


# ------------------------------------------------------------------------------------------------------ the preflight
@pytest.fixture
def pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Path]:
    """`pythons(True)`: a venv's Python that is `python` on PATH, with an SGLang or without one."""

    def make(sglang: bool) -> Path:
        home = tmp_path / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        if sglang:
            package = next(home.glob("lib/python3*/site-packages")) / "sglang"
            package.mkdir()
            for file in ("__init__.py", "launch_server.py"):
                (package / file).touch()
            (package / "version.py").write_text('__version__ = "0.5.9"\n')
        monkeypatch.setenv("PATH", f"{home}/bin{os.pathsep}{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        return home / "bin" / "python"

    return make


def checked(*command: str, **options: Any) -> tuple[Exit, dict[str, dict[str, Any]]]:
    """The exit code of a dry run, and its findings by check."""
    said: list[str] = []
    outcome = launch(command=command, dry_run=True, tell=said.append, **options)
    found: Any = outcome.data["preflight"]
    return outcome.exit, {finding["check"]: finding for finding in found}


@pytest.mark.parametrize("whole", [False, True])
def test_a_python_without_sglang_is_refused(pythons: Callable[[bool], Path], whole: bool) -> None:
    """Also the one that `python` on PATH is: `skip`, exit 0 was said of it."""
    python = pythons(False)
    word = str(python) if whole else "python"
    code, found = checked(word, *SERVER)
    assert code is Exit.ENVIRONMENT
    assert found["command"]["state"] == "ok"
    assert found["sglang"]["state"] == "fail"
    assert found["sglang"]["text"] == f"{word} is {python}; no SGLang found (none on sys.path)"
    assert "--python" in found["sglang"]["next"]
    for check in ("patches", "guard", "libraries"):
        assert found[check]["state"] == "skip"
        assert found[check]["text"] == f"NOT looked at: {word} is {python}; no SGLang found (none on sys.path)"


def test_a_script_of_a_python_without_sglang_may_know_better(pythons: Callable[[bool], Path]) -> None:
    python = pythons(False)
    code, found = checked("python", "start.py")
    assert (code, found["sglang"]["state"]) == (Exit.OK, "skip")
    assert f"python is {python}; no SGLang found" in found["sglang"]["text"]


REMOTE = '{"origin": "/sgl-workspace/sglang/__init__.py", "places": [], "path": [], "exe": "/usr/bin/python3"}'


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (f"echo '{REMOTE}'", "not a folder on disk"),  # docker exec: the files are the container's
        ("echo no -c here >&2; exit 2", "cannot be asked"),
        ("echo started", "cannot be asked"),
    ],
)
def test_a_shim_that_cannot_be_asked_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, why: str
) -> None:
    shim = tmp_path / "python3"
    shim.write_text(f"#!/bin/sh\n{does}\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    code, found = checked("python3", *SERVER)
    assert code is Exit.OK
    for check in ("sglang", "patches", "guard", "libraries"):
        assert found[check]["state"] == "skip"
        assert found[check]["text"].startswith(f"NOT looked at: python3 is {shim}; ")
        assert why in found[check]["text"]


@pytest.mark.parametrize("left", ["a folder", "a dangling link"])
def test_what_is_left_of_an_sglang_is_none(pythons: Callable[[bool], Path], left: str) -> None:
    python = pythons(False)
    package = next(python.parents[1].glob("lib/python3*/site-packages")) / "sglang"
    package.mkdir()
    if left == "a dangling link":
        (package / "__init__.py").symlink_to(package / "gone.py")
    code, found = checked("python", *SERVER)
    assert (code, found["sglang"]["state"]) == (Exit.ENVIRONMENT, "fail")


def test_a_python_with_sglang_is_looked_at(pythons: Callable[[bool], Path]) -> None:
    pythons(True)
    _, found = checked("python", *SERVER)
    assert found["sglang"]["state"] == "ok"
    assert "0.5.9" in found["sglang"]["text"]


def test_a_module_that_sglang_has_not_is_refused(pythons: Callable[[bool], Path]) -> None:
    pythons(True)
    code, found = checked("python", "-m", "sglang.launch_serve", "--model-path", "x")
    assert code is Exit.ENVIRONMENT
    assert found["sglang"]["state"] == "fail"
    assert found["sglang"]["text"].endswith("has no module sglang.launch_serve")
    assert found["sglang"]["next"] == "python -m sglang.launch_server"


def test_an_sglang_whose_folder_is_a_link_with_another_name(pythons: Callable[[bool], Path]) -> None:
    """It was said to have no module sglang.launch_server."""
    python = pythons(True)
    (package,) = python.parents[1].glob("lib/python3*/site-packages/sglang")
    package.symlink_to(package.rename(python.parents[2] / "sglang-0.5.9"))
    _, found = checked("python", *SERVER)
    assert found["sglang"]["state"] != "fail"


@pytest.mark.parametrize("command", [("bash", "-c", "python -m sglang.launch_server"), ("env", "python", *SERVER)])
def test_a_wrapper_is_said_not_to_be_looked_at(pythons: Callable[[bool], Path], command: tuple[str, ...]) -> None:
    pythons(False)
    code, found = checked(*command)
    assert code is Exit.OK
    for check in ("sglang", "patches", "guard", "libraries"):
        assert found[check]["state"] == "skip"
        assert found[check]["text"].startswith(f"NOT looked at: {command[0]} does not say which Python it uses")


def test_a_start_that_looks_at_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPATCH_DB", str(tmp_path / "runs.db"))
    said: list[str] = []
    launch(command=["true"], logs=tmp_path / "logs", tell=said.append, force=True, keep=False)
    assert any(text.startswith("warning: sglang, patches, guard: NOT looked at: true does not say") for text in said)


def test_require_is_asked_of_the_python_of_the_command(pythons: Callable[[bool], Path]) -> None:
    """It was asked of the Python that runs mlapatch."""
    python = pythons(False)
    with pytest.raises(MlapatchError) as raised:
        checked("python", *SERVER, require=["active-cast"])
    assert (raised.value.exit, raised.value.what) == (Exit.ENVIRONMENT, "no SGLang found")
    assert raised.value.where == str(python)
