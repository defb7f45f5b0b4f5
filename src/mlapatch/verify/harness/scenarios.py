"""The scenarios, as data. `drive.py` performs them; adding one here is enough to have every patch judged by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["decode", "idle", "extend", "ragged", "verify", "dflash", "draft_extend", "draft_extend_v2", "draft"]
"""What a step is; `ragged` is an extend that no request has a prefix for, `dflash` a target verify of DFLASH."""

WINDOW = 3
"""Tokens a request that verify and draft extend look at; steps of a multi-step draft."""


@dataclass(frozen=True)
class Step:
    """One forward of the model.

    `prefix` holds, for each request, the tokens already in the pool; `new` the tokens that this step adds (one number:
    the same for each). With `graph` the step replays the graph captured for that many requests, padded up to it.
    `pad_after_plan` requests are appended after the metadata was made, as eager drafts are under DP attention.
    `query` is what the queries of each head are multiplied with.
    """

    mode: Mode
    prefix: tuple[int, ...]
    new: int | tuple[int, ...] = 1
    graph: int = 0
    pad_after_plan: int = 0
    query: tuple[float, float] = (1.0, 1.0)

    def added(self) -> tuple[int, ...]:
        """Tokens that each request gains."""
        return (self.new,) * len(self.prefix) if isinstance(self.new, int) else self.new


@dataclass(frozen=True)
class Scenario:
    """Steps in order, in one backend over one pool. `captures` are (mode, requests), captured before the first step."""

    name: str
    steps: tuple[Step, ...]
    cache: Literal["e4m3", "e5m2", "bf16", "packed"] = "e4m3"
    slots: int = 192
    context: int = 64
    shared: int = 0
    layers: int = 2
    captures: tuple[tuple[Mode, int], ...] = ()
    backend: str = "flashinfer"
    flags: dict[str, Any] = field(default_factory=dict)
    may_refuse: tuple[str, ...] = ()
    """Words of which a refusal must name one, where refusing is right too."""
    must_refuse: bool = False
    cuda_only: bool = False
    stock_may_raise: bool = False
    """Whether stock may fail here (flashinfer takes no empty batch from 0.7 on), which makes it nothing to judge."""

    @property
    def share(self) -> int:
        """One in how many tokens is this rank's (decode context parallelism)."""
        return int(self.flags.get("dcp_size", 1))


def _decode(*prefix: int, graph: int = 0, query: tuple[float, float] = (1.0, 1.0)) -> Step:
    return Step("decode", prefix, graph=graph, query=query)


