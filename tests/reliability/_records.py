"""Files that mlapatch itself keeps, damaged: guard baselines, journals, runs, exports, verdicts and wheel caches."""

from __future__ import annotations

import json
import random
import shutil
import socket
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlapatch.install.wheels import WheelStore
from mlapatch.measure.runs import _COLUMNS, MIGRATIONS
from tests.corpus import BACKEND
from tests.measure.sample_runs import fill
from tests.reliability._attempts import Oracle, Tally, run
from tests.reliability._mutate import HOSTILE, as_toml, misshapen, mutated
from tests.reliability._place import VERSION, Place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEEP = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"targets":{"x":' * 50_000,
    b"",
    b"null",
    b"[]",
    b"\x00" * 1000,
    b"9" * 5000,
)
SQL = MIGRATIONS[0]


def _variant(data: bytes, rng: random.Random, dump: Callable[[Any], bytes], load: Callable[[bytes], Any]) -> bytes:
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice(DEEP)
    return dump(misshapen(load(data), rng)) if kind < 7 else mutated(data, rng)


def _json_variant(data: bytes, rng: random.Random) -> bytes:
    return _variant(data, rng, lambda value: json.dumps(value).encode(), json.loads)


def _toml_variant(data: bytes, rng: random.Random) -> bytes:
    def dump(value: Any) -> bytes:
        return as_toml(value).encode("utf-8", "replace") if isinstance(value, dict) else b"x"

    return _variant(data, rng, dump, lambda text: tomllib.loads(text.decode()))


