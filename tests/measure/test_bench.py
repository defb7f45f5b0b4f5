"""`bench`: what a stream's stamps mean, and every kind of stream read from a real socket. No test asserts a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.bench import bench
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import benchmark, server
from mlapatch.measure.runs import Store
from mlapatch.measure.stream import lines, parse
from tests.measure.fake_server import Behaviour, serve


def run(how: Behaviour, db: Path, **options: Any) -> dict[str, Any]:
    with serve(how) as url:
        settings: dict[str, Any] = {"inputs": [64], "output": 24, "repeats": 2, "db": db, **options}
        return dict(bench(url=url, **settings).data)


def test_a_stream_is_timed_as_bench_serving_does() -> None:
    """TPOT = (latency - TTFT) / (tokens - 1); a chunk of four tokens gives four ITLs of a quarter of its gap."""
    blocks = [
        (10.5, b'data: {"text": "a", "meta_info": {"completion_tokens": 1, "cached_tokens": 3}}\n\n'),
        (10.9, b'data: {"text": "abcde", "meta_info": {"completion_tokens": 5}}\n\ndata: {"te'),
        (11.0, b'xt": "abcdef", "meta_info": {"completion_tokens": 6}}\n\ndata: [DONE]\n\n'),
    ]
    stream = parse(blocks, 10.0, 6)
    assert stream.ttft == pytest.approx(0.5)
    assert stream.latency == pytest.approx(1.0)
    assert stream.tpot == pytest.approx(0.1)
    assert stream.itl == pytest.approx([0.1] * 5)
    assert (stream.tokens, stream.cached, stream.first_tokens) == (6, 3, 1)


def test_openai_chunks_without_usage_count_one_token_each() -> None:
    blocks = [(float(n), b'data: {"choices": [{"text": "x"}]}\n\n') for n in range(1, 5)]
    assert parse(blocks, 0.0, 4).tpot == pytest.approx(1.0)


def test_the_closing_usage_is_no_token() -> None:
    one = b'data: {"choices": [{"text": "x"}], "usage": {"completion_tokens": %d}}\n\n'
    end = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    stream = parse([(1.0, one % 1), (2.0, one % 2), (9.0, end)], 0.0, 2)
    assert (stream.tokens, len(stream.itl)) == (2, 1)


def test_lines_survive_any_cut() -> None:
    text = b'data: {"a": 1}\r\n\r\n: comment\n\ndata:{"b": 2}\n\ndata: [DONE]'
    for size in (1, 2, 5, 100):
        blocks = [(float(i), text[i : i + size]) for i in range(0, len(text), size)]
        assert [payload for _, payload in lines(blocks)] == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(1.0, b"data: {oops\n\n")], "not JSON"),
        ([(1.0, b'data: {"error": {"message": "no"}}\n\n')], "reports"),
        ([(1.0, b"data: [DONE]\n\n")], "without tokens"),
        ([], "without tokens"),
    ],
)
def test_answers_that_are_no_answers(blocks: list[tuple[float, bytes]], message: str) -> None:
    assert message in parse(blocks, 0.0, 4).error


@pytest.mark.parametrize(
    "how",
    [
        Behaviour(),
        Behaviour(stream_interval=5),
        Behaviour(text=False, pieces=7),
        Behaviour(old_paths=True),
        Behaviour(api="openai"),
        Behaviour(api="openai", usage=False),
        Behaviour(api="openai", refuse_stream_options=True, usage=False),
        Behaviour(api="openai", stream_interval=4),
    ],
    ids=lambda how: f"{how.api}-{how.stream_interval}-{'usage' if how.usage else 'bare'}-{how.pieces}-{how.old_paths}",
)
def test_every_kind_of_stream_is_read(how: Behaviour, tmp_path: Path) -> None:
    with serve(how) as url:
        load = benchmark.Load(inputs=(64,), output=24, repeats=2)
        case = benchmark.measure(server.probe(url), load)[0]
    found = {metric.name: metric for metric in case.metrics()}
    assert {name: len(metric.values) for name, metric in found.items()} == dict.fromkeys(
        ("TPOT", "TTFT", "ITL p99", "output"), 2
    )
    streams = [one for wave in case.waves for one in wave]
    counted = 24 if how.usage or how.stream_interval == 1 else len(range(1, 25, how.stream_interval))
    assert [(one.error, one.tokens, len(one.itl)) for one in streams] == [("", counted, counted - 1)] * 2
    assert all(one.latency > one.ttft > 0 for one in streams)
    asked = [request.get("sampling_params", request) for request in how.requests]
    assert all(one["ignore_eos"] and one["temperature"] == 0 for one in asked)


def test_facts_are_kept_and_the_key_is_not(tmp_path: Path) -> None:
    data = run(Behaviour(), tmp_path / "db", label="stock")
    server = data["setup"]["server"]
    assert (server["pool_tokens"], server["version"], server["model"]) == (495_552, "0.5.15.post1", "/models/glm")
    assert server["cuda_graphs"] is True
    with Store(tmp_path / "db") as store:
        kept = store.get("stock")
    assert "secret" not in str(kept.as_dict())
    assert kept.result["metrics"] == data["metrics"]
    assert kept.status == "done"


def test_prompts_are_fresh_ids_of_the_asked_length(tmp_path: Path) -> None:
    how = Behaviour()
    run(how, tmp_path / "db", concurrency=[4], shared_prefix=16)
    prompts = [tuple(request["input_ids"]) for request in how.requests[1:]]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({prompt[:16] for prompt in prompts}) == 1
    assert len(set(prompts)) == len(prompts) == 4 + 2 * 4
    assert {request["sampling_params"]["max_new_tokens"] for request in how.requests[5:]} == {24}


def test_what_distorts_is_said(tmp_path: Path) -> None:
    notes = " ".join(run(Behaviour(cached=48, stream_interval=3), tmp_path / "db")["notes"])
    assert "radix cache held 48 of 64" in notes
    assert "--stream-interval 3" in notes
    notes = " ".join(run(Behaviour(stop_after=10, pool=None), tmp_path / "db")["notes"])
    assert "10 tokens instead of 24" in notes
    assert "does not say its pool size" in notes
    notes = " ".join(run(Behaviour(info={"disable_cuda_graph": True}), tmp_path / "db")["notes"])
    assert "CUDA graphs are off" in notes


def test_without_keep_nothing_is_written(tmp_path: Path) -> None:
    assert run(Behaviour(), tmp_path / "db", keep=False)["run"] is None
    assert not (tmp_path / "db").exists()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError, match="no server answers") as caught:
        bench(url="http://127.0.0.1:9", db=tmp_path / "db")
    assert caught.value.exit is Exit.SERVER


def test_a_server_that_fails_is_an_error_and_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(MlapatchError, match="small request") as caught:
        run(Behaviour(fail=99), tmp_path / "db")
    assert "out of memory" in caught.value.found
    with Store(tmp_path / "db") as store:
        assert store.all()[0].status == "failed"


def test_some_failures_are_counted_and_told(tmp_path: Path) -> None:
    how = Behaviour()
    advanced: list[float] = []
    with serve(how) as url:
        load = benchmark.Load(inputs=(64,), output=8, concurrency=(4,), repeats=1, warmup=0)

        def fail_one(amount: float) -> None:
            advanced.append(amount)

        target = server.probe(url)
        how.fail_after = 1 + 3
        case = benchmark.measure(target, load, fail_one)[0]
    assert sum(advanced) == 4
    assert sum(1 for one in case.waves[0] if one.error) == 1
    assert any("1 of 4 requests failed: HTTP 500" in note for note in case.notes())


@pytest.mark.parametrize("bad", [{"output": 1}, {"inputs": [0]}, {"api": "grpc"}, {"repeats": 0}])
def test_loads_that_cannot_be_measured(bad: dict[str, Any]) -> None:
    with pytest.raises(MlapatchError) as caught:
        bench(url="http://127.0.0.1:9", keep=False, **bad)
    assert caught.value.exit is Exit.USAGE
