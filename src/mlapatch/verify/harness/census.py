"""A census of the slots that attention read, taken from its outputs alone, so that a GPU answers it as a CPU does.

With a query of zeros all scores are equal, and an output is the mean of the value rows that were read. So one more run
of a step, with the plan or graph it has, reads a pool in which each slot's row is its code: a 1.0 (exact in e4m3, e5m2
and BF16) in one column of each of three fields, zeros elsewhere. A column times the tokens seen says how often slots
with that code were read. Slots that hold no token keep their NaN, and a read of one makes the output NaN.

Told apart: one slot more, less, twice or for another, for every token, head and layer (below 32,768 slots no two have
the same code, and a count below 64 is exact to within a half, however the output was rounded). Not told apart: the
order of the reads; every slot read the same number of times more; slots exchanged so that all three fields add up
alike; and a read that gets no weight, which only the NaN shows, and on a CPU `reads`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .batch import Inputs, Plan
from .pool import HEAD_DIM, LORA_RANK, KVPool
from .scenarios import Scenario

FIELDS = (256, 128, 128)
"""Columns of each field, 512 in all: the slot's low digit, its high digit, and a hash."""
MOST = 2048
"""Tokens a request up to which a census is taken: beyond, the columns' counts drown in BF16's rounding."""
ROUNDING, LEAST = 2**-7, 2**-6
"""What a count may be off: relative (BF16 twice, or once cut off as Triton's interpreter does), and absolute."""

Basis = Literal["", "page table", "stock"]


def due(scenario: Scenario, index: int, plan: Plan, device: str) -> bool:
    """Whether a step gets a census. On a CPU, where kernels take long and `reads` counts loads too, of each mode and
    graph the step with the most requests, or the most tokens of those."""
    if scenario.cache == "packed" or not plan.out_loc.numel() or max(plan.lens) > MOST:
        return False
    if any(one.q_rope is None for layers in plan.inputs for one in layers):
        return False  # ragged: no pool is read
    alike = [step for step in scenario.steps if (step.mode, step.graph) == (plan.step.mode, plan.step.graph)]
    most = max(alike, key=lambda step: (len(step.prefix), sum(step.prefix)))
    return device != "cpu" or scenario.steps[index] == most


