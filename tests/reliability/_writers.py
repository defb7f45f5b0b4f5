"""What else mlapatch writes: the guard's baseline, the runs, the caches, the logs and records of servers."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import Any

import mlapatch.commands.guard as guard
from mlapatch.commands.runs import runs
from mlapatch.commands.status import status
from mlapatch.install.wheels import WheelStore
from mlapatch.measure.runs import Store
from mlapatch.serve.log_pump import pump
from mlapatch.serve.run_record import RunRecord, load_all
from tests.corpus import BACKEND, RUNNER
from tests.reliability._world import VERSION, World, WritePath, digest, targets


# ------------------------------------------------------------------------------------------------------------- guard
def _record(world: World) -> None:
    guard.record(file=world.baseline, sglang=world.site, replace=True)


def _baseline(world: World) -> str:
    return digest(world.baseline)


def _fetched_for_the_guard(world: World) -> None:
    """Without the release's bytes a baseline has no diffs, and says so."""
    WheelStore(world.cache).files(VERSION, [BACKEND, RUNNER])


def _edit_and_record(world: World) -> None:
    _record(world)
    target = world.site / RUNNER
    target.write_bytes(target.read_bytes() + b"# another one\n")


def _guard_after(world: World, path: WritePath, new: Any) -> list[str]:
    before = targets(world)
    guard.check(file=world.baseline if world.baseline.exists() else None, sglang=world.site)
    path.act(world)
    problems = [] if path.view(world) == new else ["recording again gives another baseline"]
    if int(guard.check(file=world.baseline, sglang=world.site).exit) != 0:
        problems.append("the guard is not clean after recording again")
    problems += [f"{left} stays" for left in (world.site / ".mlapatch").rglob("*mlapatch-tmp")]
    return problems + (["the guard changed a target"] if targets(world) != before else [])


# -------------------------------------------------------------------------------------------------------------- runs
def _bench(world: World) -> None:
    with Store(world.database) as store:
        run = store.start("bench", {"model": "glm-5"}, "second")
        store.finish(run, {"metrics": [], "text": "x" * 9000})


def _first(world: World) -> None:
    with Store(world.database) as store:
        store.finish(store.start("bench", {"n": 1}, "first"), {"value": 1})


def _kept(world: World) -> list[tuple[str, str]]:
    """Label and result of finished runs, oldest first; a copy is read, so that looking changes nothing.

    A run that was begun and not finished may be there or not, and one that was made twice is there twice.
    """
    if not world.database.exists():
        return []
    shutil.rmtree(world.home / "look", ignore_errors=True)
    shutil.copytree(world.database.parent, world.home / "look")
    with Store(world.home / "look" / "runs.sqlite3") as store:
        return list(
            dict.fromkeys((r.label, json.dumps(r.result)) for r in reversed(store.all()) if r.status != "running")
        )


def _runs_after(world: World, path: WritePath, new: Any) -> list[str]:
    there = len(runs(db=world.database).data["runs"])  # type: ignore[arg-type]
    path.act(world)
    now = len(runs(db=world.database).data["runs"])  # type: ignore[arg-type]
    return [] if now > there or now == len(new) else ["the next run was not kept"]


def _export_of_two(world: World) -> None:
    _first(world)
    run = {"kind": "bench", "status": "done"}
    lines = [json.dumps({**run, "uid": uid * 32, "label": uid, "result": {"text": uid * 5000}}) + "\n" for uid in "ab"]
    (world.home / "export.jsonl").write_text("".join(lines))


def _take_in(world: World) -> None:
    runs(take_in=world.home / "export.jsonl", db=world.database)


def _exported_before(world: World) -> None:
    _export_of_two(world)
    (world.root / "all.jsonl").write_text("an older export\n")


def _export(world: World) -> None:
    runs(export=world.root / "all.jsonl", db=world.database)


def _exported(world: World) -> str:
    return digest(world.root / "all.jsonl")


# ------------------------------------------------------------------------------------------------------------ caches
def _status(world: World) -> Any:
    found = status(sglang=world.site).data
    return [found["digest"], found["patches"]]


def _cache_after(world: World, path: WritePath, new: Any) -> list[str]:
    expected = json.loads((world.home / "verdicts.json").read_text())
    first, second = _status(world), _status(world)
    return [] if first == second == expected else ["a cache changed a verdict"]


def _fetch(world: World) -> None:
    files = WheelStore(world.cache).files(VERSION, [BACKEND, RUNNER, "sglang/no/such/file.py"])
    (world.home / "fetched").write_text(json.dumps({p: len(data) for p, data in sorted(files.files.items())}))


