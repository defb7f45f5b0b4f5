"""What `verify` is for: every folder that gets one thing wrong fails, in the scenario that shows it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from git import Actor, Repo
from packaging.version import Version

import mlapatch
import mlapatch.commands.verify as verify_command
from mlapatch.catalogue import load_catalogue
from mlapatch.commands.apply import apply
from mlapatch.commands.verify import verify as run_verify
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.verdict import apply as engine_apply
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
    environment = {**os.environ, "MLAPATCH_COMMIT": "1234abc"}
    done = subprocess.run(
        [torch_python, "-m", "mlapatch", *command], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == Exit.FOUND, done.stderr
    said = json.loads(done.stdout)
    found = said["patches"][0]
    assert (found["result"], found["failed"]) == ("fail", ["decode-eager"])
    assert found["scenarios"][0]["census"] == "page table"
    _check_facts(said, found, torch_python, wheel_dir("0.5.9"))


def _check_facts(said: dict[str, Any], found: dict[str, Any], python: str, site: Path) -> None:
    """What ran, and what ran it."""
    stock = (site / BACKEND).read_bytes()
    patch = load_catalogue([SABOTAGED]).get("off-by-one")
    outcome = engine_apply(stock, patch, Version("0.5.9"))
    assert not isinstance(outcome, Judgement)
    assert found["digests"] == {"off-by-one": patch.digest}
    assert found["stock_sha256"] == hashlib.sha256(stock).hexdigest()
    assert found["patched_sha256"] == hashlib.sha256(outcome.source).hexdigest()
    assert (said["sglang"], said["device"]) == ("0.5.9", "cpu")
    assert said["mlapatch"] == {"version": mlapatch.__version__, "commit": "1234abc"}
    asked = (
        "import platform, sys, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)"
    )
    own = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    ran_with = said["ran_with"]
    assert [ran_with[key] for key in ("python", "torch", "triton")] == own
    assert (ran_with["flashinfer"], ran_with["flashinfer_stand_in"]) == ("0.6.18", True)
    assert ran_with["machine"]["cpu"]
    assert ran_with["machine"]["cores"] == os.cpu_count()


def test_the_commit_is_the_checkouts_or_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLAPATCH_COMMIT", raising=False)
    installed = tmp_path / "lib" / "site-packages" / "mlapatch" / "__init__.py"
    monkeypatch.setattr(mlapatch, "__file__", str(installed))
    (tmp_path / "lib" / ".git").mkdir(parents=True)  # somebody's own repository around an environment
    assert verify_command._commit() is None
    monkeypatch.setattr(mlapatch, "__file__", str(tmp_path / "src" / "mlapatch" / "__init__.py"))
    (tmp_path / "src" / "mlapatch").mkdir(parents=True)
    assert verify_command._commit() is None
    Repo.init(tmp_path)
    assert verify_command._commit() is None
    head = Repo(tmp_path).index.commit("one", author=Actor("a", "a@b"), committer=Actor("a", "a@b"))
    assert verify_command._commit() == head.hexsha
    monkeypatch.setenv("MLAPATCH_COMMIT", "1234abc")
    assert verify_command._commit() == "1234abc"


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
