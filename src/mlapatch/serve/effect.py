"""Whether a patch of flashinfer's MLA backend has anything to do under a command's options; unknown is no answer.

Read from SGLang 0.5.9, 0.5.15.post1 and 0.5.23: which backends are, or fall back to, FlashInferMLAAttnBackend
(attention_registry.py, and who imports flashinfer_mla_backend.py), what a DSA model runs on by default
(is_attention_backend_not_set in server_args.py, arg_groups/), and what `--kv-cache-dtype auto` becomes
(configure_kv_cache_dtype, _dsa_kv_cache_dtype_default).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlapatch.model_config import text_part
from mlapatch.serve.model_fit import is_dsa
from mlapatch.serve.preflight import OK, SKIP, WARN, Context, Finding

_TARGET = "flashinfer_mla_backend.py"
_OTHERS = ("triton", "fa3", "fa4", "nsa", "dsa")
"""Backends of MLA that never use flashinfer's; flashmla, cutlass_mla and trtllm_mla prefill with it."""

_DSA = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_DENSE = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_READ = (
    "attention-backend",
    "prefill-attention-backend",
    "decode-attention-backend",
    "kv-cache-dtype",
    "speculative-draft-attention-backend",
    "speculative-draft-kv-cache-dtype",
    "quantization",
    "json-model-override-args",
    "config",
)
_OURS, _PHASES = "flashinfer", ("prefill", "decode")
_FP8 = ("fp8_e4m3", "fp8_e5m2")


def effect(context: Context) -> Iterable[Finding]:
    """An applied patch that this command gives nothing to do looks like one that does not help."""
    facts = context.patches
    if facts is None:
        return [Finding("effect", SKIP, context.unseen)]
    names = sorted({name for file in facts.files if file.path.name == _TARGET for name in file.patches})
    if not names:
        return [Finding("effect", SKIP, "no patch of flashinfer's MLA backend is applied")]
    if not context.command.whole or "config" in context.options.given:
        return [Finding("effect", SKIP, "the command may not hold all of the server's options")]
    for short in context.options.given:
        if any(name != short and name.startswith(short) for name in _READ):
            return [Finding("effect", SKIP, f"--{short} is an abbreviation, and it is not known of what")]
    who, has = ", ".join(names), "have" if len(names) > 1 else "has"
    for reason, hint in (
        (_other_backend(context), "--attention-backend flashinfer"),
        (_no_fp8(context), "--kv-cache-dtype fp8_e4m3"),
    ):
        if reason:
            return [Finding("effect", WARN, f"{who} {has} no effect: {reason}", next=hint)]
    used = [phase for phase, name in zip(_PHASES, context.options.attention_backends, strict=True) if name == _OURS]
    if used and context.options.text("kv-cache-dtype") in _FP8:
        where = "" if len(used) == len(_PHASES) else f", in {used[0]}"
        return [Finding("effect", OK, f"flashinfer MLA reads an FP8 pool{where}")]
    return [Finding("effect", SKIP, f"{who} acts on flashinfer MLA with an FP8 pool; the command does not name both")]


def _other_backend(context: Context) -> str:
    """Why flashinfer's MLA backend runs in no phase; '' where it may."""
    options, config = context.options, context.config()
    draft = options.text("speculative-draft-attention-backend")
    if draft and draft not in _OTHERS:
        return ""
    prefill, decode = options.attention_backends
    if prefill in _OTHERS and decode in _OTHERS:
        given = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
        used = [f"--{name} {options.text(name)}" for name in given if options.text(name) in (prefill, decode)]
        return f"{' and '.join(used)} {'do' if len(used) > 1 else 'does'} not use flashinfer MLA"
    if not prefill and not decode and config is not None and is_dsa(config) and _arch(config) in _DSA:
        return "without --attention-backend a DSA model runs on SGLang's sparse backend, not on flashinfer MLA"
    return ""


def _no_fp8(context: Context) -> str:
    """Why the KV pool is not FP8; '' where it may be."""
    options, config = context.options, context.config()
    dtype = options.text("kv-cache-dtype", "auto")
    if options.text("speculative-draft-kv-cache-dtype") in _FP8:
        return ""
    if dtype in ("bf16", "bfloat16"):
        return f"the KV pool is not FP8 (--kv-cache-dtype {dtype}), so nothing is cast"
    if dtype != "auto" or config is None:
        return ""
    shown = "--kv-cache-dtype auto" if "kv-cache-dtype" in options.given else "no --kv-cache-dtype"
    if is_dsa(config):
        sms = {gpu.sm for gpu in context.gpus or ()}
        if sms and max(sms) < 100 and _arch(config) in _DSA:
            return f"the KV pool is bfloat16 ({shown}, a DSA model on SM{max(sms)}), so nothing is cast"
        return ""
    if _arch(config) in _DENSE and not _kv_may_be_fp8(context, config):
        return f"the KV pool is not FP8 ({shown}, and the model does not ask for it), so nothing is cast"
    return ""


def _arch(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _kv_may_be_fp8(context: Context, config: dict[str, Any]) -> bool:
    """Whether a checkpoint may make `auto` FP8: modelopt's and others' quantisation of the KV cache."""
    if "quantization" in context.options.given or "json-model-override-args" in context.options.given:
        return True
    if (Path(context.options.text("model-path")) / "hf_quant_config.json").exists():
        return True
    keys = ("quantization_config", "compression_config")
    said = [part.get(key) for part in (config, text_part(config)) for key in keys]
    for quantisation in filter(None, said):
        if not isinstance(quantisation, dict) or quantisation.get("quant_method") != "fp8":
            return True
        if any("kv" in key and value for key, value in quantisation.items()):
            return True
    return False
