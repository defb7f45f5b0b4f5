"""One bad input at a time: what may come of it, how long it may take, and what the process may do meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from typer.testing import CliRunner

import mlapatch.cli
from mlapatch.errors import MlapatchError
from tests.reliability.figures import Figure

PATIENCE, STUCK = 10.0, 120.0
"""Seconds of processor time that one input may take, since others may use the machine; and seconds that it may wait."""
SENTINEL = "hostile_input_ran"
"""Stands in every planted side effect: a name that may be read and printed, and never executed or passed to a shell."""
_OWN = Path(mlapatch.cli.__file__).resolve().parents[1]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2}
_PATHS |= {"os.chmod": 1, "os.chown": 1, "os.truncate": 1, "os.utime": 1, "shutil.rmtree": 1, "sqlite3.connect": 1}
_NEVER = {"os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.spawn"}


@dataclass
class Oracle:
    """Watches the process through Python's audit events while it is active.

    `folders`: nothing in them is ever compiled from a file, imported or executed. `writable`: the only places where
    a file may be opened for writing, renamed, made or removed.
    """

    folders: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    broken: list[str] = field(default_factory=list)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writing = (isinstance(flags, int) and flags & _WRITES) or (
                isinstance(mode, str) and set(mode) & set("wax+")
            )
            if writing and not isinstance(path, int):
                self._written(event, path)
        elif event in _PATHS:
            for path in args[: _PATHS[event]]:
                self._written(event, path)
        elif event == "exec":
            code = args[0]
            if isinstance(code, CodeType) and (self._inside(code.co_filename) or SENTINEL in _texts(code)):
                self.broken.append(f"executed {code.co_filename}: {code.co_name}")
        elif event == "import":
            if SENTINEL in str(args[0]) or (args[1] and self._inside(args[1])):
                self.broken.append(f"imported {args[0]} from {args[1]}")
        elif event == "subprocess.Popen":
            words = [os.fsdecode(word) for word in args[1]] if isinstance(args[1], (list, tuple)) else [str(args[1])]
            if SENTINEL in " ".join(words) or words[:1] in (["/bin/sh"], ["sh"], ["bash"]):
                self.broken.append(f"started {words}")
        elif event in _NEVER:
            self.broken.append(f"{event}{args!r:.200}")

    def _written(self, event: str, path: object) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or path in ("/dev/null", os.devnull, ":memory:"):
            return
        named = Path(os.fsdecode(path))
        real = Path(os.path.realpath(named.parent), named.name)  # a link is replaced, not followed
        if real.parent.name == "__pycache__" and real.is_relative_to(_OWN):
            return  # Python keeps what it compiles of mlapatch, where nothing keeps it from that
        if not any(real.is_relative_to(place) for place in self.writable):
            self.broken.append(f"{event} for writing: {real}")

    def _inside(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and any(Path(path).is_relative_to(one) for one in self.folders)


def _texts(code: CodeType) -> str:
    return " ".join([*code.co_names, *(one for one in code.co_consts if isinstance(one, str))])


_active: list[Oracle] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _active:
        oracle = _active.pop()  # what the oracle itself does is not looked at
        try:
            oracle.see(event, args)
        finally:
            _active.append(oracle)


_hooked = False


@contextlib.contextmanager
def watched(oracle: Oracle) -> Iterator[Oracle]:
    """Activate an oracle; an audit hook can never be taken out, so there is one, which is idle otherwise."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _active.append(oracle)
    try:
        yield oracle
    finally:
        _active.clear()


class TooLong(BaseException):
    """One input took more than PATIENCE; no `except Exception` hides it."""


@contextlib.contextmanager
def limited(seconds: float = PATIENCE) -> Iterator[None]:
    """TooLong after so many seconds of processor time, or where nothing comes of waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, frame: FrameType | None) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        raise TooLong(f"more than {seconds} s, in {where}")

    before = signal.signal(signal.SIGVTALRM, stop), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, STUCK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGVTALRM, before[0])
        signal.signal(signal.SIGALRM, before[1])


@dataclass
class Tally:
    """Counts attempts of one kind and keeps what went wrong."""

    part: str
    kind: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    lost: int = 0
    slowest: float = 0.0

    def attempt(self, label: str, doing: Callable[[], object], oracle: Oracle | None = None) -> object:
        """Do it: an MlapatchError is an answer, anything else that is raised is lost. Returns what it returned."""
        self.tried += 1
        begin = time.process_time()
        try:
            with limited(), watched(oracle) if oracle else contextlib.nullcontext():
                return doing()
        except MlapatchError:
            return None
        except (Exception, TooLong) as error:
            at = error.__traceback__
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at else ""
            self.lose(f"{label}: {type(error).__name__} in {where}: {str(error)[:160]}")
            return None
        finally:
            self.slowest = max(self.slowest, time.process_time() - begin)
            if oracle is not None and oracle.broken:
                self.lose(f"{label}: {'; '.join(oracle.broken[:3])}")
                oracle.broken.clear()

    def lose(self, why: str) -> None:
        """Something was not as promised."""
        self.lost += 1
        if len(self.failures) < 10:
            self.failures.append(why)

    def figure(self) -> Figure:
        """The row of docs/reliability.md."""
        return Figure(self.part, self.kind, self.tried, self.tried - min(self.lost, self.tried), tuple(self.failures))


@dataclass(frozen=True)
class Ended:
    """How one command line ended."""

    code: int
    out: str
    err: str


CODES = {0, 1, 2, 3, 4, 5, 6}


def run(*arguments: str | Path) -> Ended:
    """A command line in this process. Whatever would be exit 70 is raised; so is text that could steer a terminal."""
    if not mlapatch.cli.app.registered_commands:
        mlapatch.cli._register()
    done = CliRunner().invoke(mlapatch.cli.app, [str(a) for a in arguments], catch_exceptions=False)
    if done.exit_code not in CODES:
        raise AssertionError(f"exit {done.exit_code}: {done.stderr[:200]}")
    if done.exit_code and "error: " not in done.stderr and "--json" not in arguments and not done.stdout:
        raise AssertionError(f"exit {done.exit_code} without a word")
    shown = done.stderr + ("" if "diff" in arguments or "--dry-run" in arguments else done.stdout)
    if any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown):
        raise AssertionError(f"control characters reach the terminal: {shown[:200]!r}")
    return Ended(done.exit_code, done.stdout, done.stderr)
