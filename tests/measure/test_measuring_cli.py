"""The measuring verbs as typed: help with an example, exit codes, JSON and plain output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mlapatch.cli import measuring
from tests.measure.fake_server import Behaviour, serve
from tests.measure.synthetic import Scene

VERBS = ("estimate", "trace", "profile", "bench", "runs", "compare", "report")


def invoke(*arguments: object) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    measuring.register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str) -> None:
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert f"Example: mlapatch {verb}" in result.output


def test_the_whole_loop_as_typed(tmp_path: Path) -> None:
    db = tmp_path / "runs.sqlite3"
    for label in ("stock", "patched"):
        with serve(Behaviour()) as url:
            result = invoke("bench", "--url", url, "-i", 32, "-o", 6, "-r", 2, "--label", label, "--db", db, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["setup"]["server"]["pool_tokens"] == 495_552
    listed = json.loads(invoke("runs", "--db", db, "--json").stdout)["runs"]
    assert [run["label"] for run in listed] == ["patched", "stock"]
    assert json.loads(invoke("compare", "stock", "--db", db, "--json").stdout)["comparable"] is True
    assert "TPOT" in invoke("runs", "last", "--db", db).stdout
    lines = invoke("runs", "--export", "-", "--json", "--db", db).stdout.splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["stock", "patched"]


def test_errors_have_their_codes(tmp_path: Path) -> None:
    assert invoke("estimate", "--gpu", "voodoo").exit_code == 2
    assert invoke("trace", tmp_path / "none.json").exit_code == 2
    assert invoke("bench", "--url", "http://127.0.0.1:9", "--no-keep").exit_code == 6
    assert invoke("runs", "9", "--db", tmp_path / "db").exit_code == 2
    (tmp_path / "bad").write_bytes(b"x" * 2000)
    assert invoke("runs", "--db", tmp_path / "bad").exit_code == 5


def test_trace_prints_json(tmp_path: Path) -> None:
    path = Scene(layers=4, steps=3).write(tmp_path / "a-TP-0.trace.json.gz")
    data = json.loads(invoke("trace", path, "--json").stdout)
    assert data["cast_found"] is True
    plain = invoke("trace", path).stdout
    assert "KV-pool cast: " in plain
    assert "12 calls = 4 layers x 3 steps" in plain
