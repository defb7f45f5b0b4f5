"""What attention should give, in float64, from the page table alone: no backend, plan or wrapper takes part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .batch import Inputs, Layer, Plan


@dataclass(frozen=True)
class Expected:
    """float64: `values` `[tokens, heads * 512]`, and where the caller asks for it the base-2 log-sum-exp `sums`
    `[tokens, heads]`, which the outputs have after the values."""

    values: torch.Tensor
    sums: torch.Tensor | None = None


def expected(plan: Plan, slots: torch.Tensor, size: int, cache: torch.dtype, share: int = 1) -> list[Expected]:
    """One for each forward and layer; `slots` is the request table, `size` the arena's rows. Every `share`-th token is
    this rank's (decode context parallelism), whose outputs have a log-sum-exp."""
    slots, outputs = slots.cpu(), []
    stores = [_store(plan, layer, size, cache) for layer in range(len(plan.content))]
    draft = plan.step.mode == "draft"
    for i, layers in enumerate(plan.inputs):
        for layer, one in enumerate(layers):
            if one.q_rope is None:
                outputs.append(_ragged(plan, one))
                continue
            count = len(plan.step.prefix) * (1 if draft else 0) or sum(plan.step.added())
            keys = one.key()[:count, 0].cpu().to(cache).double()
            stores[layer][(plan.out_loc[i] if draft else plan.out_loc).cpu()[:count]] = keys
            outputs.append(_attend(plan, i, one, stores[layer], slots, share))
    return outputs


def _store(plan: Plan, layer: int, size: int, cache: torch.dtype) -> torch.Tensor:
    content = plan.content[layer].cpu()
    store = torch.full((size, content.shape[-1]), float("nan"), dtype=torch.float64)
    store[plan.live.cpu()] = content.to(cache).double()
    return store


def _attend(plan: Plan, forward: int, one: Inputs, store: torch.Tensor, slots: torch.Tensor, share: int) -> Expected:
    query = one.query().cpu().double()
    _, heads, width = one.q.shape
    values = torch.zeros((0, heads * width), dtype=torch.float64)
    sums = torch.zeros((0, heads), dtype=torch.float64)
    for t, (_, row, visible) in enumerate(plan.seen(forward)):
        keys = store[slots[row, :visible:share].long()]
        scores = query[t] @ keys.T * Layer(0).scaling
        value = torch.softmax(scores, dim=-1) @ keys[:, :width]
        values = torch.cat((values, value.flatten()[None]))
        sums = torch.cat((sums, torch.logsumexp(scores, dim=-1)[None] / math.log(2.0)))
    return Expected(values, sums if share > 1 else None)


def _ragged(plan: Plan, one: Inputs) -> Expected:
    query, keys, values = one.q.cpu().double(), one.k.cpu().double(), one.v.cpu().double()
    rows, first = [], 0
    for new in plan.step.added():
        for n in range(new):
            span = slice(first, first + n + 1)
            score = torch.einsum("hd,nhd->hn", query[first + n], keys[span]) * Layer(0, ragged=True).scaling
            rows.append(torch.einsum("hn,nhd->hd", torch.softmax(score, dim=-1), values[span]).flatten())
        first += new
    return Expected(torch.stack(rows))
