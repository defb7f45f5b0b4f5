"""The numbers of the original analysis: GLM-5-NVFP4, 495,552 slots, eight RTX PRO 6000, 93.2 to 95.6 ms a token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from mlapatch.commands.estimate import estimate
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import gpus, shape
from mlapatch.measure.estimate import Pool, cast_seconds, costs, floor_seconds, shadow

if TYPE_CHECKING:
    from pathlib import Path

GLM5 = shape.preset("glm-5")
CARD = gpus.GPUS["rtx-pro-6000"]
POOL = Pool(GLM5, 495_552, page_size=64)


def test_a_layer_is_857_mb() -> None:
    assert round(POOL.cast_elements / 1e6, 1) == 285.5
    assert POOL.cast_bytes / 1e6 == pytest.approx(857, abs=1)  # quoted as 285.5 M x 3


def test_a_step_is_66_8_gb_and_64_6_ms() -> None:
    assert round(POOL.step_bytes / 1e9, 1) == 66.8
    assert cast_seconds(POOL, CARD) * GLM5.layers * 1e3 == pytest.approx(64.6, abs=0.05)
    for tpot, share in ((93.2, 0.693), (95.6, 0.676)):
        assert cast_seconds(POOL, CARD) * GLM5.layers * 1e3 / tpot == pytest.approx(share, abs=0.001)


def test_500_tokens_take_half_a_microsecond_a_layer_against_828() -> None:
    rows = {row.name: row for row in costs(POOL, CARD, 500)}
    assert round(rows["stock"].layer_seconds * 1e6) == 828
    assert round(rows["active-cast"].layer_seconds * 1e6, 1) == 0.5
    assert rows["active-cast"].prepare_bytes == 864_000


def test_the_raw_dsa_pool_is_25_49_gib() -> None:
    assert round(POOL.raw_bytes / 2**30, 2) == 25.49
    assert shape.index_bytes(128) == 132


def test_the_bf16_shadow_is_44_5_gb_and_does_not_fit() -> None:
    assert round(POOL.shadow_bytes / 1e9, 1) == 44.5
    assert round(POOL.shadow_bytes / 2**30, 1) == 41.5
    assert not shadow(POOL, CARD, 0.9, None).fits
    assert not shadow(POOL, CARD, 0.9, 55e9).fits
    assert shadow(POOL, gpus.GPUS["b300"], 0.9, 55e9).fits


def test_the_predicted_tpot_takes_the_cast_off_and_puts_the_patch_on() -> None:
    rows = {row.name: row.tpot for row in costs(POOL, CARD, 500, measured=95.6e-3)}
    assert rows["stock"] == pytest.approx(95.6e-3)
    assert rows["active-cast"] == pytest.approx(31.0e-3, abs=0.1e-3)
    assert rows["fused-decode"] == pytest.approx(31.0e-3, abs=0.1e-3)


def test_a_measured_cast_replaces_the_estimated_one() -> None:
    rows = {row.name: row.tpot for row in costs(POOL, CARD, 500, measured=80e-3, measured_cast=50e-3)}
    assert rows["fused-decode"] == pytest.approx(30e-3)


def test_the_h200_agrees_with_what_was_measured_there() -> None:
    pool = Pool(GLM5, 495_552)
    assert cast_seconds(pool, gpus.GPUS["h200"]) * 78 * 1e3 == pytest.approx(67.5, abs=0.5)  # 65.4 with attention
    assert floor_seconds(pool, gpus.GPUS["h200"], 131_072) * 1e3 == pytest.approx(1.23, abs=0.01)


def test_35291s_layer_is_226_5_mb() -> None:
    assert Pool(shape.preset("deepseek-r1"), 131_072).cast_bytes / 1e6 == pytest.approx(226.5, abs=0.1)


def test_a_gpu_without_a_measured_cast_gives_a_lower_bound() -> None:
    data = estimate(preset="glm-5", gpu="b200").data
    assert cast("dict[str, Any]", data["cast"])["lower_bound"] is True


def test_a_config_of_the_gpu_machine_is_read(tmp_path: Path) -> None:
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 78, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "index_topk": 2048, "index_head_dim": 128}))
    assert shape.read(tmp_path).index_bytes == 132
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert shape.read(tmp_path / "config.json").width == 576


def test_a_model_without_mla_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 32}))
    with pytest.raises(MlapatchError, match="not an MLA model") as caught:
        estimate(model=tmp_path)
    assert caught.value.exit is Exit.USAGE


def test_a_tpot_below_the_cast_alone_is_refused() -> None:
    with pytest.raises(MlapatchError, match="shorter than the cast"):
        estimate(preset="glm-5", gpu="rtx-pro-6000", measured_tpot=31.0)


def test_an_unknown_gpu_needs_bandwidth_and_memory() -> None:
    with pytest.raises(MlapatchError):
        estimate(preset="glm-5", gpu="voodoo")
    with pytest.raises(MlapatchError):
        estimate(preset="glm-5", bandwidth=1.0)
    estimate(preset="glm-5", bandwidth=1.0, memory=48)
