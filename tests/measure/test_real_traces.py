"""`mlapatch trace` on traces of a real server (H200, SGLang 0.5.15.post1), beside a count that shares no code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlapatch.commands.trace import trace

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def trace_check() -> ModuleType:
    """bench/gpu/trace_check.py, which is not in a package."""
    spec = importlib.util.spec_from_file_location("trace_check", ROOT / "bench" / "gpu" / "trace_check.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def only_rank(path: Path) -> dict[str, Any]:
    """What `mlapatch trace --json` says of a trace of one rank."""
    data: dict[str, Any] = trace(files=[path]).data
    (rank,) = data["ranks"]
    return dict(rank)


def test_the_cast_of_a_real_stock_trace_is_what_the_events_say() -> None:
    path = RESULTS / "h200_trace_stock.trace.json.gz"
    rank = only_rank(path)
    events = trace_check().counted(path)
    assert rank["steps"] == events["steps"] == 7
    assert rank["cast"]["layers"] == 78
    assert events["long_copies_per_step"] == [78]
    assert rank["cast"]["share_of_step"] == pytest.approx(events["share_of_step"], abs=0.02)
    assert rank["cast"]["share_of_step"] > 0.9
    assert rank["step_ms"] == pytest.approx(events["step_ms"], rel=0.02)
    assert all(kernel["short"] for kernel in rank["kernels"])
    # One more thread block than the pool's (495,552 + 1) rows fill.
    assert rank["cast"]["elements"] == pytest.approx(495_553 * 576, rel=1e-3)


@pytest.mark.parametrize("name", ["active-cast", "fused-decode"])
def test_a_real_patched_trace_has_no_cast(name: str) -> None:
    path = RESULTS / f"h200_trace_{name}.trace.json.gz"
    rank = only_rank(path)
    events = trace_check().counted(path)
    assert rank["cast"] is None
    assert events["long_copies_per_step"] == [0]
    assert rank["steps"] == events["steps"]
    assert rank["step_ms"] == pytest.approx(events["step_ms"], rel=0.02)
    recorded = json.loads((RESULTS / f"h200_trace_{name}.json").read_text(encoding="utf-8"))
    assert recorded["mlapatch"]["cast"] is None
    assert recorded["mlapatch"]["step_ms"] == pytest.approx(rank["step_ms"], rel=1e-6)
