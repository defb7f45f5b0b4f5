"""Several patches of one file: any order, any subset, and back; a third party's folder, and one that replaces."""

from __future__ import annotations

import shutil
from itertools import permutations
from pathlib import Path

import pytest

from mlapatch.catalogue import bundled_folder
from tests.cli.conftest import SiteFactory

THIRD = Path(__file__).parents[1] / "data" / "patches"
FROM = ("--patches", THIRD)


@pytest.mark.parametrize("version", ["0.4.6.post5", "0.5.23"])
def test_revert_the_first_keep_the_second(site: SiteFactory, version: str) -> None:
    here = site(version)
    original = here.bytes
    here.ok("apply", "note-fill", *FROM)
    only_second = here.bytes
    here.ok("revert", *FROM)
    assert here.bytes == original

    here.ok("apply", "gather-cast")
    only_first = here.bytes
    here.ok("apply", "note-fill", *FROM)
    both = here.bytes
    verdicts = here.verdicts(*FROM)
    assert (verdicts["gather-cast"], verdicts["note-fill"]) == ("applied", "applied")
    assert len({original, only_first, only_second, both}) == 4

    kept = here.ok("revert", "gather-cast", *FROM)
    assert here.bytes == only_second
    assert "note-fill stays applied" in kept.out
    here.ok("apply", "gather-cast", *FROM)
    assert here.bytes == both
    here.ok("revert", "note-fill", *FROM)
    assert here.bytes == only_first
    here.ok("apply", "note-fill", *FROM)
    reverted = here.ok("revert", "--json", *FROM).json["reverted"]
    assert set(reverted) == {"gather-cast", "note-fill"}
    assert here.bytes == original


def test_order_does_not_matter(site: SiteFactory) -> None:
    results = set()
    for order in permutations(["active-cast", "note-fill"]):
        here = site("0.5.9")
        for name in order:
            here.ok("apply", name, *FROM)
        results.add(here.bytes)
    here = site("0.5.9")
    here.ok("apply", "note-fill", "active-cast", *FROM)
    assert results == {here.bytes}


def test_revert_all_takes_a_third_partys_patch_out_without_its_folder(site: SiteFactory) -> None:
    here = site("0.5.9")
    original = here.bytes
    here.ok("apply", "note-fill", "gather-cast", *FROM)
    assert "note-fill" not in here.verdicts()
    done = here.ok("revert", "note-fill")
    assert "gather-cast stays applied" in done.out
    assert here.verdicts()["gather-cast"] == "applied"
    here.ok("apply", "note-fill", *FROM)
    here.ok("revert")
    assert here.bytes == original


def test_patches_of_two_files_are_written_together(site: SiteFactory) -> None:
    here = site("0.5.9")
    before = here.snapshot()
    here.ok("apply", "gather-cast", "profile-decode")
    status = here.ok("status", "--json").json
    assert {target["state"] for target in status["targets"]} == {"patched"}
    here.ok("revert", "profile-decode")
    assert here.verdicts()["gather-cast"] == "applied"
    here.ok("revert")
    after = here.snapshot()
    assert {path: after[path][0] for path in before} == {path: before[path][0] for path in before}


def test_all_or_nothing(site: SiteFactory) -> None:
    here = site("0.5.9")
    runner = here.folder / "sglang/srt/model_executor/model_runner.py"
    runner.write_bytes(runner.read_bytes().replace(b"class ModelRunner", b"class TheModelRunner"))
    frozen = here.snapshot()
    done = here("apply", "gather-cast", "profile-decode")
    assert done.code == 3, done
    assert "profile-decode: drifted" in done.err
    assert here.snapshot() == frozen


def test_patches_that_exclude_each_other(site: SiteFactory) -> None:
    here = site("0.5.9")
    frozen = here.snapshot()
    both = here("apply", "gather-cast", "active-cast")
    assert both.code == 3
    assert "gather-cast and active-cast exclude each other; nothing was written" in both.err
    assert here.snapshot() == frozen
    here.ok("apply", "gather-cast")
    applied = here.bytes
    for name in ("active-cast", "fp8-plan"):
        done = here("apply", name, "--sm", "90", "--force")
        assert done.code == 3, "--force never overrides a conflict"
        assert f"{name}: conflicts: excluded by gather-cast, which is applied" in done.err
        assert f"next: mlapatch revert gather-cast && mlapatch apply {name}" in done.err
    assert here.bytes == applied
    here.ok("revert", "gather-cast")
    here.ok("apply", "active-cast")


def replacing(folder: Path, old: str, new: str) -> Path:
    """A catalogue with another gather-cast."""
    copy = Path(shutil.copytree(bundled_folder("patches") / "gather-cast", folder / "gather-cast"))
    snippet = copy / "gather_cast.py"
    text = snippet.read_text()
    assert old in text
    snippet.write_text(text.replace(old, new))
    return folder


def test_a_folder_replaces_a_bundled_patch(site: SiteFactory, tmp_path: Path) -> None:
    other = ("--patches", replacing(tmp_path / "other", "max(4096,", "max(8192,"))
    here = site("0.5.9")
    original = here.bytes
    here.ok("apply", "gather-cast")
    bundled = here.bytes

    older = here.ok("status", "--json", *other)
    assert older.verdicts["gather-cast"] == "applied"
    assert "an older text of it is applied" in older.reason("gather-cast")
    here.ok("apply", "gather-cast", *other)
    assert b"max(8192," in here.bytes
    assert here.bytes.replace(b"max(8192,", b"max(4096,") == bundled
    frozen = here.snapshot()
    here.ok("apply", "gather-cast", *other)
    assert here.snapshot() == frozen

    here.ok("revert")
    assert here.bytes == original


def test_apply_auto_picks_and_says_why(site: SiteFactory) -> None:
    here = site("0.5.9")
    done = here.ok("apply", "auto", "--gpu", "rtx-pro-6000")
    assert "auto: active-cast for SM120, SGLang 0.5.9" in done.out
    applied = here.bytes
    again = here.ok("apply", "auto")
    assert "auto: active-cast is applied already" in again.out
    assert here.bytes == applied
    here.ok("revert")
    here.ok("apply", "gather-cast")
    assert "auto: gather-cast is applied already" in here.ok("apply", "auto").out
