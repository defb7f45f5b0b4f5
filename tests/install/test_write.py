"""The one writer: links, modes, owners, bytecode, temporary files, permissions, and two at once."""

from __future__ import annotations

import atexit
import os
import py_compile
import shutil
import stat
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from mlapatch.errors import MlapatchError
from mlapatch.install.journal import Change, Entry, Journal
from mlapatch.install.write import replace_file, sha256
from tests.cli.conftest import SRC, Command, Done, Site, mlapatch_, process, site
from tests.conftest import TreeFactory
from tests.corpus import BACKEND
from tests.ready import started

__all__ = ["mlapatch_", "site"]  # fixtures of the command line's own tests
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NOBODY = 65534


@pytest.fixture
def here(install_tree: TreeFactory, mlapatch_: Command) -> Site:
    return Site(install_tree("0.5.9"), mlapatch_)


@pytest.mark.parametrize("kind", ["hard link", "symlink", "relative symlink"])
def test_never_through_a_link(here: Site, tmp_path: Path, kind: str) -> None:
    twin = tmp_path / "uv-cache" / "twin.py"
    twin.parent.mkdir()
    original = here.bytes
    if kind == "hard link":
        os.link(here.backend, twin)
    else:
        shutil.move(here.backend, twin)
        relative = Path(os.path.relpath(twin, here.backend.parent))
        here.backend.symlink_to(relative if kind.startswith("relative") else twin)
    before = twin.stat()
    here.ok("apply", "gather-cast")
    assert here.bytes != original
    assert not here.backend.is_symlink()
    assert (twin.read_bytes(), twin.stat().st_mtime_ns) == (original, before.st_mtime_ns)
    here.ok("revert")
    assert (here.bytes, twin.read_bytes()) == (original, original)
    assert here.backend.stat().st_ino != twin.stat().st_ino


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o755, 0o664, 0o444])
def test_the_mode_is_kept(here: Site, mode: int) -> None:
    here.backend.chmod(mode)
    here.ok("apply", "active-cast")
    assert stat.S_IMODE(here.backend.stat().st_mode) == mode
    here.ok("revert")
    assert stat.S_IMODE(here.backend.stat().st_mode) == mode


@ROOT_ONLY
def test_the_owner_is_kept(here: Site) -> None:
    os.chown(here.backend, 1234, 2345)
    here.ok("apply", "active-cast")
    found = here.backend.stat()
    assert (found.st_uid, found.st_gid) == (1234, 2345)
    here.ok("revert")
    found = here.backend.stat()
    assert (found.st_uid, found.st_gid) == (1234, 2345)


def compiled(source: Path) -> list[Path]:
    """What several interpreters and optimisation levels leave beside a source, and one unchecked-hash .pyc."""
    real = [Path(cache_from_source(str(source), optimization=level)) for level in ("", 1, 2)]
    for path, level in zip(real, (0, 1, 2), strict=True):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(source), cfile=str(path), optimize=level, invalidation_mode=mode)
    others = [real[0].with_name(f"{source.stem}.{tag}.pyc") for tag in ("cpython-310", "cpython-313", "pypy311")]
    for path in others:
        path.write_bytes(b"another interpreter's")
    return [*real, *others]


def test_bytecode_of_every_tag_is_dropped(here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = here.backend.with_name("flashinfer_mla_backend_extra.py")
    neighbour.write_text("")
    kept = compiled(neighbour)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "prefix"))
    away = tmp_path / "prefix" / here.backend.parent.relative_to("/") / f"{here.backend.stem}.cpython-312.pyc"
    away.parent.mkdir(parents=True)
    for verb in (("apply", "gather-cast"), ("revert",)):
        gone = compiled(here.backend)
        away.write_bytes(b"elsewhere")
        here.ok(*verb)
        assert not [path for path in [*gone, away] if path.exists()]
        assert all(path.exists() for path in kept)
        gone = compiled(here.backend)
        here.ok(*verb)
        assert all(path.exists() for path in gone), "nothing to do, nothing dropped"


def test_no_temporary_file_stays(here: Site) -> None:
    kill_left = here.backend.with_name(f".{here.backend.name}.abc123.mlapatch-tmp")
    somebody_elses = here.backend.with_name(f".{here.backend.name}.swp")
    for path in (kill_left, somebody_elses):
        path.write_bytes(b"half")
    names = {path.name for path in here.backend.parent.iterdir()}
    here.ok("apply", "gather-cast")
    assert {path.name for path in here.backend.parent.iterdir()} == names - {kill_left.name}
    assert not list(here.folder.rglob("*mlapatch-tmp"))


