"""flashinfer's MLA and ragged wrappers in plain torch, for a CPU.

Kept as in flashinfer 0.6.3 to 0.7.2, because patches and SGLang rely on it:

- With `use_cuda_graph` `plan()` copies into the buffers given at construction; otherwise it rebinds them to its arguments.
- `_cached_module.plan` writes the host's lengths into the wrapper's int workspace and nothing else. SGLang's `fast_mla_decode_plan`
  calls only that, so `_kv_indptr_buf` keeps its old value.
- `run()` takes offsets and lengths from the int workspace and the slots from `_kv_indices_buf`, both when the kernel executes; mask
  mode, scales and tensors are fixed at the call, so a captured call keeps them.
- Rows of `out` that no plan covers are not written.
- Checks on dtypes and scales are those of 0.6.14 and later, checks on lengths those of 0.7.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .device import CAPABILITY
from .graph import launch
from .record import Plan, Recorder, Run, ints, slots_of

_KV_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


class PlanModule:
    """`_cached_module`: `plan(...)`, also spelled `plan.default(...)` before 0.4.7."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._details: dict[str, Any] = {}

    @property
    def plan(self) -> _PlanCall:
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
    """The class of `BatchMLAPagedAttentionWrapper` that reports to `recorder`; `version` is flashinfer's (major, minor)."""

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
            _check_plan(q_data_type, kv_data_type, head_dim_ckv, head_dim_kpe)
            if version >= (0, 7):
                _check_lengths(kv_indptr, kv_indices, kv_len_arr, page_size)
            if self._use_cuda_graph:
                assert self._qo_indptr_buf is not None and self._kv_indptr_buf is not None
                assert self._kv_indices_buf is not None and self._kv_len_arr_buf is not None
                self._qo_indptr_buf.copy_(qo_indptr)
                self._kv_indptr_buf.copy_(kv_indptr)
                self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
                self._kv_len_arr_buf.copy_(kv_len_arr)
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
            scales = _scales(self._kv_data_type, ckv_scale, ckv_scale_arr, kpe_scale)
            if out is None:
                out = torch.empty_like(q_nope)
            elif out.shape != q_nope.shape or out.dtype != q_nope.dtype:
                raise ValueError(
                    f"out must be {tuple(q_nope.shape)} {q_nope.dtype}, got {tuple(out.shape)} {out.dtype}"
                )
            if return_lse and lse is None:
                lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=self.device)
            indices = self._planned_kv_indices_buf if version >= (0, 7) else self._kv_indices_buf
            assert indices is not None
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


def _check_plan(q_dtype: torch.dtype, kv_dtype: torch.dtype, ckv: int, kpe: int) -> None:
    if kv_dtype not in _KV_DTYPES:
        raise ValueError(f"MLA kv_data_type {kv_dtype} is not supported. Supported dtypes: {list(_KV_DTYPES)}.")
    if kv_dtype == torch.float8_e4m3fn and (CAPABILITY[0] != 9 or q_dtype != torch.bfloat16 or (ckv, kpe) != (512, 64)):
        raise ValueError("FP8 kv_data_type for MLA needs SM90, a bfloat16 query, head_dim_ckv=512 and head_dim_kpe=64.")


def _check_lengths(indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, page_size: int) -> None:
    for name, tensor in (("kv_indptr", indptr), ("kv_indices", indices), ("kv_len_arr", lens)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} metadata must have dtype torch.int32, got {tensor.dtype}.")
    offsets = ints(indptr)
    if len(offsets) != len(lens) + 1:
        return
    if offsets[-1] > indices.numel():
        raise ValueError(f"kv_indices metadata has {indices.numel()} entries but kv_indptr[-1] is {offsets[-1]}.")
    pages = [b - a for a, b in zip(offsets, offsets[1:])]
    if pages != [math.ceil(n / page_size) for n in ints(lens)]:
        raise ValueError("CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size).")


def _scales(
    dtype: torch.dtype, ckv: float | None, ckv_arr: torch.Tensor | None, kpe: float | None
) -> tuple[float, float]:
    if dtype != torch.float8_e4m3fn:
        if ckv is not None or ckv_arr is not None or kpe is not None:
            raise ValueError("ckv_scale / ckv_scale_arr / kpe_scale are only valid when kv_data_type is FP8.")
        return 1.0, 1.0
    if (ckv is None) == (ckv_arr is None):
        raise ValueError("Exactly one of ckv_scale or ckv_scale_arr is required when kv_data_type is FP8.")
    if ckv is None:
        raise ValueError("per-token scales have no stand-in; verify on a GPU.")
    if kpe is None:
        raise ValueError("kpe_scale is required when kv_data_type is FP8.")
    for name, value in (("ckv_scale", float(ckv)), ("kpe_scale", float(kpe))):
        if not math.isfinite(value) or value <= 0.0:
            raise ValueError(f"{name} must be a finite positive value, got {value}")
    return float(ckv), float(kpe)


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
    for r, (n, where) in enumerate(zip(lens, slots)):
        if n and (int(where.min()) < 0 or int(where.max()) >= cache[0].shape[0]):
            raise IndexError(f"request {r}: a planned slot is outside 0..{cache[0].shape[0] - 1}: {ints(where[:4])}...")
        # The kernel goes by strides: a cache wider than the head is read as if it were not, without an error.
        nope, rope = (c[where, : q.shape[-1]].float() * s for c, q, s in zip(cache, query, scales))
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


class BatchPrefillWithRaggedKVCacheWrapper:
    """Prefill over keys given in full; no pool is read."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **_: Any) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._plan: dict[str, Any] | None = None

    def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, **rest: Any) -> None:
        self._plan = {"qo": ints(qo_indptr), "kv": ints(kv_indptr), **rest}

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
        assert self._plan is not None, "run before plan"
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        qo, kv = self._plan["qo"], self._plan["kv"]
        for r in range(len(qo) - 1):
            keys, values = k[kv[r] : kv[r + 1]].float(), v[kv[r] : kv[r + 1]].float()
            for t in range(qo[r], qo[r + 1]):
                visible = keys.shape[0] - (qo[r + 1] - 1 - t) if causal else keys.shape[0]
                score = torch.einsum("hd,nhd->hn", q[t].float(), keys[:visible]) * sm_scale
                lse[t] = torch.logsumexp(score, dim=-1) / math.log(2.0)
                out[t] = torch.einsum("hn,nhd->hd", torch.softmax(score, dim=-1), values[:visible]).to(out.dtype)
        return out, lse


def classes(recorder: Recorder, device: str, version: str) -> dict[str, type]:
    """The wrappers of one side under the names that SGLang imports from flashinfer: stand-ins on the CPU, recorders on a GPU."""
    if device == "cpu":
        major, minor = (int(part) for part in version.split(".")[:2])
        return {
            "BatchMLAPagedAttentionWrapper": mla_wrapper(recorder, (major, minor)),
            "BatchPrefillWithRaggedKVCacheWrapper": BatchPrefillWithRaggedKVCacheWrapper,
        }
    from . import recording

    return {"BatchMLAPagedAttentionWrapper": recording.mla_wrapper(recorder)}
