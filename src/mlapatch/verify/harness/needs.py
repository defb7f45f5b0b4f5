"""What a scenario needs that not every release has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .scenarios import Scenario

if TYPE_CHECKING:
    from .drive import Side


def missing(scenario: Scenario, side: Side) -> str:
    """Why this release cannot run the scenario, or ''. `side` is the stock one, loaded but not built."""
    members = side.modes.__members__
    backend = side.module.FlashInferMLAAttnBackend
    modes = {step.mode for step in scenario.steps}
    if "draft_extend" in modes and "DRAFT_EXTEND" not in members:
        return "this release has no DRAFT_EXTEND mode (only DRAFT_EXTEND_V2)"
    if "draft_extend_v2" in modes and "DRAFT_EXTEND_V2" not in members:
        return "this release has no DRAFT_EXTEND_V2 mode"
    if "dflash" in modes and not hasattr(backend, "_build_fast_verify_plan_kwargs"):
        return "this release has no fast plan for DFLASH verify"
    if any(mode == "draft_extend" for mode, _ in scenario.captures):
        capture = getattr(backend, "init_forward_metadata_capture_cuda_graph", None)
        if capture is None or "is_draft_extend" not in capture.__code__.co_names:
            return "this release does not capture draft extend in the flashinfer MLA backend"
    text = Path(str(side.module.__file__)).read_text(encoding="utf-8")
    if scenario.flags.get("captured_prefill") and "is_in_" not in text:
        return "this release has no captured prefill graphs"
    if "dcp_size" in scenario.flags and "dcp_enabled" not in text:
        return "this release has no decode context parallelism in the flashinfer MLA backend"
    return ""
