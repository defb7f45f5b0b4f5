"""A command that is printed acts on the SGLang that was judged; nothing is written through a link that others own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlapatch.cli.address import addressed, options
from mlapatch.commands.apply import apply
from mlapatch.commands.status import status
from mlapatch.commands.verify import verify
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome, Text, Warn
from tests.conftest import TreeFactory


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["apply", "active-cast", "--sglang", "/a b"], " --sglang '/a b'"),
        (["status", "--sglang=/x", "--patches", "p", "--patches=q"], " --sglang /x --patches p --patches q"),
        (["launch", "--command", "--", "python", "--sglang", "/x"], ""),
        (["status", "--json"], ""),
    ],
)
def test_what_is_typed_again(argv: list[str], expected: str) -> None:
    assert options(argv) == expected


def test_only_commands_about_an_installed_sglang_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mlapatch", "status", "--sglang", "/x"])
    lines = ["to undo: mlapatch revert, or mlapatch status --sglang PATH", "mlapatch check --release 1; mlapatch.toml"]
    shown = addressed(Outcome(data={"next": "mlapatch apply a", "reason": "mlapatch apply a"}, blocks=[Text(lines)]))
    assert shown.blocks == [
        Text(["to undo: mlapatch revert --sglang /x, or mlapatch status --sglang PATH", lines[1]]),
    ]
    assert shown.data == {"next": "mlapatch apply --sglang /x a", "reason": "mlapatch apply a"}


def test_following_the_advice_acts_on_the_tree_that_was_named(install_tree: TreeFactory) -> None:
    site = install_tree("0.5.9")
    command = [sys.executable, "-m", "mlapatch", "status", "--require", "active-cast", "--sglang", str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.FOUND
    following = done.stdout.splitlines()[-1].partition(": ")[2]
    assert following == f"mlapatch apply --sglang {site} active-cast"
    again = [sys.executable, "-m", *following.split()]
    assert subprocess.run(again, capture_output=True, check=False).returncode == Exit.OK
    assert json.loads(json.dumps(status(sglang=site).data["patches"], default=str))[0]["verdict"] == "applied"


def test_a_state_folder_that_is_a_link_is_not_followed(install_tree: TreeFactory, tmp_path: Path) -> None:
    """A stranger's checkout can bring one."""
    site, elsewhere = install_tree("0.5.9"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "journal.json").write_text('{"theirs": 1}')
    (site / ".mlapatch").symlink_to(elsewhere)
    with pytest.raises(MlapatchError, match="is a link") as refused:
        apply(["active-cast"], sglang=site)
    assert refused.value.exit is Exit.ENVIRONMENT
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"journal.json": '{"theirs": 1}'}


def test_a_package_that_is_a_link_is_named(install_tree: TreeFactory, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sglang").symlink_to(install_tree("0.5.9") / "sglang")
    outcome = status(sglang=tmp_path / "other")
    assert any("everything that uses that folder" in block.text for block in outcome.blocks if isinstance(block, Warn))


def test_an_installed_file_without_a_patch_is_no_pass(install_tree: TreeFactory) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    with pytest.raises(MlapatchError, match="no patch is in the installed file") as refused:
        verify([], installed=True, sglang=install_tree("0.5.9"))
    assert refused.value.exit is Exit.FOUND
