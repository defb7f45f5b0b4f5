"""What the compiler makes of fused-decode's exponents: Triton's interpreter rounds each operation, a GPU need not."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest

from tests.verify.fused_tunings import ROOT

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.verify

POINTERS = {
    **dict.fromkeys(("query", "query_rope", "kv_indices", "kv_indptr"), "*i32"),
    **dict.fromkeys(("pool", "pool_rope"), "*i16"),
    **dict.fromkeys(("part_sums", "out_lse"), "*fp32"),
    "part": "*fp16",
    "out": "*bf16",
}
COMMON: dict[str, Any] = {"TILE": 32, "OVERLAP": True}
LOADS = {"ROW": 288, "HEADS": 8, "REQUESTS": 32, "WIDE": False, "E5M2": False, "HALF": False, "CONVERT": True}
FIRST, SECOND = "fused_decode_kernel", "fused_decode_combine"
#: compute capability, kernel, warps, constants: Ampere has no conversion of e4m3 and no overlapped launch
KERNELS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "hopper-four-warps": (90, FIRST, 4, {**LOADS, "ASM": True, "WARPS": 4}),
    "hopper-two-warps": (90, FIRST, 2, {**LOADS, "ASM": True, "WARPS": 2}),
    "hopper-combine": (90, SECOND, 4, {"PIECES": 256, "FEW": 32, "BLOCK": 32}),
    "rtx-pro-6000": (120, FIRST, 4, {**LOADS, "ASM": True, "WARPS": 4}),
    "ampere": (80, FIRST, 4, {**LOADS, "ASM": True, "WARPS": 4, "CONVERT": False, "OVERLAP": False}),
}
EXPONENTIAL = re.compile(r"\bex2\.approx(?:\.ftz)?\.f32\s+\S+,\s*(%\w+);")
FIFTEEN = "0f41700000"  # weights are raised by 2^15, to suit float16
DEFINITION = re.compile(r"^\s*([\w.]+)\s+(%\w+),\s*(.*);", re.MULTILINE)


@pytest.fixture(scope="module")
def snippets() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench" / "gpu"))
        files = importlib.import_module("snippets")
        return files.load(files.FUSED_DECODE)  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", KERNELS.values(), ids=KERNELS)
def test_every_exponent_is_a_difference_times_the_gain(
    snippets: ModuleType, build: tuple[int, str, int, dict[str, Any]]
) -> None:
    """score * gain - peak would become one fused multiply-add, whose weights pass 1 and overflow for large logits."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    capability, name, warps, constants = build
    kernel = getattr(snippets, name)
    constants = {**COMMON, **constants}
    rest = [argument for argument in kernel.arg_names if argument not in constants]
    signature = {argument: POINTERS.get(argument, "fp32" if argument == "scale" else "i32") for argument in rest}
    signature |= dict.fromkeys((argument for argument in kernel.arg_names if argument in constants), "constexpr")
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in rest if argument in POINTERS
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    text = compiled.asm["ptx"]
    made = {register: (operation, inputs) for operation, register, inputs in DEFINITION.findall(text)}
    exponents = EXPONENTIAL.findall(text)
    assert len(exponents) > 2
    for exponent in exponents:
        operation, inputs = made[exponent]
        one, other, *added = (given.strip() for given in inputs.split(","))
        assert "sub.f32" in {made.get(given, ("",))[0] for given in (one, other)}, inputs
        assert (operation, added) in (("mul.f32", []), ("fma.rn.f32", [FIFTEEN])), (operation, inputs)
