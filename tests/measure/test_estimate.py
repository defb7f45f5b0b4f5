"""The numbers of the original analysis: GLM-5-NVFP4, 495,552 slots, eight RTX PRO 6000, 93.2 to 95.6 ms a token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from mlapatch.commands.estimate import estimate
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import gpus, shape
from mlapatch.measure.estimate import CAST_SPREAD, Pool, cast_seconds, costs, floor_seconds, shadow
from mlapatch.outcome import Outcome, Pairs, Table, Text

GLM5 = shape.preset("glm-5")
CARD = gpus.GPUS["rtx-pro-6000"]
POOL = Pool(GLM5, 495_552, page_size=64)
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def told(outcome: Outcome) -> str:
    lines = [line for block in outcome.blocks if isinstance(block, Text) for line in block.lines]
    return "\n".join(
        [*lines, *(value for block in outcome.blocks if isinstance(block, Pairs) for _, value in block.rows)]
    )


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


def test_an_assumed_cast_gives_a_range_that_holds_what_was_measured() -> None:
    recorded = json.loads((RESULTS / "h200_run6.json").read_bytes())["variants"]
    measured = {name: one["single"]["512"]["tpot_ms"] for name, one in recorded.items() if "single" in one}
    outcome = estimate(preset="glm-5", gpu="h200", context=512, measured_tpot=round(measured["stock"], 2))
    rows = {row["name"]: row for row in cast("list[dict[str, Any]]", outcome.data["patches"])}
    for name in ("active-cast", "gather-cast", "fused-decode"):
        low, high = (rows[name][f"predicted_tpot_{end}_seconds"] * 1e3 for end in ("low", "high"))
        assert low < measured[name] < high
        assert high - low == pytest.approx(2 * CAST_SPREAD * 67.5, rel=0.01)
    assert rows["stock"]["predicted_tpot_high_seconds"] * 1e3 == pytest.approx(measured["stock"], abs=0.01)
    low, high = (rows["active-cast"][f"predicted_tpot_{end}_seconds"] * 1e3 for end in ("low", "high"))
    docs = " ".join((RESULTS.parents[1] / "docs" / "measure.md").read_text("utf-8").split())
    where = f"for `active-cast` there at 512 tokens, where {measured['active-cast']:.2f} was measured"
    assert f"`{low:.2f} to {high:.2f} ms` {where}" in docs
    said = told(outcome)
    assert "known to 3% (67.5 ms, 2.02 ms more or less)" in said
    assert "--measured-cast MS: mlapatch trace FILE has it" in said


def test_the_spread_covers_what_was_seen_on_an_h200() -> None:
    seen = json.loads((RESULTS / "h200_trace_stock.json").read_bytes())["mlapatch"]["cast"]["bytes_per_second"]
    assert gpus.GPUS["h200"].cast_rate == pytest.approx(seen, rel=CAST_SPREAD)
    assert gpus.GPUS["h200"].cast_rate == pytest.approx(1.0e12, rel=CAST_SPREAD)  # sgl-project/sglang#35291


def test_a_measured_cast_leaves_no_range_and_an_unknown_one_half_of_it() -> None:
    given = estimate(preset="glm-5", gpu="h200", measured_tpot=71.24, measured_cast=66.25)
    row = next(row for row in cast("list[dict[str, Any]]", given.data["patches"]) if row["name"] == "fused-decode")
    assert {f"{row[key] * 1e3:.2f}" for key in row if key.startswith("predicted")} == {"4.99"}
    assert "hence the ranges" not in told(given)
    unknown = estimate(preset="glm-5", gpu="b200", measured_tpot=20.0)
    row = next(row for row in cast("list[dict[str, Any]]", unknown.data["patches"]) if row["name"] == "fused-decode")
    assert row["predicted_tpot_low_seconds"] is None
    assert "Nobody measured the cast on this GPU" in told(unknown)
    (table,) = (block for block in unknown.blocks if isinstance(block, Table))
    assert any(cell.startswith("at most ") for cell in table.rows[2])


def test_a_range_ends_at_nothing() -> None:
    rows = costs(POOL, CARD, 500, measured=65e-3)
    assert all(row.low is not None and 0 <= row.low < 1e-3 for row in rows if row.name != "stock")


def test_an_assumed_gpu_is_said() -> None:
    assert "RTX PRO 6000 Blackwell, 1.79 TB/s" in told(estimate(preset="glm-5"))
    assert "(assumed: give yours with --gpu)" in told(estimate(preset="glm-5"))
    assert cast("dict[str, Any]", estimate(preset="glm-5").data["gpu"])["assumed"] is True
    for given in (estimate(gpu="rtx-pro-6000"), estimate(bandwidth=1.0, memory=48)):
        assert "assumed" not in told(given)


@pytest.mark.parametrize(("tokens", "context", "batch"), [(10, 8192, 1), (8191, 8192, 1), (100_000, 8192, 16)])
def test_more_live_tokens_than_the_pool_holds_are_refused(tokens: int, context: int, batch: int) -> None:
    with pytest.raises(MlapatchError, match="the pool does not hold the live tokens") as caught:
        estimate(tokens=tokens, context=context, batch=batch)
    assert caught.value.exit is Exit.USAGE
    assert f"= {context * batch:,}" in caught.value.found
    assert estimate(tokens=8192).exit is Exit.OK


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(
            (option, value, "more than 0")
            for option in ("bandwidth", "memory", "measured_tpot", "measured_cast")
            for value in (0, -1.0, math.nan, math.inf, -math.inf, 1e-320, 1e300)
        ),
        *(("weights", value, "0 or more") for value in (-3.0, math.nan, math.inf)),
        *(("page_size", value, "1 or more") for value in (0, -1, 10**320)),
    ],
)
def test_a_number_that_nothing_can_have_is_refused(option: str, value: float, expected: str) -> None:
    given: dict[str, Any] = {"bandwidth": 1.8, "memory": 96, option: value}
    with pytest.raises(MlapatchError, match="--" + option.replace("_", "-")) as caught:
        estimate(**given)
    assert caught.value.exit is Exit.USAGE
    assert expected in caught.value.expected
    assert caught.value.found in str(value)


@pytest.mark.parametrize("option", ["tokens", "tp", "context", "batch"])
@pytest.mark.parametrize("value", [0, -1, 10**320])
def test_a_count_that_nothing_can_have_is_refused(option: str, value: int) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(MlapatchError, match=f"--{option} must be at least 1") as caught:
        estimate(**given)
    assert caught.value.exit is Exit.USAGE


def test_no_weights_at_all_can_be_given() -> None:
    assert estimate(weights=0, page_size=1).exit is Exit.OK


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
