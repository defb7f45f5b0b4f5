"""The part of a model's config.json that decides what its MLA KV pool costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.jsontext import is_size, parsed_object

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ModelShape:
    """An MLA model: `width` elements a token and layer (kv_lora_rank + rope), and the index-K bytes of a DSA model."""

    name: str
    layers: int
    latent: int
    rope: int
    heads: int
    index_bytes: int = 0

    @property
    def width(self) -> int:
        """Elements of the KV row of one token in one layer."""
        return self.latent + self.rope


PRESETS: dict[str, ModelShape] = {
    # config.json of zai-org/GLM-5: 78 layers, 64 heads, DSA with index_head_dim 128
    "glm-5": ModelShape("glm-5", 78, 512, 64, 64, 132),
    "deepseek-v3": ModelShape("deepseek-v3", 61, 512, 64, 128),
    "deepseek-r1": ModelShape("deepseek-r1", 61, 512, 64, 128),
    "deepseek-v3.2": ModelShape("deepseek-v3.2", 61, 512, 64, 128, 132),
    "kimi-k2": ModelShape("kimi-k2", 61, 512, 64, 64),
}


def index_bytes(head_dim: int) -> int:
    """Bytes a token and layer of the DSA indexer's key: FP8, and one FP32 scale for each 128 elements."""
    return head_dim + 4 * (head_dim // 128)


def preset(name: str) -> ModelShape:
    """A model known by name.

    Raises:
        MlapatchError: no such preset (exit 2).
    """
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise MlapatchError(
            Exit.USAGE,
            f"no preset is called {name!r}",
            expected=", ".join(PRESETS),
            next="mlapatch estimate --model PATH/config.json",
        ) from None


def read(path: Path) -> ModelShape:
    """The shape in a config.json, or in the folder that holds one.

    Raises:
        MlapatchError: no such file, not JSON, or not an MLA model (exit 2).
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = parsed_object(file.read_bytes())
    except OSError as error:
        raise MlapatchError(
            Exit.USAGE,
            "cannot read the model's config",
            where=str(file),
            found=str(error),
            next="mlapatch estimate --preset glm-5",
        ) from None
    except ValueError as error:
        raise MlapatchError(
            Exit.USAGE,
            "the model's config is not JSON",
            where=str(file),
            found=str(error),
            next="mlapatch estimate --preset glm-5",
        ) from None
    return from_config(config, str(path.parent.name if path.name == "config.json" else path.name), str(file))


def from_config(config: dict[str, Any], name: str, where: str = "config.json") -> ModelShape:
    """The shape that a parsed config states; multimodal ones keep it in `text_config`."""
    text = config.get("text_config")
    if "kv_lora_rank" not in config and isinstance(text, dict):
        config = text
    needed = ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in needed if not is_size(config.get(key))]
    if missing:
        raise MlapatchError(
            Exit.USAGE,
            "this is not an MLA model, so it has no MLA KV pool to cast",
            where=where,
            expected=", ".join(needed),
            found=f"no {', '.join(missing)} (model_type {config.get('model_type', 'unknown')!s:.60})",
            next="mlapatch estimate --preset glm-5",
        )
    index = config.get("index_head_dim") if config.get("index_topk") else None
    return ModelShape(
        name or str(config.get("model_type", "model")),
        config["num_hidden_layers"],
        config["kv_lora_rank"],
        config["qk_rope_head_dim"],
        config["num_attention_heads"],
        index_bytes(index) if is_size(index) else 0,
    )
