"""Which MLA attention backends can run a model, as coded in SGLang 0.5.9 and 0.5.23, and what each does with FP8 KV.

Each rule names the line of the release that says so. Releases in between are judged by the nearest table and the answer
says which; nothing is inferred about releases outside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from mlapatch.jsontext import size_in
from mlapatch.model_config import text_part

OLD, NEW = "0.5.9", "0.5.23"
YES, NO, CATCH = "yes", "no", "with a catch"

IN_KERNEL = "reads FP8 in its kernel: no patch needed"
CASTS = "casts the whole FP8 pool in every layer: patch it"
CASTS_TOO = "casts the whole FP8 pool in every layer, and no patch of mlapatch covers it"
PACKED = "reads packed FP8 rows in its kernel: no patch needed"
NO_FP8 = "-"


@dataclass(frozen=True)
class Question:
    """A model on a GPU.

    `heads` are query heads a rank, `sm` is 90 or 120, `release` one of OLD and NEW, `wants` the flashinfer that the
    release asks for, `prefix` how it spells its DSA flags.
    """

    nope: int
    heads: int
    dsa: bool
    arch: str
    sm: int
    release: str
    flashinfer: Version
    wants: Version
    kv: str = "fp8_e4m3"
    prefix: str = "dsa"

    @property
    def fp8(self) -> bool:
        """Whether the pool is FP8."""
        return self.kv.startswith("fp8")


@dataclass(frozen=True)
class Answer:
    """Whether a backend can run it, the rule that says so, the page size it forces (0: none), what it does with FP8."""

    backend: str
    can: str
    why: str
    source: str
    page: int = 0
    fp8: str = NO_FP8

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "backend": self.backend,
            "can": self.can,
            "why": self.why,
            "source": self.source,
            "page_size": self.page or None,
            "fp8": None if self.fp8 == NO_FP8 else self.fp8,
        }


def table_for(version: Version) -> tuple[str, str]:
    """The table that judges a release, and what to say where it is not that release's own."""
    if version == Version(OLD):
        return OLD, ""
    if version == Version(NEW):
        return NEW, ""
    table = OLD if version < Version("0.5.16") else NEW
    return table, f"the rules are those of {table}, the nearest release that was read; {version} may differ"


def pinned_flashinfer(version: Version) -> Version:
    """The flashinfer that a release's metadata pins (read from the wheels); the nearest older one's in between."""
    older = [pin for release, pin in _PINS if Version(release) <= version]
    return Version(older[-1] if older else _PINS[0][1])