@pytest.mark.parametrize("name", ["a file with spaces", "line\nbreak", "quote'\"s", "ünï-çödé", "star[*]?"])
def test_folders_of_any_name(here: Site, tmp_path: Path, name: str) -> None:
    there = Site(Path(shutil.move(here.folder, tmp_path / name)), here.run)
    before = there.sha256
    gone = compiled(there.backend)
    there.ok("apply", "active-cast")
    assert not [path for path in gone if path.exists()]
    assert there.verdicts()["active-cast"] == "applied"
    there.ok("revert")
    assert there.sha256 == before


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"theirs")
    with pytest.raises(MlapatchError) as caught:
        replace_file(path, b"ours", found=sha256(b"what was read"))
    assert (int(caught.value.exit), path.read_bytes()) == (4, b"theirs")
    assert "the file changed while mlapatch was working" in caught.value.what


LOADS = """
import os, sys
from typer.testing import CliRunner
import mlapatch.cli
mlapatch.cli._register()
# Load all there is to load while this interpreter's own folder can be read.
CliRunner().invoke(mlapatch.cli.app, ["diff", "gather-cast", "--sglang", {site!r}])
CliRunner().invoke(mlapatch.cli.app, ["apply", "absent", "--sglang", {site!r}])
import filelock, git, gitdb, importlib.metadata, mmap, smmap
import mlapatch.commands.apply, mlapatch.commands.guard, mlapatch.commands.revert, mlapatch.commands.status
"""
AS_NOBODY = """
import os
import mlapatch.cli
os.setgroups([]); os.setgid(65534); os.setuid(65534)
mlapatch.cli.main()
"""
_ready: list[str] = []


def as_nobody(site_packages: Path, *arguments: str, cwd: Path = Path("/")) -> Done:
    """The command line as another user."""
    if not _ready:
        running = ExitStack()
        atexit.register(running.close)
        loads = LOADS.format(site=str(site_packages))
        _ready.append(running.enter_context(started(sys.executable, loads, MLAPATCH_CACHE="")))
    command = [*_ready, "-c", AS_NOBODY, *arguments, "--sglang", str(site_packages)]
    environment = {**os.environ, "MLAPATCH_CACHE": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=cwd)
    return Done(done.returncode, done.stdout, done.stderr)


def open_to_all(folder: Path) -> None:
    """Let others read the folder, which pytest makes for one user."""
    for path in [folder, *folder.parents]:
        if stat.S_IMODE(path.stat().st_mode) & 0o055 != 0o055:
            path.chmod(path.stat().st_mode | 0o055)


def test_others_can_read_the_state(here: Site) -> None:
    here.ok("apply", "gather-cast")
    kept = [path for path in (here.folder / ".mlapatch").rglob("*") if path.is_file()]
    assert {path.name for path in kept} >= {"journal.json", ".gitignore"}
    assert [path for path in kept if not path.stat().st_mode & stat.S_IROTH and path.name != "lock"] == []


@ROOT_ONLY
def test_a_read_only_site_packages(here: Site) -> None:
    open_to_all(here.folder)
    frozen = here.snapshot()
    status = as_nobody(here.folder, "status", "--json")
    assert (status.code, status.verdicts["gather-cast"]) == (0, "applicable"), status
    done = as_nobody(here.folder, "apply", "gather-cast")
    assert done.code == 5, done
    assert "error: no permission to write; nothing was changed" in done.err
    assert "found: owner uid 0, running as uid 65534" in done.err
    assert "next: run as the owner, or patch when the image is built" in done.err
    assert here.snapshot() == frozen
    here.ok("apply", "gather-cast")
    frozen = here.snapshot()
    again = as_nobody(here.folder, "apply", "gather-cast")
    assert (again.code, "already applied, nothing to do" in again.out) == (0, True), again
    assert as_nobody(here.folder, "revert").code == 5
    assert here.snapshot() == frozen


@ROOT_ONLY
def test_a_file_that_cannot_be_read(here: Site) -> None:
    open_to_all(here.folder)
    here.backend.chmod(0o600)
    done = as_nobody(here.folder, "status")
    assert done.code == 5
    assert "error: a target file cannot be read" in done.err


