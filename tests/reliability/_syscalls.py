"""Faults at system calls: builds _syscalls.c, and arms it in the process that was started with it in LD_PRELOAD."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import unittest
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("_syscalls.c")


class Call(IntFlag):
    """Kinds of system calls, as in _syscalls.c."""

    OPEN, WRITE, SYNC, RENAME, UNLINK, MKDIR, CHMOD, LINK, LOCK, CLOSE, TRUNCATE = (1 << bit for bit in range(11))


class Mode(IntEnum):
    """What happens at the n-th call, as in _syscalls.c: nothing, a kill before it, one error, errors from there on, a
    write of half the bytes, or that and a kill."""

    COUNT, KILL, ONCE, EVER, SHORT, TORN = range(6)


EVERY = Call(0b111_1111_1111)
_NAMES = Call.OPEN | Call.RENAME | Call.UNLINK | Call.MKDIR | Call.CHMOD | Call.LINK
_ROOM = Call.OPEN | Call.WRITE | Call.SYNC | Call.RENAME | Call.MKDIR | Call.LINK | Call.CLOSE | Call.TRUNCATE


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what happens, with which error, at which calls."""

    name: str
    mode: Mode
    calls: Call
    error: int = 0

    @property
    def kills(self) -> bool:
        """Whether the process ends with it."""
        return self.mode in (Mode.KILL, Mode.TORN)


FAULTS = (
    Fault("kill -9", Mode.KILL, EVERY),
    Fault("kill -9 in a write", Mode.TORN, Call.WRITE),
    Fault("short write", Mode.SHORT, Call.WRITE),
    *(Fault(f"{name} once", Mode.ONCE, calls, number) for name, calls, number in (
        ("ENOSPC", _ROOM, errno.ENOSPC),
        ("EACCES", _NAMES, errno.EACCES),
        ("EROFS", _NAMES, errno.EROFS),
        ("EIO", EVERY, errno.EIO),
        ("ENOLCK", Call.LOCK, errno.ENOLCK),
    )),
    *(Fault(f"{name} from then on", Mode.EVER, calls, number) for name, calls, number in (
        ("ENOSPC", _ROOM, errno.ENOSPC),
        ("EACCES", _NAMES, errno.EACCES),
        ("EROFS", _NAMES, errno.EROFS),
        ("EIO", EVERY, errno.EIO),
        ("ENOLCK", Call.LOCK, errno.ENOLCK),
    )),
)  # fmt: skip


def build(folder: Path) -> Path:
    """The shared object for LD_PRELOAD. SkipTest where there is no Linux or no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.uname().sysname != "Linux":
        raise unittest.SkipTest("faults at system calls need Linux and a C compiler (cc)")
    built = folder / "_syscalls.so"
    command = [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", str(built), str(SOURCE)]
    subprocess.run(command, check=True)
    return built


class Injector:
    """The counterpart in this process."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._folder = os.fsencode(folder.resolve())

    def arm(self, fault: Fault, nth: int, record: int = -1) -> None:
        """Act at the nth call from now on; `record` is a descriptor that takes every change."""
        values = (int(fault.calls), int(fault.mode), ctypes.c_long(nth), fault.error, record)
        self._library.fault_arm(self._folder, *values)

    def disarm(self) -> None:
        """Act no more."""
        self._library.fault_disarm()

    @property
    def count(self) -> int:
        """Calls seen since `arm`."""
        return int(self._library.fault_count())


@dataclass(frozen=True)
class Event:
    """One recorded change."""

    what: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


def events(log: Path) -> list[Event]:
    """What `record` was given."""
    raw, found, place = log.read_bytes(), [], 0
    while place < len(raw):
        end = raw.index(b"\n", place)
        what, path, other, offset, size = raw[place:end].split(b"\x1f")
        place = end + 1 + int(size)
        found.append(Event(what.decode(), os.fsdecode(path), os.fsdecode(other), int(offset), raw[end + 1 : place]))
    return found
