"""What a backend asked of its attention wrappers: every plan, and what every run read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Plan:
    """One `plan()`, fast or not. Lengths and offsets are the host's; `indices` are the planned slots, in order.

    A fast plan carries no more than the lengths: the rest stays as the wrapper's first plan set it.
    """

    qo_indptr: tuple[int, ...]
    kv_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    causal: bool
    head_dims: tuple[int, int] | None = None
    page_size: int | None = None
    sm_scale: float | None = None
    q_dtype: str | None = None
    kv_dtype: str | None = None
    indices: tuple[int, ...] | None = None
    fast: bool = False


@dataclass(frozen=True)
class Run:
    """One `run()`: the rows that attention consumed, `[n, 576]` after scaling, and where they lay."""

    qo_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...]
    rows: torch.Tensor
    indices: tuple[int, ...]
    causal: bool
    sm_scale: float


@dataclass
class Recorder:
    """Collects until taken."""

    plans: list[Plan] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def take(self) -> tuple[list[Plan], list[Run]]:
        """Everything since the last time."""
        plans, runs = self.plans, self.runs
        self.plans, self.runs = [], []
        return plans, runs


def ints(values: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    """A tensor's values on the host."""
    return tuple(int(v) for v in (values.tolist() if isinstance(values, torch.Tensor) else values))


def slots_of(
    indices: torch.Tensor, kv_indptr: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> list[torch.Tensor]:
    """For each request the rows of the cache that its plan names, `[len]` int64: page `indices[i]` holds `page_size` of
    them."""
    found = []
    for first, n in zip(kv_indptr, kv_lens, strict=False):  # offsets have one more
        token = torch.arange(n, device=indices.device)
        pages = indices[first : first + -(-n // page_size)].long()
        if pages.numel() * page_size < n:
            raise IndexError(
                f"{n} tokens planned from entry {first} of kv_indices, which has {indices.numel()} entries"
            )
        found.append(pages[token // page_size] * page_size + token % page_size)
    return found
