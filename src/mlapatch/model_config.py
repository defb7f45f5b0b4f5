"""A model's config.json, or a model known by name: one reader, and one set of refusals, for every verb that asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.jsontext import is_size, parsed_object

NEXT = "--model PATH with an MLA model's config.json or the folder that holds it, or --preset glm-5"

_DSA = {"index_topk": 2048, "index_head_dim": 128}
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
_GLM = {  # config.json of zai-org/GLM-5
    **_DEEPSEEK,
    **_DSA,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "qk_nope_head_dim": 192,
}
PRESETS: dict[str, dict[str, Any]] = {
    "glm-5": _GLM,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v3.2": {**_DEEPSEEK, **_DSA, "architectures": ["DeepseekV32ForCausalLM"]},
    "kimi-k2": {**_DEEPSEEK, "num_attention_heads": 64},
}


def preset(name: str) -> dict[str, Any]:
    """What the config.json of a model known by name says, as far as mlapatch asks.

    Raises:
        MlapatchError: no such preset (exit 2).
    """
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise MlapatchError(
            Exit.USAGE, f"no preset is called {name!r}", expected=", ".join(PRESETS), next=NEXT
        ) from None


def read(path: Path, needed: Sequence[str] = ("kv_lora_rank",)) -> tuple[dict[str, Any], Path]:
    """The whole config in a file, or in the config.json of a folder, and that file.

    Raises:
        MlapatchError: it cannot be read, is no JSON, or lacks one of the `needed` sizes: no MLA model (exit 2).
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        config = parsed_object(file.read_bytes())
    except (OSError, ValueError) as error:
        what = "cannot read the model's config" if isinstance(error, OSError) else "the model's config is not JSON"
        found = getattr(error, "strerror", None) or str(error)
        raise MlapatchError(Exit.USAGE, what, where=str(file), found=found, next=NEXT) from None
    missing = [key for key in needed if not is_size(text_part(config).get(key))]
    if missing:
        raise MlapatchError(
            Exit.USAGE,
            "this is not an MLA model",
            where=str(file),
            expected=", ".join(needed),
            found=f"no {', '.join(missing)} (model_type {config.get('model_type', 'unknown')!s:.60})",
            next=NEXT,
        )
    return config, file


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own part: multimodal configs keep it in `text_config`, as SGLang takes it."""
    inner = config.get("text_config")
    if isinstance(inner, dict) and ("kv_lora_rank" in inner or "kv_lora_rank" not in config):
        return inner
    return config