_MIXED = (_decode(5, 17, 1, 30), _decode(33, 2), _decode(40, 12, 7))
_REPLAYS = (
    _decode(9, 20, 3, 14, graph=4),
    _decode(40, 51, 22, 6, graph=4),
    _decode(1, 2, 0, 4, graph=4),
    _decode(25, 31, 8, graph=4),
    _decode(17, graph=1),
    _decode(44, graph=1),
    _decode(12, 50, graph=2),
)
_CAPTURED: tuple[tuple[Mode, int], ...] = (("decode", 4), ("decode", 2), ("decode", 1))
_HIT = (Step("extend", (9, 0, 17), new=(3, 4, 1)), Step("extend", (30,), new=2), Step("extend", (2, 5), new=(6, 1)))
_VERIFY = (Step("verify", (7, 22, 1), new=WINDOW), Step("verify", (40,), new=WINDOW))
_VERIFY_REPLAYS = (
    Step("verify", (6, 15), new=WINDOW, graph=2),
    Step("verify", (33, 41), new=WINDOW, graph=2),
    Step("verify", (2, 1), new=WINDOW, graph=2),
    Step("verify", (19,), new=WINDOW, graph=2),
)
_DRAFT_REPLAYS = (
    Step("draft", (8,), graph=1),
    Step("draft", (12, 30), graph=2),
    Step("draft", (44, 3), graph=2),
    Step("draft", (21,), graph=2),
)
_EXTREME, _BEYOND_FP16, _TINY, _ONE = 300.0, 2.0**20, 1e-36, 1.0
"""What queries are multiplied with in the two scenarios of that name.

With random keys the logits of a head vary by 1.7 times as much: `_EXTREME` and `_BEYOND_FP16` leave one token all the
weight. Well defined only where the largest two are further apart than float32 rounds, half a unit for logits of
millions: `tests/verify/test_extremes.py` holds this data to it, so that float64, stock and patch agree on the token.
`_BEYOND_FP16` makes queries of up to 4 million (FP16 ends at 65,504). Not more: where a kernel computes exp2(logit *
scale - peak) as one multiply-add, it is off by what the peak was rounded by, which cancels out here but reaches powers
that overflow with logits from about 2**28 on, and stock's kernels are not ours. `_TINY` is less than FP16 has, and all
weights are equal: what would scale it into FP16's range is more than float32 has.
"""
_SUBCLASSES = ("flashmla", "cutlass_mla", "trtllm_mla")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("decode-eager", _MIXED),
    Scenario("decode-replay", _REPLAYS, slots=320, captures=_CAPTURED),
    Scenario(
        "decode-eager-between-replays",
        (_decode(9, 20, graph=2), _decode(30, 4, 11), _decode(33, 1, graph=2), _decode(3)),
        captures=(("decode", 2),),
    ),
    Scenario("decode-no-request", (_decode(4), _decode(), _decode(6, 2)), stock_may_raise=True),
    Scenario("decode-first-token", (_decode(0), _decode(3, 0, 6))),
    Scenario("decode-many", (Step("decode", tuple(n % 5 for n in range(24))),), slots=192),
    Scenario("decode-shared-prefix", (_decode(*(44,) * 6), _decode(46, 45)), slots=72, shared=44),
    Scenario(
        "decode-shared-prefix-replay",
        (_decode(*(44,) * 4, graph=4), _decode(45, 44, 44, graph=4), _decode(*(46,) * 4, graph=4)),
        slots=72,
        shared=44,
        captures=(("decode", 4),),
    ),
    Scenario(
        "decode-lengths",
        tuple(_decode(n - 1) for n in (1, 511, 512, 513)),
        slots=640,
        context=520,
        layers=1,
    ),
    Scenario(
        "decode-lengths-replay",
        tuple(_decode(n - 1, graph=1) for n in (513, 1, 511, 512)),
        slots=640,
        context=520,
        layers=1,
        captures=(("decode", 1),),
    ),
    Scenario(
        "decode-length-131072", (_decode(131071), _decode(12, 131071)), slots=132096, context=131080, cuda_only=True
    ),
    Scenario(
        "decode-extreme-logits",
        (_decode(75, 20, query=(_EXTREME, -_EXTREME)), _decode(30, query=(_EXTREME, _ONE))),
        context=80,
        layers=1,
    ),
    Scenario(
        "decode-query-beyond-fp16",
        (_decode(75, 20, graph=2, query=(_BEYOND_FP16, _TINY)), _decode(30, graph=2, query=(_ONE, -_BEYOND_FP16))),
        context=80,
        layers=1,
        captures=(("decode", 2),),
    ),
    Scenario("idle-after-decode", (_decode(5, 17), Step("idle", ()), _decode(8), Step("idle", ()), _decode(2, 3, 4))),
    Scenario(
        "idle-between-replays",
        (_decode(15, 7, graph=2), Step("idle", ()), Step("idle", (), graph=2), _decode(30, 2, graph=2)),
        captures=(("decode", 2),),
    ),
    Scenario("extend-prefix", _HIT),
    Scenario("extend-shared-prefix", (Step("extend", (40,) * 4, new=2),), slots=64, shared=40),
    Scenario("extend-ragged", (Step("ragged", (0, 0), new=(5, 3)), Step("extend", (9,), new=3))),
    Scenario(
        "extend-captured-prefill",
        (Step("extend", (0, 0), new=(5, 3)), Step("extend", (11, 0), new=(2, 4))),
        flags={"captured_prefill": True},
    ),
    Scenario(
        "extend-ragged-disabled",
        (Step("extend", (0, 0), new=(4, 2)), *_HIT[:1]),
        flags={"flashinfer_mla_disable_ragged": True},
    ),
    Scenario("mixed-decode-extend", (_decode(9, 4), _HIT[0], _decode(30), Step("extend", (14,), new=5), _decode(3, 2))),
    Scenario("verify-eager", _VERIFY),
    Scenario("verify-replay", _VERIFY_REPLAYS, captures=(("verify", 2),)),
    Scenario(
        "verify-and-decode-replay",
        (_decode(21, 9, graph=2), _VERIFY_REPLAYS[0], _decode(4, 33, graph=2), _VERIFY_REPLAYS[1], _HIT[1]),
        captures=(("decode", 2), ("verify", 2)),
    ),
    Scenario("draft-extend-eager", (Step("draft_extend", (9, 20), new=(3, 1)), Step("draft_extend", (31,), new=2))),
    Scenario(
        "draft-extend-replay",
        (
            Step("draft_extend", (9, 20), new=(3, 1), graph=2),
            Step("draft_extend", (40, 33), new=(1, 2), graph=2),
            Step("draft_extend", (5,), new=2, graph=2),
        ),
        captures=(("draft_extend", 2),),
    ),
    Scenario(
        "draft-extend-v2", (Step("draft_extend_v2", (9, 20), new=WINDOW), Step("draft_extend_v2", (31,), new=WINDOW))
    ),
    Scenario("draft-eager", (Step("draft", (9, 20)), Step("draft", (33,)), Step("draft", (2, 14, 5))), backend="draft"),
    Scenario(
        "draft-dp-padded",
        (Step("draft", (30, 41)), Step("draft", (9, 20), pad_after_plan=2), Step("draft", (3,), pad_after_plan=3)),
        backend="draft",
    ),
    Scenario("draft-replay", _DRAFT_REPLAYS, backend="draft", captures=(("draft", 2), ("draft", 1))),
    Scenario("dflash-verify-eager", (Step("dflash", (7, 22), new=WINDOW),)),
    Scenario(
        "dflash-verify-replay",
        tuple(Step("dflash", p, new=WINDOW, graph=2) for p in ((6, 15), (33, 41), (2, 1), (19,))),
        captures=(("dflash", 2),),
    ),
    *(
        Scenario(f"{name.replace('_', '-')}-extend", _HIT, backend=name, flags={"disable_chunked_prefix_cache": True})
        for name in _SUBCLASSES
    ),
    Scenario("trtllm-mla-verify", _VERIFY, backend="trtllm_mla"),
    Scenario("e5m2-decode", (*_MIXED[:2], _HIT[0]), cache="e5m2", may_refuse=("e5m2",)),
    Scenario("e5m2-replay", _REPLAYS[:3], cache="e5m2", captures=_CAPTURED[:1], may_refuse=("e5m2",)),
    Scenario("bf16-decode", (*_MIXED, *_HIT, *_VERIFY[:1]), cache="bf16"),
    Scenario("bf16-replay", (*_REPLAYS[:4],), cache="bf16", captures=_CAPTURED[:1]),
    Scenario("packed-656", (_decode(5, 9), _HIT[0]), cache="packed", must_refuse=True),
    Scenario("two-batch-overlap", (*_MIXED[:2], _HIT[0]), flags={"enable_two_batch_overlap": True}),
    Scenario("pdmux", (*_MIXED[:2], _HIT[0]), flags={"enable_pdmux": True}),
    Scenario("dcp", (*_MIXED[:2], *_REPLAYS[:2]), flags={"dcp_size": 2}, captures=_CAPTURED[:1]),
    Scenario("page-size-64", (*_MIXED[:1], *_HIT[:1]), slots=320, flags={"page_size": 64}),
)
