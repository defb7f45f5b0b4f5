"""Many processes at once on one world, prints a JSON line a race: see races.py. The processes are forks of this one."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlapatch.assess
import mlapatch.commands.guard as guard
import mlapatch.install.journal
from mlapatch.commands.apply import apply
from mlapatch.commands.revert import revert
from mlapatch.commands.status import status
from mlapatch.errors import MlapatchError
from mlapatch.install.baseline import load_baseline
from mlapatch.install.journal import Journal
from mlapatch.install.wheels import WheelStore
from mlapatch.install.write import Staged
from mlapatch.measure.runs import Store
from tests.corpus import BACKEND, RUNNER
from tests.reliability._importing import code_of, imported
from tests.reliability._world import VERSION, World, digest, stale_bytecode, targets, unclean

PROCESSES = 20
Found = list[str]  # one entry an attempt: '' or what went wrong


def at_once(acts: list[Callable[[], Found]], kill_after: list[float] | None = None) -> Found:
    """Run each in a fork of its own, all of them at the same moment; with `kill_after` the forks are killed."""
    go, ready = os.pipe()
    children: list[tuple[int, int]] = []
    for act in acts:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ready)
            os.read(go, 1)
            try:
                said = act()
            except MlapatchError as error:
                said = [f"exit {int(error.exit)}: {error.what} {error.where} {error.found}"]
            except BaseException:
                said = [" ".join(traceback.format_exc().split()[-60:])]
            os.write(write_end, json.dumps(said).encode()[: 1 << 15])
            os._exit(0)
        os.close(write_end)
        children.append((child, read_end))
    os.close(go)
    os.close(ready)
    found: Found = []
    for number, (child, read_end) in enumerate(children):
        if kill_after:
            time.sleep(kill_after[number])
            os.kill(child, signal.SIGKILL)
        with os.fdopen(read_end, "rb") as answer:
            told = answer.read()
        os.waitpid(child, 0)
        found += json.loads(told) if told else ([""] if kill_after else ["it ended without a word"])
    return found


@dataclass
class Race:
    """The world, what its targets may be, and chance."""

    world: World
    chance: random.Random
    many: int
    sides: dict[str, set[str]]

    def patching(self) -> Found:
        """Apply, revert and read at once; then a revert of everything."""
        verbs = [self._apply, self._apply_two, self._revert_one, self._revert, self._read, self._read]
        acts = [self._each(verbs[n % 6], self.many * (8 if n % 6 > 3 else 1)) for n in range(PROCESSES)]
        return [*at_once(acts), *self.settled()]

    def _each(self, act: Callable[[], str], times: int) -> Callable[[], Found]:
        return lambda: [act() for _ in range(times)]

    def settled(self) -> Found:
        revert(sglang=self.world.site)
        return ["; ".join(unclean(self.world))]

    def _apply(self) -> str:
        apply(["gather-cast"], sglang=self.world.site)
        return ""

    def _apply_two(self) -> str:
        apply(["gather-cast", "profile-decode"], sglang=self.world.site)
        return ""

    def _revert(self) -> str:
        revert(sglang=self.world.site)
        return ""

    def _revert_one(self) -> str:
        revert(["gather-cast"], sglang=self.world.site)
        return ""

    def _read(self) -> str:
        found: Any = status(sglang=self.world.site).data
        verdicts = {patch["name"]: patch["verdict"] for patch in found["patches"]}
        for path, name in ((BACKEND, "gather-cast"), (RUNNER, "profile-decode")):
            target = next(t for t in found["targets"] if path.endswith(t["path"]))
            if target["sha256"] not in self.sides[path]:
                return f"{path} is neither old nor new"
            expected = "applicable" if target["sha256"] == self.old(path) else "applied"
            if verdicts[name] != expected:
                return f"{name} is {verdicts[name]}, and the bytes are those of {expected}"
        return ""

    def old(self, path: str) -> str:
        return str(json.loads((self.world.home / "original.json").read_text())[(BACKEND, RUNNER).index(path)])

    def killed(self) -> Found:
        """Appliers and reverters that are killed at any moment, one after the other, while others read."""
        found: Found = []
        for _ in range(self.many * 4):
            acts = [self._each(self.chance.choice([self._apply_two, self._revert, self._revert_one]), 50)]
            found += at_once(acts, [self.chance.uniform(0.0, 0.15)])
            found.append(self._read_whole())
        return [*found, *self.settled()]

    def _read_whole(self) -> str:
        now = targets(self.world)
        whole = all(one in self.sides[path] for one, path in zip(now, (BACKEND, RUNNER), strict=True))
        return "; ".join([*([] if whole else ["neither old nor new"]), *stale_bytecode(self.world)])

    def lock_holder_killed(self) -> Found:
        """Whoever holds the lock dies: the next one does not wait for it."""
        found: Found = []
        state = self.world.site / ".mlapatch"
        for _ in range(self.many):
            holding, held = os.pipe()
            child = os.fork()
            if child == 0:
                with Journal(state).locked():
                    os.write(held, b"x")
                    time.sleep(60)
                os._exit(0)
            os.read(holding, 1)
            mlapatch.install.journal.LOCK_SECONDS = 0.1
            found.append(_refused(self._apply))
            mlapatch.install.journal.LOCK_SECONDS = 30.0
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(holding)
            os.close(held)
            (state / "lock").write_text(f"{child}\n")  # and what an older kind of lock would have left
            begin = time.monotonic()
            self._apply()
            found += ["" if time.monotonic() - begin < 10 else "waited for a process that is gone", *self.settled()]
        return found

    def starting(self) -> Found:
        """Servers that import the file while it is patched and reverted: old or new, and never a stale .pyc."""
        for path in (BACKEND, RUNNER):
            for compiled in (self.world.site / path).parent.glob("__pycache__/*"):
                compiled.unlink()
        codes = {self.old(BACKEND): code_of(self.world)}
        self._apply()
        codes[digest(self.world.site / BACKEND)] = code_of(self.world)
        self._revert()
        importers = [self._each(lambda: imported(self.world, codes), self.many * 25) for _ in range(4)]
        writers = [self._each(self._apply, self.many * 4), self._each(self._revert, self.many * 4)]
        found = at_once([*importers, *writers])
        revert(sglang=self.world.site)
        return [*found, "" if code_of(self.world) == codes[self.old(BACKEND)] else "a stale .pyc at the end"]

    def database(self) -> Found:
        """Runs of 20 processes, in a file that none of them has seen, while others list them."""
        self.world.database.unlink(missing_ok=True)
        acts = [self._each(self._list if n % 4 == 3 else self._bench, self.many) for n in range(PROCESSES)]
        found = at_once(acts)
        with Store(self.world.database) as store:
            done = [run for run in store.all() if run.status == "done" and run.result == {"text": "x" * 3000}]
        expected = sum(n % 4 != 3 for n in range(PROCESSES)) * self.many
        with sqlite3.connect(self.world.database) as raw:
            sound = raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        raw.close()
        return [*found, "" if len(done) == expected and sound else f"{len(done)} of {expected} runs, sound: {sound}"]

    def _bench(self) -> str:
        with Store(self.world.database) as store:
            store.finish(store.start("bench", {"n": os.getpid()}, "raced"), {"text": "x" * 3000})
        return ""

    def _list(self) -> str:
        with Store(self.world.database) as store:
            return "" if all(run.label == "raced" for run in store.all()) else "a run that nobody made"

    def caches(self) -> Found:
        """Cold caches filled by 20 processes at once; the wheel is fetched once."""
        found: Found = []
        for _ in range(max(1, self.many // 3)):
            for path in sorted(self.world.cache.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            found += at_once([self._fetch if n % 2 else self._each(self._read, 2) for n in range(PROCESSES)])
            fetched = len(list(self.world.home.glob("fetched-*")))
            found.append("" if fetched == 1 else f"fetched {fetched} times")
            for mark in self.world.home.glob("fetched-*"):
                mark.unlink()
        return found

    def _fetch(self) -> Found:
        store = WheelStore(self.world.cache)
        files = store.files(VERSION, [BACKEND, RUNNER])
        if store.fetched:
            (self.world.home / f"fetched-{os.getpid()}").touch()
        return ["" if files.sha256[BACKEND] == files.record[BACKEND] else "other bytes than the wheel's"]

    def baselines(self) -> Found:
        """One baseline, recorded and read by many."""

        def record() -> str:
            guard.record(file=self.world.baseline, sglang=self.world.site, replace=True)
            return "" if len(load_baseline(self.world.baseline).files) >= 2 else "a file is missing in the baseline"

        return at_once([self._each(record, max(1, self.many // 2)) for _ in range(PROCESSES // 2)])

    def commands(self) -> Found:
        """20 whole commands of a shell at once: apply, revert and status --json."""
        found: Found = []
        environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
        verbs = [["apply", "gather-cast"], ["revert"], ["status", "--json"], ["apply", "profile-decode"]]
        for _ in range(max(1, self.many // 4)):
            running = [
                subprocess.Popen(
                    [sys.executable, "-m", "mlapatch", *verbs[n % 4], "--sglang", str(self.world.site)],
                    env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for n in range(PROCESSES)
            ]  # fmt: skip
            for process in running:
                out, err = process.communicate()
                found.append("" if process.returncode == 0 else f"exit {process.returncode}: {out}{err}"[-500:])
            found += self.settled()
        return found


def widen(chance: random.Random) -> None:
    """Pauses between the steps of reading and writing: what could happen in between does happen."""

    def paused(function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any, **named: Any) -> Any:
            time.sleep(chance.choice((0, 0, 0.002, 0.01)))
            try:
                return function(*given, **named)
            finally:
                time.sleep(chance.choice((0, 0, 0.002, 0.01)))

        return slow

    for owner, name in ((Journal, "_write"), (Journal, "entries"), (Staged, "place"), (mlapatch.assess, "_read")):
        setattr(owner, name, paused(getattr(owner, name)))


def _refused(act: Callable[[], str]) -> str:
    try:
        act()
    except MlapatchError as error:
        return "" if int(error.exit) == 5 and "another mlapatch" in error.what else f"said {error.what}"
    return "the lock was not held"


RACES = {
    "20 processes apply, revert and read": Race.patching,
    "processes killed at any moment": Race.killed,
    "the holder of the lock is killed": Race.lock_holder_killed,
    "servers import while the file is patched": Race.starting,
    "20 processes keep and list runs": Race.database,
    "20 processes fill cold caches": Race.caches,
    "10 processes record one baseline": Race.baselines,
    "20 commands of a shell": Race.commands,
}


def races(world: World, seed: int, many: int, names: list[str]) -> Iterator[tuple[str, Found]]:
    for name in names:
        world.restore("pristine")
        world.enter()
        mlapatch.install.journal.LOCK_SECONDS = 30.0
        old = targets(world)
        apply(["gather-cast", "profile-decode"], sglang=world.site)
        new = targets(world)
        revert(sglang=world.site)
        status(sglang=world.site)
        sides = {path: {a, b} for path, a, b in zip((BACKEND, RUNNER), old, new, strict=True)}
        yield name, RACES[name](Race(world, random.Random(f"{seed} {name}"), many, sides))  # noqa: S311


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--many", type=int, default=12)
    parser.add_argument("--races", nargs="*", default=list(RACES))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work) as home:
        world = World(Path(home).resolve())
        world.build()
        (world.home / "original.json").write_text(json.dumps(targets(world)))
        world.copy("pristine")
        widen(random.Random(asked.seed))  # noqa: S311
        for name, found in races(world, asked.seed, asked.many, asked.races):
            lost = [one for one in found if one]
            line = {"race": name, "tried": len(found), "lost": len(lost), "failures": lost[:10]}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
