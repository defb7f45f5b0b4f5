"""profile-decode: it fits every release, goes out without a trace, and its helper profiles a real torch on the CPU."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any, cast

import pytest
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.commands.apply import apply
from mlapatch.commands.revert import revert
from mlapatch.commands.status import status
from mlapatch.engine.verdict import Fits
from mlapatch.engine.verdict import apply as apply_to
from tests.conftest import TreeFactory
from tests.corpus import ALL_CONTENTS, ALL_RELEASES, RELEASES, RUNNER, Corpus

NAME = "profile-decode"


@pytest.mark.parametrize("version", RELEASES)
def test_reverting_keeps_what_was_edited_before_and_after(version: str, install_tree: TreeFactory) -> None:
    site = install_tree(version)
    path = site / RUNNER
    before = path.read_bytes() + b"\nBEFORE = True\n"
    path.write_bytes(before)
    apply([NAME], sglang=site)
    patched = path.read_bytes()
    assert b"DECODE_PROFILE.before_forward(self, forward_batch)" in patched
    line = b"\nlogger = logging.getLogger(__name__)\n"
    assert patched.count(line) == 1
    path.write_bytes(patched.replace(line, line + b"AFTER = True\n"))
    assert verdict(site) == "applied"
    revert([NAME], sglang=site)
    assert path.read_bytes() == before.replace(line, line + b"AFTER = True\n")


def test_it_goes_together_with_a_patch_of_the_backend(install_tree: TreeFactory, corpus: Corpus) -> None:
    site = install_tree("0.5.9")
    apply([NAME, "active-cast"], sglang=site)
    revert(["active-cast"], sglang=site)
    assert verdict(site) == "applied"
    revert([NAME], sglang=site)
    assert (site / RUNNER).read_bytes() == corpus.text("0.5.9", RUNNER)


def verdict(site: Path) -> str:
    data: Any = status(sglang=site).data
    return str({row["name"]: row["verdict"] for row in data["patches"]}[NAME])


@pytest.mark.parametrize("version", ALL_RELEASES if os.environ.get("MLAPATCH_PERTURB") == "all" else ALL_CONTENTS[::4])
def test_it_fits_every_release(version: str, corpus: Corpus) -> None:
    patch = load_catalogue().patches[NAME]
    stock = corpus.text(version, RUNNER)
    outcome = apply_to(stock, patch, Version(version))
    assert isinstance(outcome, Fits), outcome.reason
    kept = iter(outcome.source.splitlines())
    assert all(line in kept for line in stock.splitlines())  # nothing but insertions


class Mode:
    """SGLang's ForwardMode, as far as the helper asks it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"


class Batch:
    def __init__(self, name: str) -> None:
        self.forward_mode = Mode(name)


