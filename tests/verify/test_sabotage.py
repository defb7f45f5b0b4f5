"""What `verify` is for: every folder that gets one thing wrong fails, in the scenario that shows it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.commands.apply import apply
from mlapatch.commands.verify import verify as run_verify
from mlapatch.engine.judgement import Verdict
from mlapatch.engine.verdict import judge
from mlapatch.exits import Exit
from tests.conftest import TreeFactory
from tests.corpus import BACKEND, Corpus
from tests.verify.conftest import SABOTAGED, Verify

pytestmark = pytest.mark.verify


@dataclass(frozen=True)
class Sabotage:
    """A folder, a release, the scenarios that must fail, and others that cannot see the fault."""

    name: str
    version: str
    fails: tuple[str, ...]
    passes: tuple[str, ...] = ("decode-eager",)


SABOTAGES = (
    Sabotage("capture-time-size", "0.5.9", ("decode-replay", "verify-replay", "draft-extend-replay")),
    Sabotage("stale-indptr", "0.5.9", ("decode-replay", "draft-replay"), ("decode-eager", "verify-replay")),
    Sabotage("stale-dflash-indptr", "0.5.23", ("dflash-verify-replay",), ("verify-replay",)),
    Sabotage("off-by-one", "0.5.9", ("decode-eager", "extend-prefix", "verify-replay"), ()),
    Sabotage("one-too-many", "0.5.9", ("decode-replay",)),
    Sabotage("workspace-not-refreshed", "0.5.15.post1", ("decode-eager", "decode-replay"), ()),
    Sabotage("workspace-a-layer", "0.5.15.post1", ("decode-eager", "mixed-decode-extend"), ()),
    Sabotage("wrong-slot", "0.5.9", ("decode-eager", "extend-prefix"), ()),
    Sabotage("no-cast-in-extend", "0.5.9", ("extend-prefix", "verify-eager", "flashmla-extend")),
    Sabotage("k-scale-applied-twice", "0.5.23", ("decode-eager", "extend-prefix"), ()),
    Sabotage("batch-size-count", "0.5.9", ("draft-dp-padded",), ("decode-eager", "draft-eager")),
    Sabotage("cast-before-write", "0.5.9", ("extend-prefix",)),
    Sabotage("no-width-check", "0.5.9", ("packed-656",)),
    Sabotage("whole-tail", "0.5.9", ("decode-replay",)),
)


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda s: f"{s.name}-{s.version}")
def test_fails_where_it_is_wrong(verify: Verify, sabotage: Sabotage) -> None:
    found = verify(sabotage.name, sabotage.version, *sabotage.fails, *sabotage.passes)
    assert {name for name, result in found.items() if result.failed} == set(sabotage.fails)
    for name in sabotage.fails:
        assert "found" in found[name].detail or "read" in found[name].detail


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
def test_passes_without_the_fault(verify: Verify, version: str) -> None:
    scenarios = {name for sabotage in SABOTAGES for name in (*sabotage.fails, *sabotage.passes)}
    found = verify("sound", version, *scenarios)
    assert {name: r.detail for name, r in found.items() if r.failed} == {}
    assert found["packed-656"].result == "refused"


def test_every_folder_is_tried() -> None:
    folders = {path.parent.name for path in Path(SABOTAGED).glob("*/patch.toml")}
    assert folders - {"sound"} == {sabotage.name for sabotage in SABOTAGES}


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda s: f"{s.name}-{s.version}")
def test_the_folder_is_a_patch_that_applies(sabotage: Sabotage, corpus: Corpus) -> None:
    patch = load_catalogue([SABOTAGED]).get(sabotage.name)
    found = judge(corpus.text(sabotage.version), patch, Version(sabotage.version), prove=True)
    assert found.verdict is Verdict.APPLICABLE, found.reason


def test_the_command_line_fails_and_names_the_scenario(torch_python: str, wheel_dir: TreeFactory) -> None:
    command = ["verify", "off-by-one", "--patches", str(SABOTAGED), "--scenario", "decode-eager", "--json"]
    command += ["--sglang", str(wheel_dir("0.5.9"))]
    done = subprocess.run([torch_python, "-m", "mlapatch", *command], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.FOUND, done.stderr
    found = json.loads(done.stdout)["patches"][0]
    assert (found["result"], found["failed"]) == ("fail", ["decode-eager"])


def test_installed_bytes_that_were_changed_by_hand_are_run_not_refused(
    torch_python: str, wheel_dir: TreeFactory, tmp_path: Path
) -> None:
    """A change inside the patch's own lines is what `--installed` is asked about."""
    site = Path(shutil.copytree(wheel_dir("0.5.9"), tmp_path / "site"))
    assert apply(["active-cast"], sglang=site).exit is Exit.OK
    path = site / BACKEND
    right = path.read_bytes()
    wrong = right.replace(b"if decode and wrapper._use_cuda_graph", b"if False")
    path.write_bytes(wrong)
    assert wrong != right
    outcome = run_verify([], installed=True, scenarios=["decode-replay"], sglang=site)
    assert outcome.exit is Exit.FOUND
