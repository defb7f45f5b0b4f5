"""`launch` keeps a run when the start is decided, and nothing that the store does reaches the server."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mlapatch
from mlapatch.commands.compare import compare
from mlapatch.commands.launch import launch
from mlapatch.commands.report import report
from mlapatch.commands.runs import runs
from mlapatch.commands.stop import stop
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure.runs import Run, Store
from mlapatch.outcome import Outcome, Pairs, Text, Warn
from mlapatch.serve.follow import Timing
from mlapatch.serve.preflight import PatchedFile, PatchFacts
from mlapatch.serve.run_record import load_all
from tests.serve.test_launch import FAKE, end_all, free_port, until

BACKEND = "/sp/sglang/srt/layers/attention/flashinfer_mla_backend.py"
SHA = "ab" * 32
FACTS = PatchFacts(
    sglang="0.5.15.post1",
    files=(PatchedFile(Path(BACKEND), SHA, ("active-cast",)),),
    digests={"active-cast": "0123456789abcdef"},
)


@dataclass
class Place:
    """A folder with the file of runs and the logs."""

    folder: Path
    port: int
    said: list[str] = field(default_factory=list)

    @property
    def db(self) -> Path:
        return self.folder / "runs.sqlite3"

    def command(self, *extra: str) -> list[str]:
        return [sys.executable, str(FAKE), "--port", str(self.port), *extra]

    def launch(self, *extra: str, **options: Any) -> Outcome:
        timing = Timing(look=0.03, poll=0.05, linger=0.3, report_silence=0.4)
        settings: dict[str, Any] = {"command": self.command(*extra), "name": "fake", "force": True, "detach": True}
        settings |= {"logs": self.folder / "logs", "tell": self.said.append, "timing": timing, "db": self.db}
        outcome = launch(**(settings | options))
        stop(logs=self.folder / "logs")
        return outcome

    def kept(self) -> list[Run]:
        with Store(self.db) as store:
            return store.all()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("FAKE_TMP", str(tmp_path))
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: FACTS)
    yield Place(tmp_path, free_port())
    end_all(tmp_path)


MARKED = ("--mark", BACKEND, SHA)


def test_a_ready_server_is_kept(place: Place) -> None:
    outcome = place.launch("--tp", "2", *MARKED, "--api-key", "hunter2-is-secret", label="patched")
    assert outcome.exit is Exit.OK, outcome.data
    (run,) = place.kept()
    assert (outcome.data["run"], run.kind, run.label, run.state) == (run.id, "launch", "patched", "done")
    assert Pairs([("run", str(run.id))]) in outcome.blocks
    assert run.setup["command"] == load_all(place.folder / "logs")[0].command
    assert "hunter2" not in json.dumps(run.as_dict())
    assert run.setup["options"]["api-key"] == "***"
    assert (run.setup["options"]["tp-size"], run.setup["server"]["tp"]) == ("2", 2)
    assert (run.setup["sglang"], run.setup["name"]) == ("0.5.15.post1", "fake")
    assert run.setup["patches"] == {
        "applied": ["active-cast"],
        "digests": {"active-cast": "0123456789abcdef"},
        "files": {"flashinfer_mla_backend.py": SHA},
    }
    assert run.result["state"] == "ready"
    assert run.result["phases"] == outcome.data["phases"]
    assert run.result["outcome"]["ranks"] == {"flashinfer_mla_backend.py": {SHA: "TP0, TP1"}}
    figures = {(metric["case"], metric["name"]): metric["values"] for metric in run.result["metrics"]}
    assert figures["launch", "seconds to ready"] == [run.result["seconds"]]
    assert ("warm-up", "seconds in phase") in figures
    assert run.result["summary"] == f"ready after {run.result['seconds']:.1f} s"


def test_a_failed_start_is_kept_with_its_rule(place: Place) -> None:
    place.launch("--tp", "2", *MARKED)
    outcome = place.launch("--tp", "2", "--die-in", "graph-capture", "--die-how", "oom")
    assert outcome.exit is Exit.SERVER
    found: Any = outcome.data["diagnosis"]
    failed, ready = place.kept()
    assert (failed.state, outcome.data["run"]) == ("failed", failed.id)
    assert failed.result["outcome"]["diagnosis"] == {key: found[key] for key in ("rule", "phase", "rank", "cause")}
    assert found["rule"]
    assert found["phase"] == "graph-capture"
    assert ("launch", "seconds to ready") not in {(m["case"], m["name"]) for m in failed.result["metrics"]}
    listed: Any = runs(kind="launch", db=place.db)
    rows = [row[-1] for row in listed.blocks[0].rows]
    assert f"in graph-capture: {found['rule']}" in rows[0]
    assert rows[1] == ready.result["summary"]
    shown = runs(run=str(failed.id), db=place.db)
    assert ("log", outcome.data["log"]) in shown.blocks[0].rows  # type: ignore[union-attr]
    compared: Any = compare(a=str(ready.id), b=str(failed.id), db=place.db).data
    (pair,) = compared["pairs"]
    changed = {entry["key"]: (entry["a"], entry["b"]) for entry in pair["outcome"]}
    assert changed["state"] == ("ready", "failed")
    assert changed["diagnosis.rule"] == ("-", found["rule"])
    assert {entry["key"] for entry in pair["setup"]} >= {"options.die-in", "options.die-how"}
    assert Text(["launch: the same came out."]) in compare(a=str(ready.id), b=str(ready.id), db=place.db).blocks
    with pytest.raises(MlapatchError, match="no run to report on"):
        report(output=place.folder / "page.html", db=place.db)
    runs(export=place.folder / "all.jsonl", db=place.db)
    lines = (place.folder / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["result"]["state"] for line in lines] == ["ready", "failed"]


def test_a_server_that_answers_garbage_is_kept_as_failed(place: Place) -> None:
    assert place.launch("--answer", "repeats", *MARKED).exit is Exit.SERVER
    (run,) = place.kept()
    assert (run.state, run.result["state"]) == ("failed", "failed")
    assert run.result["outcome"]["diagnosis"]["rule"] == "ready-check"


def test_one_that_serves_in_the_foreground_is_kept_when_it_is_ready(place: Place) -> None:
    """By the command line, as a user has it: MLAPATCH_DB, and SIGTERM as the end."""
    environment = {**os.environ, "MLAPATCH_DB": str(place.db)}
    environment["PYTHONPATH"] = str(Path(mlapatch.__file__).parents[1])
    words = ["launch", "--logs", str(place.folder / "logs"), "--force", "--label", "mine", "--command", "--"]
    command = [sys.executable, "-m", "mlapatch", *words, *place.command()]
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: place.db.exists() and any(run.state == "done" for run in place.kept()))
    (run,) = place.kept()
    assert launcher.poll() is None
    assert (run.label, run.result["state"]) == ("mine", "ready")
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=60)
    assert place.kept() == [run]


def test_an_interrupted_start_is_kept_as_such(place: Place) -> None:
    def interrupt() -> None:
        until(lambda: any("started pid" in line for line in place.said))
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        place.launch("--die-in", "weights", "--die-how", "hang")
    (run,) = place.kept()
    assert (run.state, run.result["error"], run.setup["name"]) == ("interrupted", "interrupted", "fake")


def _not_a_database(db: Path) -> None:
    db.write_bytes(b"x" * 4096)


def _another_programs(db: Path) -> None:
    with sqlite3.connect(db) as other:
        other.execute("CREATE TABLE theirs (a)")


def _a_folder(db: Path) -> None:
    db.mkdir()


@pytest.mark.parametrize("spoil", [_not_a_database, _another_programs, _a_folder])
@pytest.mark.parametrize("fails", [False, True])
def test_a_store_that_cannot_be_used_changes_nothing(place: Place, spoil: Callable[[Path], None], fails: bool) -> None:
    spoil(place.db)
    outcome = place.launch(*(("--die-in", "weights", "--die-how", "exit") if fails else MARKED))
    assert outcome.exit is (Exit.SERVER if fails else Exit.OK), outcome.data
    assert (outcome.data["state"], outcome.data["run"]) == ("failed" if fails else "ready", None)
    warnings = [block.text for block in outcome.blocks if isinstance(block, Warn) and "not kept" in block.text]
    assert len(warnings) == 1
    assert str(place.db) in warnings[0]


def test_a_store_that_fails_when_the_server_is_ready(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(Store, "finish", broken)
    outcome = place.launch(*MARKED)
    assert (outcome.exit, outcome.data["run"]) == (Exit.OK, None)
    assert "not kept as a run: stale file handle (OSError)" in {b.text for b in outcome.blocks if isinstance(b, Warn)}


def test_a_store_that_another_process_holds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlapatch.measure.keeping.BY_THE_WAY_SECONDS", 0.2)
    Store(place.db).__exit__()
    with sqlite3.connect(place.db, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        outcome = place.launch(*MARKED)
    assert (outcome.exit, outcome.data["state"], outcome.data["run"]) == (Exit.OK, "ready", None)
    assert any("database is locked" in block.text for block in outcome.blocks if isinstance(block, Warn))


def test_arguments_that_are_no_utf8_are_kept(place: Place) -> None:
    outcome = place.launch(*MARKED, "--served-model-name", "mod\udcffel")
    assert (outcome.exit, outcome.data["state"]) == (Exit.OK, "ready"), outcome.data
    (run,) = place.kept()
    assert run.setup["options"]["served-model-name"] == "mod?el"


def test_what_starts_nothing_is_no_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.launch(dry_run=True).data["state"] == "dry-run"
    facts = PatchFacts(guard="violated", guard_text="1 edit is gone")
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: facts)
    assert place.launch().data["state"] == "refused"
    monkeypatch.setattr("mlapatch.commands.launch.patch_facts", lambda *_: FACTS)
    assert place.launch(*MARKED, keep=False).data["run"] is None
    assert not place.db.exists()
