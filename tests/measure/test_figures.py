"""Measurements that the code and the docs repeat are those of the run in README's table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mlapatch.commands.backends import TPOT_MS, backends
from mlapatch.outcome import Text

ROOT = Path(__file__).parents[2]


def latest() -> tuple[str, dict[str, Any]]:
    """The newest recorded run, as bench/gpu/table.py names it."""
    spec = importlib.util.spec_from_file_location("table", ROOT / "bench" / "gpu" / "table.py")
    assert spec
    assert spec.loader
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    name = table.RUNS[0]
    return name, json.loads((ROOT / "bench" / "results" / name).read_bytes())["variants"]


def tpot(variant: str) -> list[str]:
    return [f"{latest()[1][variant]['single'][tokens]['tpot_ms']:.2f}" for tokens in ("512", "8192", "65536")]


@pytest.mark.parametrize("variant", TPOT_MS)
def test_what_backends_says_of_triton_is_the_latest_run(variant: str) -> None:
    assert [f"{ms:.2f}" for ms in TPOT_MS[variant]] == tpot(variant)
    *_, advice = backends(preset="glm-5", sm=120, release="0.5.9").blocks
    assert isinstance(advice, Text)
    (line,) = (line for line in advice.lines if line.startswith("What triton costs"))
    assert " / ".join(tpot(variant)) in line


def test_what_the_docs_say_of_a_trace_is_the_latest_run() -> None:
    said = " ".join((ROOT / "docs" / "measure.md").read_text("utf-8").split())
    assert f"measured {tpot('active-cast')[0]} ms with `active-cast` ([{latest()[0]}]" in said
    recorded = json.loads((ROOT / "bench" / "results" / "h200_trace_stock.json").read_bytes())["mlapatch"]
    assert f"The {recorded['without_cast_ms']:.2f} ms that `trace` predicts" in said
    assert f"says {100 * recorded['cast']['share_of_step']:.2f} % of a step" in said


def test_what_the_docs_say_of_bench_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "h200_bench_agreement.json").read_bytes())
    median = recorded["mlapatch_bench"]["metrics"][0]["median"]
    assert f"`mlapatch bench` says TPOT {median:.3f} ms" in (ROOT / "docs" / "measure.md").read_text("utf-8")