def _fetched_before(world: World) -> None:
    WheelStore(world.cache).files(VERSION, [BACKEND])


def _wheels_after(world: World, path: WritePath, new: Any) -> list[str]:
    for _ in range(2):
        found = WheelStore(world.cache).files(VERSION, [BACKEND, RUNNER])
        if found.sha256[BACKEND] != found.record[BACKEND] or not found.files[RUNNER]:
            return ["the cache gives other bytes than the wheel"]
    if not WheelStore(world.cache).has(VERSION, [BACKEND, RUNNER]):
        return ["nothing is kept"]
    return []


def _unpack(world: World) -> None:
    WheelStore(world.cache).unpack(VERSION, world.root / "unpacked")


def _unpacked(world: World) -> list[str]:
    folder = world.root / "unpacked"
    return sorted(f"{path.relative_to(folder)} {digest(path)}" for path in folder.rglob("*") if path.is_file())


def _unpack_after(world: World, path: WritePath, new: Any) -> list[str]:
    if not (world.root / "unpacked").exists():
        path.act(world)
    return [] if path.view(world) == new else ["unpacked otherwise the second time"]


# ----------------------------------------------------------------------------------------------------------- servers
def _record_of(world: World, state: str) -> RunRecord:
    log, when = str(world.logs / "server.log"), "2026-01-01T00:00:00+0000"
    return RunRecord("server", 1, 1.0, 1, when, log, ["python"], state=state, patches={"x": "y" * 5000})


def _starting(world: World) -> None:
    _record_of(world, "starting").save()


def _ready(world: World) -> None:
    _record_of(world, "starting").with_state("ready")


def _states(world: World) -> list[str]:
    return [record.state for record in load_all(world.logs)]


TEXT = b"".join(b"line %d of the server\n" % number for number in range(400))


def _log(world: World) -> None:
    """A server that prints in three goes, and the process that keeps what it prints."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(read_end)
        try:
            for start in range(0, len(TEXT), 3000):
                os.write(write_end, TEXT[start : start + 3000])
                os.sched_yield()
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        pump(read_end, world.logs / "server.log", [])
    finally:
        os.close(read_end)
    os.wait()


def _logged(world: World) -> str:
    log = world.logs / "server.log"
    return log.read_text() if log.exists() else ""


def _lines_of_the_server(now: str, old: str, new: str) -> bool:
    """Lines may be missing (a full disk) or cut (a kill); none is wrong or out of order."""
    said = now.splitlines() if now.endswith("\n") or not now else now.splitlines()[:-1]
    cut = [number - 1 for number, line in enumerate(said) if line.startswith("[mlapatch]")]
    lines = [line for number, line in enumerate(said) if number not in cut and number - 1 not in cut]
    rest = iter(new.splitlines())
    return all(any(line == its for its in rest) for line in lines)


CACHE = replace(WritePath("", print, lambda _: None), undone=False, lasting=False)
RECORD = replace(CACHE, lasting=True)
RECORDS = [
    replace(
        RECORD, name="guard record", act=_record, view=_baseline, before=_fetched_for_the_guard, after=_guard_after
    ),
    replace(
        RECORD, name="guard record --replace", act=_record, view=_baseline, before=_edit_and_record, after=_guard_after
    ),
    replace(RECORD, name="the first run", act=_bench, view=_kept, after=_runs_after, losses=10),
    replace(
        RECORD,
        name="another run",
        act=_bench,
        view=_kept,
        before=_first,
        after=_runs_after,
        losses=10,
    ),
    replace(
        RECORD, name="runs --import", act=_take_in, view=_kept, before=_export_of_two, after=_runs_after, losses=10
    ),
    replace(RECORD, name="runs --export", act=_export, view=_exported, before=_exported_before, losses=10),
    replace(CACHE, name="verdict cache", act=_status, after=_cache_after, errors=(0,)),
    replace(CACHE, name="wheel cache", act=_fetch, after=_wheels_after, losses=40),
    replace(CACHE, name="wheel cache, more files", act=_fetch, before=_fetched_before, after=_wheels_after, losses=40),
    replace(CACHE, name="unpacked wheel", act=_unpack, view=_unpacked, after=_unpack_after, losses=0),
    replace(RECORD, name="server record", act=_ready, view=_states, before=_starting),
    replace(CACHE, name="server log", act=_log, view=_logged, allowed=_lines_of_the_server, errors=(0,), losses=0),
]
