"""`mlapatch check`: what it reads, what it says, and when it fails."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from packaging.version import Version

from mlapatch import compat
from mlapatch.catalogue import load_catalogue
from mlapatch.commands.apply import apply
from mlapatch.commands.check import check
from mlapatch.commands.revert import revert
from mlapatch.compat import Subject, judge_all
from mlapatch.engine.judgement import Judgement
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.wheels import WheelStore
from mlapatch.outcome import Outcome, Text
from mlapatch.verdict_cache import VerdictCache
from tests.conftest import TreeFactory
from tests.corpus import ALL_CONTENTS, ALL_RELEASES, BACKEND, CONTENTS, RUNNER, Corpus
from tests.install.local_index import LocalIndex, make_wheel

ANY_GPU = ("active-cast", "gather-cast")


@pytest.fixture
def index(local_index: LocalIndex, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalIndex:
    """Four releases: one that fits, the same file again, one whose anchor moved, and one before the cast."""
    good, pins = corpus.text("0.5.23"), ("flashinfer_python[cu13]==0.7.2",)
    files = {BACKEND: good, RUNNER: corpus.text("0.5.23", RUNNER)}
    make_wheel(local_index.folder, "0.9.0", files, requires=pins)
    make_wheel(local_index.folder, "0.9.1", files, requires=pins)
    moved = {**files, BACKEND: good.replace(b"get_key_buffer", b"get_kv_buffer")}
    make_wheel(local_index.folder, "0.9.2", moved, requires=pins)
    old = {**files, BACKEND: corpus.text("0.4.6.post4")}
    make_wheel(local_index.folder, "0.4.6.post4", old, requires=("flashinfer_python==0.2.5",))
    monkeypatch.setenv("MLAPATCH_CACHE", str(tmp_path / "cache"))
    return local_index


def verdicts(outcome: Outcome) -> dict[str, dict[str, str]]:
    releases: Any = outcome.data["releases"]
    return {row["name"]: {p["name"]: p["verdict"] for p in row["patches"]} for row in releases}


def words(outcome: Outcome) -> str:
    return "\n".join(line for block in outcome.blocks if isinstance(block, Text) for line in block.lines)


@pytest.mark.parametrize("name", ANY_GPU)
@pytest.mark.parametrize("version", ALL_CONTENTS)
def test_every_content_is_applied_and_comes_back(install_tree: TreeFactory, version: str, name: str) -> None:
    site = install_tree(version)
    before = (site / BACKEND).read_bytes()
    assert apply([name], sglang=site, sm=120).exit is Exit.OK
    after = (site / BACKEND).read_bytes()
    assert after != before
    compile(after, "patched.py", "exec", dont_inherit=True)
    assert check([name], sglang=site, sm=120).exit is Exit.OK
    assert revert([name], sglang=site).exit is Exit.OK
    assert hashlib.sha256((site / BACKEND).read_bytes()).digest() == hashlib.sha256(before).digest()


def test_every_release_of_the_table_fits(corpus: Corpus) -> None:
    content = {release: row["sha256"] for row in CONTENTS for release in row["releases"]}
    outcome = check(ANY_GPU, releases=ALL_RELEASES)
    assert outcome.exit is Exit.OK
    rows: Any = outcome.data["releases"]
    assert {row["version"] for row in rows} == set(ALL_RELEASES)
    for row in rows:
        assert row["sha256"] == content[row["version"]]
        assert {p["verdict"] for p in row["patches"]} == {"applicable"}, row


def test_with_everything_cached_nothing_is_judged_or_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["active-cast", "gather-cast", "fp8-plan"]
    check(names, all_releases=True)
    kept = tmp_path / "verdicts.json"  # the shared one is written by tests that run at the same time
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(VerdictCache.default().path or "", kept)
    monkeypatch.setattr(VerdictCache, "default", lambda: VerdictCache(kept))
    first = check(names, all_releases=True)
    monkeypatch.setattr(compat, "_computed", _never)
    monkeypatch.setattr(WheelStore, "_wheel", _never)
    outcome = check(names, all_releases=True)
    assert verdicts(outcome) == verdicts(first)
    assert len(verdicts(outcome)) >= 57


def _never(*given: object) -> NoReturn:
    raise AssertionError(given)


def test_work_grows_with_contents_not_with_releases(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLAPATCH_CACHE", str(tmp_path))
    judged: list[object] = []
    real = compat._prove

    def counted(source: bytes, job: Sequence[compat._Task]) -> list[Judgement]:
        judged.extend(job)
        return real(source, job)

    monkeypatch.setattr(compat, "_prove", counted)
    same = next(row["releases"] for row in CONTENTS if "0.5.9" in row["releases"])
    patch = load_catalogue().get("active-cast")
    subjects = [Subject(v, Version(v), {patch.target: corpus.text(v)}) for v in same]
    rows = judge_all(subjects, [patch])
    assert len(rows) == len(same) == 14
    assert len(judged) == 1
    judge_all(subjects, [patch])
    assert len(judged) == 1, "verdicts are kept"


def test_ranges_latest_and_names(index: LocalIndex) -> None:
    assert list(verdicts(check(releases=[">=0.9,<0.9.2"]))) == ["0.9.0", "0.9.1"]
    assert list(verdicts(check(releases=["latest"]))) == ["0.9.2"]
    assert list(verdicts(check(["active-cast"], all_releases=True))) == ["0.9.0", "0.9.1", "0.9.2"]
    for wrong in ("new", "0.5.x", "=>1"):
        with pytest.raises(MlapatchError) as raised:
            check(releases=[wrong])
        assert raised.value.exit is Exit.USAGE
    with pytest.raises(MlapatchError, match="no release of SGLang is >=7") as raised:
        check(releases=[">=7"])
    assert "0.9.2" in raised.value.found
    with pytest.raises(MlapatchError, match="did you mean 'active-cast'"):
        check(["activ-cast"], releases=["0.9.0"])


def test_a_named_patch_that_does_not_fit_fails(index: LocalIndex) -> None:
    assert check(ANY_GPU, releases=["0.9.0", "0.9.1"]).exit is Exit.OK
    outcome = check(ANY_GPU, all_releases=True)
    assert outcome.exit is Exit.FOUND
    assert verdicts(outcome)["0.9.2"] == {"active-cast": "drifted", "gather-cast": "drifted"}
    assert outcome.data["failing"] == [{"name": name, "version": "0.9.2"} for name in ANY_GPU]
    said = words(outcome)
    assert "forward_extend" in said
    assert "get_kv_buffer" in said, "the nearest candidate is named"
    assert "does not fit: active-cast on 0.9.2, gather-cast on 0.9.2" in said


def test_without_names_only_what_is_applied_can_fail(index: LocalIndex, install_tree: TreeFactory) -> None:
    assert check(releases=["0.9.2"]).exit is Exit.OK
    site = install_tree("0.5.9")
    apply(["active-cast"], sglang=site, sm=120)
    outcome = check(releases=["0.9.2"], sglang=site)
    assert outcome.exit is Exit.FOUND
    assert outcome.data["counted"] == ["active-cast"]
    assert check(releases=["0.9.1"], sglang=site).exit is Exit.OK


def test_without_anything_that_counts_the_line_says_what_to_write(index: LocalIndex) -> None:
    outcome = check(all_releases=True)
    assert outcome.exit is Exit.OK
    rows = json.loads(json.dumps(outcome.data))["releases"]
    distinct = len({row["sha256"] for row in rows if row["sha256"]})
    *_, last = words(outcome).splitlines()
    assert last.startswith(f"{len(rows)} checked (distinct contents: {distinct} of flashinfer_mla_backend.py, ")
    assert last.endswith("Next: name those that must fit: mlapatch check active-cast --all-releases")
    *_, last = words(check(releases=["0.9.0", ">=0.9.1"])).splitlines()
    assert last.endswith("mlapatch check active-cast --release 0.9.0 --release '>=0.9.1'")


def test_unsupported_counts_where_the_release_was_named(index: LocalIndex) -> None:
    outcome = check(["active-cast"], releases=["0.4.6.post4"])
    assert outcome.exit is Exit.FOUND
    assert "whole-pool cast first appears in 0.4.6.post5" in words(outcome)
    assert check(["active-cast"], releases=["<0.5"]).exit is Exit.OK
    assert verdicts(check(["fp8-plan"], releases=["0.9.0"]))["0.9.0"] == {"fp8-plan": "applicable"}
    assert verdicts(check(["fp8-plan"], releases=["0.9.0"], gpu="h200"))["0.9.0"] == {"fp8-plan": "applicable"}
    refused = check(["fp8-plan"], releases=["0.9.0"], sm=120)
    assert verdicts(refused)["0.9.0"] == {"fp8-plan": "unsupported"}
    assert refused.exit is Exit.FOUND


def test_the_pinned_flashinfer_counts(corpus: Corpus) -> None:
    outcome = check(["fp8-plan"], releases=["0.5.9", "0.5.16"])
    assert {name: v["fp8-plan"] for name, v in verdicts(outcome).items()} == {
        "0.5.9": "unsupported",
        "0.5.16": "applicable",
    }
    assert "flashinfer 0.6.3 is pinned" in words(outcome)
    assert "fp8-plan needs SM90 too" in words(outcome)


def test_a_wheel_file(index: LocalIndex) -> None:
    wheel = index.folder / "sglang-0.9.2-py3-none-any.whl"
    outcome = check(["active-cast"], wheels=[wheel])
    assert outcome.exit is Exit.FOUND
    assert verdicts(outcome) == {wheel.name: {"active-cast": "drifted"}}
    assert not index.served


def test_refs_of_a_checkout(corpus: Corpus, tmp_path: Path) -> None:
    tree = tmp_path / "sglang"
    package = tree / "python" / "sglang"
    (package / "srt/layers/attention").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    file = tree / "python" / BACKEND

    def git(*args: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *who, *args], cwd=tree, check=True, capture_output=True)

    git("init")
    for version in ("0.4.6.post4", "0.5.9"):
        file.write_bytes(corpus.text(version))
        git("add", ".")
        git("commit", "-m", version)
        git("tag", f"v{version}")
    file.write_bytes(corpus.text("0.5.23").replace(b"get_key_buffer", b"get_kv_buffer"))
    git("commit", "-a", "-m", "drift")
    outcome = check(["active-cast"], refs=["v0.4.6.post4", "v0.5.9", "HEAD", "HEAD~1"], sglang=tree)
    assert {name: v["active-cast"] for name, v in verdicts(outcome).items()} == {
        "v0.4.6.post4": "unsupported",
        "v0.5.9": "applicable",
        "HEAD": "drifted",
        "HEAD~1": "applicable",
    }
    assert outcome.exit is Exit.FOUND
    for ref in ("nowhere", "--help"):
        with pytest.raises(MlapatchError, match="no commit of the checkout"):
            check(["active-cast"], refs=[ref], sglang=tree)


def test_the_installed_one_by_default(install_tree: TreeFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install_tree("0.5.9")
    outcome = check(sglang=site, sm=120)
    assert outcome.exit is Exit.OK
    rows: Any = outcome.data["releases"]
    assert [row["version"] for row in rows] == ["0.5.9"]
    text = (site / BACKEND).read_text()
    (site / BACKEND).write_text(text.replace("get_key_buffer", "get_kv_buffer"))
    assert check(sglang=site, sm=120).exit is Exit.OK, "nothing is applied and nothing was named"
    assert check(["active-cast"], sglang=site, sm=120).exit is Exit.FOUND
    with pytest.raises(MlapatchError) as raised:
        check(sglang=site / "nothing")
    assert raised.value.exit is Exit.ENVIRONMENT


def test_an_upgrade_that_lost_the_patch_is_found(install_tree: TreeFactory, corpus: Corpus) -> None:
    site = install_tree("0.5.9")
    apply(["active-cast"], sglang=site, sm=120)
    assert check(sglang=site, sm=120).exit is Exit.OK
    (site / BACKEND).write_bytes(corpus.text("0.5.9"))
    outcome = check(sglang=site, sm=120)
    assert outcome.exit is Exit.FOUND
    assert next(iter(verdicts(outcome).values()))["active-cast"] == "lost"


def test_what_cannot_be_fetched_is_said_and_the_rest_is_checked(index: LocalIndex) -> None:
    check(["active-cast"], all_releases=True)
    make_wheel(index.folder, "0.9.3", {BACKEND: b"x = 1\n"}, wrong=(BACKEND,))
    outcome = check(["active-cast"], releases=["0.9.0", "0.9.3"])
    assert outcome.exit is Exit.ENVIRONMENT
    missing: Any = outcome.data["missing"]
    assert [item["version"] for item in missing] == ["0.9.3"]
    with pytest.raises(MlapatchError, match=r"no wheel of sglang 0\.8"):
        check(["active-cast"], releases=["0.8"])


def test_offline_the_last_listing_is_used(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    first = check(["active-cast"], all_releases=True)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr("mlapatch.install.wheels._LISTING_SECONDS", 0)
    assert verdicts(check(["active-cast"], all_releases=True)) == verdicts(first)


def test_markdown_has_the_date_and_the_catalogues_digest(index: LocalIndex) -> None:
    text = words(check(ANY_GPU, all_releases=True, as_markdown=True))
    assert load_catalogue().digest[:16] in text
    assert time.strftime("%Y-%m-%d", time.gmtime()) in text
    assert "| 0.9.0 | `85ba5db394df` | applicable | applicable |" in text
    assert "- active-cast on 0.9.2: drifted:" in text


def test_a_missing_file_is_drift_not_a_crash(
    local_index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPATCH_CACHE", str(tmp_path / "cache"))
    make_wheel(local_index.folder, "0.9.0", {"sglang/__init__.py": b""})
    outcome = check(["active-cast"], releases=["0.9.0"])
    assert verdicts(outcome) == {"0.9.0": {"active-cast": "drifted"}}
    assert "is not in 0.9.0" in words(outcome)


def test_the_command_line(index: LocalIndex, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlapatch", "check", "active-cast", "--release", ">=0.9"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert [set(row) >= {"version", "sha256", "patches"} for row in data["releases"]] == [True] * 3
    assert [set(p) >= {"name", "verdict", "reason"} for row in data["releases"] for p in row["patches"]] == [True] * 3
    assert "fetching: 3" in done.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert again.returncode == 1
    assert "release: 0.9.0  sha256: 85ba5db394df  active-cast: applicable" in again.stdout.splitlines()
    assert "fetching" not in again.stderr
    both = subprocess.run([*command, "--json", "--markdown"], capture_output=True, check=False, cwd=tmp_path)
    assert both.returncode == 2


def test_ctrl_c_keeps_what_was_fetched(index: LocalIndex, tmp_path: Path) -> None:
    index.held = ("-0.9.2-",)
    command = [sys.executable, "-m", "mlapatch", "check", "active-cast", "--release", ">=0.9", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    kept = tmp_path / "cache" / "releases"
    deadline = time.monotonic() + 60
    while not list(kept.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == Exit.INTERRUPTED
    assert not out
    had = {path.stem for path in kept.glob("*.json")}
    assert had
    assert "0.9.2" not in had
    assert not any((tmp_path / "cache" / "tmp").iterdir())
    index.held = ()
    index.served.clear()
    assert check(["active-cast"], releases=[">=0.9"]).exit is Exit.FOUND
    assert not {name.split("-")[1] for name in index.served} & had