def question(
    config: dict[str, Any], *, tp: int, sm: int, release: str, flashinfer: Version, wants: Version, kv: str, prefix: str
) -> Question:
    """From a parsed config.json."""
    text = text_part(config)
    named = config.get("architectures")
    return Question(
        nope=size_in(text, "qk_nope_head_dim", 128),
        heads=max(1, size_in(text, "num_attention_heads", 128) // tp),
        dsa=text.get("index_topk") is not None,
        arch=str(named[0]) if isinstance(named, list) and named else "unknown",
        sm=sm,
        release=release,
        flashinfer=flashinfer,
        wants=wants,
        kv=kv,
        prefix=prefix,
    )


def answers(asked: Question) -> list[Answer]:
    """Every backend that the release knows for MLA."""
    return [judge(asked) for judge in _JUDGES[asked.release]]


# -------------------------------------------------------------------------------------------------------------- rules
def _dense(asked: Question, name: str, fp8: str, why: str, source: str, page: int = 0) -> Answer:
    """A backend that attends to all tokens and reads plain rows; on a DSA model the pool must be told to have them."""
    shown = fp8 if asked.fp8 else NO_FP8
    if not asked.dsa:
        return Answer(name, YES, why, source, page, shown)
    if page not in (0, 64):
        where = "mem_cache/memory_pool.py 1778 (0.5.9), 5371 (0.5.23)"
        return Answer(name, NO, f"forces pages of {page}; a DSA model's KV pool asserts 64", where, page)
    flag = asked.prefix
    layout = f"; FP8 needs --{flag}-prefill-backend trtllm and --{flag}-decode-backend trtllm, or it reads garbage"
    return Answer(name, CATCH, f"{why}; dense attention{layout if asked.fp8 else ''}", source, 64, shown)


def _flashinfer(asked: Question) -> Answer:
    source = "entrypoints/engine.py 848 (0.5.9), 1954 (0.5.23)"
    if asked.flashinfer < asked.wants:
        rule = f"this SGLang wants flashinfer >= {asked.wants}; {asked.flashinfer} is there"
        return Answer("flashinfer", NO, rule, source)
    source = "layers/attention/flashinfer_mla_backend.py forward_decode, forward_extend"
    return _dense(asked, "flashinfer", CASTS, "any GPU from SM80; speculative decoding with topk=1 only", source)


def _triton(asked: Question) -> Answer:
    why = "any GPU"
    if asked.fp8 and asked.release == OLD:
        why += "; prefill with a prefix rounds the query to FP8, and k_scale is ignored"
    source = "layers/attention/triton_ops/decode_attention.py 355, extend_attention.py 376 (0.5.9)"
    if asked.release == NEW:
        source = "kernels/ops/attention/decode_attention.py, extend_attention.py 614-619 (0.5.23)"
    return _dense(asked, "triton", IN_KERNEL, why, source)


def _trtllm(asked: Question) -> Answer:
    name, source = "trtllm_mla", "server_args.py 1876-1892 (0.5.9), arg_groups/overrides.py 1203-1217 (0.5.23)"
    legal = ("fp8_e4m3", "bf16", "auto") + (("fp4_e2m1",) if asked.release == OLD else ())
    if asked.sm < 100:
        return Answer(name, NO, f"needs Blackwell (SM100 or SM12x); this is SM{asked.sm}", source)
    if asked.kv not in legal:
        return Answer(name, NO, f"takes --kv-cache-dtype {', '.join(legal)}, not {asked.kv}", source)
    if asked.nope != 128 and asked.flashinfer < Version("0.6.5"):
        rule = f"flashinfer {asked.flashinfer} wants qk_nope_head_dim 128; this model has {asked.nope}"
        return Answer(name, NO, rule, "flashinfer 0.6.3 mla.py 87")
    if asked.sm >= 120 and asked.release == OLD and not asked.fp8:
        return Answer(
            name, NO, "goes to XQA on SM12x, which takes FP8 query and KV only", "flashinfer 0.6.3 mla.py 600"
        )
    if asked.sm >= 120 and asked.heads != 128:
        rule = (
            f"goes to XQA on SM12x, built for 128 query heads a rank; this model has {asked.heads}, "
            "which flashinfer's wrapper refuses and the path that SGLang calls does not check"
        )
        return Answer(name, NO, rule, "flashinfer 0.7.2 mla/_batch_mla/_backends/xqa_backend.py 117")
    return _dense(asked, name, IN_KERNEL, "the query is cast to FP8 as well; pages of 32 or 64", source, 64)


def _cutlass(asked: Question) -> Answer:
    source = "server_args.py 1866-1873, layers/attention/cutlass_mla_backend.py 31 (0.5.9)"
    if asked.sm // 10 != 10:
        rule = f"sgl_kernel's cutlass_mla is built for SM100; this is SM{asked.sm}, and SGLang does not check"
        return Answer("cutlass_mla", NO, rule, source, 128)
    return _dense(asked, "cutlass_mla", IN_KERNEL, "no k_scale", source, 128)


def _flashmla(asked: Question) -> Answer:
    source = "server_args.py 1856-1863 (0.5.9), arg_groups/overrides.py 1147-1154 (0.5.23)"
    if asked.sm // 10 != 9:
        rule = f"the kernel is built for SM90; this is SM{asked.sm}, and SGLang does not check: it fails late"
        return Answer("flashmla", NO, rule, source, 64)
    return _dense(asked, "flashmla", IN_KERNEL, "SM90; FP8 costs about 0.4 ms a step more than BF16", source, 64)


def _fa3(asked: Question) -> Answer:
    source = "layers/attention/attention_registry.py 126-137 (0.5.9), 238-250 (0.5.23)"
    if asked.sm // 10 != 9:
        return Answer("fa3", NO, f"for MLA it asserts SM90; this is SM{asked.sm}", source)
    if asked.kv == "fp8_e5m2":
        return Answer("fa3", NO, "takes fp8_e4m3 only: SGLang switches to triton with a warning", "server_args.py 1912")
    return _dense(asked, "fa3", CASTS_TOO, "SM90", "layers/attention/flashattention_backend.py 999, 1274 (0.5.9)")


def _dsa(asked: Question) -> Answer:
    name = asked.prefix
    source = "startup failure 24; server_args.py 1145-1180 (0.5.9)"
    if not asked.dsa:
        return Answer(name, NO, "only for models with index_topk in their config", source)
    if asked.kv not in ("fp8_e4m3", "bfloat16", "bf16", "auto"):
        return Answer(name, NO, f"DSA takes bfloat16 or fp8_e4m3 KV, not {asked.kv}", source)
    if asked.sm < 120:
        return Answer(name, YES, "sparse attention: the model's own", source, 64, PACKED if asked.fp8 else NO_FP8)
    if asked.release == NEW and asked.fp8 and asked.arch == "GlmMoeDsaForCausalLM":
        why = "sparse attention through flashinfer_sparse_mla, the default for GLM with FP8 KV on SM12x"
        return Answer(name, YES, why, "arg_groups/overrides.py 672 (0.5.23)", 64, PACKED)
    return Answer(
        name, NO, f"DeepGEMM has no kernel for SM{asked.sm}: it dies with `Unsupported architecture`", source, 64
    )


def _cutedsl(asked: Question) -> Answer:
    source = "arg_groups/overrides.py 1233-1260 (0.5.23)"
    if asked.sm // 10 != 10:
        return Answer("cutedsl_mla", NO, f"needs SM100; this is SM{asked.sm}", source)
    if asked.kv not in ("fp8_e4m3", "bf16", "bfloat16", "auto"):
        return Answer("cutedsl_mla", NO, f"does not take {asked.kv} KV", source)
    return _dense(asked, "cutedsl_mla", IN_KERNEL, "decode only; trtllm_mla does the prefill", source, 64)


_PINS = (
    ("0.5.9", "0.6.3"),
    ("0.5.10", "0.6.7.post3"),
    ("0.5.11", "0.6.8.post1"),
    ("0.5.12", "0.6.11.post1"),
    ("0.5.13", "0.6.12"),
    ("0.5.16", "0.6.14"),
    ("0.5.17", "0.6.15.post1"),
    ("0.5.18", "0.6.17"),
    ("0.5.19", "0.6.18"),
    ("0.5.22", "0.7.1"),
    ("0.5.23", "0.7.2"),
)

_JUDGES: dict[str, tuple[Callable[[Question], Answer], ...]] = {
    OLD: (_flashinfer, _triton, _trtllm, _cutlass, _flashmla, _fa3, _dsa),
    NEW: (_flashinfer, _triton, _trtllm, _flashmla, _fa3, _dsa, _cutedsl),
}
