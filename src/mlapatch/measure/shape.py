"""The part of a model's config.json that decides what its MLA KV pool costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlapatch import model_config
from mlapatch.jsontext import is_size

if TYPE_CHECKING:
    from pathlib import Path

NEEDED = ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_attention_heads")


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


def index_bytes(head_dim: int) -> int:
    """Bytes a token and layer of the DSA indexer's key: FP8, and one FP32 scale for each 128 elements."""
    return head_dim + 4 * (head_dim // 128)


def preset(name: str) -> ModelShape:
    """A model known by name; MlapatchError (exit 2) where there is none."""
    return from_config(model_config.preset(name), name.lower())


def read(path: Path) -> ModelShape:
    """The shape in a config.json, or in the folder that holds one; MlapatchError (exit 2) as `model_config.read`."""
    config, file = model_config.read(path, NEEDED)
    return from_config(config, file.parent.name if file.name == "config.json" else file.name)


def from_config(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a config with all that is `NEEDED` states."""
    text = model_config.text_part(config)
    index = text.get("index_head_dim") if text.get("index_topk") else None
    return ModelShape(
        name or str(config.get("model_type", "model")),
        text["num_hidden_layers"],
        text["kv_lora_rank"],
        text["qk_rope_head_dim"],
        text["num_attention_heads"],
        index_bytes(index) if is_size(index) else 0,
    )
