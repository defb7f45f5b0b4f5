"""The batch of one step: slots, inputs and the forward batch that a backend gets, the same for both sides."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from .pool import HEAD_DIM, LORA_RANK, ROPE_DIM
from .scenarios import WINDOW, Scenario, Step

HEADS = 2
NOPE_DIM, V_DIM = 128, 128
SCALING = float((NOPE_DIM + ROPE_DIM) ** -0.5)
DRAFT_STEPS = WINDOW


class Layer:
    """`RadixAttention` as MLA uses it: one KV head of 576, or per-head keys of 192 where prefill is ragged.

    `k_scale` is not 1 on purpose: the pool's writes apply no scale, so a read must not either.
    """

    def __init__(self, layer_id: int, ragged: bool = False, device: str = "cpu") -> None:
        self.layer_id = layer_id
        self.tp_q_head_num = HEADS
        self.tp_k_head_num = self.tp_v_head_num = HEADS if ragged else 1
        self.head_dim = self.qk_head_dim = NOPE_DIM + ROPE_DIM if ragged else HEAD_DIM
        self.v_head_dim = V_DIM if ragged else LORA_RANK
        self.scaling = SCALING
        self.logit_cap = 0.0
        self.k_scale = self.v_scale = torch.tensor(0.5, device=device)
        self.k_scale_float = self.v_scale_float = 0.5
        self.sliding_window_size = -1
        self.is_cross_attention = False


class ForwardBatch:
    """`ForwardBatch`: whatever a backend reads of it; anything else is None."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


@dataclass
class Inputs:
    """One layer's tensors of a step: queries `[tokens, heads, ...]`, keys `[tokens, 1 or heads, ...]`, BF16."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None

    def query(self) -> torch.Tensor:
        """The whole query, `[tokens, heads, 576]`, or 192 where it is ragged."""
        return self.q if self.q_rope is None else torch.cat((self.q, self.q_rope), dim=-1)

    def key(self) -> torch.Tensor:
        """The whole key, `[tokens, 1, 576]`, or `[tokens, heads, 192]`."""
        return self.k if self.k_rope is None else torch.cat((self.k, self.k_rope), dim=-1)

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [t for t in (self.q, self.k, self.v, self.q_rope, self.k_rope) if t is not None]


@dataclass
class Plan:
    """Everything a step needs besides the backend."""

    step: Step
    rows: torch.Tensor
    """Request r's row in the table, `[bs]` int64."""
    live: torch.Tensor
    """Slots that hold tokens before the step, each once."""
    content: list[torch.Tensor]
    """For each layer `[len(live), 576]` BF16."""
    out_loc: torch.Tensor
    """Slots that the step writes, `[tokens]`; for a draft `[draft steps, requests]`."""
    positions: torch.Tensor
    inputs: list[list[Inputs]]
    """For each forward (one, or one a draft step), each layer."""
    lens: tuple[int, ...]
    """Tokens in the pool after the step."""

    def seen(self, forward: int) -> list[tuple[int, int, int]]:
        """For each token of a forward: its request, the row of that in the table, and how many tokens it sees."""
        rows, prefix = self.rows.tolist(), self.step.prefix
        if self.step.mode == "draft":
            return [(r, row, before + forward + 1) for r, (row, before) in enumerate(zip(rows, prefix, strict=True))]
        added = self.step.added()
        return [
            (r, row, before + n + 1)
            for r, (row, before) in enumerate(zip(rows, prefix, strict=True))
            for n in range(added[r])
        ]


def generator(seed: int, scenario: str, step: int) -> torch.Generator:
    """The same numbers for both sides, whatever else ran before."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{scenario}/{step}".encode()))


def rows_of(step: Step, index: int) -> list[int]:
    """The request table's row of each request; the order turns from step to step."""
    rows = list(range(1, len(step.prefix) + 1))
    return rows[::-1] if index % 2 else rows


