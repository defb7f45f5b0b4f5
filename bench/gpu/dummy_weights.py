"""Random weights of an MLA model with which the next token depends on what attention computes (compare.py --weights).

SGLang's own dummy weights lie within 0.001 of zero, norm weights too: every token's log-probability is that of a
uniform choice, whatever attention did. With these the model behaves like a transformer:

- norm weights are 1, matrices have variance 1/fan_in, each tensor with a seed of its own name;
- all layers together add to the residual stream about twice the size of the embedding, most of it attention;
- coordinate 0 of the residual stream is the same for every token and only feeds rotary parts of queries and keys. With
  all rotary pairs alike the logit falls with the logarithm of the distance, so attention falls with a power of it, a
  different one for each head: at any length the newest token has a share, and so have the far ones;
- the other parts of queries and keys add a random logit for each pair of tokens (CONTENT, before the softmax);
- logits of tokens spread by LOGITS, so that the best two are some tenths apart and seldom closer than rounding errors.

compare.py copies this file into a server's own copy of SGLang. Needs torch only.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

CONSTANT = 16.0  # coordinate 0 of each embedding; the others have variance 1
ROTARY_KEY = 1 / 12  # of coordinate 0, after its norm between 15 (first layer) and 9 (last), to each rotary key element
QUERY_LATENT = 2 / 3  # of the same, to element 0 of the query latent
POWERS = (0.5, 1.5)  # attention falls with distance to these powers in the first and the last head of a middle layer
LOG_PERIODS = 13.8  # ln of the rotary base, 1e6
CONTENT = 1.3  # standard deviation of the random part of an attention logit
ATTENTION, MLP = 2.8, 0.5  # variance that all attention and all MLP layers together add to the residual stream
MIXED, ACTIVATED = 0.5, 0.6  # typical size of an element of attention's output, and of silu(gate) * up
LOGITS = 3.0  # standard deviation of the logits


def initialize(model: Any) -> None:
    """Fill every floating point tensor of the model's state. ValueError for one that no rule is for."""
    state = model.state_dict()
    attentions = [
        (name, module)
        for name, module in model.named_modules()
        if f"{name}.kv_b_proj.weight" in state and f"{name}.fused_qkv_a_proj_with_mqa.weight" in state
    ]
    if not attentions:
        raise ValueError("no layer with MLA attention")
    layers = len(attentions)
    for name, tensor in state.items():
        if torch.is_floating_point(tensor):
            tensor.copy_(values(name, tensor, layers))
    for name, module in attentions:
        shape_attention(name, module, state)
    count = sum(tensor.numel() for tensor in state.values())
    # compare.py looks for this line (copies.SAID).
    print(f"mlapatch: weights of dummy_weights.py, {count} elements, {layers} layers", flush=True)


def values(name: str, like: torch.Tensor, layers: int) -> torch.Tensor:
    """The tensor called `name`, before shape_attention."""
    if like.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name}: no rule for {like.dtype}")
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if like.ndim == 1:
        if "norm" in kind:
            return torch.ones_like(like)
        if "bias" in kind:
            return torch.zeros_like(like)
    if like.ndim < 2:
        raise ValueError(f"{name}: no rule for the shape {tuple(like.shape)}")
    generator = torch.Generator(device=like.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    made = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    scale = like.shape[-1] ** -0.5
    if kind == "embed_tokens":
        made[:, 0] = CONSTANT
        scale = 1.0
    elif kind in ("lm_head", "gate_up_proj", "fused_qkv_a_proj_with_mqa"):
        made[:, 0] = 0
        scale *= LOGITS if kind == "lm_head" else 1.0
    elif kind in ("o_proj", "down_proj"):
        made[0] = 0  # the constant coordinate stays as it is
        share, size = (ATTENTION, MIXED) if kind == "o_proj" else (MLP, ACTIVATED)
        scale *= (share / layers) ** 0.5 / size
    return made * scale


def shape_attention(name: str, module: Any, state: dict[str, torch.Tensor]) -> None:
    """Let the rotary parts carry the distance, and give the other parts the spread of CONTENT."""
    rope, nope = module.qk_rope_head_dim, module.qk_nope_head_dim
    down = state[f"{name}.fused_qkv_a_proj_with_mqa.weight"]
    up = state[f"{name}.q_b_proj.weight"]
    heads = up.unflatten(0, (-1, nope + rope))
    size = (nope + rope) ** 0.5
    down[0] = 0
    down[0, 0] = QUERY_LATENT
    down[-rope:, 0] = ROTARY_KEY
    heads[:, :nope] *= CONTENT * size / nope**0.5
    heads[:, nope:] *= 0.25
    heads[:, :, 0] = 0
    # Query element x key element x rope / size is the logit at distance 0, of a middle layer (coordinate 0 is 12).
    powers = torch.linspace(*POWERS, len(heads), dtype=torch.float32, device=up.device)
    query = powers * LOG_PERIODS * size / rope / (12 * ROTARY_KEY)
    heads[:, nope:, 0] = (query / (12 * QUERY_LATENT)).to(up.dtype)[:, None]
