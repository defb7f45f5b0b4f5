"""Wheel, editable, checkout, worktree, submodule, bare folder: pristine or not, and the way back without the state."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Site, SiteFactory, process
from tests.conftest import TreeFactory
from tests.corpus import BACKEND

_IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *_IDENTITY, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def _plain_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the developer's own git settings."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


@pytest.fixture
def checkout(install_tree: TreeFactory, tmp_path: Path, mlapatch_: Command) -> Site:
    """A git checkout of SGLang, as upstream lays it out: `python/sglang`."""
    repository = tmp_path / "a checkout"
    (repository / "python").mkdir(parents=True)
    shutil.move(install_tree("0.5.9") / "sglang", repository / "python" / "sglang")
    (repository / "python" / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
    (repository / "python" / "sglang" / "_version.py").unlink(missing_ok=True)
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=0.5.9")
    return Site(repository / "python", mlapatch_)


def facts(here: Site) -> tuple[str, str | None, str]:
    """Kind of install, version, state of the backend's file."""
    status = here.ok("status", "--json").json
    state = next(t["state"] for t in status["targets"] if f"sglang/{t['path']}" == BACKEND)
    return status["sglang"]["install"], status["sglang"]["version"], state


def test_a_wheel(site: SiteFactory) -> None:
    here = site("0.5.9")
    assert facts(here) == ("wheel", "0.5.9", "pristine")
    here.edit("import torch\n", "import torch  # local\n")
    assert facts(here) == ("wheel", "0.5.9", "edited")


@pytest.mark.parametrize("names", ["package", "site", "venv"])
def test_the_target_by_any_of_its_folders(site: SiteFactory, tmp_path: Path, names: str) -> None:
    here = site("0.5.9")
    venv = tmp_path / "venv/lib/python3.12/site-packages"
    venv.parent.mkdir(parents=True)
    venv.symlink_to(here.folder)
    path = {"package": here.folder / "sglang", "site": here.folder, "venv": tmp_path / "venv"}[names]
    status = here.run("status", "--json", "--sglang", path)
    assert status.json["sglang"]["path"] == str(here.folder / "sglang")


def test_a_checkout(checkout: Site) -> None:
    before = checkout.bytes
    assert facts(checkout) == ("checkout", "0.5.9", "pristine")
    checkout.ok("apply", "gather-cast")
    assert facts(checkout) == ("checkout", "0.5.9", "patched")
    assert git(checkout.folder, "status", "--porcelain") == f"M python/{BACKEND}", "the state is ignored"
    by_root = checkout.run("status", "--json", "--sglang", checkout.folder.parent)
    assert by_root.verdicts["gather-cast"] == "applied"
    checkout.ok("revert")
    assert checkout.bytes == before
    assert git(checkout.folder, "status", "--porcelain") == ""


@pytest.mark.parametrize("how", ["checkout", "stash", "branch"])
def test_git_loses_a_patch_and_status_says_so(checkout: Site, how: str) -> None:
    git(checkout.folder, "branch", "other")
    before = checkout.bytes
    checkout.ok("apply", "gather-cast")
    applied = checkout.bytes
    steps: dict[str, list[tuple[str, ...]]] = {
        "checkout": [("checkout", "--quiet", "--", ".")],
        "stash": [("stash", "--quiet")],
        "branch": [("checkout", "--quiet", "--force", "other")],
    }
    for step in steps[how]:
        git(checkout.folder, *step)
    assert checkout.bytes == before
    status = checkout.ok("status", "--json")
    assert status.verdicts["gather-cast"] == "lost"
    assert "it was applied on SGLang 0.5.9, and the file was replaced since" in status.reason("gather-cast")
    assert "next for gather-cast: mlapatch apply gather-cast" in checkout.ok("status").out
    assert checkout("status", "--require", "gather-cast").code == 1
    checkout.ok("apply", "gather-cast")
    assert checkout.bytes == applied
    checkout.ok("revert")
    assert checkout.bytes == before


def test_a_lost_patch_is_forgotten_by_revert(checkout: Site) -> None:
    checkout.ok("apply", "gather-cast")
    git(checkout.folder, "checkout", "--quiet", "--", ".")
    before = checkout.bytes
    assert "forgotten" in checkout.ok("revert").out
    assert checkout.bytes == before
    assert checkout.verdicts()["gather-cast"] == "applicable"


def test_an_upgrade_loses_a_patch(site: SiteFactory) -> None:
    here, newer = site("0.5.9"), site("0.5.23")
    here.ok("apply", "gather-cast")
    shutil.rmtree(here.folder / "sglang")
    shutil.rmtree(here.folder / "sglang-0.5.9.dist-info")
    shutil.copytree(newer.folder, here.folder, dirs_exist_ok=True)
    status = here.ok("status", "--json")
    assert status.verdicts["gather-cast"] == "lost"
    assert "it was applied on SGLang 0.5.9, and the file is now 0.5.23's" in status.reason("gather-cast")
    before = here.bytes
    here.ok("apply", "gather-cast")
    here.ok("revert")
    assert here.bytes == before


