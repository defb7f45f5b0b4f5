"""The stand-ins keep what flashinfer and CUDA graphs do, where patches rely on it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not importable")

from mlapatch.verify.harness import batch, facts, graph, recording, wrappers  # noqa: E402 - needs torch
from mlapatch.verify.harness.record import Recorder  # noqa: E402
from mlapatch.verify.harness.scenarios import SCENARIOS, Scenario  # noqa: E402

pytestmark = pytest.mark.verify

HEADS = 2


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def pool(slots: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn((slots, 1, 576), generator=torch.Generator().manual_seed(1)).to(dtype)


def query(tokens: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(2)
    q = torch.randn((tokens, HEADS, 576), generator=random).bfloat16()
    return q[..., :512], q[..., 512:]


def wrapper(version: tuple[int, int] = (0, 6), **buffers: Any) -> Any:
    made = wrappers.mla_wrapper(Recorder(), version)
    return made(torch.empty(16, dtype=torch.uint8), use_cuda_graph=bool(buffers), **buffers)


def plan(
    target: Any, qo: Any, kv: Any, indices: Any, lens: Any, causal: bool = False, kv_dtype: Any = torch.bfloat16
) -> None:
    target.plan(qo, kv, indices, lens, HEADS, 512, 64, 1, causal, 0.1, torch.bfloat16, kv_dtype)


def run(target: Any, cache: Any, tokens: int, **scales: float) -> Any:
    q, rope = query(tokens)
    return target.run(q, rope, cache[..., :512], cache[..., 512:], **scales)


def expected(cache: Any, slots: list[int], token: int, tokens: int) -> Any:
    q = torch.cat(query(tokens), dim=-1)[token].double()
    keys = cache[slots, 0].double()
    return torch.softmax(q @ keys.T * 0.1, dim=-1) @ keys[:, :512]


def test_decode_reads_the_planned_slots() -> None:
    cache, target = pool(10), wrapper()
    plan(target, ints(0, 1, 2), ints(0, 3, 5), ints(7, 2, 9, 4, 0), ints(3, 2))
    out = run(target, cache, 2)
    for token, slots in enumerate(([7, 2, 9], [4, 0])):
        assert torch.allclose(out[token].double(), expected(cache, slots, token, 2), atol=2e-2)


def test_causal_tokens_see_what_is_before_them() -> None:
    cache, target = pool(10), wrapper()
    plan(target, ints(0, 2), ints(0, 4), ints(1, 2, 3, 4), ints(4), causal=True)
    out = run(target, cache, 2)
    assert torch.allclose(out[0].double(), expected(cache, [1, 2, 3], 0, 2), atol=2e-2)
    assert torch.allclose(out[1].double(), expected(cache, [1, 2, 3, 4], 1, 2), atol=2e-2)


def test_an_eager_plan_rebinds_and_a_graph_plan_copies() -> None:
    indptr, eager = ints(0, 2), wrapper()
    plan(eager, ints(0, 1), indptr, ints(3, 4), ints(2))
    assert eager._kv_indptr_buf is indptr
    own = {"qo_indptr": ints(0, 0), "kv_indptr": ints(0, 0), "kv_indices": ints(*[9] * 6), "kv_len_arr": ints(0)}
    graphed = wrapper(**own)
    plan(graphed, ints(0, 1), indptr, ints(3, 4), ints(2))
    assert graphed._kv_indptr_buf is own["kv_indptr"]
    assert own["kv_indptr"].tolist() == [0, 2]
    assert own["kv_indices"].tolist() == [3, 4, 9, 9, 9, 9]


def test_a_fast_plan_changes_lengths_and_no_buffer() -> None:
    cache = pool(10)
    own = {"qo_indptr": ints(0, 0), "kv_indptr": ints(0, 0), "kv_indices": ints(*[0] * 6), "kv_len_arr": ints(0)}
    target = wrapper(**own)
    plan(target, ints(0, 1), ints(0, 1), ints(5), ints(1))
    own["kv_indices"][:3] = ints(7, 2, 9)
    spaces = (target._float_workspace_buffer, target._int_workspace_buffer, target._pin_memory_int_workspace_buffer)
    target._cached_module.plan(*spaces, ints(0, 1), ints(0, 3), ints(3), HEADS, 512, False)
    assert own["kv_indptr"].tolist() == [0, 1]
    assert torch.allclose(run(target, cache, 1)[0].double(), expected(cache, [7, 2, 9], 0, 1), atol=2e-2)


def test_rows_without_a_plan_are_not_written() -> None:
    target = wrapper()
    plan(target, ints(0, 1), ints(0, 2), ints(3, 4), ints(2))
    q, rope = query(3)
    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16)
    cache = pool(6)
    target.run(q, rope, cache[..., :512], cache[..., 512:], out=out)
    assert not out[0].isnan().any()
    assert out[1:].isnan().all()


def test_fp8_needs_its_scales_and_applies_them() -> None:
    cache, target = pool(10, torch.float8_e4m3fn), wrapper()
    plan(target, ints(0, 1), ints(0, 2), ints(3, 4), ints(2), kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="Exactly one of"):
        run(target, cache, 1)
    one = run(target, cache, 1, ckv_scale=1.0, kpe_scale=1.0)
    half = run(target, cache, 1, ckv_scale=0.5, kpe_scale=0.5)
    assert torch.allclose(one[0].double(), expected(cache.bfloat16(), [3, 4], 0, 1), atol=2e-2)
    assert not torch.equal(one, half)


def test_dtypes_must_be_the_planned_ones() -> None:
    target = wrapper()
    plan(target, ints(0, 1), ints(0, 2), ints(3, 4), ints(2))
    with pytest.raises(ValueError, match="does not match the planned dtype"):
        run(target, pool(6, torch.float8_e4m3fn), 1)
    with pytest.raises(ValueError, match="is not supported"):
        plan(target, ints(0, 1), ints(0, 2), ints(3, 4), ints(2), kv_dtype=torch.float8_e5m2)


def test_lengths_are_checked_from_0_7_on() -> None:
    plan(wrapper((0, 6)), ints(0, 1), ints(0, 2), ints(3, 4), ints(1))
    with pytest.raises(ValueError, match="page counts"):
        plan(wrapper((0, 7)), ints(0, 1), ints(0, 2), ints(3, 4), ints(1))
    with pytest.raises(ValueError, match="kv_indices metadata has 1"):
        plan(wrapper((0, 7)), ints(0, 1), ints(0, 2), ints(3), ints(2))


def test_a_slot_outside_the_cache_is_an_error() -> None:
    target = wrapper()
    plan(target, ints(0, 1), ints(0, 2), ints(3, 40), ints(2))
    with pytest.raises(IndexError, match="outside"):
        run(target, pool(6), 1)


def test_a_replay_repeats_the_work_and_not_the_decisions() -> None:
    length, values, log = [2], torch.arange(8.0), graph.CpuGraph()
    out = log.capture(lambda: values[: length[0]] * 2)
    length[0] = 5
    values += 10
    log.replay()
    assert out.tolist() == [20.0, 22.0]


def test_a_replay_leaves_garbage_where_nothing_is_written() -> None:
    log = graph.CpuGraph()

    def forward() -> Any:
        made = torch.empty(3)
        made[:2] = 1
        return made

    out = log.capture(forward)
    log.replay()
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2].isnan()


@pytest.mark.parametrize("forbidden", [lambda t: t.max().item(), lambda t: t.nonzero(), lambda t: torch.unique(t)])
def test_a_capture_refuses_what_cuda_refuses(forbidden: Any) -> None:
    with pytest.raises(graph.CaptureError, match="not permitted when stream is capturing"):
        graph.CpuGraph().capture(lambda: forbidden(torch.ones(3)))


def test_the_gpu_recorder_sees_what_the_stand_in_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU flashinfer's own class is recorded from outside; here the stand-in takes its place."""
    inside, outside = Recorder(), Recorder()
    flashinfer = types.ModuleType("flashinfer")
    vars(flashinfer)["BatchMLAPagedAttentionWrapper"] = wrappers.mla_wrapper(inside, (0, 7))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    target = recording.mla_wrapper(outside)(torch.empty(16, dtype=torch.uint8))
    plan(target, ints(0, 1, 2), ints(0, 2, 3), ints(4, 5, 1), ints(2, 1))
    run(target, pool(8), 2)
    assert outside.plans == inside.plans
    (seen,), (done,) = outside.runs, inside.runs
    assert torch.equal(seen.rows, done.rows)
    assert (seen.indices, seen.kv_lens, seen.qo_indptr) == (done.indices, done.kv_lens, done.qo_indptr)


def test_facts_of_a_gpu_are_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(facts, "version", lambda *names: f"the installed {names[0]}")
    found = facts.facts("cuda", "0.7.2")
    machine = found["machine"]
    assert (machine["gpu"], machine["memory_bytes"], machine["capability"]) == ("NVIDIA H200", 150_000_000_000, "9.0")
    assert (found["flashinfer"], found["flashinfer_stand_in"]) == ("the installed flashinfer-python", False)
    assert facts.facts("cpu", "0.7.2")["flashinfer"] == "0.7.2"
    assert "gpu" not in facts.facts("cpu", "0.7.2")["machine"]


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if not s.cuda_only], ids=lambda s: s.name)
def test_a_scenario_fits_its_pool_and_repeats(scenario: Scenario) -> None:
    slots = batch.table(scenario, 0)
    for index in range(len(scenario.steps)):
        first, again = (batch.make(scenario, index, slots, 0, "cpu") for _ in range(2))
        assert torch.equal(first.out_loc, again.out_loc)
        assert not set(first.out_loc.flatten().tolist()) & (set(first.live.tolist()) | {0})
        assert all(torch.equal(a, b) for a, b in zip(first.content, again.content, strict=True))
