"""No setting of git, and no git at all, changes what the guard says of a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.corpus import Corpus
from tests.guard.trees import ARGS, COMMUNICATOR, EDITS, OTHER, TOPK, Tree, checkout, git

#: What `guard check` says of `prepared`, whatever the repository is.
EXPECTED = {ARGS: "changed", COMMUNICATOR: "untouched", TOPK: "gone", OTHER: "new", "srt/mine.py": "new"}
Hostile = Callable[[Tree, pytest.MonkeyPatch], "Tree | None"]


def prepared(tree: Tree) -> None:
    """Three recorded edits, of which one is changed and one gone; a new one, and a new file."""
    for relative, old, new in EDITS[:4]:
        tree.replace(relative, *(_as_it_is(tree, relative, part) for part in (old, new)))
    tree.record()
    tree.replace(ARGS, b"SM120 = True", b"SM120 = None")
    tree.replace(TOPK, *(_as_it_is(tree, TOPK, part) for part in (EDITS[3][2], EDITS[3][1])))
    data = tree.path(OTHER).read_bytes()
    tree.path(OTHER).write_bytes(data.replace(b"import", b"lmport", 1))
    tree.path("srt/mine.py").write_text("MINE = True\n")


def _as_it_is(tree: Tree, relative: str, text: bytes) -> bytes:
    return text.replace(b"\n", b"\r\n") if b"\r\n" in tree.path(relative).read_bytes() else text


def said(tree: Tree, **environment: str) -> tuple[int, dict[str, Any]]:
    """`mlapatch guard check --json` in a process of its own, with the environment that a user may have."""
    command = [sys.executable, "-m", "mlapatch", "guard", "check", "--json", "--sglang", str(tree.package)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.stderr == ""
    return done.returncode, dict(json.loads(done.stdout))


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {f["path"]: f["state"] for f in answer["files"] if f["state"] != "unedited"}


def config(*settings: str) -> Hostile:
    def apply_(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        for setting in settings:
            name, _, value = setting.partition("=")
            git(tree.root, "config", name, value)

    return apply_


def script(tree: Tree, text: str) -> Path:
    path = tree.root.parent / "hostile.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def external_diff(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(script(tree, "echo nothing to see; exit 0"))
    git(tree.root, "config", "diff.external", program)
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", program)


def fsmonitor(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tree.root, "config", "core.fsmonitor", str(script(tree, r"printf 'token\0'")))


def global_settings(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree.root.parent / "gitconfig"
    (tree.root.parent / "ignore").write_text("*.py\n")
    path.write_text(
        f"[core]\n excludesFile = {tree.root.parent / 'ignore'}\n pager = false\n quotePath = true\n"
        "[color]\n ui = always\n[diff]\n noprefix = true\n[status]\n short = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(path))


def another_repository(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tree.root.parent / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))


def autocrlf(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tree.root, "config", "core.autocrlf", "true")
    git(tree.root, "rm", "--cached", "-r", "--quiet", ".")
    git(tree.root, "reset", "--hard", "--quiet")
    assert b"\r\n" in tree.path(ARGS).read_bytes()


def attributes(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.root / ".git" / "info" / "attributes").write_text("*.py -text diff=nothing filter=nothing binary\n")
    git(tree.root, "config", "filter.nothing.clean", "true")
    git(tree.root, "config", "diff.nothing.textconv", "true")


def excluded(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree.root / ".git" / "info" / "exclude").write_text("*\n")


def another_owner(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a repository to somebody else")
    for folder, _, names in os.walk(tree.root):
        for name in (Path(folder), *(Path(folder, name) for name in names)):
            os.chown(name, 12345, 12345)


def worktree(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Tree:
    root = tree.root.parent / "worktree"
    git(tree.root, "worktree", "add", "--quiet", "--detach", str(root))
    return Tree("checkout", root, tree.corpus)


def submodule(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Tree:
    outer = tree.root.parent / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    git(outer, "submodule", "--quiet", "add", str(tree.root), "deps/sglang")
    return Tree("checkout", outer / "deps" / "sglang", tree.corpus)


def shallow(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Tree:
    git(tree.root, "commit", "--quiet", "--allow-empty", "-m", "second")
    git(tree.root.parent, "clone", "--quiet", "--depth=1", f"file://{tree.root}", "shallow")
    return Tree("checkout", tree.root.parent / "shallow", tree.corpus)


def borrowed_objects(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Tree:
    git(tree.root.parent, "clone", "--quiet", "--shared", str(tree.root), "borrowed")
    return Tree("checkout", tree.root.parent / "borrowed", tree.corpus)


def packed(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tree.root, "gc", "--quiet")
    git(tree.root, "pack-refs", "--all")


REPOSITORIES: dict[str, Hostile] = {
    "plain": config(),
    "external diff": external_diff,
    "colour": config("color.diff=always", "color.ui=always", "core.pager=false"),
    "fsmonitor": fsmonitor,
    "global settings": global_settings,
    "another repository in the environment": another_repository,
    "autocrlf": autocrlf,
    "eol": config("core.eol=crlf", "core.safecrlf=true"),
    "attributes": attributes,
    "excluded": excluded,
    "another owner": another_owner,
    "worktree": worktree,
    "submodule": submodule,
    "shallow": shallow,
    "borrowed objects": borrowed_objects,
    "packed": packed,
}


@pytest.fixture
def hostile(request: pytest.FixtureRequest, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    (tmp_path / "install").mkdir()
    tree = checkout(corpus, tmp_path / "install")
    tree = REPOSITORIES[request.param](tree, monkeypatch) or tree
    prepared(tree)
    return tree


@pytest.mark.parametrize("hostile", REPOSITORIES, indirect=True)
def test_every_repository_gets_the_same_answer(hostile: Tree) -> None:
    code, answer = said(hostile)
    assert (code, states(answer)) == (4, EXPECTED)
    assert answer["origin"].startswith("commit ")
    changed = next(f["diff"] for f in answer["files"] if f["path"] == ARGS)
    assert [line for line in changed.splitlines() if line[0] in "+-"][2:] == ["-SM120 = True", "+SM120 = None"]


@pytest.mark.parametrize("hostile", ["plain", "worktree", "submodule", "shallow", "packed", "autocrlf"], indirect=True)
@pytest.mark.parametrize("refresh", ["", "quiet"])
def test_without_the_git_program(hostile: Tree, refresh: str, tmp_path: Path) -> None:
    without = {"PATH": str(tmp_path / "nothing"), **({"GIT_PYTHON_REFRESH": refresh} if refresh else {})}
    assert shutil.which("git", path=without["PATH"]) is None
    assert said(hostile, **without) == said(hostile)


def test_edits_hidden_from_git_status_are_found(repo: Tree) -> None:
    repo.record()
    for flag, relative in (("--assume-unchanged", TOPK), ("--skip-worktree", ARGS)):
        git(repo.root, "update-index", flag, f"python/sglang/{relative}")
    repo.edit_all()
    assert git(repo.root, "status", "--porcelain", "--", f"python/sglang/{TOPK}", f"python/sglang/{ARGS}") == ""
    found = repo.check()[1]
    assert (found[TOPK], found[ARGS]) == ("new", "new")


def test_a_replaced_commit_hides_nothing(repo: Tree) -> None:
    first = git(repo.root, "rev-parse", "HEAD").strip()
    repo.edit_all()
    repo.record()
    git(repo.root, "commit", "-a", "-q", "-m", "mine")
    git(repo.root, "replace", "HEAD", first)
    assert set(repo.check()[1].values()) == {"committed"}


def test_staged_or_not_is_the_same(repo: Tree) -> None:
    repo.edit_all()
    repo.record()
    git(repo.root, "add", "--all")
    assert repo.check() == (0, {})
    git(repo.root, "reset", "--hard", "-q")
    assert set(repo.check()[1].values()) == {"gone"}


def test_a_repository_without_a_commit_is_no_origin(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "install").mkdir()
    repo = checkout(corpus, tmp_path / "install")
    shutil.rmtree(repo.root / ".git")
    git(repo.root, "init", "--quiet")
    assert said(repo)[1]["origin"] == "the wheel of SGLang 0.5.9"
