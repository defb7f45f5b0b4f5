"""Each kind of defect that the campaign `inputs` found, as a test of its own; the campaign itself tries more."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlapatch.cli.render import _json, visible
from mlapatch.engine.judgement import Judgement
from mlapatch.engine.patch import load_patch
from mlapatch.engine.verdict import apply
from mlapatch.install.journal import Journal
from mlapatch.jsontext import parsed
from mlapatch.measure import metrics
from mlapatch.measure.runs import MIGRATIONS
from mlapatch.verdict_cache import VerdictCache
from tests.cli.conftest import process
from tests.reliability._attempts import Oracle, TooLong, limited, run, watched
from tests.reliability._readings import CONFIG
from tests.reliability._strangers import NAMED, Build

EVENT: dict[str, Any] = {
    "ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0,
    "args": {"grid": [1, 1, 1], "block": [1, 1, 1], "correlation": 1},
}  # fmt: skip


@pytest.mark.parametrize(("build", "code"), [pytest.param(build, code, id=name) for name, build, code in NAMED])
def test_a_strangers_folder_is_read_or_refused_quickly(tmp_path: Path, build: Build, code: int) -> None:
    folder = tmp_path / "catalogue" / "mine"
    folder.mkdir(parents=True)
    build(folder)
    oracle = Oracle((folder.parent,), (tmp_path / "nowhere",))
    with limited(), watched(oracle):
        done = run("list", "--patches", folder.parent)
    assert done.code == (2 if code == 2 else 0), done
    assert len(done.err) < 5000
    assert not oracle.broken


@pytest.mark.parametrize(
    "odd",
    [
        {"tid": [1], "cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"cat": "gpu_user_annotation", "name": f"step[DECODE bs={'9' * 5000}"},
        {"name": [1]}, {"pid": {"a": 1}}, {"cat": ["kernel"]}, {"cat": "cpu_op", "name": {}},
        {"args": {"grid": [[1], {}, None]}}, {"args": {"grid": ["a"], "block": [2**62] * 9}},
        {"args": {"grid": [1, 1, 1], "correlation": 2**63}}, {"ts": 10**400}, {"ts": 1e308, "dur": 1e308},
        {"dur": float("nan")}, {"dur": float("inf")}, {"name": "<" * 10_000 + ">" * 10_000},
    ],
)  # fmt: skip
def test_an_event_of_any_shape_is_counted_or_left_out(tmp_path: Path, odd: dict[str, Any]) -> None:
    path = tmp_path / "a.trace.json"
    path.write_text(json.dumps({"traceEvents": [EVENT, {**EVENT, **odd}] * 20}))
    with limited():
        assert run("trace", path).code == 0


@pytest.mark.parametrize("text", [b'{"\\x": 1}', b'{"\xff": 1}', b"[" * 100_000, b'{"traceEvents":[' + b"[" * 100_000])
def test_a_trace_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.trace.json"
    path.write_bytes(text)
    assert run("trace", path).code == 2


@pytest.mark.parametrize(
    "odd", [{"num_hidden_layers": 0}, {"num_hidden_layers": -5}, {"kv_lora_rank": 10**400}, {"kv_lora_rank": True}, []]
)
def test_a_config_of_any_shape_is_refused(tmp_path: Path, odd: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **odd} if odd else odd))
    done = run("estimate", "--model", path)
    assert done.code == 2, done


def test_a_config_may_say_odd_things_elsewhere(tmp_path: Path) -> None:
    odd = {"index_head_dim": -(10**30), "qk_nope_head_dim": [], "architectures": 5, "model_type": {"a": "\x1b[2J"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **odd}))
    for verb in (("estimate",), ("backends", "--release", "0.5.9", "--gpu", "h200")):
        assert run(*verb, "--model", path).code == 0


def database(path: Path, *rows: str, version: int = 1, schema: str = MIGRATIONS[0]) -> bytes:
    with sqlite3.connect(path) as db:
        db.executescript(schema)
        for row in rows:
            db.execute(f"INSERT INTO runs VALUES ({row})")  # noqa: S608
        db.execute(f"PRAGMA user_version = {version}")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("schema", "version"),
    [("CREATE TABLE bookmarks (a)", 0), ("CREATE TABLE bookmarks (a)", 1), ("CREATE TABLE runs (a)", 0),
     ("CREATE TABLE runs (a)", 1), (MIGRATIONS[0], -1), (MIGRATIONS[0], 999)],
)  # fmt: skip
def test_another_programs_database_stays_as_it_is(tmp_path: Path, schema: str, version: int) -> None:
    path = tmp_path / "places.sqlite"
    before = database(path, version=version, schema=schema)
    done = run("runs", "--db", path)
    assert (done.code, path.read_bytes() == before) == (5, True), done
    assert [item.name for item in tmp_path.iterdir()] == ["places.sqlite"]


@pytest.mark.parametrize(
    "row",
    [
        "1, 'u', 'bench', '', 'done', '2026', NULL, 'h', 1, 'x', '{', '[1]'",
        "1, x'ff', 'bench', x'ff', 'running', x'ff', NULL, x'ff', x'ff', x'ff', '{}', '{}'",
        "1, 'u', 'bench', 5, 'done', '2026', NULL, 'h', 'x', 'x', '{}', '{\"metrics\": [1, {\"values\": [{}, null]}]}'",
    ],
)
def test_a_damaged_run_hides_no_other(tmp_path: Path, row: str) -> None:
    path = tmp_path / "runs.sqlite3"
    database(path, row, "2, 'v', 'bench', 'good', 'done', '2026', NULL, 'h', 1, 'x', '{}', '{}'")
    assert "label: good" in run("runs", "--db", path).out
    for verb in (("runs", "1"), ("runs", "--json"), ("compare", "1", "2")):
        assert run(*verb, "--db", path).code in (0, 2)


def test_figures_that_are_none_are_left_out() -> None:
    odds: tuple[Any, ...] = (5, [5], [{}], [{"values": 5}], [{"values": ["x", None, float("nan"), 10**400]}])
    for odd in odds:
        assert metrics.of({"metrics": odd}) == []
    (one,) = metrics.of({"metrics": [{"values": [1, "x"], "name": 7}]})
    assert (one.name, one.values) == ("7", (1.0,))


def test_nothing_steers_the_terminal() -> None:
    assert visible("a\x1b[2J\x9b31m\u202e\r\x07\x7f\n\tb") == "a\\x1b[2J\\x9b31m\\u202e\\r\\x07\\x7f\n\tb"
    assert json.loads(_json(["\x9b\u202e\x7f\x1b"])) == ["\x9b\u202e\x7f\x1b"]
    assert _json("\x9b\u202e\x7f\x1b\n") == '"\\u009b\\u202e\\u007f\\u001b\\n"'
    assert visible("é 🙂 /päth\\x") == "é 🙂 /päth\\x"


def test_paths_need_not_be_utf8(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J")
    done = process("status", "--json", "--sglang", odd)
    assert done.code == 5
    assert json.loads(done.out)["error"]["where"].startswith(str(tmp_path))
    assert process("status", "--sglang", "a" * 5000).code == 5
    assert process("--help", env={"PYTHONIOENCODING": "ascii:strict"}).code == 0


def test_a_bug_is_reported_without_a_temporary_folder(tmp_path: Path) -> None:
    code = "import mlapatch.cli as c, sys, tempfile\ndef no(**_): raise OSError('full')\ntempfile.mkstemp = no\n"
    code += "sys.exit(c._report_bug(ValueError('\\udcff\\x1b[2J')))"
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 70
    assert done.stderr.startswith("error: a bug in mlapatch (ValueError: ")
    assert "\x1b" not in done.stderr


def test_nesting_is_no_traceback(tmp_path: Path) -> None:
    deep = "[" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed(deep)
    (tmp_path / "journal.json").write_text(deep)
    (tmp_path / "verdicts.json").write_text(deep)
    assert Journal(tmp_path).entries() == {}
    assert VerdictCache(tmp_path / "verdicts.json").kept == {}


def test_a_journal_names_no_file_outside(tmp_path: Path) -> None:
    for digest in ("/dev/zero", "../journal.json", "\0", "", "a" * 5000):
        assert Journal(tmp_path).object(digest) is None
    step = {"path": "/dev/zero", "new": "0" * 64, "entry": None}
    (tmp_path / "journal.json").write_text(json.dumps({"format": 1, "targets": {}, "pending": {"a": step}}))
    assert Journal(tmp_path).entries() == {}


def test_the_oracle_sees_what_it_must(tmp_path: Path) -> None:
    folder, fine = tmp_path / "folder", tmp_path / "fine"
    folder.mkdir()
    fine.mkdir()
    (folder / "planted.py").write_text("x = 1\n")
    oracle = Oracle((folder,), (fine,))
    with watched(oracle):
        (fine / "a").write_text("")
        (folder / "planted.py").read_text()
    assert not oracle.broken
    with watched(oracle):
        (tmp_path / "b").write_text("")
        (tmp_path / "b").rename(fine / "c")
        exec(compile("x = 1", str(folder / "planted.py"), "exec"))  # noqa: S102
        os.system("true")  # noqa: S605
    assert [one.split()[0] for one in oracle.broken] == [
        "open",
        "os.rename",
        "executed",
        "os.system('true',)"[:9] + "(b'true',)",
    ]


def test_a_hang_is_ended() -> None:
    def endless() -> None:
        with limited(0.1):
            while True:
                pass

    with pytest.raises(TooLong):
        endless()


def test_an_inserted_line_cannot_change_the_files_coding() -> None:
    table = {
        "name": "p", "summary": "", "target": "a.py", "post": [{"scope": "module", "present": "added = {x}"}],
        "edit": [{"scope": "module", "at": "start", "code": "# coding: latin-1\nadded = 1\n"}],
    }  # fmt: skip
    outcome = apply("x = 'é'\n".encode(), load_patch(table, {}), None)
    assert isinstance(outcome, Judgement)
    assert outcome.reason == "the patched a.py would be iso-8859-1, not utf-8"


@pytest.mark.parametrize(
    "odd",
    [
        {"pid": -1}, {"pid": 0}, {"pid": True}, {"pid": "1"}, {"pid": 2**40}, {"session": None}, {"created": "x"},
        {"created": float("nan")}, {"name": ["x"]}, {"command": "rm"}, {"log": "/etc/passwd"}, {"x": 1}, {"port": {}},
    ],
)  # fmt: skip
def test_a_damaged_record_of_a_server_signals_and_writes_nothing(tmp_path: Path, odd: dict[str, Any]) -> None:
    own = psutil.Process()
    good = {"name": "s", "pid": own.pid, "created": own.create_time(), "session": -1, "started": "", "command": ["x"]}
    (tmp_path / "s.json").write_text(json.dumps({**good, "log": "s.log", **odd}))
    oracle = Oracle((), (tmp_path,))
    with watched(oracle):
        assert run("stop", "--logs", tmp_path).code == 0
        assert run("logs", "--logs", tmp_path).code in (2, 5)
        assert run("logs", "--list", "--logs", tmp_path).code == 0
    assert not oracle.broken


def test_a_kept_verdict_of_another_patch_is_not_believed() -> None:
    table = {
        "name": "p", "summary": "", "target": "a.py", "post": [{"scope": "module", "present": "f()"}],
        "edit": [{"scope": "module", "at": "end", "code": "f()\n"}],
    }  # fmt: skip
    cache, patch = VerdictCache(None), load_patch(table, {})
    right = cache.judge(b"def f(): pass\n", patch, None)
    (key,) = cache.kept
    odds: tuple[dict[str, Any], ...] = ({"name": "q"}, {"name": None}, {"traces": float("inf")}, {"verdict": []})
    for odd in odds:
        cache.kept[key] = {**right.to_cache(), **odd}
        assert cache.judge(b"def f(): pass\n", patch, None) == right
