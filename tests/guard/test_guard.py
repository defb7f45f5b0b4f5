"""Each way to lose, change or add a local edit is caught, in a wheel install and in a checkout alike."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlapatch.assess import assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.commands.apply import apply
from mlapatch.commands.guard import check
from mlapatch.commands.revert import revert
from mlapatch.commands.status import status
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.guard import GuardedFile, GuardReport, State, guard_state, preflight
from mlapatch.install.target import find_target
from mlapatch.outcome import Block, Diff, Pairs, Table
from tests.conftest import TreeFactory
from tests.corpus import Corpus
from tests.guard.trees import (
    ARGS,
    CLEAN,
    COMMUNICATOR,
    EDITS,
    MLA,
    MODEL_RUNNER,
    OTHER,
    TOPK,
    Tree,
    checkout,
    git,
    install,
    upgrade,
)

WORDS = ((ARGS, b"flashinfer_cutlass"), (ARGS, b"is_sm120_supported"))


def test_recorded_edits_are_untouched(tree: Tree) -> None:
    assert tree.check() == CLEAN
    tree.edit_all()
    tree.record()
    assert tree.check() == CLEAN


@pytest.mark.parametrize("number", range(len(EDITS)))
def test_deleting_any_one_edit_is_caught_though_every_word_is_there(tree: Tree, number: int) -> None:
    for relative, word in WORDS:
        assert word in tree.original(relative)  # in a stock file: its presence proves nothing
    tree.edit_all()
    tree.record()
    relative, old, new = EDITS[number]
    tree.replace(relative, new, old)
    assert all(word in tree.path(name).read_bytes() for name, word in WORDS)
    code, found = tree.check()
    assert code == Exit.REFUSED
    assert found == {relative: "changed" if relative == ARGS else "gone"}  # server_args.py has another edit left
    removed = [line for line in tree.diff(relative).splitlines() if line.startswith("-") and line[1:3] != "--"]
    assert removed[0][1:].encode() in new


@pytest.mark.parametrize("relative", [ARGS, TOPK])
def test_a_checkout_or_reinstall_of_a_file_is_caught(tree: Tree, relative: str) -> None:
    tree.edit_all()
    tree.record()
    tree.restore(relative)
    assert tree.path(relative).read_bytes() == tree.original(relative)
    assert tree.check() == (4, {relative: "gone"})


def test_a_reset_of_everything_is_caught(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    for relative in (ARGS, COMMUNICATOR, TOPK, MODEL_RUNNER):
        tree.restore(relative)
    code, found = tree.check()
    assert (code, set(found.values()), len(found)) == (4, {"gone"}, 4)


def test_a_changed_edit_is_caught(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    tree.replace(TOPK, b"TOPK_ON_SM120 = True", b"TOPK_ON_SM120 = None")  # the same size
    assert tree.check() == (4, {TOPK: "changed"})
    assert "-TOPK_ON_SM120 = True\n+TOPK_ON_SM120 = None\n" in tree.diff(TOPK)


@pytest.mark.parametrize("relative", [OTHER, COMMUNICATOR, MLA])
def test_a_new_edit_is_caught(tree: Tree, relative: str) -> None:
    tree.replace(*EDITS[0])
    tree.record()
    data = tree.path(relative).read_bytes()
    tree.path(relative).write_bytes(data.replace(b"import", b"lmport", 1))  # the same size
    assert tree.check() == (4, {relative: "new"})
    assert "\n+" in tree.diff(relative)


def test_a_new_edit_beside_a_recorded_one_is_caught(tree: Tree) -> None:
    tree.replace(*EDITS[0])
    tree.record()
    tree.replace(*EDITS[1])
    assert tree.check() == (4, {ARGS: "changed"})


def test_added_and_deleted_files_are_edits(tree: Tree) -> None:
    added = tree.path("srt/layers/mine.py")
    added.write_text("MINE = True\n")
    tree.path(OTHER).unlink()
    tree.record()
    assert tree.check() == CLEAN
    added.unlink()
    tree.path(OTHER).write_bytes(tree.original(OTHER))
    assert tree.check() == (4, {"srt/layers/mine.py": "gone", OTHER: "gone"})
    tree.path("srt/layers/tuned.json").write_text("{}")
    assert tree.check()[1]["srt/layers/tuned.json"] == "new"


def test_caches_and_what_the_build_writes_are_no_edits(tree: Tree) -> None:
    tree.record()
    cache = tree.path("srt/__pycache__")
    cache.mkdir()
    (cache / "x.cpython-312.pyc").write_bytes(b"")
    (cache / "y.py").write_bytes(b"")
    tree.path("srt/grpc_pb2.py").write_bytes(b"")
    tree.path("srt/core.so").write_bytes(b"")
    assert tree.check() == CLEAN


def test_edits_without_a_baseline_are_refused(tree: Tree) -> None:
    tree.replace(*EDITS[2])
    outcome = check(sglang=tree.package)
    assert outcome.exit is Exit.REFUSED
    assert outcome.data["state"] == "unrecorded"
    assert tree.check() == (4, {COMMUNICATOR: "new"})
    found = assess_(tree)
    report = guard_state(found)
    assert (report.state, report.has_local_edits, report.refuses) == ("unrecorded", True, True)
    assert preflight(found)[0] == "unrecorded"


def test_nothing_to_guard_is_no_reason_to_refuse(tree: Tree) -> None:
    report = guard_state(assess_(tree))
    assert (report.state, report.has_local_edits, report.refuses) == ("unrecorded", False, False)
    assert preflight(assess_(tree)) == ("clean", "no baseline, and no local edit")


def assess_(tree: Tree) -> Any:
    target = find_target(tree.package)
    return assess(target, load_catalogue(), machine_of(target, sm=1))


# ------------------------------------------------------------------------------------------------------- commits
def test_an_edit_that_moved_into_a_commit_is_caught(repo: Tree) -> None:
    repo.edit_all()
    repo.record()
    git(repo.root, "commit", "-a", "-q", "-m", "mine")
    code, found = repo.check()
    assert (code, set(found.values()), len(found)) == (4, {"committed"}, 4)
    assert "SM120 = True" in repo.diff(ARGS)


def test_one_committed_edit_of_several(repo: Tree) -> None:
    repo.edit_all()
    repo.record()
    git(repo.root, "commit", "-q", "-m", "mine", "--", f"python/sglang/{TOPK}")
    assert repo.check() == (4, {TOPK: "committed"})


def test_an_edit_committed_together_with_others(repo: Tree) -> None:
    repo.replace(*EDITS[0])
    repo.record()
    repo.replace(*EDITS[1])
    git(repo.root, "commit", "-a", "-q", "-m", "both")
    assert repo.check() == (4, {ARGS: "committed"})


def test_half_of_an_edit_committed(repo: Tree) -> None:
    repo.replace(*EDITS[0])
    repo.replace(*EDITS[1])
    whole = repo.path(ARGS).read_bytes()
    repo.record()
    repo.replace(ARGS, EDITS[1][2], EDITS[1][1])
    git(repo.root, "commit", "-a", "-q", "-m", "half")
    repo.path(ARGS).write_bytes(whole)
    assert repo.check() == (4, {ARGS: "committed"})


def test_a_committed_edit_that_is_reverted_is_gone(repo: Tree) -> None:
    repo.edit_all()
    repo.record()
    git(repo.root, "commit", "-a", "-q", "-m", "mine")
    git(repo.root, "revert", "--no-edit", "HEAD")
    assert set(repo.check()[1].values()) == {"gone"}


def test_a_commit_without_the_edit_leaves_it(repo: Tree) -> None:
    repo.edit_all()
    repo.record()
    git(repo.root, "stash", "-q")
    repo.replace(ARGS, b"import importlib.util\n", b"import importlib.util  # upstream\n")
    git(repo.root, "commit", "-a", "-q", "-m", "upstream")
    assert set(repo.check()[1].values()) == {"gone"}
    git(repo.root, "stash", "pop", "-q")
    assert repo.check() == CLEAN  # the same edits on another commit
    repo.replace(ARGS, EDITS[1][2], EDITS[1][1])
    assert repo.check() == (4, {ARGS: "changed"})


def test_an_upgrade_that_drops_the_edits_is_caught(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    upgrade(tree, "0.5.10")
    code, found = tree.check()
    assert (code, set(found.values()), len(found)) == (4, {"gone"}, 4)
    tree.edit_all()
    assert tree.check() == CLEAN


# ---------------------------------------------------------------------------------------------- mlapatch's own edits
def test_patches_come_and_go_without_a_word_of_the_guard(tree: Tree) -> None:
    tree.edit_all()
    tree.replace(MLA, b"\nimport torch\n", b"\nimport torch  # by hand\n")
    tree.record()
    edited = tree.path(MODEL_RUNNER).read_bytes()
    apply(["profile-decode", "active-cast"], sglang=tree.package)
    assert tree.path(MODEL_RUNNER).read_bytes() != edited
    assert tree.check() == CLEAN
    tree.record(file=Path("patched.toml"))
    assert Path("patched.toml").read_bytes() == Path("mlapatch-guard.toml").read_bytes()
    revert(sglang=tree.package)
    assert tree.check() == CLEAN
    assert tree.path(MODEL_RUNNER).read_bytes() == edited


def test_the_users_edit_is_seen_through_a_patch_of_the_same_file(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    apply(["profile-decode"], sglang=tree.package)
    relative, old, new = EDITS[-1]
    tree.replace(relative, new, old)
    assert tree.check() == (4, {MODEL_RUNNER: "gone"})
    tree.replace(relative, old, new)
    assert tree.check() == CLEAN
    tree.restore(MODEL_RUNNER)  # the accident: a checkout drops the patch and the edit
    assert tree.check() == (4, {MODEL_RUNNER: "gone"})


def test_without_the_state_folder_a_patch_is_still_told_apart(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    apply(["active-cast"], sglang=tree.package)
    shutil.rmtree(tree.package.parent / ".mlapatch")
    assert tree.check() == CLEAN


def test_a_hand_in_the_patchs_own_lines_is_refused(tree: Tree) -> None:
    tree.record()
    apply(["profile-decode"], sglang=tree.package)
    tree.replace(MODEL_RUNNER, b"            DECODE_PROFILE.after_forward(self)\n", b"            pass\n")
    assert tree.check() == (4, {MODEL_RUNNER: "changed"})
    with pytest.raises(MlapatchError) as refused:
        tree.record()
    assert refused.value.exit is Exit.REFUSED


def test_a_patch_that_was_committed_with_the_edit(repo: Tree) -> None:
    repo.edit_all()
    repo.record()
    apply(["profile-decode"], sglang=repo.package)
    git(repo.root, "commit", "-a", "-q", "-m", "everything")
    assert set(repo.check()[1].values()) == {"committed"}


# ------------------------------------------------------------------------------------------------------ status
def test_status_shows_the_guard(tree: Tree) -> None:
    tree.edit_all()
    tree.record()
    data: Any = status(sglang=tree.package).data["guard"]
    assert data["state"] == "clean"
    tree.restore(TOPK)
    told = status(sglang=tree.package)
    data = told.data["guard"]
    assert data["state"] == "violated"
    assert {f["path"]: f["state"] for f in data["files"]}[TOPK] == "gone"
    line = next(row[1] for block in told.blocks if isinstance(block, Pairs) for row in block.rows if row[0] == "guard")
    assert line.endswith(f"{TOPK} (gone); baseline {Path('mlapatch-guard.toml').resolve()}")


def test_a_quick_status_does_not_deny_what_it_did_not_look_at(corpus: Corpus, tmp_path: Path) -> None:
    tree = install("wheel", corpus, tmp_path / "install")
    guard: Any = status(sglang=tree.package).data["guard"]
    assert guard["files"] == []
    told = guard_state(assess_(tree), scan=False)
    assert not told.complete
    assert "guard check" in told.text
    target = tree.path("srt/layers/attention/flashinfer_mla_backend.py")
    target.write_bytes(target.read_bytes() + b"# mine\n")
    guard = status(sglang=tree.package).data["guard"]
    backend = "srt/layers/attention/flashinfer_mla_backend.py"
    assert [(f["path"], f["state"]) for f in guard["files"]] == [(backend, "new")]
    apply(["active-cast"], sglang=tree.package)
    told = guard_state(assess_(tree), scan=False)
    assert (told.files, told.unseen) == ((), (backend,))  # taking the patch off first is guard check's work
    assert f"not looked into: {backend}" in told.text
    assert status(sglang=tree.package).data["guard"]["complete"] is False  # type: ignore[index]
    target.unlink()
    guard = status(sglang=tree.package).data["guard"]
    assert [(f["path"], f["state"]) for f in guard["files"]] == [(backend, "new")]


def test_status_survives_a_broken_baseline(tree: Tree) -> None:
    Path("mlapatch-guard.toml").write_text("format = 99\n")
    data: Any = status(sglang=tree.package).data["guard"]
    assert data["state"] == "violated"


def test_a_quick_status_loads_neither_git_nor_libcst(corpus: Corpus, tmp_path: Path) -> None:
    site = install("wheel", corpus, tmp_path / "install").package
    code = (
        "import sys; from pathlib import Path; from mlapatch.commands.status import status\n"
        f"data = status(sglang=Path({str(site)!r})).data['guard']\n"
        "print(data['state'], [m for m in ('git', 'gitdb', 'libcst', 'merge3') if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[-1].stdout == "unrecorded []\n"


def test_a_whole_wheel(unpacked: TreeFactory) -> None:
    site = unpacked("0.5.9")
    assert check(sglang=site).exit is Exit.OK
    config = next((site / "sglang").rglob("*.json"))
    config.write_bytes(config.read_bytes()[::-1])
    files: Any = check(sglang=site).data["files"]
    assert [f["path"] for f in files] == [config.relative_to(site / "sglang").as_posix()]


def test_a_folder_without_any_origin(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = checkout(corpus, _made(tmp_path / "install"))
    shutil.rmtree(tree.root / ".git")
    tree.path("version.py").write_text("")
    tree.path("_version.py").unlink(missing_ok=True)
    tree.record()
    assert tree.check() == CLEAN
    tree.replace(*EDITS[2])
    assert tree.check() == (4, {COMMUNICATOR: "new"})
    assert "+FUSED_ALLREDUCE_ON_SM120 = True" in tree.diff(COMMUNICATOR)


def test_a_copy_without_git_is_compared_with_the_wheel(unpacked: TreeFactory, corpus: Corpus) -> None:
    site = unpacked("0.5.9")
    shutil.rmtree(site / "sglang-0.5.9.dist-info")
    tree = Tree("wheel", site, corpus)
    assert find_target(site).install == "folder"
    assert tree.check() == CLEAN
    tree.replace(*EDITS[2])
    tree.path("srt/not_in_the_wheel.py").write_text("")  # a source tree has files that no wheel ships
    assert tree.check() == (4, {COMMUNICATOR: "new"})
    tree.record()
    assert tree.check() == CLEAN


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# ------------------------------------------------------------------------------------------------------ launch
@pytest.mark.parametrize("number", range(len(EDITS)))
def test_launch_starts_nothing_where_one_edit_is_gone(tree: Tree, number: int) -> None:
    tree.edit_all()
    tree.record()
    relative, old, new = EDITS[number]
    tree.replace(relative, new, old)
    code, said = launched(tree, "--dry-run")
    assert code == Exit.REFUSED
    assert relative in said
    code, said = launched(tree)
    assert code == Exit.REFUSED
    assert "mlapatch guard check" in said
    assert not Path("started").exists()


def test_launch_forces_nothing_past_the_guard_and_goes_on_where_it_is_clean(tree: Tree) -> None:
    tree.replace(*EDITS[2])
    assert launched(tree, "--force")[0] == Exit.REFUSED  # nothing records the edit
    assert not Path("started").exists()
    tree.record()
    assert launched(tree, "--force")[0] != Exit.REFUSED
    assert Path("started").exists()


def launched(tree: Tree, *options: str) -> tuple[int, str]:
    server = (sys.executable, "-c", "open('started', 'w')", "--port", "8765")
    command = [sys.executable, "-m", "mlapatch", "launch", *options, "--sglang", str(tree.package), "--command", "--"]
    done = subprocess.run([*command, *server], capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_one_line_names_a_few_files_and_counts_the_rest() -> None:
    files = tuple(GuardedFile(f"srt/file{number}.py", State.NEW, "an edit", "") for number in range(300))
    text = GuardReport("unrecorded", has_local_edits=True, files=files).text
    assert "srt/file5.py (new)" in text
    assert "srt/file6.py" not in text
    assert "and 294 more (mlapatch guard check)" in text


def lines_of(block: Block) -> list[str]:
    """What a block prints, line by line."""
    if isinstance(block, Table):
        return [" ".join(map(str, row)) for row in block.rows]
    return block.text.splitlines() if isinstance(block, Diff) else list(getattr(block, "lines", ()))


def test_hundreds_of_deleted_files_are_counted_and_the_changed_one_is_shown(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images drop the tests of a wheel: 250,000 lines of deleted text must not bury the one edit that matters."""
    gone = [GuardedFile(f"tests/{i}.py", State.NEW, "no baseline records it", "-x\n" * 3_000) for i in range(200)]
    lost = GuardedFile("srt/server_args.py", State.GONE, "the edit is gone", "-import one\n+import two\n")
    kept = [GuardedFile(f"srt/{i}.py", State.UNTOUCHED, "as recorded", "") for i in range(100)]
    report = GuardReport("violated", True, (lost, *gone, *kept))
    monkeypatch.setattr("mlapatch.commands.guard.guard_state", lambda *_, **__: report)
    outcome = check(sglang=tree.root)
    lines = [line for block in outcome.blocks for line in lines_of(block)]
    assert len(lines) < 200
    assert sum("+import two" in line for line in lines) == 1
    assert any("161 more file(s)" in line for line in lines)
    assert any("100 more file(s)" in line for line in lines)
    files = outcome.data["files"]
    assert isinstance(files, list)
    assert len(files) == 301
