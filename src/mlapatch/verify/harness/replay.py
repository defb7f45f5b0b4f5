"""Captures a backend's forwards as SGLang's graph runners do, and replays them with other batches."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import census
from .batch import DRAFT_STEPS, HEADS, ForwardBatch, Inputs, Plan
from .graph import new_graph
from .pool import HEAD_DIM, LORA_RANK, ROPE_DIM
from .reads import PoolReads
from .scenarios import WINDOW, Mode

if TYPE_CHECKING:
    from .drive import Side

COMMITTED = ("verify", "dflash", "draft")
"""Modes whose `seq_lens` leave out the tokens that the step adds."""


@dataclass
class Captured:
    """A graph, the static tensors that it reads, and the outputs that it writes."""

    graph: Any
    fb: ForwardBatch
    inputs: list[list[Inputs]]
    outputs: list[torch.Tensor]


def capture_all(side: Side) -> None:
    """Every capture of the scenario, over a pool that holds nothing yet."""
    most = max(bs for _, bs in side.scenario.captures)
    init = side.backend.init_cuda_graph_state
    if "max_num_tokens" in inspect.signature(init).parameters:
        init(most, most * WINDOW)
    else:
        init(most)
    if side.scenario.cache != "packed":
        for layer in range(side.scenario.layers):
            none = torch.zeros(0, dtype=torch.int64, device=side.device)
            side.pool.fill(layer, none, torch.zeros((0, HEAD_DIM), device=side.device))
    for mode, bs in side.scenario.captures:
        side.graphs[mode, bs] = _capture(side, mode, bs)


def fill_value(side: Side) -> int:
    """The length that padded requests get."""
    return int(side.parts[0].get_cuda_graph_seq_len_fill_value())


def _capture(side: Side, mode: Mode, bs: int) -> Captured:
    """Every request a dummy of the fill length in row 0; warm up, then capture."""
    window = WINDOW if mode in ("verify", "dflash", "draft_extend") else 1
    tokens, forwards = bs * window, (DRAFT_STEPS - 1 if mode == "draft" else 1)

    def numbers(shape: tuple[int, ...], value: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=side.device)

    lens = numbers((bs,), max(fill_value(side), 1))
    loc = numbers((DRAFT_STEPS, bs) if mode == "draft" else (tokens,), 0)
    added = torch.full((bs,), window, dtype=torch.int32, device=side.device)
    spec = side.spec(mode, added)
    fb = side.batch(mode, bs, numbers((bs,), 0), lens, lens.cpu(), loc, numbers((tokens,), 1), spec)
    inputs = [[_static(side, tokens) for _ in range(side.scenario.layers)] for _ in range(forwards)]
    _capture_metadata(side, fb, bs, tokens)
    for _ in range(2 if side.device != "cpu" else 1):
        side.forward(fb, inputs, poisoned=True)
    graph = new_graph(side.device)
    return Captured(graph, fb, inputs, graph.capture(lambda: side.forward(fb, inputs, poisoned=False)))


def _static(side: Side, tokens: int) -> Inputs:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((tokens, *shape), dtype=torch.bfloat16, device=side.device)

    k = zeros(1, LORA_RANK)
    return Inputs(zeros(HEADS, LORA_RANK), k, k, zeros(HEADS, ROPE_DIM), zeros(1, ROPE_DIM))


def _capture_metadata(side: Side, fb: ForwardBatch, bs: int, tokens: int) -> None:
    backend = side.backend
    if hasattr(backend, "init_forward_metadata_out_graph"):  # from 0.5.13
        backend.init_forward_metadata_out_graph(fb, in_capture=True)
    elif side.scenario.backend == "draft":
        backend.init_forward_metadata_capture_cuda_graph(fb)
    else:
        backend.init_forward_metadata_capture_cuda_graph(
            bs, tokens, fb.req_pool_indices, fb.seq_lens, None, fb.forward_mode, fb.spec_info
        )


def replay(side: Side, plan: Plan) -> list[torch.Tensor]:
    """Copies the batch into the graph's tensors, padded, refreshes the metadata, poisons, and replays."""
    mode: Mode = "decode" if plan.step.mode == "idle" else plan.step.mode
    captured = side.graphs[mode, plan.step.graph]
    bs, count, fb, fill = plan.step.graph, len(plan.step.prefix), captured.fb, fill_value(side)
    lens = torch.tensor(plan.step.prefix if mode in COMMITTED else plan.lens, dtype=torch.int64)
    host = torch.cat((lens, torch.full((bs - count,), fill, dtype=torch.int64)))
    fb.seq_lens.copy_(host)
    fb.req_pool_indices.zero_()[:count] = plan.rows
    fb.out_cache_loc.zero_()[..., : plan.out_loc.shape[-1]] = plan.out_loc
    fb.positions.fill_(fill)[: plan.positions.numel()] = plan.positions
    added = torch.tensor([*plan.step.added(), *[1] * (bs - count)], dtype=torch.int32, device=side.device)
    spec = side.spec(mode, added)
    view = side.batch(
        mode, bs, fb.req_pool_indices, fb.seq_lens, host_lens(mode, host), fb.out_cache_loc, fb.positions, spec
    )
    _replay_metadata(side, view, bs)
    side.again = lambda: _run(side, captured, census.inputs(captured.inputs, fb.out_cache_loc))
    return _run(side, captured, plan.inputs)


def _run(side: Side, captured: Captured, inputs: list[list[Inputs]]) -> list[torch.Tensor]:
    for static, given in zip(captured.inputs, inputs, strict=True):
        for into, one in zip(static, given, strict=True):
            for a, b in zip(into.tensors(), one.tensors(), strict=True):
                a.zero_()[: b.shape[0]] = b
    side.poison()
    PoolReads.active = side.reads
    captured.graph.replay()
    PoolReads.active = None
    return captured.outputs


def _replay_metadata(side: Side, fb: ForwardBatch, bs: int) -> None:
    backend = side.backend
    if hasattr(backend, "init_forward_metadata_out_graph"):
        backend.init_forward_metadata_out_graph(fb)
    elif side.scenario.backend == "draft":
        backend.init_forward_metadata_replay_cuda_graph(fb, bs)
    else:
        backend.init_forward_metadata_replay_cuda_graph(
            bs, fb.req_pool_indices, fb.seq_lens, fb.seq_lens_sum, None, fb.forward_mode, fb.spec_info, fb.seq_lens_cpu
        )


def host_lens(mode: Mode, lens: torch.Tensor) -> torch.Tensor:
    """A DFLASH verify's host lengths include the window, as `_build_fast_verify_plan_kwargs` of 0.5.19 and later
    says."""
    return lens + WINDOW if mode == "dflash" else lens
