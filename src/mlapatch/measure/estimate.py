"""What the whole-pool cast costs on paper, and what each patch would move instead. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlapatch.measure.gpus import Gpu
    from mlapatch.measure.shape import ModelShape

FP8, BF16 = 1, 2
CAST_SPREAD = 0.03
"""How far a cast may be from the rate that was seen on such a GPU: two measurements on H200s are 2 % apart
(0.99 and 1.01 TB/s, gpus.py and bench/results/h200_trace_stock.json), and clocks, drivers and grids differ."""


@dataclass(frozen=True)
class Pool:
    """A rank's KV pool: `tokens` slots a layer, and SGLang allocates one page more (rows)."""

    model: ModelShape
    tokens: int
    page_size: int = 1

    @property
    def rows(self) -> int:
        """Rows of `get_key_buffer(layer)`: (size + page_size, 1, width)."""
        return self.tokens + self.page_size

    @property
    def kv_bytes(self) -> int:
        """FP8 KV of all layers, without the indexer's keys."""
        return self.tokens * self.model.layers * self.model.width * FP8

    @property
    def raw_bytes(self) -> int:
        """FP8 KV and, for a DSA model, the indexer's keys (the raw layout of 576 + 132 bytes)."""
        return self.tokens * self.model.layers * (self.model.width * FP8 + self.model.index_bytes)

    @property
    def cast_elements(self) -> int:
        """Elements that one layer's cast converts."""
        return self.rows * self.model.width

    @property
    def cast_bytes(self) -> int:
        """Bytes that one layer's cast moves: FP8 read, BF16 written."""
        return self.cast_elements * (FP8 + BF16)

    @property
    def step_bytes(self) -> int:
        """Bytes that the casts of one decode step move."""
        return self.cast_bytes * self.model.layers

    @property
    def shadow_bytes(self) -> int:
        """A BF16 copy of the pool of every layer: the fix that was rejected."""
        return self.tokens * self.model.layers * self.model.width * BF16

    @property
    def workspace_bytes(self) -> int:
        """One BF16 copy of one layer's arena, shared by all layers; stock's transient copy is as large."""
        return self.cast_elements * BF16


@dataclass(frozen=True)
class Cost:
    """What one layer moves to make the KV ready and to read it, for some live tokens; times in seconds.

    `tpot` is the predicted one; `low` and `high` are what the cast's uncertain time makes of it, `low` None where the
    cast's time is a lower bound: what takes longer leaves less.
    """

    name: str
    prepare_bytes: float
    read_bytes: float
    layer_seconds: float
    step_seconds: float
    tpot: float | None
    low: float | None
    high: float | None
    note: str


@dataclass(frozen=True)
class Shadow:
    """Whether the all-layer BF16 shadow fits next to what the GPU already holds."""

    needed: float
    free: float
    basis: str

    @property
    def fits(self) -> bool:
        """True when the free memory holds it."""
        return self.needed <= self.free


def cast_seconds(pool: Pool, gpu: Gpu) -> float:
    """One layer's stock cast: at the rate seen on this GPU, else at full bandwidth (then it is a lower bound)."""
    return pool.cast_bytes / (gpu.cast_rate or gpu.bandwidth)


def floor_seconds(pool: Pool, gpu: Gpu, live: int) -> float:
    """Reading the live tokens of all layers once, in FP8, at full bandwidth: no decode step is faster."""
    return live * pool.model.width * FP8 * pool.model.layers / gpu.bandwidth


def cast_error(seconds: float, gpu: Gpu, *, measured: bool) -> float:
    """How many seconds more or less a cast may take; 0 where it was measured, or is only known to take that long."""
    return 0.0 if measured or gpu.cast_rate is None else CAST_SPREAD * seconds


def costs(
    pool: Pool, gpu: Gpu, live: int, measured: float | None = None, measured_cast: float | None = None
) -> list[Cost]:
    """Stock and each patch for `live` tokens (context x batch), and the TPOT that each would leave.

    `measured` is the stock TPOT in seconds; `measured_cast` its cast time a step, when a trace gave it.
    The cast is taken off and the patch's own traffic put back, at full bandwidth. Where it reads FP8 the
    rest of attention is assumed to take as long as before. The cast is most of a stock TPOT, so that a small error of
    its time is a large one of what remains: a range says so, unless the cast was measured.
    """
    width, layers = pool.model.width, pool.model.layers
    active, compact, native = live * width * (FP8 + BF16), live * width * BF16, live * width * FP8
    stock_step = measured_cast if measured_cast is not None else cast_seconds(pool, gpu) * layers
    error = cast_error(stock_step, gpu, measured=measured_cast is not None)
    bound = measured_cast is None and gpu.cast_rate is None

    def patch(name: str, prepare: float, read: float, note: str) -> Cost:
        step = prepare * layers / gpu.bandwidth
        if measured is None:
            return Cost(name, prepare, read, step / layers, step, None, None, None, note)
        rest = measured - stock_step
        tpot, low, high = (max(rest + off, 0.0) + step for off in (0.0, -error, error))
        return Cost(name, prepare, read, step / layers, step, tpot, None if bound else low, high, note)

    why = "casts the whole pool, whatever the context"
    stock_layer = stock_step / layers
    return [
        Cost("stock", pool.cast_bytes, compact, stock_layer, stock_step, measured, measured, measured, why),
        patch(
            "gather-cast",
            active,
            compact,
            "compact when eager; in captured graphs in place, as active-cast",
        ),
        patch("active-cast", active, compact, "works in CUDA graphs; no host work a step"),
        patch("fp8-plan", 0.0, native, _plan_note(gpu)),
        patch("fused-decode", 0.0, native, "reads the FP8 slots itself; any GPU with Triton"),
    ]


def _plan_note(gpu: Gpu) -> str:
    if gpu.sm == 0:
        return "SM90 and flashinfer >= 0.6.14 only"
    return "needs flashinfer >= 0.6.14" if gpu.sm == 90 else f"SM90 only: refused on this GPU (SM{gpu.sm})"


def shadow(pool: Pool, gpu: Gpu, fraction: float, weights: float | None) -> Shadow:
    """Does the all-layer BF16 shadow fit at `--mem-fraction-static`?

    With the weights of a rank known (bytes), it must fit into the static share next to weights and pool. Without,
    SGLang is taken to have filled that share already, so only the rest of the memory is left.
    """
    if weights is None:
        return Shadow(pool.shadow_bytes, gpu.memory * (1 - fraction), f"outside the static {fraction:.0%}")
    free = gpu.memory * fraction - weights - pool.raw_bytes
    return Shadow(pool.shadow_bytes, max(free, 0.0), f"in the static {fraction:.0%}, after weights and pool")
