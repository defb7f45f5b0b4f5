"""The servers that compare.py can run: the patch that is applied, and what else differs from the common arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from greedy import LENGTHS, STREAMS

SABOTAGED = Path(__file__).resolve().parents[2] / "tests" / "verify" / "sabotaged"


@dataclass(frozen=True)
class Variant:
    """One server."""

    patch: str = ""
    args: tuple[str, ...] = ()
    backend: str = "flashinfer"
    flashinfer: bool = False  # use /tmp/flashinfer (0.6.18) instead of the payload's 0.6.12
    model: str = "/tmp/model"
    page_size: int = 1
    lengths: tuple[int, ...] = LENGTHS
    streams: int = STREAMS
    compare_with: str = "stock"
    patches: Path | None = None  # a folder to take the patch from


DSA = ("--dsa-prefill-backend", "trtllm", "--dsa-decode-backend", "trtllm")
EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
EAGER = ("--disable-cuda-graph",)
SHORT = (512, 8192)


def dsa(patch: str = "", compare_with: str = "dsa-stock") -> Variant:
    """The DSA model: pages of 64, both of its backends trtllm."""
    model = "/tmp/model-dsa"
    return Variant(patch, DSA, model=model, page_size=64, lengths=SHORT, streams=0, compare_with=compare_with)


def eagle(patch: str = "") -> Variant:
    """EAGLE with the NextN draft model."""
    model = "/tmp/model-nextn"
    return Variant(patch, EAGLE, model=model, lengths=SHORT, streams=0, compare_with="eagle-stock")


def dcp(patch: str = "") -> Variant:
    """Two ranks on two GPUs that share the tokens; needs a machine of two."""
    args = ("--tp-size", "2", "--dcp-size", "2", "--disable-custom-all-reduce")
    return Variant(patch, args, streams=0, compare_with="dcp-stock")


VARIANTS = {
    "stock": Variant(),
    "active-cast": Variant("active-cast"),
    "gather-cast": Variant("gather-cast"),
    "fused-decode": Variant("fused-decode"),
    "triton": Variant(backend="triton"),
    "fp8-plan": Variant("fp8-plan", flashinfer=True),
    "stock-eager": Variant(args=EAGER, lengths=SHORT, streams=0),
    "gather-cast-eager": Variant("gather-cast", args=EAGER, lengths=SHORT, streams=0),
    # Controls: wrong on purpose, to see whether equal outputs would tell.
    "off-by-one": Variant("off-by-one", patches=SABOTAGED),
    "wrong-slot": Variant("wrong-slot", patches=SABOTAGED),
    "workspace-not-refreshed": Variant("workspace-not-refreshed", patches=SABOTAGED),
    "dsa-stock": dsa(compare_with="stock"),
    "dsa-active-cast": dsa("active-cast"),
    "dsa-gather-cast": dsa("gather-cast"),
    "eagle-stock": eagle(),
    "eagle-active-cast": eagle("active-cast"),
    "dcp-stock": dcp(),
    "dcp-active-cast": dcp("active-cast"),
    "dcp-fused-decode": dcp("fused-decode"),
}
