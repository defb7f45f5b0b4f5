"""Random decode batches for attention.py, and what attention over them is in float64."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch

LATENT, ROPE, WIDTH = 512, 64, 576
SCALE = 1 / 16
CASE = re.compile(r"(?P<requests>\d+)x(?P<tokens>\d+)(?P<ragged>v?)(?:h(?P<heads>\d+))?(?:q(?P<power>-?\d+))?")


@dataclass(frozen=True)
class Case:
    """REQUESTSxTOKENS[v][hHEADS][qPOWER]: with v the lengths vary from 0 to twice TOKENS, and the query is multiplied
    by 2 ** POWER."""

    name: str
    requests: int
    tokens: int
    ragged: bool
    heads: int
    power: int

    @classmethod
    def parsed(cls, name: str, heads: int) -> Case:
        match = CASE.fullmatch(name)
        if not match:
            raise SystemExit(f"--cases: '{name}' is not REQUESTSxTOKENS[v][hHEADS][qPOWER]")
        own = {key: int(match[key] or default) for key, default in (("heads", heads), ("power", 0))}
        return cls(name, int(match["requests"]), int(match["tokens"]), bool(match["ragged"]), **own)

    def lengths(self) -> list[int]:
        """Tokens of each request; the same in every process."""
        if not self.ragged:
            return [self.tokens] * self.requests
        chosen = random.Random(self.name)
        return [chosen.randint(0, 2 * self.tokens) for _ in range(self.requests)]


@dataclass
class Batch:
    """The inputs of one case: kv_indices are random slots, all different."""

    case: Case
    lengths: list[int]
    slots: int
    indices: torch.Tensor
    indptr: torch.Tensor
    query: torch.Tensor
    rope: torch.Tensor
    out: torch.Tensor
    wanted: torch.Tensor | None = None
    wanted_lse: torch.Tensor | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.case.requests

    @property
    def heads(self) -> int:
        return self.case.heads


def batch_of(case: Case, slots: int) -> Batch:
    lengths = case.lengths()
    shape, device = (case.requests, case.heads), "cuda"
    query = torch.randn(*shape, WIDTH, device=device, dtype=torch.bfloat16) * 2.0**case.power
    return Batch(
        case,
        lengths,
        slots,
        torch.randperm(slots, device=device)[: sum(lengths)].int(),
        torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        query[..., :LATENT].contiguous(),
        query[..., LATENT:].contiguous(),
        torch.empty(*shape, LATENT, device=device, dtype=torch.bfloat16),
    )


def reference(batch: Batch, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over one layer's pool, zeros for a request without tokens, and the base-2 log-sum-exp."""
    rows, sums = [], []
    for i, slots in enumerate(batch.indices.long().split(batch.lengths)):
        key = pool[slots, 0].double()
        score = batch.query[i].double() @ key[:, :LATENT].T + batch.rope[i].double() @ key[:, LATENT:].T
        rows.append(torch.softmax(score * SCALE, -1) @ key[:, :LATENT])
        sums.append(torch.logsumexp(score * SCALE, -1) / math.log(2.0))
    return torch.stack(rows), torch.stack(sums)
