# ruff: noqa: ARG002 - the signatures are flashinfer's
"""flashinfer's ragged prefill wrapper in plain torch, for a CPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from .record import ints


class BatchPrefillWithRaggedKVCacheWrapper:
    """Prefill over keys given in full; no pool is read."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **_: Any) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._offsets: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, **_: Any) -> None:
        """Where each request's queries and keys begin, `[bs + 1]` each."""
        self._offsets = ints(qo_indptr), ints(kv_indptr)

    begin_forward = plan

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float, **_: Any
    ) -> torch.Tensor:
        """`q` `[tokens, heads, qk]`, `k` `[keys, heads, qk]`, `v` `[keys, heads, vo]` -> `[tokens, heads, vo]`."""
        return self.forward_return_lse(q, k, v, causal, sm_scale)[0]

    run = forward

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the base-2 log-sum-exp `[tokens, heads]`."""
        if self._offsets is None:
            raise RuntimeError("BatchPrefillWithRaggedKVCacheWrapper.run() called before plan().")
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        qo, kv = self._offsets
        for r in range(len(qo) - 1):
            keys, values = k[kv[r] : kv[r + 1]].float(), v[kv[r] : kv[r + 1]].float()
            for t in range(qo[r], qo[r + 1]):
                visible = keys.shape[0] - (qo[r + 1] - 1 - t) if causal else keys.shape[0]
                score = torch.einsum("hd,nhd->hn", q[t].float(), keys[:visible]) * sm_scale
                lse[t] = torch.logsumexp(score, dim=-1) / math.log(2.0)
                out[t] = torch.einsum("hn,nhd->hd", torch.softmax(score, dim=-1), values[:visible]).to(out.dtype)
        return out, lse