class Runner:
    """A model runner whose `forward` is the patched one's, around one matrix product."""

    def __init__(self, helper: dict[str, Any], draft: bool = False, **attributes: object) -> None:
        self.helper = helper
        self.is_draft_worker = draft
        self.__dict__.update(attributes)

    def forward(self, mode: str = "decode") -> None:
        torch = self.helper["torch"]
        if self.helper["DECODE_PROFILE"] is not None:
            self.helper["DECODE_PROFILE"].before_forward(self, Batch(mode))
        with torch.profiler.record_function(f"step {mode}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        if self.helper["DECODE_PROFILE"] is not None:
            self.helper["DECODE_PROFILE"].after_forward(self)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("MLAPATCH_PROFILE_DIR", str(tmp_path / "traces"))
    monkeypatch.setenv("MLAPATCH_PROFILE_STEPS", "3")
    monkeypatch.setenv("MLAPATCH_PROFILE_WARMUP", "2")
    return inserted()


def inserted() -> dict[str, Any]:
    """The helper's own module, as it would be made by the import of the patched file."""
    torch = pytest.importorskip("torch")
    folder = load_catalogue().folders[NAME]
    source = (folder / "decode_profile.py").read_text()
    names: dict[str, Any] = {"torch": torch, "logger": logging.getLogger(NAME)}
    exec(compile(source, "decode_profile.py", "exec"), names)  # noqa: S102
    return names


def steps(path: Path) -> list[str]:
    events = cast("list[dict[str, Any]]", json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    return [str(e["name"]) for e in events if str(e.get("name", "")).startswith("step ") and e.get("ph") == "X"]


def test_the_wanted_steps_are_in_one_file_a_rank(helper: dict[str, Any], tmp_path: Path) -> None:
    runner, draft = Runner(helper, tp_rank=3), Runner(helper, draft=True, tp_rank=3)
    for mode in ("decode", "extend", "decode", "decode", "extend", "verify", "decode", "decode"):
        draft.forward()
        runner.forward(mode)
    files = list((tmp_path / "traces").iterdir())
    assert len(files) == 1
    assert files[0].name.endswith("-TP-3-DECODE.trace.json.gz")
    assert helper["DECODE_PROFILE"] is None  # once a server
    counted = [name for name in steps(files[0]) if name != "step extend"]
    assert counted.count("step verify") == 1
    assert len(counted) == 3 + 3  # and the draft's steps between them


@pytest.mark.parametrize(
    ("attributes", "part"),
    [
        ({"tp_rank": 1, "pp_rank": 0, "pp_size": 1, "dp_size": 1}, "-TP-1-DECODE"),
        ({"tp_rank": 1, "pp_rank": 0, "pp_size": 2, "dp_rank": None}, "-TP-1-PP-0-DECODE"),
        ({"tp_rank": 0, "dp_rank": 1}, "-TP-0-DP-1-DECODE"),
    ],
)
def test_names_are_as_sglang_gives_them(helper: dict[str, Any], attributes: dict[str, Any], part: str) -> None:
    place = type("Parallel", (), attributes)()
    names = {
        helper["decode_profile_name"](Runner(helper, **attributes)),
        helper["decode_profile_name"](Runner(helper, ps=place)),  # 0.5.16 to 0.5.20
    }
    helper["get_parallel"] = lambda: place  # 0.5.21 on
    names.add(helper["decode_profile_name"](Runner(helper)))
    assert len(names) == 1
    assert names.pop().endswith(f"{part}.trace.json.gz")


def test_mlapatch_trace_finds_the_rank(helper: dict[str, Any], tmp_path: Path) -> None:
    from mlapatch.measure.tracefile import _RANK

    name = helper["decode_profile_name"](Runner(helper, tp_rank=5))
    match = _RANK.search(name)
    assert match
    assert match[1] == "5"


def test_another_replica_of_the_same_name_keeps_its_trace(
    helper: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPATCH_PROFILE_ID", "mine")
    for again in (helper, inserted()):
        for _ in range(5):
            Runner(again, tp_rank=0).forward()
    assert len(list((tmp_path / "traces").iterdir())) == 2
    assert (tmp_path / "traces" / "mine-TP-0-DECODE.trace.json.gz").is_file()


def test_without_a_folder_nothing_is_there_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLAPATCH_PROFILE_DIR", raising=False)
    names = inserted()
    assert names["DECODE_PROFILE"] is None
    Runner(names).forward()


@pytest.mark.parametrize("value", ["0", "-1", "ten", "1.5"])
def test_a_wrong_number_stops_the_start(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLAPATCH_PROFILE_DIR", str(tmp_path))
    monkeypatch.setenv("MLAPATCH_PROFILE_STEPS", value)
    with pytest.raises(ValueError, match="MLAPATCH_PROFILE_STEPS must be a whole number"):
        inserted()


def test_a_profile_that_fails_is_given_up(
    helper: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    for _ in range(6):
        Runner(helper, tp_rank=0).forward()
    assert helper["DECODE_PROFILE"] is None
    assert "cannot start the profile; the server goes on without it" in caplog.text


def test_with_a_gpu_only_its_activity_is_traced(helper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch, asked, waited = helper["torch"], [], []

    class Profile:
        def __init__(self, **options: object) -> None:
            asked.append(options)

        def start(self) -> None: ...
        def stop(self) -> None: ...
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_bytes(b"")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(len(asked)))
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    for _ in range(5):
        Runner(helper, tp_rank=0).forward()
    assert asked == [
        {"activities": [torch.profiler.ProfilerActivity.CUDA], "record_shapes": False, "with_stack": False}
    ]
    assert waited == [0, 1]  # before the first and after the last step, never between
