"""Checks of layout, page size, backend and KV dtype against the model: wrong answers or a late death otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from packaging.version import InvalidVersion, Version

from mlapatch.jsontext import size_in
from mlapatch.model_config import text_part
from mlapatch.serve.libraries import FLASHINFER, KERNELS
from mlapatch.serve.preflight import FAIL, OK, SKIP, WARN, Context, Finding
from mlapatch.serve.server_options import dsa_prefix

_FORCED_PAGES = {"flashmla": 64, "trtllm_mla": 64, "cutlass_mla": 128}
_NO_CONFIG = "the model's config.json is not on this machine, or cannot be read"
_DSA_KV = ("fp8_e4m3", "bfloat16", "bf16", "auto", "")


def is_dsa(config: dict[str, Any]) -> bool:
    """A DSA model (GLM-5, DeepSeek-V3.2): `index_topk` in its config, as SGLang's is_deepseek_nsa/_dsa decide."""
    return text_part(config).get("index_topk") is not None


def page_size(context: Context, config: dict[str, Any]) -> int:
    """The page size that the server will use: 64 (x index_kpool) for DSA, what the backend forces, or what is asked."""
    if is_dsa(config):
        return 64 * size_in(text_part(config), "index_kpool", 1)
    backend = context.options.text("attention-backend")
    return _FORCED_PAGES.get(backend) or context.options.number("page-size", 1) or 1


def chunk(context: Context) -> Iterable[Finding]:
    """SGLang asserts that the chunk is a multiple of the page size."""
    config, size = context.config(), context.options.number("chunked-prefill-size")
    if config is None:
        return [Finding("page size", SKIP, _NO_CONFIG)]
    if size is None or size <= 0:
        why = "the command gives --chunked-prefill-size no number" if size is None else "chunked prefill is off"
        return [Finding("page size", SKIP, why)]
    page = page_size(context, config)
    if size % page:
        rounded = (size + page - 1) // page * page
        text = f"chunked prefill size {size} is no multiple of the page size {page}: SGLang refuses to start"
        return [Finding("page size", FAIL, text, next=f"--chunked-prefill-size {rounded}")]
    return [Finding("page size", OK, f"{page}; chunked prefill size {size}")]


def layout(context: Context) -> Iterable[Finding]:
    """Dense backends read plain rows; a DSA pool in FP8 has them only with both DSA backends trtllm.

    The layout follows the DSA backends alone, whatever --attention-backend says (calculate_mla_kv_cache_dim, 0.5.9 and
    0.5.23).
    """
    config, options = context.config(), context.options
    if config is None or not is_dsa(config):
        why = _NO_CONFIG if config is None else "no DSA model: every backend reads its rows alike"
        return [Finding("KV layout", SKIP, why)]
    dtype, backend = options.text("kv-cache-dtype", "auto"), options.text("attention-backend")
    if dtype not in _DSA_KV:
        text = f"DSA models take only bfloat16 or fp8_e4m3 KV, not {dtype}"
        return [Finding("KV layout", FAIL, text, next="--kv-cache-dtype fp8_e4m3")]
    if backend == "cutlass_mla":
        text = "cutlass_mla forces pages of 128; the KV pool of a DSA model asserts 64"
        return [Finding("KV layout", FAIL, text, next="--attention-backend flashinfer")]
    if backend in ("", "nsa", "dsa") or dtype != "fp8_e4m3":
        return [Finding("KV layout", OK, f"DSA model, {backend or 'default'} backend, {dtype} KV")]
    default = "trtllm" if _default_is_trtllm(context) else "packed"
    raw = [given or default for given in options.dsa_backends].count("trtllm")
    if raw == 2:
        return [Finding("KV layout", OK, "DSA model, plain FP8 rows (both DSA backends are trtllm)")]
    text = (
        f"the FP8 pool would have packed DSA rows, which {backend} misreads: garbage, without an error"
        if raw == 0
        else "only one DSA backend is trtllm: a prefix hit of 8,192 tokens or more ends the server"
    )
    facts = context.patches
    prefix = dsa_prefix(facts.sglang if facts else "", facts.package if facts else None)
    hint = f"--{prefix}-prefill-backend trtllm --{prefix}-decode-backend trtllm"
    return [Finding("KV layout", FAIL, text, next=hint)]


def graphs(context: Context) -> Iterable[Finding]:
    """Without CUDA graphs decode is bound by the CPU, and removing the cast hardly shows."""
    option = context.options.graphs_disabled
    if not option:
        return [Finding("CUDA graphs", OK, "no option switches them off")]
    text = f"{option} switches CUDA graphs off: the CPU then launches every kernel of every layer, and no patch shows"
    return [Finding("CUDA graphs", WARN, text, next=f"start without {option}")]


def libraries(context: Context) -> Iterable[Finding]:
    """The libraries are there, and match each other and the release.

    Of a wrapper or script it is not known that it starts SGLang, nor with the Python that was looked at: no refusal.
    """
    facts = context.patches
    if facts is None:
        return [Finding("libraries", SKIP, context.unseen)]
    worst = FAIL if context.command.whole else WARN
    found = [Finding("libraries", worst, text, next="mlapatch doctor") for text in facts.library_problems]
    for gone in facts.missing:
        state = worst if _needed(gone.name, context) else WARN
        found.append(Finding("libraries", state, gone.text, next=gone.next))
    if found:
        return found
    if not facts.flashinfer:
        return [Finding("libraries", SKIP, "no flashinfer is installed beside this SGLang")]
    if facts.flashinfer.endswith("(pinned)"):
        asked = facts.flashinfer.partition(" ")[0]
        text = f"SGLang asks for flashinfer {asked}; which one its Python has is not known"
        return [Finding("libraries", SKIP, text)]
    return [Finding("libraries", OK, f"flashinfer {facts.flashinfer}")]


def _needed(name: str, context: Context) -> bool:
    """Whether this start is certain to fail without a package; what it uses by default is not known here."""
    if name == FLASHINFER:
        return "flashinfer" in context.options.attention_backends
    return name not in KERNELS or bool(context.gpus)


def _default_is_trtllm(context: Context) -> bool:
    """What a release chooses for FP8 KV where no flag is given.

    0.5.9: never trtllm. 0.5.15.post1: trtllm on SM100 and later. 0.5.17 on: another packed layout on SM120
    (arg_groups/overrides.py of 0.5.15.post1 and 0.5.23).
    """
    facts = context.patches
    if facts is None or not context.gpus:
        return False
    try:
        version = Version(facts.sglang)
    except InvalidVersion:
        return False
    sms = {gpu.sm for gpu in context.gpus}
    newest = 119 if version >= Version("0.5.17") else 999
    return version >= Version("0.5.15") and all(100 <= sm <= newest for sm in sms)


FIT_CHECKS = (libraries, chunk, layout, graphs)
