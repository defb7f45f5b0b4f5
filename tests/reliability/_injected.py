"""Runs with _syscalls.c preloaded, prints a JSON line for each write path and fault: see faults.py.

Each attempt is a fork of this process, which has everything parsed already.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlapatch.errors import MlapatchError
from tests.reliability import _powerloss as powerloss
from tests.reliability._syscalls import EVERY, FAULTS, Call, Fault, Injector, Mode, events
from tests.reliability._world import PATCHING, World, WritePath, targets
from tests.reliability._writers import RECORDS

PATHS = {path.name: path for path in (*PATCHING, *RECORDS)}
WATCH = Fault("", Mode.COUNT, EVERY)


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: an exit code (None: killed), what was said, and the calls that were counted."""

    exit: int | None
    said: str
    calls: int


def attempt(injector: Injector, act: Callable[[], Any], fault: Fault, nth: int, record: int = -1) -> Ended:
    """`act` in a fork, with a fault at the nth call."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        code, said = 0, ""
        try:
            injector.arm(fault, nth, record)
            act()
        except MlapatchError as error:
            code, said = int(error.exit), f"{error.what} ({error.where}) {error.next}"
        except BaseException as error:
            code, said = 70, f"{type(error).__name__}: {error}: " + " <- ".join(_where(error))
        finally:
            injector.disarm()
            os.write(write_end, json.dumps([code, said, injector.count]).encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        told = answer.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return Ended(None, signal.Signals(os.WTERMSIG(status)).name, nth)
    return Ended(*json.loads(told))


def _where(error: BaseException) -> list[str]:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "mlapatch" in f.filename]
    return [f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:])]


@dataclass
class Bench:
    """One write path, prepared: the state before it, and what can be seen before and after."""

    world: World
    path: WritePath
    old: Any = None
    new: Any = None

    def prepare(self) -> None:
        self.world.restore("pristine")
        if self.path.before:
            self.path.before(self.world)
        self.world.copy("before")
        self.old = self.path.view(self.world)
        self.path.act(self.world)
        self.new = self.path.view(self.world)

    def problems(self, ended: Ended, fault: Fault) -> list[str]:
        """What is not as promised after an attempt."""
        try:
            now = self.path.view(self.world)
            found = [] if self.path.allowed(now, self.old, self.new) else ["neither old nor new"]
            if fault.kills:
                found += [] if ended.exit is None else [f"it was not killed but ended with {ended.exit}: {ended.said}"]
            elif ended.exit not in self.path.errors:
                found.append(f"exit {ended.exit}: {ended.said}")
            elif ended.exit and not ended.said.strip():
                found.append("an error without a word")
            elif ended.exit == 0 and now != self.new and self.path.errors != (0,):
                found.append("said done, and is not")
            if "nothing was changed" in ended.said and now != self.old:
                found.append(f"says that nothing was changed: {ended.said}")
            if fault.mode is Mode.ONCE and self.path.undone and ended.exit == 5 and now != self.old:
                found.append("one error, and not undone")
            return found + self.path.after(self.world, self.path, self.new)
        except Exception as error:
            return [f"afterwards {type(error).__name__}: {error}: {' <- '.join(_where(error))}"]

    def faults(self, injector: Injector, fault: Fault, stride: int) -> Iterator[list[str]]:
        stride = 1 if fault.calls == Call.LOCK else stride * 3 if fault.mode is Mode.EVER else stride
        for nth in range(1 + sum((self.path.name + fault.name).encode()) % min(stride, 5), 5000, stride):
            self.world.restore("before")
            ended = attempt(injector, lambda: self.path.act(self.world), fault, nth)
            if ended.exit is not None and ended.calls < nth:
                return
            yield [f"{self.path.name}, {fault.name} at call {nth}: {one}" for one in self.problems(ended, fault)]

    def losses(self, injector: Injector, killed_at: int, stride: int) -> Iterator[list[str]]:
        """A power loss during the path; with `killed_at` during its second go, the first one having been killed."""
        self.world.restore("before")
        log = self.world.home / "events"
        record = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if killed_at:
            attempt(injector, lambda: self.path.act(self.world), Fault("", Mode.KILL, EVERY), killed_at, record)
        attempt(injector, lambda: self.path.act(self.world), WATCH, 0, record)
        os.close(record)
        states = powerloss.states(self.world.root, self.world.home / "before", events(log))
        for number, (event, last, tree) in enumerate(states):
            if number % stride and not (last and self.path.lasting):
                continue
            powerloss.lay_out(self.world.root, tree)
            gone = last and self.path.lasting and self.path.view(self.world) != self.new
            found = ["what was done is gone"] if gone else []
            found += self.problems(Ended(None, "", 0), Fault("", Mode.KILL, EVERY))
            after = f", killed at call {killed_at} and done again" if killed_at else ""
            where = f"{self.path.name}{after}, power loss after event {event} (tree {number})"
            yield [f"{where}: {one}" for one in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--paths", nargs="*", default=list(PATHS))
    parser.add_argument("--stride", type=int, default=1, help="every n-th call only")
    parser.add_argument("--loss-stride", type=int, default=1)
    parser.add_argument("--killed", type=int, nargs="*", default=[], help="power losses in a second go, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work) as home:
        world = World(Path(home).resolve())
        world.build()
        world.enter()
        (world.home / "original.json").write_text(json.dumps(targets(world)))
        world.copy("pristine")
        (world.home / "verdicts.json").write_text(json.dumps(PATHS["verdict cache"].act(world)))
        injector = Injector(world.root)
        for name in asked.paths:
            bench = Bench(world, PATHS[name])
            bench.prepare()
            for fault in FAULTS:
                tell(name, fault.name, bench.faults(injector, fault, asked.stride))
            if bench.path.losses:
                for killed_at in (0, *asked.killed):
                    tell(name, "power loss", bench.losses(injector, killed_at, asked.loss_stride * bench.path.losses))


def tell(path: str, fault: str, tries: Iterator[list[str]]) -> None:
    outcomes = list(tries)
    lost = ["; ".join(found) for found in outcomes if found]
    line = {"path": path, "fault": fault, "tried": len(outcomes), "lost": len(lost), "failures": lost[:10]}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
