"""One test for each kind of defect that the campaigns of faults and races have found."""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import json
import marshal
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mlapatch.assess
import mlapatch.disk
import mlapatch.install.write
from mlapatch.commands.runs import runs
from mlapatch.disk import make_folder, write_atomically, write_output
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.journal import Journal
from mlapatch.install.write import Staged
from mlapatch.measure.keeping import keeping
from mlapatch.measure.runs import Store
from mlapatch.serve.log_pump import pump
from mlapatch.serve.run_record import RunRecord, load_all
from tests.cli.conftest import SRC, Command, Site, mlapatch_
from tests.conftest import TreeFactory
from tests.corpus import RUNNER

__all__ = ["mlapatch_"]


@pytest.fixture
def here(install_tree: TreeFactory, mlapatch_: Command) -> Site:
    return Site(install_tree("0.5.9"), mlapatch_)


def name_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "there")


# ---------------------------------------------------------------------------------------------------- apply and revert
def test_no_file_is_touched_before_all_are_written(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file's folder is full: the first one never had other bytes, not even for a moment."""
    placed: list[Path] = []
    stage, place = mlapatch.install.journal.stage, Staged.place  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "mlapatch.install.journal.stage", lambda path, *a, **k: full() if path.name in RUNNER else stage(path, *a, **k)
    )

    def noted(self: Staged) -> None:
        placed.append(self.path)
        place(self)

    monkeypatch.setattr(Staged, "place", noted)
    before = here.bytes
    done = here("apply", "gather-cast", "profile-decode")
    assert (done.code, here.bytes, placed) == (5, before, [])
    assert "cannot write: No space left on device; nothing was changed" in done.err
    assert not list(here.folder.rglob("*mlapatch-tmp"))


