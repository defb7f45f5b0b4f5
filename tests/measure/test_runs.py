"""The file of runs: several processes, kills, migration, export; and comparisons that know noise."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.compare import compare
from mlapatch.commands.runs import runs
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import runs as store_module
from mlapatch.measure.keeping import keeping
from mlapatch.measure.metrics import Metric, changes
from mlapatch.measure.runs import Store
from mlapatch.outcome import Text
from tests.measure.sample_runs import fill

WRITER = """
import sys
from pathlib import Path
from mlapatch.measure.runs import Store
from tests.measure.sample_runs import fill
for number in range(int(sys.argv[3])):
    with Store(Path(sys.argv[1])) as store:
        run = store.start("bench", {"writer": sys.argv[2], "number": number})
        store.finish(run, {"number": number})
"""
KILLED = """
import sys, time
from pathlib import Path
from mlapatch.measure.runs import Store
from tests.measure.sample_runs import fill
store = Store(Path(sys.argv[1]))
for number in range(5):
    store.finish(store.start("bench", {"number": number}), {"number": number})
store.start("bench", {"number": 5})
store._db.execute("BEGIN IMMEDIATE")
store._db.execute("DELETE FROM runs")
print("ready", flush=True)
time.sleep(60)
"""


def process(script: str, *arguments: object) -> subprocess.Popen[str]:
    source = str(Path(store_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    db = tmp_path / "new" / "runs.sqlite3"
    writers = [process(WRITER, db, name, 40) for name in "abc"]
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    with Store(db) as store:
        found = store.all()
    assert sorted((run.setup["writer"], run.result["number"]) for run in found) == [
        (name, number) for name in "abc" for number in range(40)
    ]
    assert {run.status for run in found} == {"done"}


def test_a_kill_loses_at_most_the_unfinished_run(tmp_path: Path) -> None:
    db = tmp_path / "runs.sqlite3"
    victim = process(KILLED, db)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "ready\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    with Store(db) as store:
        found = store.all()
        assert [(run.setup["number"], run.state) for run in found] == [
            (5, "lost"),
            *((n, "done") for n in (4, 3, 2, 1, 0)),
        ]
        store.finish(store.start("bench", {}), {})


def _fail_half_way(result: dict[str, Any]) -> None:
    result["half"] = 1
    raise ValueError("no")


def test_an_exception_marks_the_run_as_failed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), keeping(True, tmp_path / "db", "bench", {}, "") as kept:
        _fail_half_way(kept.result)
    with pytest.raises(KeyboardInterrupt), keeping(True, tmp_path / "db", "bench", {}, ""):
        raise KeyboardInterrupt
    with Store(tmp_path / "db") as store:
        second, first = store.all()
    assert (first.status, first.result) == ("failed", {"half": 1, "error": "ValueError: no"})
    assert (second.status, second.state, second.decided) == ("interrupted", "interrupted", False)


def test_an_older_file_is_migrated_and_a_newer_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = tmp_path / "db"
    with Store(db) as store:
        store.start("bench", {"kept": 1})
    newer = [*store_module.MIGRATIONS, "ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT ''"]
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "MIGRATIONS", newer)
        with Store(db) as store:
            assert store.all()[0].setup == {"kept": 1}
    with pytest.raises(MlapatchError, match="newer mlapatch") as caught:
        Store(db)
    assert caught.value.exit is Exit.ENVIRONMENT


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = tmp_path / "db"
    Store(db).__exit__()
    bad = [*store_module.MIGRATIONS, "ALTER TABLE runs ADD COLUMN note TEXT; ALTER TABLE nothing ADD COLUMN x"]
    monkeypatch.setattr(store_module, "MIGRATIONS", bad)
    with pytest.raises(MlapatchError, match="cannot be used"):
        Store(db)
    connection = sqlite3.connect(db)
    assert "note" not in connection.execute("SELECT sql FROM sqlite_master WHERE name = 'runs'").fetchone()[0]
    connection.close()


def test_what_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").write_text("hello, this is not a database at all" * 10)
    with pytest.raises(MlapatchError, match="cannot be used"):
        Store(tmp_path / "db")


def test_export_and_import(tmp_path: Path) -> None:
    with Store(tmp_path / "a") as store:
        store.finish(store.start("bench", {"x": 1}, "stock"), {"y": 2})
        store.start("trace", {})
    out = tmp_path / "out.jsonl"
    runs(export=out, db=tmp_path / "a")
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["bench", "trace"]
    for added in (2, 0):
        assert runs(take_in=out, db=tmp_path / "b").data == {"added": added}
    with Store(tmp_path / "b") as store:
        assert store.get("stock").result == {"y": 2}
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(MlapatchError, match="not an export"):
        runs(take_in=tmp_path / "bad", db=tmp_path / "b")


def test_runs_are_found_by_what_people_type(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        for label in ("stock", "patched", "stock"):
            store.finish(store.start("bench", {}, label), {})
        assert [store.get(name).id for name in ("1", "stock", "last", "last~1", "patched")] == [1, 3, 3, 2, 2]
        assert store.get(store.get("2").uid[:6]).id == 2
        with pytest.raises(MlapatchError, match=r"no run 'x'$"):
            store.get("x")
        with pytest.raises(MlapatchError, match="no run 'stok'; did you mean 'stock'"):
            store.get("stok")


def test_a_kind_is_one_that_a_run_can_have(tmp_path: Path) -> None:
    db = tmp_path / "db"
    with Store(db) as store:
        store.finish(store.start("verify", {}), {})
        store.finish(store.start("verify", {}), {})
    for export in (None, tmp_path / "x"):
        with pytest.raises(MlapatchError, match="no kind of run 'bnch'; did you mean 'bench'") as caught:
            runs(kind="bnch", db=db, export=export)
        assert caught.value.exit is Exit.USAGE
        assert caught.value.expected == "bench, profile, trace, launch, verify"
    (shown,) = runs(kind="bench", db=db).blocks
    assert isinstance(shown, Text)
    assert shown.lines == [f"No bench in {db} (2 verify). Next: mlapatch runs"]
    (shown,) = runs(kind="bench", db=tmp_path / "empty").blocks
    assert isinstance(shown, Text)
    assert shown.lines[0].startswith("No runs yet in ")


def metric(*values: float, name: str = "TPOT", better: str = "lower") -> Metric:
    return Metric("512 in", name, "ms", better, values)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((70.0, 71.0, 72.0), (5.2, 5.24, 5.26), "better"),
        ((5.2, 5.24, 5.26), (70.0, 71.0, 72.0), "worse"),
        ((70.0, 71.0, 73.0), (69.0, 71.9, 72.0), "noise"),
        ((70.0, 70.1, 70.2), (70.3, 70.4, 70.5), "noise"),
        ((70.0,), (71.0,), "noise"),
        ((70.0,), (75.0,), "worse"),
    ],
)
def test_a_change_must_exceed_the_noise(a: tuple[float, ...], b: tuple[float, ...], verdict: str) -> None:
    assert changes([metric(*a)], [metric(*b)])[0].verdict == verdict


def test_throughput_is_better_when_higher() -> None:
    a, b = metric(216.0, better="higher"), metric(1538.0, better="higher")
    assert changes([a], [b])[0].verdict == "better"


def _bench(store: Store, label: str, pool: int | None, *tpot: float) -> None:
    server: dict[str, Any] = {"gpu": "NVIDIA H200", "version": "0.5.15.post1"}
    if pool:
        server["pool_tokens"] = pool
    run = store.start("bench", {"server": server, "load": {"repeats": 3}}, label)
    store.finish(run, {"metrics": [metric(*tpot).as_dict()]})


def test_compare_says_what_changed_and_when_it_must_not(tmp_path: Path) -> None:
    db = tmp_path / "db"
    with Store(db) as store:
        _bench(store, "stock", 495_552, 69.8, 70.5, 71.3)
        _bench(store, "patched", 495_552, 5.23, 5.25, 5.26)
        _bench(store, "small", 131_072, 20.0, 20.1, 20.2)
        _bench(store, "unknown", None, 20.0, 20.1, 20.2)
    data: Any = compare(a="stock", b="patched", db=db).data
    assert data["comparable"] is True
    assert data["pairs"][0]["changes"][0]["verdict"] == "better"
    assert data["pairs"][0]["setup"] == []
    data = compare(a="stock", b="small", db=db).data
    assert data["comparable"] is False
    assert "495552 against 131072" in data["pairs"][0]["obstacles"][0]
    assert compare(a="stock", b="unknown", db=db).data["comparable"] is False


def test_runs_are_deleted_by_number_all_or_none(tmp_path: Path) -> None:
    db = tmp_path / "db"
    with Store(db) as store:
        for label in ("a", "b", "a", ""):
            store.finish(store.start("bench", {}, label), {})
        store.start("bench", {})
        left = [run.id for run in store.all()]
    for wrong, said in (("a", "number 'a'"), ("9", "number '9'"), ("last", "number 'last'"), ("5", "is not over yet")):
        with pytest.raises(MlapatchError, match=said) as caught:
            runs(delete=["1", wrong], db=db)
        assert caught.value.exit is Exit.USAGE
        with Store(db) as store:
            assert [run.id for run in store.all()] == left
    assert runs(delete=["1", "3", "1"], db=db).data["deleted"] == [1, 3]
    with Store(db) as store:
        assert [run.id for run in store.all()] == [5, 4, 2]
        assert store.start("bench", {}) == 6, "a number is never given again"
    with pytest.raises(MlapatchError, match="goes with nothing else"):
        runs(delete=["2"], kind="bench", db=db)


def test_a_run_that_nothing_here_will_end_can_be_deleted(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    whose = [("another machine", os.getpid()), ("", 1), (here, gone.pid), (here, 0), (here, os.getpid())]
    with Store(tmp_path / "db") as store:
        store.add(
            {"uid": str(number), "kind": "bench", "status": "running", "host": host, "pid": pid}
            for number, (host, pid) in enumerate(whose)
        )
        assert [run.state for run in reversed(store.all())] == ["running", "running", "lost", "lost", "running"]
    with pytest.raises(MlapatchError, match="run 5 is not over yet"):
        runs(delete=["1", "5"], db=tmp_path / "db")
    assert runs(delete=["1", "2", "3", "4"], db=tmp_path / "db").data["deleted"] == [1, 2, 3, 4]


def test_a_verify_that_took_less_time_is_no_better(tmp_path: Path) -> None:
    with Store(tmp_path / "db") as store:
        for spent in (20.0, 10.0):
            found = Metric("active-cast", "seconds", "s", "lower", (spent,)).as_dict()
            store.finish(
                store.start("verify", {}), {"metrics": [found], "outcome": {"active-cast": {"result": "pass"}}}
            )
    data: Any = compare(a="1", b="2", db=tmp_path / "db").data
    assert [change["verdict"] for change in data["pairs"][0]["changes"]] == ["changed"]


def test_labels_compare_every_kind_that_both_have(tmp_path: Path) -> None:
    fill(tmp_path / "db", tmp_path, layers=4)
    data: Any = compare(a="stock", b="patched", db=tmp_path / "db").data
    assert [(pair["kind"], pair["a"], pair["b"]) for pair in data["pairs"]] == [("bench", 1, 2), ("profile", 3, 4)]
    with Store(tmp_path / "db") as store:
        for kind, label in (("bench", "only"), ("trace", "only"), ("launch", "x"), ("verify", "x")):
            store.finish(store.start(kind, {}, label), {})
    with pytest.raises(MlapatchError, match="no kind of run in common"):
        compare(a="only", b="x", db=tmp_path / "db")