def test_revert_without_the_state_in_a_checkout(checkout: Site) -> None:
    before = checkout.bytes
    checkout.ok("apply", "gather-cast")
    shutil.rmtree(checkout.folder / ".mlapatch")
    assert checkout.verdicts()["gather-cast"] == "applied"
    checkout.edit("import torch\n", "import torch  # local\n")
    done = checkout.ok("revert")
    assert "gather-cast: reverted" in done.out
    assert checkout.bytes == before.replace(b"import torch\n", b"import torch  # local\n", 1)


def test_revert_without_the_state_from_the_wheel(site: SiteFactory) -> None:
    here = site("0.5.9")
    before = here.bytes
    here.ok("apply", "gather-cast")
    shutil.rmtree(here.folder / ".mlapatch")
    assert here.verdicts()["gather-cast"] == "applied"
    here.ok("revert")
    assert here.bytes == before


def test_a_wheel_that_is_not_the_installed_one_proves_nothing(site: SiteFactory) -> None:
    here = site("0.5.9")
    here.ok("apply", "gather-cast")
    shutil.rmtree(here.folder / ".mlapatch")
    record = here.folder / "sglang-0.5.9.dist-info" / "RECORD"
    lines = record.read_text().splitlines(keepends=True)
    fake = f"{BACKEND},sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
    record.write_text("".join(fake if line.startswith(BACKEND) else line for line in lines))
    frozen = here.snapshot()
    done = here("revert")
    assert done.code == 5
    assert "the wheel on the index is not the one that was installed; nothing was written" in done.err
    assert here.snapshot() == frozen


def test_a_bare_folder(site: SiteFactory) -> None:
    here = site("0.5.9")
    shutil.rmtree(here.folder / "sglang-0.5.9.dist-info")
    before = here.bytes
    kind, version, state = facts(here)
    assert (kind, state) == ("folder", "pristine")
    assert version in ("0.5.9", None)
    here.ok("apply", "gather-cast")
    assert facts(here)[2] == "patched"
    shutil.rmtree(here.folder / ".mlapatch")
    frozen = here.snapshot()
    done = here("revert")
    assert done.code == 5
    assert "nothing proves what the original file was; nothing was written" in done.err
    assert here.snapshot() == frozen
    assert b"gather_cast" in here.bytes != before


def test_a_bare_folder_in_somebody_elses_repository(site: SiteFactory) -> None:
    """A folder that git does not track, in a work tree, is no checkout of SGLang."""
    here = site("0.5.9")
    shutil.rmtree(here.folder / "sglang-0.5.9.dist-info")
    git(here.folder.parent, "init", "--quiet")
    before = here.bytes
    assert facts(here)[::2] == ("folder", "pristine")
    here.ok("apply", "gather-cast")
    assert facts(here)[2] == "patched"
    here.ok("revert")
    assert here.bytes == before


def test_a_worktree_and_a_submodule(checkout: Site, tmp_path: Path) -> None:
    git(checkout.folder, "worktree", "add", "--quiet", str(tmp_path / "tree"), "-b", "side")
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(checkout.folder.parent), "sub")
    for folder in (tmp_path / "tree", outer / "sub"):
        here = Site(folder / "python", checkout.run)
        before = here.bytes
        assert facts(here) == ("checkout", "0.5.9", "pristine")
        here.ok("apply", "active-cast")
        shutil.rmtree(here.folder / ".mlapatch")
        here.ok("revert")
        assert here.bytes == before
    assert checkout.verdicts()["active-cast"] == "applicable"


def test_autocrlf(checkout: Site) -> None:
    committed = checkout.bytes
    git(checkout.folder, "config", "core.autocrlf", "true")
    checkout.backend.unlink()
    git(checkout.folder, "checkout", "--quiet", "--", ".")
    before = checkout.bytes
    assert before == committed.replace(b"\n", b"\r\n")
    assert facts(checkout) == ("checkout", "0.5.9", "pristine")
    checkout.ok("apply", "gather-cast")
    assert checkout.bytes.count(b"\n") == checkout.bytes.count(b"\r\n")
    assert facts(checkout)[2] == "patched"
    shutil.rmtree(checkout.folder / ".mlapatch")
    checkout.ok("revert")
    assert checkout.bytes == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_checkout_of_another_owner(checkout: Site) -> None:
    for path in [checkout.folder.parent, *checkout.folder.parent.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert facts(checkout) == ("checkout", "0.5.9", "pristine")


def test_the_users_git_settings_change_no_answer(checkout: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_PAGER", "false")
    assert facts(checkout) == ("checkout", "0.5.9", "pristine")
    assert os.environ["GIT_DIR"] == "/nowhere"


def test_without_git_the_structure_still_says(checkout: Site) -> None:
    """No git program: nothing tells pristine from edited, and every verdict is there."""
    done = process("status", "--json", "--sglang", checkout.folder, env={"PATH": "/nowhere"})
    assert done.code == 0, done
    assert done.verdicts["gather-cast"] == "applicable"
