"""Speculative inputs: the release's own index arguments in small stand-in classes."""

from __future__ import annotations

from typing import Any

import torch

from . import source
from .standins import World

_HOMES = {
    "EagleVerifyInput": ("sglang.srt.speculative.eagle_info", "sglang.srt.speculative.eagle_utils"),
    "EagleDraftInput": ("sglang.srt.speculative.eagle_info", "sglang.srt.speculative.eagle_utils"),
    "EagleDraftExtendInput": ("sglang.srt.speculative.eagle_info",),
    "DFlashVerifyInput": ("sglang.srt.speculative.dflash_info",),
}
_TYPES = {
    "EagleVerifyInput": "EAGLE_VERIFY",
    "EagleDraftInput": "EAGLE_DRAFT",
    "EagleDraftExtendInput": "EAGLE_DRAFT_EXTEND",
    "DFlashVerifyInput": "DFLASH_VERIFY",
}


def register(world: World) -> None:
    """Makes the classes that the release has known to the world, before its backend is loaded."""
    base = world.resolve("sglang.srt.speculative.spec_info", "SpecInput")
    for name, homes in _HOMES.items():
        body: dict[str, Any] = {"ragged_verify_layout": None, "custom_mask": None, "topk": 1}
        for home in homes:
            try:
                body["generate_attn_arg_prefill"] = source.take_method(
                    world.package, home, name, "generate_attn_arg_prefill", world.resolve
                )
                break
            except source.MissingDefinition:
                continue
        cls = type(base)(name, (base,), body)
        cls.__abstractmethods__ = frozenset()
        world.names[name] = cls


def make(world: World, name: str, **attributes: Any) -> Any:
    """An instance that carries its type and `attributes`."""
    cls = world.names[name]
    spec = object.__new__(cls)
    types = world.resolve("sglang.srt.speculative.spec_info", "SpecInputType")
    spec.spec_input_type = getattr(types, "__members__", {}).get(_TYPES[name])
    for key, value in attributes.items():
        setattr(spec, key, value)
    return spec


def verify(world: World, window: int, device: str, dflash: bool) -> Any:
    """A verify of `window` tokens a request, chain shaped (topk 1)."""
    mask = None if dflash else torch.ones(1 << 16, dtype=torch.bool, device=device)
    return make(
        world,
        "DFlashVerifyInput" if dflash else "EagleVerifyInput",
        draft_token_num=window,
        custom_mask=mask,
        num_tokens_per_req=window,
        spec_steps=window - 1,
    )


def draft_extend(world: World, accepted: torch.Tensor, window: int) -> Any:
    """A draft extend in which request r gained `accepted[r]` tokens (int32)."""
    extends = hasattr(world.names["EagleDraftExtendInput"], "generate_attn_arg_prefill")
    spec = make(
        world,
        "EagleDraftExtendInput" if extends else "EagleDraftInput",
        accept_length=accepted,
        num_tokens_per_req=window,
        num_tokens_per_batch=window,
    )
    spec.num_correct_drafts = spec.num_accept_tokens = accepted
    return spec


def draft(world: World) -> Any:
    """The input of a multi-step draft; the backend puts its indices in it."""
    return make(world, "EagleDraftInput", kv_indptr=None, kv_indices=None)
