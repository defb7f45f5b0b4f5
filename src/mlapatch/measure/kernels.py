"""Kernels grouped by name and grid, and what a name and a grid tell: the family, and how many elements a copy moves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

CAST = "KV-pool cast"
IDLE = "GPU idle"

# The first that matches wins, so the more telling words come first.
_FAMILIES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("copies, elementwise", re.compile(r"at::native::\w*elementwise_kernel")),
    ("mlapatch", re.compile(r"mlapatch|cast_slots|active_cast|cast_active|gather_cast|fused_decode")),
    ("communication", re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|_shot_", re.I)),
    ("norm, rope", re.compile(r"rms_?norm|layer_?norm|fused_add|rope|rotary", re.I)),
    ("KV write", re.compile(r"set_mla_kv|set_kv_buffer|store_?cache|concat_mla|copy_all_layer_kv|kv_indices", re.I)),
    ("MoE", re.compile(r"moe|expert|topk_gating|grouped_topk|GroupProblem", re.I)),
    (
        "attention",
        re.compile(
            r"mla|attention|fmha|flash_?(attn|fwd|infer::.*(decode|prefill))|_fwd_.*kernel_stage|decode_split|"
            r"decode_combine|indexer",
            re.I,
        ),
    ),
    ("GEMM", re.compile(r"gemm|nvjet|cutlass|cublas|matmul|splitKreduce|gemv|xmma|dot_kernel", re.I)),
    ("sampling", re.compile(r"argmax|arg_max|softmax|sampl|multinomial|top_?[kp]|sort", re.I)),
    ("quantise", re.compile(r"quant|fp8", re.I)),
    (
        "copies, elementwise",
        re.compile(r"memcpy|memset|elementwise|copy|cat|index|fill|act_and_mul|reduce_kernel|triton_", re.I),
    ),
)

_COPY = re.compile(r"(?<!index_)elementwise_kernel.*(copy|LoadWithCast)|(direct|float8)_copy_kernel")
_CASTING = re.compile(r"LoadWithCast|float8_copy")
_SAME_DTYPE = re.compile(r"gpu_kernel_impl_nocast")
_UNROLLED = re.compile(
    r"unrolled_elementwise_kernel<.*?,\s*(?:std::|at::detail::)?[Aa]rray<char\s?\*,\s*\d+\w*>,\s*(\d+)\s*,"
)
_STRIDED = re.compile(r"\belementwise_kernel<(\d+),\s*(\d+),")


def family(name: str) -> str:
    """What part of a step a kernel belongs to, by its name."""
    for label, pattern in _FAMILIES:
        if pattern.search(name):
            return label
    return "other"


@dataclass
class Group:
    """All launches of one kernel name with one grid; durations in us."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    count: int = 0
    total: float = 0.0
    ops: list[int] = field(default_factory=list)

    @property
    def is_copy(self) -> bool:
        """PyTorch's elementwise copy, unless its name says that no dtype changes; stock's cast is one."""
        return _COPY.search(self.name) is not None and _SAME_DTYPE.search(self.name) is None

    @property
    def converts(self) -> bool:
        """A copy between two dtypes."""
        return _CASTING.search(self.name) is not None

    @property
    def elements(self) -> int:
        """Elements that the grid covers: an upper bound, by less than one block; 0 where no grid was recorded."""
        blocks = threads = 1
        for n in self.grid:
            blocks *= n
        for n in self.block:
            threads *= n
        if not self.grid or not self.block:
            return 0
        return blocks * threads * self._per_thread()

    def _per_thread(self) -> int:
        if (strided := _STRIDED.search(self.name)) is not None:
            return int(strided.group(2))
        if (unrolled := _UNROLLED.search(self.name)) is not None:
            return int(unrolled.group(1))
        return 4  # PyTorch's thread_work_size before it became a template argument

    @property
    def grid_text(self) -> str:
        """The grid as CUDA writes it."""
        return "x".join(map(str, self.grid)) or "not recorded"


def short(name: str, width: int = 60) -> str:
    """A kernel name without its template and parameter lists."""
    plain = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    while (inner := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = inner
    plain = plain.split("(")[0].replace("at::native::", "")
    if _COPY.search(name):
        plain += " (copy, converts dtype)" if _CASTING.search(name) else " (copy)"
    return plain if len(plain) <= width else plain[: width - 1] + "…"
