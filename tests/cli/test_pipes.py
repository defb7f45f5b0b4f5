"""A reader that closes the pipe early changes no exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlapatch
from tests.conftest import TreeFactory


def test_a_closed_pipe_is_no_finding(install_tree: TreeFactory) -> None:
    site = install_tree("0.5.9")
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
    command = [sys.executable, "-m", "mlapatch", "diff", "active-cast", "--sglang", str(site)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


LONG = "/no/such/folder/with/a/name/that/is/longer/than/forty/columns/and/has a space/site-packages"


def piped(*arguments: str, columns: str = "40") -> tuple[str, str]:
    """What a narrow terminal's pipe carries."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1]), "COLUMNS": columns}
    command = [sys.executable, "-m", "mlapatch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("status", "--sglang", LONG), f"  where: {LONG}"),
        (("status", "name", "--sm", "90"), "error: names are for --require: mlapatch status --require NAME..."),
        (("status", f"--no{LONG}"), f"error: no such option: --no{LONG}"),
        (("apply", "no-such-patch-with-a-long-name-of-more-than-forty-columns", "--sglang", LONG), None),
        (("verify", "active-cast", "--device", LONG), f"error: --device is cpu or cuda, not {LONG}"),
        (("list", "--patches", LONG), f"  where: {LONG}"),
        (("diagnose", LONG), f"  where: {LONG}"),
        (("estimate", "--tp", LONG), f"error: '--tp': '{LONG}' is not a valid int"),
    ],
)
def test_errors_in_a_pipe_are_not_cut(arguments: tuple[str, ...], line: str | None) -> None:
    out, err = piped(*arguments)
    wanted = line or "error: there is no patch 'no-such-patch-with-a-long-name-of-more-than-forty-columns'"
    assert wanted in err.splitlines(), err
    assert out == ""
    assert not set("╭│╰─…") & set(err), "no boxes, and nothing shortened"
    assert piped(*arguments, columns="200") == (out, err)


@pytest.mark.parametrize("verb", ["status", "launch", "bench", "guard record"])
def test_help_in_a_pipe_is_not_cut(verb: str) -> None:
    from tests.cli.test_messages import verbs

    out, _ = piped(*verb.split(), "--help")
    lines = [line.strip() for line in out.splitlines()]
    for paragraph in (verbs()[verb].help or "").split("\n\n"):
        assert " ".join(paragraph.split()) in lines
    assert not set("╭│╰─…") & set(out)


def test_tables_in_a_pipe_are_not_cut(install_tree: TreeFactory) -> None:
    site = install_tree("0.5.9")
    out, _ = piped("status", "--sglang", str(site))
    assert out == piped("status", "--sglang", str(site), columns="400")[0]
    assert any(len(line) > 100 for line in out.splitlines())


def unread(*arguments: str, full: bool = False, errors: bool = False) -> tuple[int, str]:
    """Exit code and what stderr got, where stdout (with `errors`, stderr) is a closed pipe or a full disk."""
    read, write = (None, os.open("/dev/full", os.O_WRONLY)) if full else os.pipe()
    if read is not None:
        os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "mlapatch", *arguments],
        stdout=subprocess.DEVNULL if errors else write,
        stderr=write if errors else subprocess.PIPE,
        env=environment,
        check=False,
        timeout=60,
    )
    os.close(write)
    return done.returncode, (done.stderr or b"").decode()


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [(("nosuch",), 2, "error: no such command 'nosuch'"), (("status", "--sglang", "/nosuch"), 5, "error: ")],
)
def test_an_error_that_nobody_can_read_keeps_its_code(arguments: tuple[str, ...], code: int, what: str) -> None:
    assert unread(*arguments, "--json") == (code, "")
    assert unread(*arguments, errors=True) == (code, "")
    if Path("/dev/full").exists():
        found, said = unread(*arguments, "--json", full=True)
        assert found == code
        assert said.startswith(what), "what cannot be written as JSON is said as text"
        assert "bug" not in said
        assert unread(*arguments, full=True, errors=True) == (code, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("list", 0), ("list --json", 0), ("nosuch --json", 2), ("status --sglang /nosuch", 5)],
)
def test_closed_streams_change_no_exit_code(closed: str, arguments: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
    command = ["sh", "-c", f'exec "$0" -m mlapatch {arguments} {closed}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_requirement_that_is_met_needs_no_stdout(install_tree: TreeFactory) -> None:
    site = install_tree("0.5.9")
    environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
    for words, code in (
        ("status --require active-cast", 1),
        ("apply active-cast", 0),
        ("status --require active-cast", 0),
    ):
        command = ["sh", "-c", f'exec "$0" -m mlapatch {words} --sglang "$1" >&-', sys.executable, str(site)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False, timeout=60)
        assert done.returncode == code, (words, done.stderr)
