"""flashinfer's own MLA wrapper on a GPU, with its plans and the rows of its eager runs recorded.

A captured run executes without Python, so replays are judged by their outputs; their plans are recorded all the same.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from .record import Plan, Recorder, Run, ints, slots_of

_LENGTHS = ("qo_indptr", "kv_indptr", "kv_len_arr")


def mla_wrapper(recorder: Recorder) -> type:
    """A subclass of the installed `BatchMLAPagedAttentionWrapper` that reports to `recorder`."""
    from flashinfer import BatchMLAPagedAttentionWrapper

    class Recorded(BatchMLAPagedAttentionWrapper):  # type: ignore[misc, unused-ignore]
        """Records, then does as flashinfer does."""

        def plan(
            self,
            qo_indptr: torch.Tensor,
            kv_indptr: torch.Tensor,
            kv_indices: torch.Tensor,
            kv_len_arr: torch.Tensor,
            *rest: Any,
            **more: Any,
        ) -> Any:
            result = super().plan(qo_indptr, kv_indptr, kv_indices, kv_len_arr, *rest, **more)
            names = (
                "num_heads",
                "head_dim_ckv",
                "head_dim_kpe",
                "page_size",
                "causal",
                "sm_scale",
                "q_data_type",
                "kv_data_type",
            )
            given = {**dict(zip(names, rest, strict=False)), **more}
            offsets = ints(kv_indptr)
            self._recorded = Plan(
                ints(qo_indptr),
                offsets,
                ints(kv_len_arr),
                given["num_heads"],
                given["causal"],
                (given["head_dim_ckv"], given["head_dim_kpe"]),
                given["page_size"],
                given["sm_scale"],
                str(given["q_data_type"]),
                str(given["kv_data_type"]),
                ints(kv_indices[: offsets[-1]]),
            )
            recorder.plans.append(self._recorded)
            return result

        def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, *rest: Any, **more: Any) -> Any:
            if not torch.cuda.is_current_stream_capturing():
                self._note_run(ckv_cache, kpe_cache, more.get("ckv_scale") or 1.0, more.get("kpe_scale") or 1.0)
            return super().run(q_nope, q_pe, ckv_cache, kpe_cache, *rest, **more)

        def _note_run(self, ckv: torch.Tensor, kpe: torch.Tensor, ckv_scale: float, kpe_scale: float) -> None:
            plan = self._recorded
            where = torch.cat(
                slots_of(self._kv_indices_buf, plan.kv_indptr, plan.kv_lens, plan.page_size or 1)
                or [ckv.new_zeros(0).long()]
            )
            flat_ckv, flat_kpe = ckv.reshape(-1, ckv.shape[-1]), kpe.reshape(-1, kpe.shape[-1])
            rows = torch.cat((flat_ckv[where].float() * ckv_scale, flat_kpe[where].float() * kpe_scale), dim=-1)
            recorder.runs.append(
                Run(plan.qo_indptr, plan.kv_lens, rows.cpu(), ints(where), plan.causal, plan.sm_scale or 0.0)
            )

    Recorded.__name__ = "BatchMLAPagedAttentionWrapper"
    return Recorded


def fast_plans(module: types.ModuleType, recorder: Recorder) -> None:
    """Records the calls of the module's fast plans, which go past the wrapper's `plan`."""
    for name in ("fast_mla_decode_plan", "fast_mla_prefill_plan"):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _recorded(original, recorder))


def _recorded(original: Any, recorder: Recorder) -> Any:
    @functools.wraps(original)
    def plan(
        self: Any, qo: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, *rest: Any
    ) -> Any:
        recorder.plans.append(Plan(ints(qo), ints(kv), ints(lens), rest[0], rest[4], fast=True))
        return original(self, qo, kv, indices, lens, *rest)

    return plan