def guard_files(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of a recorded baseline, of an SGLang with a local edit."""
    tally = Tally("inputs", "mutants of mlapatch-guard.toml: guard check, status")
    place.restore()
    args = place.site / "sglang" / "srt" / "server_args.py"
    args.write_bytes(b"# local edit\n" + args.read_bytes())
    file = place.work / "baseline" / "mlapatch-guard.toml"
    file.parent.mkdir()
    assert run("guard", "record", "--sglang", place.site, "--file", file).code == 0
    data, frozen = file.read_bytes(), place.contents()
    oracle = Oracle((), place.writable)
    for number in range(60 if thorough else 5):
        variant = _toml_variant(data, rng)
        file.write_bytes(variant)
        tally.attempt(f"{number}", lambda: _guarded(place, file), oracle)
    file.write_bytes(data)
    if place.contents() != frozen:
        tally.lose("guard check wrote to the SGLang")
    args.write_bytes(args.read_bytes().removeprefix(b"# local edit\n"))
    place.restore()
    return tally


def _guarded(place: Place, file: Path) -> None:
    done = run("guard", "check", "--sglang", place.site, "--file", file)
    assert done.code in (0, 4), done


def journals(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of journal.json and of kept bytes, under an applied patch: revert is exact or refuses."""
    tally = Tally("inputs", "mutants of journal.json and its objects under an applied patch: status, revert")
    place.restore()
    assert run("apply", "active-cast", "--sglang", place.site).code == 0
    kept = place.work / "state"
    shutil.copytree(place.state, kept)
    patched = place.backend.read_bytes()
    oracle = Oracle((), place.writable)
    for number in range(50 if thorough else 5):
        shutil.rmtree(place.state)
        shutil.copytree(kept, place.state)
        place.backend.write_bytes(patched)
        objects = sorted((place.state / "objects").iterdir())
        victim = place.state / "journal.json" if rng.random() < 0.7 else rng.choice(objects)
        if victim.name == "journal.json":
            victim.write_bytes(_json_variant(victim.read_bytes(), rng))
        elif rng.random() < 0.3:
            victim.unlink()
        else:
            victim.write_bytes(mutated(victim.read_bytes(), rng))
        tally.attempt(f"{number}: {victim.name[:12]}", lambda: _reverted(place, patched), oracle)
    place.restore()
    return tally


def _reverted(place: Place, patched: bytes) -> None:
    assert run("status", "--sglang", place.site).code == 0
    assert place.backend.read_bytes() == patched, "status wrote"
    done = run("revert", "--sglang", place.site)
    now = place.backend.read_bytes()
    original = place.originals[BACKEND]
    assert now == (original if done.code == 0 else patched), (
        f"exit {done.code}, and the bytes are others: {done.err[:200]}"
    )


def databases(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Files of runs with damaged pages, other schemas, and rows of any type."""
    tally = Tally(
        "inputs", "databases of runs, damaged, foreign, newer, or with rows of any type: runs, compare, report"
    )
    folder = place.work / "runs"
    folder.mkdir()
    good = folder / "good.sqlite3"
    fill(good, folder, layers=4)
    with sqlite3.connect(good) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")
    data = good.read_bytes()
    oracle = Oracle((), (*place.writable, folder))
    for number in range(50 if thorough else 6):
        path = folder / f"{number}.sqlite3"
        kind = rng.randrange(3)
        if kind == 0:
            path.write_bytes(_damaged(data, rng))
        elif kind == 1:
            path.write_bytes(data)
            _odd_cells(path, rng)
        else:
            _odd_schema(path, rng)
        before = path.read_bytes()
        tally.attempt(f"{number}", lambda p=path, b=before, f=kind == 2: _listed(p, b, foreign=f), oracle)  # type: ignore[misc]
        for left in folder.glob(f"{number}.sqlite3*"):
            left.unlink()
    return tally


def _damaged(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 8, 200))):
        damaged[rng.randrange(100 if rng.random() < 0.2 else len(damaged))] = rng.randrange(256)
    return bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.2 else damaged)


def _odd_cells(path: Path, rng: random.Random) -> None:
    columns = ("kind", "label", "status", "started", "finished", "host", "pid", "mlapatch", "setup", "result")
    with sqlite3.connect(path) as db:
        for _ in range(rng.choice((1, 2, 4))):
            column, row = rng.choice(columns), rng.randrange(1, 5)
            value: Any = rng.choice([h for h in HOSTILE if not isinstance(h, (list, dict)) and h is not None])
            if column in ("setup", "result") and rng.random() < 0.8:
                (text,) = db.execute(f"SELECT {column} FROM runs WHERE id = ?", (row,)).fetchone() or ("{}",)  # noqa: S608
                value = json.dumps(misshapen(_or_empty(text), rng))
            elif column == "pid":
                value = rng.choice((-1, 0, 2**62, "x", b"\xff"))
                db.execute("UPDATE runs SET status = 'running', host = ?", (socket.gethostname(),))
            elif isinstance(value, int) and abs(value) >= 2**63:
                value = b"\xff\xfe"
            db.execute(f"UPDATE OR IGNORE runs SET {column} = ? WHERE id = ?", (value, row))  # noqa: S608


def _or_empty(text: object) -> Any:
    try:
        return json.loads(str(text))
    except ValueError:
        return {}


def _odd_schema(path: Path, rng: random.Random) -> None:
    scripts = (
        ("CREATE TABLE bookmarks (a)", 0), ("CREATE TABLE bookmarks (a)", 1), ("CREATE TABLE runs (a)", 0),
        ("CREATE TABLE runs (a, b)", 1), ("CREATE VIEW runs AS SELECT 1 AS id", 1), (SQL, 999), (SQL, -1), (SQL, 0),
        (SQL + "DROP INDEX runs_by_label; ALTER TABLE runs DROP COLUMN mlapatch", 1),
        (f"CREATE TABLE runs ({_COLUMNS}); INSERT INTO runs VALUES (NULL, 'u', 1, x'ff', 2, 3, 4, 5, 'x', 7, 8, 9)", 1),  # noqa: S608
    )  # fmt: skip
    script, version = rng.choice(scripts)
    with sqlite3.connect(path) as db:
        db.executescript(script)
        db.execute(f"PRAGMA user_version = {version}")


def _listed(path: Path, before: bytes, *, foreign: bool) -> None:
    verbs: tuple[tuple[str, ...], ...] = (
        ("runs",), ("runs", "--json"), ("runs", "1"), ("runs", "last"), ("compare", "1", "2"), ("report", "1", "2"),
    )  # fmt: skip
    for verb in verbs:
        out = ("--output", str(path.with_suffix(".sqlite3.html"))) if verb[0] == "report" else ()
        done = run(*verb, "--db", path, *out)
        if foreign and done.code == 5:
            assert path.read_bytes() == before, f"{verb}: a refused database was changed"
            return
        foreign = False


def exports(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of exported runs, taken in and then listed."""
    tally = Tally("inputs", "mutants of exported runs: runs --import, then runs")
    folder = place.work / "exports"
    folder.mkdir()
    fill(folder / "good.sqlite3", folder, layers=4)
    assert run("runs", "--export", folder / "good.jsonl", "--db", folder / "good.sqlite3").code == 0
    lines = (folder / "good.jsonl").read_bytes().splitlines()
    oracle = Oracle((), (*place.writable, folder))
    for number in range(20 if thorough else 4):
        (folder / "bad.jsonl").write_bytes(b"\n".join(_json_variant(line, rng) for line in lines))
        path = folder / f"{number}.sqlite3"

        def taken(path: Path = path) -> None:
            run("runs", "--import", folder / "bad.jsonl", "--db", path)
            for verb in (("runs",), ("runs", "last"), ("compare", "last", "last~1"), ("runs", "--json")):
                run(*verb, "--db", path)

        tally.attempt(f"{number}", taken, oracle)
        for left in folder.glob(f"{number}.sqlite3*"):
            left.unlink()
    return tally


def verdict_caches(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of the cache of verdicts: status goes on."""
    tally = Tally("inputs", "mutants of the cache of verdicts: status")
    place.restore()
    path = place.cache / "verdicts.json"
    path.unlink(missing_ok=True)
    assert run("status", "--sglang", place.site).code == 0
    data = path.read_bytes()
    for number in range(20 if thorough else 5):
        path.write_bytes(_json_variant(data, rng))

        def status() -> None:
            assert run("status", "--sglang", place.site).code == 0

        tally.attempt(f"{number}", status, Oracle((), place.writable))
    path.write_bytes(data)
    return tally


def wheel_caches(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of a kept release and of its bytes: the store gives the release's own bytes, or none."""
    tally = Tally("inputs", "mutants of the wheel cache: the release's own bytes, or none")
    entry = place.cache / "releases" / f"{VERSION}.json"
    data = entry.read_bytes()
    digests = [digest for digest in json.loads(data)["files"].values() if digest]
    for number in range(600 if thorough else 30):
        victim = entry
        if rng.random() < 0.4:
            digest = rng.choice(digests)
            victim = place.cache / "objects" / digest[:2] / digest
            if not victim.exists():
                victim = entry
        good = victim.read_bytes()
        victim.write_bytes(_json_variant(good, rng) if victim is entry else mutated(good, rng))

        def cached() -> None:
            from packaging.version import Version

            found = WheelStore(place.cache)._cached(Version(VERSION), [BACKEND])
            if found is not None and BACKEND in found.files:
                assert found.files[BACKEND] == place.originals[BACKEND], "other bytes than the release's"

        tally.attempt(f"{number}: {victim.name[:12]}", cached, Oracle((), place.writable))
        victim.write_bytes(good)
    return tally
