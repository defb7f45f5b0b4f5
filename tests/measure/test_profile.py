"""`profile` against a server that writes a trace a rank, slowly, once a load came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.profile import profile
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure.profiling import expected_files
from mlapatch.measure.runs import Store
from tests.measure.fake_server import Behaviour, serve


def run(how: Behaviour, path: Path, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"steps": 4, "output": 20, "input_tokens": 16, "timeout": 30, **options}
    with serve(how) as url:
        return dict(profile(url=url, output_dir=path / "traces", db=path / "db", **settings).data)


def test_every_ranks_trace_is_read_and_kept(tmp_path: Path) -> None:
    how = Behaviour(ranks=2)
    data = run(how, tmp_path, label="stock")
    assert [rank["rank"] for rank in data["trace"]["ranks"]] == ["0", "1"]
    assert data["trace"]["cast_found"] is True
    assert [rank["steps"] for rank in data["trace"]["ranks"]] == [4, 4]
    body = how.profiles[0]
    assert body["with_stack"] is body["record_shapes"] is False
    assert (body["activities"], body["num_steps"]) == (["GPU"], 4)
    assert how.stopped == 0
    with Store(tmp_path / "db") as store:
        kept = store.get("stock")
    assert kept.kind == "profile"
    assert kept.result["metrics"][0]["values"] == [rank["step_ms"] for rank in data["trace"]["ranks"]]


def test_the_profile_starts_only_once_tokens_arrive(tmp_path: Path) -> None:
    how = Behaviour(ranks=1)
    run(how, tmp_path)
    assert len(how.requests) >= 1
    assert len(how.profiles) == 1


def test_a_busy_profiler_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError, match="refuses to profile") as caught:
        run(Behaviour(busy_profile=True), tmp_path)
    assert "already in progress" in caught.value.found
    assert "/stop_profile" in caught.value.next


def test_missing_files_stop_the_profiler(tmp_path: Path) -> None:
    how = Behaviour(write_traces=False)
    with pytest.raises(MlapatchError, match="not every rank") as caught:
        run(how, tmp_path, timeout=0.5)
    assert caught.value.exit is Exit.SERVER
    assert how.stopped == 1
    with Store(tmp_path / "db") as store:
        assert store.all()[0].status == "failed"


def test_a_server_that_answers_nothing(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError, match="answers no request"):
        run(Behaviour(fail=9), tmp_path)


def test_an_openai_endpoint_cannot_be_profiled(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError, match="no inference server"):
        run(Behaviour(api="openai"), tmp_path)


@pytest.mark.parametrize(
    ("facts", "files"),
    [
        ({}, 1),
        ({"tp": 8}, 8),
        ({"tp": 8, "dp": 8, "dp_attention": True}, 8),
        ({"tp": 2, "dp": 4, "dp_attention": False}, 8),
        ({"tp": 16, "nodes": 2}, 8),
        ({"tp": 4, "pp": 2}, 8),
    ],
)
def test_how_many_files_to_wait_for(facts: dict[str, Any], files: int) -> None:
    assert expected_files(facts) == files