def test_two_processes_at_once(here: Site) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "mlapatch", "apply", "gather-cast", "--sglang", str(here.folder)]
    before = here.sha256
    racing = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0] for process in racing]
    assert [process.returncode for process in racing] == [0, 0, 0]
    assert sum("applied to" in text for text in said) == 1
    assert sum("already applied, nothing to do" in text for text in said) == 2
    assert here.verdicts()["gather-cast"] == "applied"
    here.ok("revert")
    assert here.sha256 == before


def test_a_lock_that_is_held(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlapatch.install.journal.LOCK_SECONDS", 0.1)
    before = here.sha256
    with Journal(here.folder / ".mlapatch").locked():
        assert here.verdicts()["gather-cast"] == "applicable", "reading needs no lock"
        done = here("apply", "gather-cast")
    assert done.code == 5
    assert "error: another mlapatch is writing to this SGLang" in done.err
    assert here.sha256 == before
    here.ok("apply", "gather-cast")


def test_a_stale_lock_holds_nobody_up(here: Site) -> None:
    state = here.folder / ".mlapatch"
    state.mkdir()
    (state / "lock").write_text("4194305\n")
    here.ok("apply", "gather-cast")


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"format": 1, "targets": {"a": 1}}', b'{"format": 1, "targets": []}', b"\xff\xfe"]
)
def test_a_damaged_journal_is_as_good_as_none(here: Site, damage: bytes) -> None:
    before = here.bytes
    here.ok("apply", "gather-cast")
    journal = here.folder / ".mlapatch" / "journal.json"
    journal.write_bytes(damage)
    assert here.verdicts()["gather-cast"] == "applied"
    here.ok("revert")
    assert here.bytes == before


def test_the_originals_outlive_a_damaged_journal(here: Site) -> None:
    here.edit("import torch\n", "import torch  # mine\n")
    mine = here.sha256
    here.ok("apply", "gather-cast")
    (here.folder / ".mlapatch" / "journal.json").write_bytes(b"{")
    here.ok("apply", "profile-decode")
    assert (here.folder / ".mlapatch" / "objects" / mine).is_file()


def test_objects_are_proven_and_needless_ones_go(here: Site) -> None:
    before = here.bytes
    here.ok("apply", "gather-cast")
    objects = here.folder / ".mlapatch" / "objects"
    kept = objects / sha256(before)
    assert kept.read_bytes() == before
    kept.write_bytes(b"damaged")
    here.ok("revert")
    assert here.bytes == before, "from the wheel instead"
    assert [path for path in objects.iterdir() if path.name != kept.name] == []


def test_the_state_of_a_newer_mlapatch_is_left_alone(here: Site) -> None:
    here.ok("apply", "gather-cast")
    journal = here.folder / ".mlapatch" / "journal.json"
    journal.write_text(journal.read_text().replace('"format": 1', '"format": 2'))
    assert here.verdicts()["gather-cast"] == "applied"
    frozen = {path: digest for path, (digest, _, _) in here.snapshot().items()}
    done = here("revert")
    assert (done.code, "the state was written by another version of mlapatch" in done.err) == (5, True)
    assert {path: digest for path, (digest, _, _) in here.snapshot().items()} == frozen


def test_an_error_in_the_second_file_undoes_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_bytes(b"1")
    second.write_bytes(b"changed by somebody else")
    journal = Journal(tmp_path / ".mlapatch")
    entry = Entry(sha256(b"1"), sha256(b"2"), "0.5.9", {})
    changes = [
        Change("first.py", first, b"1", b"2", entry, {sha256(b"1"): b"1", sha256(b"2"): b"2"}),
        Change("second.py", second, b"1", b"2", entry),
    ]
    with journal.locked(), pytest.raises(MlapatchError) as caught:
        journal.commit(changes)
    assert int(caught.value.exit) == 4
    assert first.read_bytes() == b"1"
    assert journal.entries() == {}


def test_the_state_folder_is_ignored_by_git(here: Site) -> None:
    here.ok("apply", "gather-cast")
    assert (here.folder / ".mlapatch" / ".gitignore").read_text() == "*\n"
    assert BACKEND in {str(path.relative_to(here.folder)) for path in here.folder.rglob("*.py")}
    assert process("status", "--sglang", here.folder).code == 0
