"""bench/gpu/dummy_weights.py on a small model with the names of SGLang's: what attention then does."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not importable")

from tests.test_gpu_compare import module  # noqa: E402 - needs torch

pytestmark = pytest.mark.verify

HIDDEN, QUERY, LATENT, ROPE, NOPE, VALUE, HEADS = 256, 128, 64, 64, 32, 32, 4
SHAPES = {
    "fused_qkv_a_proj_with_mqa": (QUERY + LATENT + ROPE, HIDDEN),
    "q_a_layernorm": (QUERY,),
    "q_b_proj": (HEADS * (NOPE + ROPE), QUERY),
    "kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
    "kv_a_layernorm": (LATENT,),
    "o_proj": (HIDDEN, HEADS * VALUE),
}


def part(*shape: int) -> Any:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.full(shape, float("nan"), dtype=torch.bfloat16), requires_grad=False)
    return made


def model(layers: int = 2) -> Any:
    made, made.model = torch.nn.Module(), torch.nn.Module()
    made.model.embed_tokens, made.model.norm, made.lm_head = part(500, HIDDEN), part(HIDDEN), part(500, HIDDEN)
    made.model.layers = torch.nn.ModuleList()
    for _ in range(layers):
        layer = torch.nn.Module()
        layer.input_layernorm, layer.self_attn, layer.mlp = part(HIDDEN), torch.nn.Module(), torch.nn.Module()
        layer.self_attn.qk_rope_head_dim, layer.self_attn.qk_nope_head_dim = ROPE, NOPE
        for name, shape in SHAPES.items():
            setattr(layer.self_attn, name, part(*shape))
        layer.mlp.gate_up_proj, layer.mlp.down_proj = part(2 * HIDDEN, HIDDEN), part(HIDDEN, HIDDEN)
        made.model.layers.append(layer)
    return made


def test_every_tensor_is_filled_the_same_each_time_and_no_two_alike() -> None:
    weights = module("dummy_weights")
    first, second = model(), model()
    torch.set_default_dtype(torch.bfloat16)  # as SGLang's loader does
    try:
        for made in (first, second):
            weights.initialize(made)
    finally:
        torch.set_default_dtype(torch.float32)
    state = first.state_dict()
    for name, tensor in state.items():
        assert torch.equal(tensor, second.state_dict()[name])
        assert tensor.isfinite().all()
        assert "norm" not in name or (tensor == 1).all()
    one, other = (state[f"model.layers.{i}.self_attn.q_b_proj.weight"] for i in range(2))
    assert not torch.equal(one, other)
    spread = state["model.layers.0.mlp.gate_up_proj.weight"].float().std().item()
    assert spread == pytest.approx(HIDDEN**-0.5, rel=0.05)


def test_attention_falls_with_a_power_of_the_distance() -> None:
    weights = module("dummy_weights")
    made = model()
    weights.initialize(made)
    state, layer = made.state_dict(), "model.layers.0.self_attn"
    constant = 12.0  # what coordinate 0 is after the norm of a middle layer
    down = state[f"{layer}.fused_qkv_a_proj_with_mqa.weight"].float()
    heads = state[f"{layer}.q_b_proj.weight"].float().unflatten(0, (HEADS, -1))
    assert (down[1:-ROPE, 0] == 0).all()
    assert (heads[:, :NOPE, 0] == 0).all()
    query, key = heads[:, NOPE:, 0] * down[0, 0] * constant, down[-ROPE:, 0] * constant
    turns = 1e6 ** -(torch.arange(ROPE // 2) / (ROPE // 2))
    for power, head in zip(torch.linspace(*weights.POWERS, HEADS), query, strict=True):
        pairs = (head * key).view(-1, 2).sum(1) / math.sqrt(NOPE + ROPE)
        assert pairs.sum().item() == pytest.approx(power.item() * weights.LOG_PERIODS, rel=0.02)
        near, far = ((pairs * torch.cos(turns * distance)).sum().item() for distance in (0, 1000))
        assert near - far == pytest.approx(power.item() * math.log(1000), rel=0.25)


def test_the_constant_coordinate_is_left_alone() -> None:
    weights = module("dummy_weights")
    made = model()
    weights.initialize(made)
    state = made.state_dict()
    assert (state["model.embed_tokens.weight"][:, 0] == weights.CONSTANT).all()
    assert (state["lm_head.weight"][:, 0] == 0).all()
    for layer in range(2):
        assert (state[f"model.layers.{layer}.self_attn.o_proj.weight"][0] == 0).all()
        assert (state[f"model.layers.{layer}.mlp.down_proj.weight"][0] == 0).all()
        assert (state[f"model.layers.{layer}.mlp.gate_up_proj.weight"][:, 0] == 0).all()


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [("a.scale", torch.zeros(3), "shape"), ("a.weight", torch.zeros(3, 3).to(torch.float8_e4m3fn), "float8")],
)
def test_a_tensor_without_a_rule_is_refused(name: str, tensor: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        module("dummy_weights").values(name, tensor, 2)


def test_a_model_without_mla_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer with MLA"):
        module("dummy_weights").initialize(torch.nn.Linear(2, 2))