def table(scenario: Scenario, seed: int) -> torch.Tensor:
    """`[rows, context]` int32 slots in no order, slot 0 in none; row 0 is all zeros, for padding."""
    longest = [0] * (1 + max((len(s.prefix) for s in scenario.steps), default=0))
    for index, step in enumerate(scenario.steps):
        extra = DRAFT_STEPS + 1 if step.mode == "draft" else 0
        for row, before, added in zip(rows_of(step, index), step.prefix, step.added(), strict=True):
            longest[row] = max(longest[row], before + added + extra)
    page = int(scenario.flags.get("page_size", 1))
    order = torch.randperm(scenario.slots // page, generator=generator(seed, scenario.name, -1)) + 1
    pages = iter(order.tolist())

    def fresh(tokens: int) -> list[int]:
        """Slots of whole pages, as SGLang's allocator gives them."""
        taken = [page * first for first in itertools.islice(pages, -(-tokens // page))]
        slots = [first + p for first in taken for p in range(page)][:tokens]
        if len(slots) < tokens:
            raise ValueError(f"{scenario.name} needs more than its {scenario.slots} slots")
        return slots

    common = fresh(scenario.shared)
    result = torch.zeros((len(longest), scenario.context), dtype=torch.int32)
    for row, n in enumerate(longest[1:], start=1):
        slots = common[:n] + fresh(max(n - scenario.shared, 0))
        result[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return result


def make(scenario: Scenario, index: int, slots: torch.Tensor, seed: int, device: str) -> Plan:
    """The `index`-th step of a scenario."""
    step = scenario.steps[index]
    random = generator(seed, scenario.name, index)
    rows = rows_of(step, index)
    where = [slots[row].tolist() for row in rows]
    lens = tuple(before + n for before, n in zip(step.prefix, step.added(), strict=True))
    live = sorted({slot for row, n in zip(where, step.prefix, strict=True) for slot in row[:n]})
    content = [
        torch.randn((len(live), HEAD_DIM), generator=random).bfloat16().to(device) for _ in range(scenario.layers)
    ]
    if step.mode == "draft":
        drafted = [[row[n + i] for row, n in zip(where, step.prefix, strict=True)] for i in range(DRAFT_STEPS)]
        out_loc, positions = torch.tensor(drafted, dtype=torch.int64), torch.tensor(step.prefix, dtype=torch.int64)
        forwards, tokens = DRAFT_STEPS - 1, len(rows)
    else:
        spans = [range(before, after) for before, after in zip(step.prefix, lens, strict=True)]
        written = [row[p] for row, span in zip(where, spans, strict=True) for p in span]
        out_loc = torch.tensor(written, dtype=torch.int64)
        positions = torch.tensor([p for span in spans for p in span], dtype=torch.int64)
        forwards, tokens = 1, len(written)
    inputs = [[_inputs(random, tokens, step, device) for _ in range(scenario.layers)] for _ in range(forwards)]
    return Plan(
        step,
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(live, dtype=torch.int64, device=device),
        content,
        out_loc.to(device),
        positions.to(device),
        inputs,
        lens,
    )


def _inputs(random: torch.Generator, tokens: int, step: Step, device: str) -> Inputs:
    def normal(*shape: int, times: torch.Tensor | float = 1.0) -> torch.Tensor:
        return (torch.randn((tokens, *shape), generator=random) * times).bfloat16().to(device)

    factors = torch.tensor(step.query)[:, None]
    if step.mode == "ragged":
        width = NOPE_DIM + ROPE_DIM
        return Inputs(normal(HEADS, width, times=factors), normal(HEADS, width), normal(HEADS, V_DIM), None, None)
    k = normal(1, LORA_RANK)
    q, q_rope = normal(HEADS, LORA_RANK, times=factors), normal(HEADS, ROPE_DIM, times=factors)
    return Inputs(q, k, k, q_rope, normal(1, ROPE_DIM))


def padded(inputs: Inputs, tokens: int) -> Inputs:
    """The same with zeros appended up to `tokens` rows."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_zeros((tokens - tensor.shape[0], *tensor.shape[1:]))))

    rope = [None if t is None else pad(t) for t in (inputs.q_rope, inputs.k_rope)]
    return Inputs(pad(inputs.q), pad(inputs.k), pad(inputs.v), rope[0], rope[1])
