# ruff: noqa: ARG002 - the signatures are flashinfer's
"""flashinfer's MLA wrapper in plain torch, for a CPU.

Kept as in flashinfer 0.6.3 to 0.7.2, because patches and SGLang rely on it:

- With `use_cuda_graph` `plan()` copies into the buffers given at construction; otherwise it rebinds them to its
  arguments.
- `_cached_module.plan` writes the host's lengths into the wrapper's int workspace and nothing else. SGLang's
  `fast_mla_decode_plan` calls only that, so `_kv_indptr_buf` keeps its old value.
- `run()` takes offsets and lengths from the int workspace and the slots from `_kv_indices_buf`, both when the kernel
  executes; mask mode, scales and tensors are fixed at the call, so a captured call keeps them.
- Rows of `out` that no plan covers are not written.
- Checks on dtypes and scales are those of 0.6.14 and later, checks on lengths those of 0.7.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import contracts
from .graph import launch
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .record import Plan, Recorder, Run, ints, slots_of


class PlanModule:
    """`_cached_module`: `plan(...)`, also spelled `plan.default(...)` before 0.4.7."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._details: dict[str, Any] = {}

    @property
    def plan(self) -> _PlanCall:
        """The native module's function."""
        return _PlanCall(self)

    def write(self, workspace: torch.Tensor, plan: Plan) -> None:
        """Stores `[requests, offsets of queries, offsets of keys, lengths]` in the int workspace."""
        numbers = [len(plan.kv_lens), *plan.qo_indptr, *plan.kv_indptr, *plan.kv_lens]
        workspace.view(torch.int32)[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        self._recorder.plans.append(plan)

    def detail(self, **details: Any) -> None:
        """What the next plan carries beyond the module's own arguments."""
        self._details = details

    def take_details(self) -> dict[str, Any]:
        """The details, once."""
        details, self._details = self._details, {}
        return details


class _PlanCall:
    def __init__(self, module: PlanModule) -> None:
        self._module = module

    def __call__(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_workspace: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> list[int]:
        details = self._module.take_details()
        plan = Plan(ints(qo_indptr), ints(kv_indptr), ints(kv_lens), num_heads, causal, fast=not details, **details)
        self._module.write(int_workspace, plan)
        return [head_dim_o]

    default = __call__


def mla_wrapper(recorder: Recorder, version: tuple[int, int]) -> type:
    """The class of `BatchMLAPagedAttentionWrapper` that reports to `recorder`; `version` is flashinfer's (major,
    minor)."""

    class BatchMLAPagedAttentionWrapper:
        """MLA over paged slots; see the module's docstring for what is kept."""

        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            use_cuda_graph: bool = False,
            qo_indptr: torch.Tensor | None = None,
            kv_indptr: torch.Tensor | None = None,
            kv_indices: torch.Tensor | None = None,
            kv_len_arr: torch.Tensor | None = None,
            backend: str = "auto",
        ) -> None:
            self._float_workspace_buffer = float_workspace_buffer
            self.device = float_workspace_buffer.device
            self._int_workspace_buffer = torch.zeros(64 * 1024, dtype=torch.uint8, device=self.device)
            self._pin_memory_int_workspace_buffer = torch.zeros(0, dtype=torch.uint8)
            self._use_cuda_graph = use_cuda_graph
            self._qo_indptr_buf = qo_indptr
            self._kv_indptr_buf = kv_indptr
            self._kv_indices_buf = kv_indices
            self._kv_len_arr_buf = kv_len_arr
            self._backend = "fa3" if backend == "auto" else backend

        def plan(
            self,
            qo_indptr: torch.Tensor,
            kv_indptr: torch.Tensor,
            kv_indices: torch.Tensor,
            kv_len_arr: torch.Tensor,
            num_heads: int,
            head_dim_ckv: int,
            head_dim_kpe: int,
            page_size: int,
            causal: bool,
            sm_scale: float,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
            use_profiler: bool = False,
        ) -> None:
            contracts.check_plan(q_data_type, kv_data_type, head_dim_ckv, head_dim_kpe)
            if version >= (0, 7):
                contracts.check_lengths(kv_indptr, kv_indices, kv_len_arr, page_size)
            if self._use_cuda_graph:
                _given(self._qo_indptr_buf).copy_(qo_indptr)
                _given(self._kv_indptr_buf).copy_(kv_indptr)
                _given(self._kv_indices_buf)[: len(kv_indices)].copy_(kv_indices)
                _given(self._kv_len_arr_buf).copy_(kv_len_arr)
            else:
                self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
                self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
            self._planned_kv_indices_buf = self._kv_indices_buf
            self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
            self._head_dim_ckv = head_dim_ckv
            self._q_data_type, self._kv_data_type = q_data_type, kv_data_type
            self._cached_module = PlanModule(recorder)
            live = int(kv_indptr[-1])
            self._cached_module.detail(
                head_dims=(head_dim_ckv, head_dim_kpe),
                page_size=page_size,
                sm_scale=sm_scale,
                q_dtype=str(q_data_type),
                kv_dtype=str(kv_data_type),
                indices=ints(kv_indices[:live]),
            )
            self._plan_info = self._cached_module.plan(
                self._float_workspace_buffer,
                self._int_workspace_buffer,
                self._pin_memory_int_workspace_buffer,
                qo_indptr,
                kv_indptr,
                kv_len_arr,
                num_heads,
                head_dim_ckv,
                causal,
            )

        begin_forward = plan

        def run(
            self,
            q_nope: torch.Tensor,
            q_pe: torch.Tensor,
            ckv_cache: torch.Tensor,
            kpe_cache: torch.Tensor,
            out: torch.Tensor | None = None,
            lse: torch.Tensor | None = None,
            return_lse: bool = False,
            profiler_buffer: torch.Tensor | None = None,
            kv_len: torch.Tensor | None = None,
            page_table: torch.Tensor | None = None,
            return_lse_base_on_e: bool = False,
            o_scale: float | None = None,
            *,
            ckv_scale: float | None = None,
            ckv_scale_arr: torch.Tensor | None = None,
            kpe_scale: float | None = None,
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            if not hasattr(self, "_plan_info"):
                raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
            for name, given, planned in (
                ("q_nope", q_nope.dtype, self._q_data_type),
                ("q_pe", q_pe.dtype, self._q_data_type),
                ("ckv_cache", ckv_cache.dtype, self._kv_data_type),
                ("kpe_cache", kpe_cache.dtype, self._kv_data_type),
            ):
                if given != planned:
                    raise ValueError(f"{name}.dtype={given} does not match the planned dtype {planned}.")
            scales = contracts.scales(self._kv_data_type, ckv_scale, ckv_scale_arr, kpe_scale)
            if out is None:
                out = torch.empty_like(q_nope)
            elif out.shape != q_nope.shape or out.dtype != q_nope.dtype:
                raise ValueError(
                    f"out must be {tuple(q_nope.shape)} {q_nope.dtype}, got {tuple(out.shape)} {out.dtype}"
                )
            if return_lse and lse is None:
                lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=self.device)
            indices = _given(self._planned_kv_indices_buf if version >= (0, 7) else self._kv_indices_buf)
            cache = (ckv_cache, kpe_cache)
            query, causal, scale, base_e = (q_nope, q_pe), self._causal, self._sm_scale, return_lse_base_on_e
            workspace, result, sums = self._int_workspace_buffer, out, lse
            page = self._page_size
            launch(
                lambda: _attend(
                    recorder, workspace, indices, page, query, cache, scales, result, sums, causal, scale, base_e
                )
            )
            return (out, lse) if return_lse and lse is not None else out

    return BatchMLAPagedAttentionWrapper


def _given(buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is None:
        raise ValueError("CUDA graph mode requires reserved qo_indptr, kv_indptr, kv_indices, and kv_len_arr buffers.")
    return buffer


def _attend(
    recorder: Recorder,
    workspace: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
    query: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[float, float],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    causal: bool,
    sm_scale: float,
    base_e: bool,
) -> None:
    """The kernel: for each planned request, softmax(q k^T) over its slots, in float32, each row on its own."""
    numbers = workspace.view(torch.int32).tolist()
    count = numbers[0]
    qo, kv = numbers[1 : count + 2], numbers[count + 2 : 2 * count + 3]
    lens = numbers[2 * count + 3 : 3 * count + 3]
    slots = slots_of(indices, kv[:count], lens, page_size)
    cache = (cache[0].reshape(-1, cache[0].shape[-1]), cache[1].reshape(-1, cache[1].shape[-1]))
    rows: list[torch.Tensor] = []
    for r, (n, where) in enumerate(zip(lens, slots, strict=True)):
        if n and (int(where.min()) < 0 or int(where.max()) >= cache[0].shape[0]):
            raise IndexError(f"request {r}: a planned slot is outside 0..{cache[0].shape[0] - 1}: {ints(where[:4])}...")
        # The kernel goes by strides: a cache wider than the head is read as if it were not, without an error.
        nope, rope = (c[where, : q.shape[-1]].float() * s for c, q, s in zip(cache, query, scales, strict=True))
        keys = torch.cat((nope, rope), dim=-1)
        rows.append(keys)
        for t in range(qo[r], qo[r + 1]):
            visible = n - (qo[r + 1] - 1 - t) if causal else n
            if visible <= 0:
                out[t] = 0
                continue
            q = torch.cat((query[0][t], query[1][t]), dim=-1).float()
            score = (q @ keys[:visible].T) * sm_scale
            out[t] = (torch.softmax(score, dim=-1) @ nope[:visible]).to(out.dtype)
            if lse is not None:
                sums = torch.logsumexp(score, dim=-1)
                lse[t] = sums if base_e else sums / math.log(2.0)
    recorder.runs.append(
        Run(
            tuple(qo),
            tuple(lens),
            torch.cat(rows) if rows else torch.zeros(0),
            ints(torch.cat(slots)) if slots else (),
            causal,
            sm_scale,
        )
    )


def classes(recorder: Recorder, device: str, version: str) -> dict[str, type]:
    """The wrappers of one side under the names that SGLang imports from flashinfer: stand-ins on the CPU, recorders on
    a GPU."""
    if device == "cpu":
        major, minor = (int(part) for part in version.split(".")[:2])
        return {
            "BatchMLAPagedAttentionWrapper": mla_wrapper(recorder, (major, minor)),
            "BatchPrefillWithRaggedKVCacheWrapper": BatchPrefillWithRaggedKVCacheWrapper,
        }
    from . import recording

    return {"BatchMLAPagedAttentionWrapper": recording.mla_wrapper(recorder)}