def columns(slots: torch.Tensor, layer: int) -> torch.Tensor:
    """`slots` `[n]` -> the columns of their codes `[n, 3]`, int64; each layer has its own."""
    slots = slots.long()
    low = (slots + 89 * layer) % FIELDS[0]
    high = (slots // FIELDS[0] + layer) % FIELDS[1]
    mixed = ((slots + 7919 * layer) * 2654435761 % 2**32) >> 25
    return torch.stack((low, FIELDS[0] + high, FIELDS[0] + FIELDS[1] + mixed), dim=-1)


def codes(slots: torch.Tensor, layer: int) -> torch.Tensor:
    """The rows of `slots` `[n]`: `[n, 576]` BF16, the rope zero."""
    rows = torch.zeros((slots.numel(), HEAD_DIM), dtype=torch.bfloat16, device=slots.device)
    return rows.scatter_(1, columns(slots, layer), 1.0)


def fill(pool: KVPool, plan: Plan) -> None:
    """The code of each live slot and of slot 0, which padding reads; NaN in all others."""
    live = torch.cat((plan.live.new_zeros(1), plan.live))
    for layer in range(pool.layer_num):
        pool.fill(layer, live, codes(live, layer))


def inputs(like: list[list[Inputs]], loc: torch.Tensor) -> list[list[Inputs]]:
    """Queries of zeros, and as keys the codes of the slots that they are written to: `loc` `[tokens]`, or for a draft
    `[draft steps, requests]`."""
    found: list[list[Inputs]] = []
    for i, layers in enumerate(like):
        where = loc[i] if loc.dim() > 1 else loc
        found.append([_coded(one, where, layer) for layer, one in enumerate(layers)])
    return found


def _coded(one: Inputs, loc: torch.Tensor, layer: int) -> Inputs:
    rows = codes(loc[: one.k.shape[0]], layer)[:, None]
    rope = None if one.q_rope is None else torch.zeros_like(one.q_rope)
    key = rows[..., :LORA_RANK].contiguous()
    return Inputs(torch.zeros_like(one.q), key, key, rope, rows[..., LORA_RANK:].contiguous())


@dataclass(frozen=True)
class Due:
    """What one output should say: `counts` `[tokens, 512]`, and for each token its request and how many it sees."""

    counts: torch.Tensor
    seen: torch.Tensor
    requests: list[int]


def by_table(plan: Plan, slots: torch.Tensor, share: int) -> list[Due]:
    """For each forward and layer the counts by the request table `slots` alone; every `share`-th token is this rank's
    (decode context parallelism)."""
    found, slots = [], slots.cpu()
    for i, layers in enumerate(plan.inputs):
        tokens = plan.seen(i)
        for layer in range(len(layers)):
            read = [slots[row, :n][::share] for _, row, n in tokens]
            counts = [torch.bincount(columns(one, layer).flatten(), minlength=LORA_RANK) for one in read]
            seen = torch.tensor([len(one) for one in read], dtype=torch.float64)
            found.append(Due(torch.stack(counts).double(), seen, [request for request, _, _ in tokens]))
    return found


def judge(stock: list[torch.Tensor], patched: list[torch.Tensor], table: list[Due]) -> tuple[Basis, str]:
    """What the patched side was held against, and what differs ('' if nothing).

    Outputs are `[tokens or more, heads * 512 or more]`. Where stock itself does not read what the page table says (it
    plans draft steps with too few tokens), stock is the reference.
    """
    want = [_counts(out, due) for out, due in zip(stock, table, strict=True)]
    rows = [due.counts[:, None].expand_as(one) for one, due in zip(want, table, strict=True)]
    basis: Basis = "page table"
    if any(bool(_off(one, row).any()) for one, row in zip(want, rows, strict=True)):
        basis, rows = "stock", want
    for i, (out, due, expected) in enumerate(zip(patched, table, rows, strict=True)):
        found = _counts(out, due)
        off = _off(found, expected)
        if bool(off.any()):
            return basis, f"census, output {i + 1} of {len(patched)}, {_said(found, expected, off, due)}"
    return basis, ""


def _counts(output: torch.Tensor, due: Due) -> torch.Tensor:
    """`[tokens, heads, 512]` float64: how often each code was read."""
    tokens, width = len(due.requests), output.shape[1] // LORA_RANK * LORA_RANK
    mean = output[:tokens, :width].reshape(tokens, -1, LORA_RANK).double().cpu()
    return mean.mul(due.seen[:, None, None])


def _off(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    near = (found - expected).abs() <= LEAST + ROUNDING * expected.abs()
    return ~(near | (found.isnan() & expected.isnan()))


def _said(found: torch.Tensor, expected: torch.Tensor, off: torch.Tensor, due: Due) -> str:
    token, head, code = (int(i) for i in off.nonzero()[0])
    at = f"request {due.requests[token]}, token {token}: "
    largest, seen = float(found[token, head].abs().max()), float(due.seen[token])
    if not largest <= seen * (1 + ROUNDING) + LEAST:  # NaN too; Triton's interpreter reads an FP8 NaN as 480
        value = "NaN" if math.isnan(largest) else f"{largest:.3g} reads of one code"
        return f"{at}found {value}, expected at most {seen:g}: a row that holds no token was read, or none at all"
    many = int(off[token, head].sum())
    counts = f"read {float(found[token, head, code]):.3g} times, {float(expected[token, head, code]):.3g} expected"
    return f"{at}slots with code {code} {counts} ({many} of {LORA_RANK} codes differ)"
