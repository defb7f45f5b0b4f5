"""What attention should give, in float64, from the page table alone: no backend, plan or wrapper takes part."""

from __future__ import annotations

import torch

from .batch import Inputs, Layer, Plan


def expected(plan: Plan, slots: torch.Tensor, size: int, cache: torch.dtype) -> list[torch.Tensor]:
    """For each forward and layer `[tokens, heads * 512]` float64; `slots` is the request table, `size` the arena's
    rows."""
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
            outputs.append(_attend(plan, i, one, stores[layer], slots))
    return outputs


def _store(plan: Plan, layer: int, size: int, cache: torch.dtype) -> torch.Tensor:
    content = plan.content[layer].cpu()
    store = torch.full((size, content.shape[-1]), float("nan"), dtype=torch.float64)
    store[plan.live.cpu()] = content.to(cache).double()
    return store


def _attend(plan: Plan, forward: int, one: Inputs, store: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    query = one.query().cpu().double()
    rows = []
    for t, (_, row, visible) in enumerate(plan.seen(forward)):
        keys = store[slots[row, :visible].long()]
        weights = torch.softmax(query[t] @ keys.T * Layer(0).scaling, dim=-1)
        rows.append((weights @ keys[:, : one.q.shape[-1]]).flatten())
    return torch.stack(rows) if rows else torch.zeros((0, one.q.shape[1] * one.q.shape[2]), dtype=torch.float64)


def _ragged(plan: Plan, one: Inputs) -> torch.Tensor:
    query, keys, values = one.q.cpu().double(), one.k.cpu().double(), one.v.cpu().double()
    rows, first = [], 0
    for new in plan.step.added():
        for n in range(new):
            span = slice(first, first + n + 1)
            score = torch.einsum("hd,nhd->hn", query[first + n], keys[span]) * Layer(0, ragged=True).scaling
            rows.append(torch.einsum("hn,nhd->hd", torch.softmax(score, dim=-1), values[span]).flatten())
        first += new
    return torch.stack(rows)
