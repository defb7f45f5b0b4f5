"""The harness against real releases: stock equals itself, and the stand-ins compute attention."""

from __future__ import annotations

import pytest

from tests.corpus import RELEASES
from tests.verify.conftest import Verify

pytestmark = pytest.mark.verify

MAY_SKIP = {
    "decode-length-131072": "needs a GPU",
    "draft-extend-eager": "DRAFT_EXTEND",
    "draft-extend-replay": "",
    "draft-extend-v2": "DRAFT_EXTEND_V2",
    "dflash-verify-eager": "DFLASH",
    "dflash-verify-replay": "DFLASH",
    "dcp": "decode context parallelism",
    "extend-captured-prefill": "captured prefill",
    "cutlass-mla-extend": "no cutlass_mla_backend.py",
    "trtllm-mla-extend": "",
    "trtllm-mla-verify": "",
}
"""Scenarios that a release may not have, and a word of the reason."""

READS_LESS = {"draft-eager", "draft-dp-padded", "draft-replay"}
"""Stock plans its eager draft steps without, and its draft replays with too few of, the tokens just drafted."""

ROUNDING = 2.5e-3
"""The relative error of rounding to BF16, in the L2 norm of a token, with room."""


@pytest.mark.parametrize("version", RELEASES)
def test_stock_equals_itself_and_float64(verify: Verify, version: str) -> None:
    found = verify(None, version)
    judged = {name: r for name, r in found.items() if name != "packed-656"}
    assert {name: r.detail for name, r in judged.items() if r.failed} == {}
    skipped = {name: r.detail for name, r in judged.items() if r.result == "skip"}
    assert {n: d for n, d in skipped.items() if n not in MAY_SKIP or MAY_SKIP[n] not in d} == {}
    errors = {name: r.stock_error for name, r in judged.items() if r.stock_error is not None and name not in READS_LESS}
    bases = {name: r.census for name, r in judged.items() if name not in READS_LESS and r.result != "skip"}
    assert {name: basis for name, basis in bases.items() if basis != "page table"} == {}
    assert len(errors) > 25
    assert {name: e for name, e in errors.items() if e > ROUNDING} == {}
    assert found["packed-656"].failed, "stock reads the packed pool, and must be caught at it"


def test_another_seed_gives_other_numbers_and_the_same_result(verify: Verify) -> None:
    first, again = (verify(None, "0.5.9", "decode-eager")["decode-eager"] for _ in range(2))
    assert first.stock_error == again.stock_error


def test_other_arithmetic_is_judged_by_its_error(verify: Verify) -> None:
    found = verify("k-scale-applied-twice", "0.5.9", "decode-eager", "bf16-decode", exact=False)
    assert found["decode-eager"].failed
    assert "against float64" in found["decode-eager"].detail
    assert found["bf16-decode"].result == "pass"
