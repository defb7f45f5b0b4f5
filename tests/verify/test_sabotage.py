"""What `verify` is for: every folder that gets one thing wrong fails, in the scenario that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

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