def test_what_cannot_be_undone_is_named(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Staged.place

    def broken(self: Staged) -> None:
        if placed:
            full()
        placed.append(self.path)
        place(self)

    placed: list[Path] = []
    monkeypatch.setattr(Staged, "place", broken)
    done = here("apply", "gather-cast", "profile-decode")
    assert done.code == 5
    assert "nothing was changed" not in done.err
    assert "nor can what was written be undone" in done.err
    assert "with the patches of this command: srt/layers/attention/flashinfer_mla_backend.py" in done.err
    assert "next: mend the disk; then run the same command again, or mlapatch revert" in done.err
    monkeypatch.undo()
    here.ok("revert")
    assert here.verdicts()["gather-cast"] == "applicable"


def test_a_state_left_by_a_kill_settles_also_where_nothing_is_to_do(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.ok("apply", "gather-cast")
    here.ok("revert")
    state = here.folder / ".mlapatch"
    kept = json.loads((state / "journal.json").read_text())
    kept["pending"] = {"a.py": {"path": str(here.folder / "a.py"), "new": "0" * 64, "entry": None}}
    (state / "journal.json").write_text(json.dumps(kept))
    synced: set[Path] = set()
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.add(name_of(fd))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    left = [
        state / ".journal.json.x.mlapatch-tmp",
        state / "objects" / ".ab.y.mlapatch-tmp",
        here.folder / ".a.py.z.mlapatch-tmp",
    ]
    for path in left:
        path.write_bytes(b"half")
    here.ok("revert")
    assert [path for path in left if path.exists()] == []
    assert json.loads((state / "journal.json").read_text())["pending"] == {}
    assert here.folder in synced, "a kill between a rename and its sync, and then a power loss"


def test_everything_on_the_way_is_synced(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power loss keeps the new bytes and loses the folder with the old ones, or brings a .pyc back."""
    synced: set[Path] = set()
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.add(name_of(fd))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    cache = here.backend.parent / "__pycache__"
    cache.mkdir()
    here.ok("apply", "gather-cast")
    folders = {
        here.folder,
        here.folder / ".mlapatch",
        here.folder / ".mlapatch" / "objects",
        here.backend.parent,
        cache,
    }
    assert folders <= synced


def test_an_error_of_a_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> Any:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    make_folder(tmp_path / "on" / "a file system that cannot")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        make_folder(tmp_path / "on" / "a broken disk")


def test_no_bytecode_of_a_start_in_between_looks_right(here: Site) -> None:
    """Python takes the time of a source, then its bytes: apply and revert can both come in that second."""
    loader = importlib.machinery.SourceFileLoader("raced", str(here.backend))
    soon = time.time() + 1000  # as if the whole test took no time: each second is later than the one before
    os.utime(here.backend, (soon, soon))
    original = loader.get_code("raced")
    seen, seconds = loader.path_stats(str(here.backend)), [int(here.backend.stat().st_mtime)]
    here.ok("apply", "gather-cast")
    patched = here.backend.read_bytes()
    seconds.append(int(here.backend.stat().st_mtime))
    here.ok("revert")
    seconds.append(int(here.backend.stat().st_mtime))
    assert seconds == sorted(set(seconds))
    code = loader.source_to_code(patched, str(here.backend))
    times = b"".join(int(seen[name]).to_bytes(4, "little") for name in ("mtime", "size"))
    compiled = importlib.util.MAGIC_NUMBER + bytes(4) + times + marshal.dumps(code)
    loader.set_data(importlib.util.cache_from_source(str(here.backend)), compiled)
    assert loader.get_code("raced") == original


def test_a_status_sees_one_moment(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revert comes in between the journal and the bytes: the patch was never lost."""
    here.ok("apply", "gather-cast")
    read, done = mlapatch.assess._read, list[str]()

    def reverted_meanwhile(path: Path) -> bytes | None:
        if not done:
            done.append("once")
            here.ok("revert")
        return read(path)

    monkeypatch.setattr(mlapatch.assess, "_read", reverted_meanwhile)
    assert here.verdicts()["gather-cast"] == "applicable"
    assert done


# ---------------------------------------------------------------------------------------------------- runs and reports
def test_a_full_disk_is_no_bug_of_the_runs(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.sqlite3") as store:
        run = store.start("bench", {})
        store._db.execute("PRAGMA max_page_count = 1")
        with pytest.raises(MlapatchError, match="the file of runs cannot be used") as caught:
            store.finish(run, {"text": "x" * 100_000})
        assert (int(caught.value.exit), caught.value.found) == (5, "database or disk is full")
        store._db.execute("PRAGMA max_page_count = 1000")
        store.finish(run, {"value": 1})
        assert store.get("last").result == {"value": 1}


def test_figures_that_cannot_be_kept_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(*_: Any, **__: Any) -> None:
        raise MlapatchError(Exit.ENVIRONMENT, "the file of runs cannot be used", found="disk is full")

    monkeypatch.setattr(Store, "finish", unusable)
    with keeping(True, tmp_path / "runs.sqlite3", "bench", {}, "") as kept:
        kept.result |= {"metrics": [1], "notes": ["a note"]}
    assert kept.result["metrics"] == [1]
    assert kept.result["notes"] == ["a note", "not kept as a run: the file of runs cannot be used (disk is full)"]
    assert kept.run is None


def test_an_export_is_whole_and_no_device_is_replaced(tmp_path: Path) -> None:
    link, there = tmp_path / "link", tmp_path / "there"
    there.write_bytes(b"old")
    link.symlink_to(there)
    write_output(link, b"new")
    assert (link.is_symlink(), there.read_bytes()) == (True, b"new")
    write_output(Path("/dev/null"), b"text")
    assert not Path("/dev/null").is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: link.write_bytes(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"through")
    reader.join()
    assert there.read_bytes() == b"through"
    with pytest.raises(MlapatchError, match="no new export is there, or a whole one"):
        runs(export=tmp_path / "no such folder" / "a", db=tmp_path / "runs.sqlite3")


def test_output_that_cannot_be_written_is_no_bug(here: Site) -> None:
    command = [sys.executable, "-m", "mlapatch", "status", "--sglang", str(here.folder)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with Path("/dev/full").open("wb") as nowhere:
        done = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    assert done.returncode == 5, done
    assert done.stderr == "error: what was asked is done, but the output cannot be written: No space left on device\n"


def test_half_written_files_go_after_an_hour(tmp_path: Path) -> None:
    old, fresh, other = (tmp_path / f".{name}.mlapatch-tmp" for name in ("a.json.x", "a.json.y", "b.json.x"))
    for path in (old, fresh, other):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    write_atomically(tmp_path / "a.json", b"whole")
    assert [path.exists() for path in (old, fresh, other)] == [False, True, True]


# ------------------------------------------------------------------------------------------------------------- servers
def pumped(text: bytes, log: Path) -> None:
    read_end, write_end = os.pipe()

    def server() -> None:
        for start in range(0, len(text), 1000):
            os.write(write_end, text[start : start + 1000])
        os.close(write_end)

    writer = threading.Thread(target=server)
    writer.start()
    pump(read_end, log, [])
    writer.join()
    os.close(read_end)


def test_a_server_outlives_a_full_disk_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pumped(b"a line\n" * 100_000, Path("/dev/full"))  # more than a pipe holds: it would block, or die
    write, log, failing = os.write, tmp_path / "log", [2, 3]

    def full_for_a_while(fd: int, data: bytes) -> int:
        if name_of(fd) != log:
            return write(fd, data)
        count[0] += 1
        return full() if count[0] in failing else write(fd, data[: max(1, len(data) // 2)])

    count = [0]
    monkeypatch.setattr("mlapatch.serve.log_pump.os.write", full_for_a_while)
    lines = [b"line %d\n" % number for number in range(40_000)]
    pumped(b"".join(lines), log)
    said = log.read_bytes().splitlines(keepends=True)
    note = next(line for line in said if line.startswith(b"[mlapatch] "))
    missing = int(note.split()[1])
    written = sum(len(line) for line in said if line != note)
    assert written - missing <= len(b"".join(lines)) <= written + missing
    assert said[-1] == lines[-1]


def record(folder: Path) -> RunRecord:
    return RunRecord("s", 1, 1.0, 1, "now", str(folder / "s.log"), ["python"])


def test_a_record_that_cannot_be_written_ends_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path).save()
    monkeypatch.setattr("mlapatch.disk.written_beside", full)
    said: list[str] = []
    assert record(tmp_path).with_state("ready", tell=said.append).state == "ready"
    assert said == ["cannot write: No space left on device; the record of the server is not kept (there)"]
    assert [one.state for one in load_all(tmp_path)] == ["starting"]


def test_a_server_that_cannot_be_recorded_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlapatch.disk.written_beside", full)
    stopped: list[str] = []
    with pytest.raises(MlapatchError, match="No space left on device; the server was stopped") as caught:
        record(tmp_path).save(otherwise=lambda: stopped.append("it"))
    assert (int(caught.value.exit), stopped) == (5, ["it"])


# --------------------------------------------------------------------------------------------------------------- locks
def test_the_lock_is_free_when_its_holder_is_killed(here: Site) -> None:
    code = "import sys, time\nfrom pathlib import Path\nfrom mlapatch.install.journal import Journal\n"
    code += "with Journal(Path(sys.argv[1])).locked():\n    print('held', flush=True)\n    time.sleep(60)\n"
    command = [sys.executable, "-c", code, str(here.folder / ".mlapatch")]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
    here.ok("apply", "gather-cast")
    assert Journal(here.folder / ".mlapatch").entries()


def test_a_file_system_without_locks_is_no_bug(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What older releases of filelock raise where flock is not there."""

    def acquire(*_: Any, **__: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    before = here.bytes
    done = here("apply", "gather-cast")
    assert (done.code, here.bytes) == (5, before)
    assert "error: this file system knows no file locks; nothing was changed" in done.err
