"""What flashinfer's MLA wrapper refuses: dtypes and scales as from 0.6.14 on, lengths as from 0.7 on."""

from __future__ import annotations

import itertools
import math

import torch

from .device import CAPABILITY
from .record import ints

_KV_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def check_plan(q_dtype: torch.dtype, kv_dtype: torch.dtype, ckv: int, kpe: int) -> None:
    """ValueError where no kernel takes these dtypes and widths."""
    if kv_dtype not in _KV_DTYPES:
        raise ValueError(f"MLA kv_data_type {kv_dtype} is not supported. Supported dtypes: {list(_KV_DTYPES)}.")
    if kv_dtype == torch.float8_e4m3fn and (CAPABILITY[0] != 9 or q_dtype != torch.bfloat16 or (ckv, kpe) != (512, 64)):
        raise ValueError("FP8 kv_data_type for MLA needs SM90, a bfloat16 query, head_dim_ckv=512 and head_dim_kpe=64.")


def check_lengths(indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, page_size: int) -> None:
    """ValueError where offsets, slots and lengths disagree; `indptr` `[bs + 1]`, `lens` `[bs]`, int32."""
    for name, tensor in (("kv_indptr", indptr), ("kv_indices", indices), ("kv_len_arr", lens)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} metadata must have dtype torch.int32, got {tensor.dtype}.")
    offsets = ints(indptr)
    if len(offsets) != len(lens) + 1:
        return
    if offsets[-1] > indices.numel():
        raise ValueError(f"kv_indices metadata has {indices.numel()} entries but kv_indptr[-1] is {offsets[-1]}.")
    pages = [b - a for a, b in itertools.pairwise(offsets)]
    if pages != [math.ceil(n / page_size) for n in ints(lens)]:
        raise ValueError("CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size).")


def scales(
    dtype: torch.dtype, ckv: float | None, ckv_arr: torch.Tensor | None, kpe: float | None
) -> tuple[float, float]:
    """The two scales that an FP8 cache needs and any other refuses."""
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
