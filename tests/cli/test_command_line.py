"""What goes wrong around a verb: a wrong command line is an error like any other, and Ctrl-C is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SRC, Command, process
from tests.conftest import TreeFactory

WRONG = [
    (("apply",), "missing argument 'NAME...'", "none", "mlapatch apply --help"),
    (("apply", "active-cast", "--bogus"), "no such option: --bogus", "--bogus", "mlapatch apply --help"),
    (("status", "active-cast"), "names are for --require: mlapatch status --require NAME...", "", "mlapatch status"),
    (("diff", "a", "b"), "got unexpected extra argument", "", "mlapatch diff --help"),
    (("verify", "--device", "tpu"), "--device is cpu or cuda, not tpu", "", "mlapatch verify --help"),
    (("guard", "check", "--bogus"), "no such option: --bogus", "--bogus", "mlapatch guard check --help"),
    (("estimate", "--tp", "many"), "'--tp': 'many' is not a valid int", "", "mlapatch estimate --help"),
    (("check", "--markdown"), "--json and --markdown exclude each other", "", "mlapatch check --help"),
    (("frobnicate",), "no such command 'frobnicate'", "", "mlapatch --help"),
]


@pytest.mark.parametrize(("arguments", "what", "found", "following"), WRONG)
def test_a_wrong_command_line_is_json_where_json_was_asked_for(
    mlapatch_: Command, arguments: tuple[str, ...], what: str, found: str, following: str
) -> None:
    done = mlapatch_(*arguments, "--json")
    assert (done.code, done.err) == (2, "")
    assert done.json["exit"] == 2
    error: dict[str, Any] = done.json["error"]
    assert error["what"].startswith(what)  # click adds what it might have been
    assert error.get("found", "") == found
    assert error["expected"].startswith(f"mlapatch {arguments[0] if arguments[0] != 'frobnicate' else ''}".strip())
    assert error["next"].startswith(following)


@pytest.mark.parametrize(("arguments", "what", "found", "following"), WRONG[:7])
def test_a_wrong_command_line_ends_with_what_to_type(
    mlapatch_: Command, arguments: tuple[str, ...], what: str, found: str, following: str
) -> None:
    done = mlapatch_(*arguments)
    assert (done.code, done.out) == (2, "")
    first, *_, last = done.err.splitlines()
    assert first.startswith(f"error: {what}")
    assert last.startswith(f"  next: {following}")


@pytest.mark.parametrize("option", ["--sglang", "--python", "--patches"])
def test_an_empty_place_is_not_the_working_folder(mlapatch_: Command, option: str) -> None:
    for words in ((option, ""), (f"{option}=",)):
        done = mlapatch_("guard", "check", *words)
        assert (done.code, done.out) == (2, "")
        assert f"error: {option} is empty" in done.err
        assert "  next: mlapatch guard check --help" in done.err


def test_what_stands_after_two_dashes_asks_for_no_json(mlapatch_: Command) -> None:
    done = mlapatch_("launch", "--bogus", "--", "--json")
    assert (done.code, done.out) == (2, "")


def test_no_verb_is_the_help(mlapatch_: Command) -> None:
    done = mlapatch_()
    assert "Usage: mlapatch" in done.out + done.err
    assert "error" not in done.err


def interrupted(program: str, *arguments: str | Path) -> tuple[int, str]:
    """Run a Python program that sends itself SIGINT; its exit code and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    return done.returncode, done.stderr


#: Interrupts when a module is imported, or a function is called, for the first time.
AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            {act}
sys.meta_path.insert(0, Finder())
from mlapatch.__main__ import main
main()
"""
AFTER = """
import os, signal, sys
from {module} import {owner}
real = {owner}.{name}
def call(*arguments, **words):
    done = real(*arguments, **words)
    {owner}.{name} = real
    os.kill(os.getpid(), signal.SIGINT)
    return done
{owner}.{name} = call
from mlapatch.__main__ import main
main()
"""


SIGNAL = "os.kill(os.getpid(), signal.SIGINT)"
WRAPPED = "raise RuntimeError('Error calling __set_name__') from KeyboardInterrupt()"  # as Python to 3.11 does


@pytest.mark.parametrize("act", [SIGNAL, WRAPPED])
@pytest.mark.parametrize(
    "name",
    ["mlapatch.cli", "typer", "mlapatch.cli.serving", "mlapatch.commands.apply", "mlapatch.catalogue", "libcst"],
)
def test_an_interruption_before_anything_is_written(
    install_tree: TreeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, act: str
) -> None:
    site = install_tree("0.5.9")
    monkeypatch.setenv("MLAPATCH_CACHE", str(tmp_path / "cache"))  # cold: libcst is imported
    code, err = interrupted(AT_IMPORT.format(name=name, act=act), "apply", "active-cast", "--sglang", site)
    assert (code, err) == (130, "interrupted; nothing was written\n")
    assert not (site / ".mlapatch" / "journal.json").exists()


@pytest.mark.parametrize(
    ("module", "owner", "name", "kept"),
    [
        ("mlapatch.install.journal", "Journal", "_keep", False),
        ("mlapatch.install.write", "Staged", "place", False),  # undone
        ("mlapatch.install.journal", "Journal", "_replace", True),
        ("mlapatch.install.journal", "Journal", "commit", True),
    ],
)
def test_an_interruption_says_whether_something_was_written(
    install_tree: TreeFactory, module: str, owner: str, name: str, kept: bool
) -> None:
    site = install_tree("0.5.9")
    program = AFTER.format(module=module, owner=owner, name=name)
    code, err = interrupted(program, "apply", "active-cast", "--sglang", site)
    what = "what was finished is kept" if kept else "nothing was written"
    assert (code, err) == (130, f"interrupted; {what}\n")
    status = process("status", "--json", "--sglang", site, env={})
    assert json.loads(status.out)["targets"][0]["state"] == ("patched" if kept else "pristine")


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_ctrl_c_is_one_line_at_any_time(install_tree: TreeFactory, tmp_path: Path, seconds: float) -> None:
    site = install_tree("0.5.9")
    environment = {**os.environ, "PYTHONPATH": str(SRC), "MLAPATCH_CACHE": str(tmp_path / "cache")}
    ready = "import sys; print(flush=True); sys.argv[0] = 'mlapatch'; from mlapatch.__main__ import main; main()"
    command = [sys.executable, "-c", ready, "apply", "active-cast", "--dry-run", "--sglang", str(site)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process_:
        assert process_.stdout is not None
        process_.stdout.readline()
        time.sleep(seconds)
        process_.send_signal(signal.SIGINT)
        _, err = process_.communicate(timeout=60)
    assert (process_.returncode, err) in [(130, "interrupted; nothing was written\n"), (0, "")]
