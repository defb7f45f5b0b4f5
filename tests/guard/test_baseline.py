"""The baseline: a file that people read and commit, found where they work, and never silently forgetful."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlapatch.engine.textdiff import hunks, patched, unified
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.baseline import NAME, Baseline, Recorded, load_baseline, rendered, save_baseline
from tests.corpus import Corpus
from tests.guard.trees import ARGS, CLEAN, COMMUNICATOR, EDITS, MODEL_RUNNER, TOPK, Tree, install
from tests.install.test_write import NOBODY, ROOT_ONLY, as_nobody, open_to_all

PIECES = st.sampled_from(
    [
        "a",
        "'''",
        '"""',
        '"',
        "'",
        "\\",
        "\r\n",
        "\r",
        "\n",
        "\t",
        "\x0c",
        "\x00",
        "\x7f",
        "é",
        "\u2028",
        "\\u0041",
        "@@",
    ]
)
TEXT = st.lists(PIECES, max_size=40).map("".join)


@given(old=TEXT, new=TEXT)
def test_a_diff_gives_the_new_bytes_again(old: str, new: str) -> None:
    diff = unified(old.encode(), new.encode(), "srt/x.py")
    assert patched(old.encode(), diff) == new.encode()
    assert bool(hunks(diff)) == (old != new)
    if old != new:
        assert patched(new.encode() + b"other\n", diff) != new.encode()


