"""The server's process tree: start it, see who died and what it is doing, end all of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mlapatch.disk import environment_errors
from mlapatch.serve.run_record import LOGS_ELSEWHERE

_RANK = re.compile(r"sglang::scheduler((?:_[A-Z][A-Z_]*\d+)+)")
_COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "fatbinary", "nvlink", "c++", "g++")


@dataclass(frozen=True)
class Worker:
    """A process of the server that must not end before the server does. `rank` is None for others than schedulers."""

    pid: int
    created: float
    title: str
    rank: str | None


@dataclass(frozen=True)
class Death:
    """A worker that is gone; `code` as subprocess counts (negative for signals), None where it cannot be known."""

    worker: Worker
    code: int | None


@dataclass
class Tree:
    """A started server. `session` is its session id: its descendants stay in it unless they start their own."""

    root: psutil.Process
    session: int
    child: subprocess.Popen[bytes] | None = None
    pump: subprocess.Popen[bytes] | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    compiling: frozenset[str] = frozenset()

    def look(self) -> list[Death]:
        """Take a snapshot of the tree; the workers that ended since the last one."""
        compilers: set[str] = set()
        present: dict[int, psutil.Process] = {}
        for process in self._descendants():
            present[process.pid] = process
            self.seen[process.pid] = process
            try:
                with process.oneshot():
                    title = " ".join(process.cmdline()) or process.name()
                    if process.name() in _COMPILERS:
                        compilers.add(f"{process.name()} {process.pid}")
                    elif process.status() != psutil.STATUS_ZOMBIE:
                        self._note(process, title)
            except psutil.Error:
                continue
        self.compiling = frozenset(compilers)
        deaths = [Death(w, _exit_code(w.pid)) for w in self.workers.values() if not _lives(present.get(w.pid), w)]
        for death in deaths:
            del self.workers[death.worker.pid]
        return deaths

    def exit_code(self) -> int | None:
        """The root's exit code where it has ended, else None; -1000 where it ended and nobody can tell how."""
        if self.child is not None:
            return self.child.poll()
        return None if _alive(self.root) else -1000

    def leave(self) -> None:
        """Let go of a server that stays: its own parent is init from now on."""
        for process in (self.child, self.pump):
            if process is not None and process.poll() is None:
                process.returncode = 0  # nobody will wait for it, and Popen need not warn of that

    def finish_log(self, seconds: float = 5.0) -> None:
        """Wait until the last bytes of an ended server are in its log."""
        if self.pump is not None:
            try:
                self.pump.wait(seconds)
            except subprocess.TimeoutExpired:
                self.pump.kill()
                self.pump.wait()

    def cpu_percent(self) -> float:
        """CPU use of the whole tree since the last call, in percent of one core."""
        total = 0.0
        for process in list(self.seen.values()):
            try:
                total += process.cpu_percent()
            except psutil.Error:
                continue
        return total

    def stop(self, *, grace: float = 10.0, tick: Callable[[], None] = lambda: None) -> list[int]:
        """End every process of the tree: SIGTERM, then SIGKILL after `grace` seconds. Returns what had to be killed."""
        self.look()
        _signal(self._members(), signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._members() and time.monotonic() < deadline:
            tick()
            self._reap(0.05)
        stubborn = [process.pid for process in self._members()]
        deadline = time.monotonic() + 10
        while self._members() and time.monotonic() < deadline:
            _signal(self._members(), signal.SIGKILL)
            self._reap(0.05)
        if self.child is not None:  # it may be dying still, which is neither alive nor to be waited for at once
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(2)
        return stubborn

    def _reap(self, seconds: float) -> None:
        if self.child is not None:
            try:
                self.child.wait(seconds)
                if self._members():
                    time.sleep(seconds)
                return
            except subprocess.TimeoutExpired:
                return
        time.sleep(seconds)

    def _members(self) -> list[psutil.Process]:
        """Everyone still alive: descendants, those seen earlier, and whoever is in the server's session."""
        members = {p.pid: p for p in [self.root, *self._descendants(), *self.seen.values()] if _alive(p)}
        for process in psutil.process_iter():
            if process.pid in members or process.pid == os.getpid():
                continue
            try:
                if os.getsid(process.pid) == self.session and _alive(process):
                    members[process.pid] = process
            except (OSError, psutil.Error):
                continue
        return list(members.values())

    def _descendants(self) -> list[psutil.Process]:
        try:
            return self.root.children(recursive=True)
        except psutil.Error:
            return []

    def _note(self, process: psutil.Process, title: str) -> None:
        ours = "sglang::" in title
        if not ours and "spawn_main" not in title:
            return
        rank = _RANK.search(title)
        name = rank[1].lstrip("_").replace("_", " ") if rank else None
        self.workers[process.pid] = Worker(process.pid, process.create_time(), title[:200], name)


def start(command: Sequence[str], *, environment: Mapping[str, str], log: Path, secrets: Sequence[str]) -> Tree:
    """Start a command in its own session, its output going to `log` without the secrets.

    Raises:
        OSError: the command cannot be run.
        MlapatchError: the log cannot be written (exit 5).
    """
    with environment_errors(log.parent, "the server was not started", elsewhere=LOGS_ELSEWHERE):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch(mode=0o600)
    read_end, write_end = os.pipe()
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            env=dict(environment),
            start_new_session=True,
        )
        pump = _start_pump(read_end, log, secrets)
    finally:
        os.close(read_end)
        os.close(write_end)
    root = psutil.Process(child.pid)
    return Tree(root, child.pid, child, pump)


def find(pid: int, created: float, session: int) -> Tree | None:
    """A server started earlier, unless it is gone and its number was given to another process."""
    try:
        root = psutil.Process(pid)
        same = abs(root.create_time() - created) < 1.0 and _alive(root)
        if same and os.getsid(pid) == session:  # a damaged record could name the session of a shell
            return Tree(root, session)
    except (psutil.Error, OSError):
        pass
    return None


def _start_pump(source: int, log: Path, secrets: Sequence[str]) -> subprocess.Popen[bytes]:
    read_end, write_end = os.pipe()
    os.write(write_end, json.dumps(list(secrets)).encode())
    os.close(write_end)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mlapatch.serve.log_pump", str(log), str(read_end)],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read_end,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        os.close(read_end)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _lives(process: psutil.Process | None, worker: Worker) -> bool:
    if process is None:
        return False
    try:
        return process.create_time() == worker.created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil checks that the pid is still the same process
        except psutil.Error:
            continue


def _exit_code(pid: int) -> int | None:
    """A zombie's exit code from /proc, which its own parent has not fetched yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = int(fields[49])  # field 52 of stat, exit_code; the list begins at field 3
    except (OSError, ValueError, IndexError):
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C does, so that the server does not outlive a launcher that watches it."""

    def interrupt(number: int, frame: object) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not the main thread: the caller's business
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