@given(old=TEXT, new=TEXT)
def test_a_baseline_says_after_reading_what_was_written(
    old: str, new: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    diff = unified(old.encode(), new.encode(), "srt/x.py")
    files = {"srt/x.py": Recorded("srt/x.py", "0" * 64, "1" * 64, diff), "y.py": Recorded("y.py", "2" * 64, "2" * 64)}
    baseline = Baseline("0.5.9", "", files)
    path = tmp_path_factory.mktemp("baseline") / NAME
    save_baseline(path, baseline)
    assert load_baseline(path) == baseline
    path.write_bytes(rendered(baseline).encode().replace(b"\n", b"\r\n"))  # as core.autocrlf checks it out
    assert load_baseline(path) == baseline


def test_it_is_readable_and_the_same_each_time(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    text = Path(NAME).read_text()
    for relative in (ARGS, COMMUNICATOR, TOPK, MODEL_RUNNER):
        assert f'path = "{relative}"\nstate = "edited"' in text
    for _, _, new in EDITS:
        assert all(f"\n+{line}\n" in text for line in new.decode().splitlines() if "SM120" in line)
    assert str(tree.root) not in text  # it can be committed, and used on another machine
    tree.record()
    assert Path(NAME).read_text() == text


def test_both_kinds_of_install_write_the_same(corpus: Corpus, tmp_path: Path) -> None:
    texts = []
    for kind in ("wheel", "checkout"):
        tree = install(kind, corpus, tmp_path / kind)
        tree.edit_all()
        tree.path("srt/mine.py").write_text("MINE = True\n")
        tree.record(file=Path(f"{kind}.toml"))
        lines = Path(f"{kind}.toml").read_text().splitlines()
        texts.append([line for line in lines if not line.startswith("commit = ")])
    assert texts[0] == texts[1]


def test_the_watched_files_are_named_although_nothing_is_edited(tree: Tree) -> None:
    data = tree.record()
    assert data["watched"] == [COMMUNICATOR, TOPK, MODEL_RUNNER, ARGS]
    assert data["files"] == []


def test_lost_edits_are_not_forgotten_by_recording_again(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    before = Path(NAME).read_bytes()
    tree.restore(TOPK)
    with pytest.raises(MlapatchError) as refused:
        tree.record()
    assert refused.value.exit is Exit.REFUSED
    assert "-TOPK_ON_SM120 = True" in refused.value.detail
    with pytest.raises(MlapatchError):
        tree.record(file=Path("elsewhere.toml"))
    assert Path(NAME).read_bytes() == before
    tree.record(replace=True)
    assert tree.check() == CLEAN


def test_further_edits_are_recorded_without_a_question(tree: Tree) -> None:
    tree.replace(*EDITS[2])
    tree.record()
    tree.replace(*EDITS[3])
    tree.record()
    assert tree.check() == CLEAN


def test_another_machine_has_the_file_only(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    shutil.rmtree(tree.package.parent / ".mlapatch")
    assert tree.check() == CLEAN
    tree.replace(TOPK, b"TOPK_ON_SM120 = True", b"TOPK_ON_SM120 = None")
    tree.restore(COMMUNICATOR)
    assert tree.check() == (4, {TOPK: "changed", COMMUNICATOR: "gone"})
    assert "-TOPK_ON_SM120 = True\n+TOPK_ON_SM120 = None\n" in tree.diff(TOPK)
    assert "-FUSED_ALLREDUCE_ON_SM120 = True\n" in tree.diff(COMMUNICATOR)


def test_the_shown_diff_brings_a_lost_edit_back(tree: Tree) -> None:
    tree.edit_all()
    edited = tree.path(TOPK).read_bytes()
    tree.record()
    tree.restore(TOPK)
    patch = ["patch", "--silent", "-R", "-p1", "-d", str(tree.package.parent)]
    subprocess.run(patch, input=tree.diff(TOPK), text=True, check=True)
    assert tree.path(TOPK).read_bytes() == edited
    assert tree.check() == CLEAN


def test_offline_the_recorded_diff_is_shown(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = install("wheel", corpus, tmp_path / "install")
    tree.edit_all()
    tree.record()
    offline(tmp_path, monkeypatch)
    shutil.rmtree(tree.root / ".mlapatch")
    tree.restore(TOPK)
    assert tree.check() == (4, {TOPK: "gone"})
    assert "TOPK_ON_SM120 = True" in tree.diff(TOPK)


def test_recorded_offline_there_is_no_diff_and_still_a_guard(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = install("wheel", corpus, tmp_path / "install")
    tree.edit_all()
    offline(tmp_path, monkeypatch)
    tree.record()
    assert tree.check() == CLEAN
    tree.restore(TOPK)
    tree.replace(*EDITS[1][:1], EDITS[1][2], EDITS[1][1])
    assert tree.check() == (4, {TOPK: "gone", ARGS: "changed"})
    assert "-TOPK_ON_SM120 = True" in tree.diff(TOPK)  # the edited bytes are kept


def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPATCH_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


def test_where_it_is_looked_for(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.edit_all()
    tree.record()
    tree.restore(TOPK)
    lost = (4, {TOPK: "gone"})
    assert tree.check() == lost
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tree.check() == lost  # the copy in the state folder
    tree.record(file=tree.package.parent / NAME, replace=True)
    assert tree.check() == CLEAN  # beside the package
    assert tree.check(file=tmp_path / "here" / NAME) == lost
    monkeypatch.chdir(tmp_path / "here")
    assert tree.check() == lost  # here comes first
    with pytest.raises(MlapatchError) as missing:
        tree.check(file=Path("nowhere.toml"))
    assert missing.value.exit is Exit.USAGE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not toml [",
        "format = 2\n",
        'format = 1\nsglang = "0.5.9"\n[[file]]\npath = "a.py"\nstate = "edited"\noriginal = "x"\n',
        f'format = 1\nsglang = "0.5.9"\n[[file]]\npath = "../a.py"\nstate = "added"\nedited = "{"0" * 64}"\n',
        'format = 1\nsglang = "0.5.9"\nfile = 3\n',
    ],
)
def test_a_baseline_that_cannot_be_read_guards_nothing_and_says_so(tree: Tree, text: str) -> None:
    Path(NAME).write_text(text)
    with pytest.raises(MlapatchError) as broken:
        tree.check()
    assert broken.value.exit is Exit.REFUSED
    with pytest.raises(MlapatchError):
        tree.record()
    tree.record(replace=True)
    assert tree.check() == CLEAN


def test_a_folder_that_cannot_be_written(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        (tree.package.parent / ".mlapatch").write_text("a file where the state folder should be")
    else:
        tree.package.parent.chmod(0o555)
    tree.edit_all() if os.geteuid() == 0 else None
    tree.record()
    assert tree.check() == CLEAN


# --------------------------------------------------------------------------------------------- folders of another user
@ROOT_ONLY
def test_another_users_folder_and_what_to_do_instead(tree: Tree, tmp_path: Path) -> None:
    """Both pieces of advice are followed here, by the user who got them."""
    tree.edit_all()
    open_to_all(tree.root)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    os.chown(ours, NOBODY, NOBODY)
    refused = as_nobody(tree.package, "guard", "record", cwd=theirs)
    assert refused.code == 5, refused
    assert "no permission to write" in refused.err
    assert "or in a folder of yours: mlapatch guard record" in refused.err
    assert f"--file FOLDER/{NAME}" in refused.err
    assert "image" not in refused.err
    done = as_nobody(tree.package, "guard", "record", "--file", str(ours / NAME), cwd=theirs)
    assert done.code == 0, done
    assert f"pass --file {ours / NAME} to guard check" in done.err
    assert f"launch takes it only as {NAME} of the folder it runs in" in done.err
    assert "nothing was changed" not in done.err
    assert as_nobody(tree.package, "guard", "check", "--file", str(ours / NAME), cwd=theirs).code == 0
    done = as_nobody(tree.package, "guard", "record", cwd=ours)
    assert f"run guard check and launch in {ours}" in done.err
    assert as_nobody(tree.package, "guard", "check", cwd=ours).code == 0
    assert as_nobody(tree.package, "guard", "check", cwd=theirs).code == 4, "not found there: as was said"


@ROOT_ONLY
def test_a_file_in_a_folder_that_cannot_be_looked_into(tree: Tree, tmp_path: Path) -> None:
    tree.edit_all()
    open_to_all(tree.root)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    done = as_nobody(tree.package, "guard", "record", "--file", str(closed / NAME))
    assert done.code == 5, done
    assert "in a folder of yours" in done.err
    check = as_nobody(tree.package, "guard", "check", "--file", str(closed / NAME))
    assert (check.code, "cannot be looked at" in check.err) == (4, True), check


@ROOT_ONLY
def test_a_baseline_that_cannot_be_looked_at_is_not_none(tree: Tree) -> None:
    """Root recorded with umask 077, in a folder of its own; the server's user asks from another one."""
    tree.edit_all()
    tree.record()
    Path(NAME).unlink()
    open_to_all(tree.root)
    (kept,) = tree.root.rglob(NAME)
    state = kept.parent
    state.chmod(0o700)
    check = as_nobody(tree.package, "guard", "check")
    assert check.code == 4, check
    assert str(state / NAME) in check.err
    assert "chmod o+rx" in check.err
