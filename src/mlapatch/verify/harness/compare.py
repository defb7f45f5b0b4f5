"""Compares what the two sides did in one step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .drive import Taken
from .record import Plan, Run
from .reference import Expected

WORSE = 1.05
"""An output of other arithmetic may be this much further from float64 than stock's is."""
MARGIN = {"cpu": 2e-3, "cuda": 2e-4}
"""And this much more (relative). The CPU's stand-in for stock rounds once, to BF16; kernels round within too."""
COARSE = 0.05
"""Where stock is further than this from float64 (it plans draft steps with too few tokens), stock is the reference."""
NEAR = 6e-3
"""How close to stock then: both are rounded to BF16."""
SUMS = 1e-3
"""How far a base-2 log-sum-exp may be from float64, absolute: it is float32 and rounded nowhere within."""


@dataclass(frozen=True)
class Difference:
    """One line that says what differs and where."""

    detail: str


@dataclass(frozen=True)
class Rules:
    """How a step is judged.

    `exact`: outputs equal bit for bit, and plans and rows read too; else outputs are judged against `reference`,
    float64. `plain`: the pool is BF16, so the planned slots and dtype must be stock's as well.
    """

    exact: bool
    plain: bool
    device: str
    reference: list[Expected] | None


def step(stock: Taken, patched: Taken, rules: Rules) -> tuple[float, Difference | None]:
    """The largest output difference of a step, and what is wrong, if anything."""
    where = f"step {stock.step + 1}"
    largest, wrong = _outputs(stock, patched, rules, where)
    if rules.exact and wrong is None:
        wrong = _plans(stock, patched, rules.plain, where) or _runs(stock.runs, patched.runs, rules.plain, where)
    return largest, wrong or _reads(stock, patched, where)


def error(taken: Taken, reference: list[Expected]) -> float:
    """How far the outputs of a step are from float64: the largest relative error of a token, in the L2 norm."""
    pairs = zip(taken.outputs, (one.values for one in reference), strict=True)
    return max((_relative(_rows(got, want, taken.tokens), want) for got, want in pairs), default=0.0)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if not got.numel():
        return 0.0
    off = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    return float("inf") if bool(off.isnan().any()) else float(off.max())


def _furthest(got: torch.Tensor, want: torch.Tensor) -> float:
    off = (got.double() - want.double()).abs()
    off[got.isnan() & want.isnan()] = 0.0
    if not off.numel():
        return 0.0
    return float("inf") if bool(off.isnan().any()) else float(off.max())


def _rows(output: torch.Tensor, reference: torch.Tensor, tokens: int) -> torch.Tensor:
    """The rows that hold tokens, without the padding after them and without a log-sum-exp beside them."""
    return output[:tokens, : reference.shape[1]].cpu()


def _outputs(stock: Taken, patched: Taken, rules: Rules, where: str) -> tuple[float, Difference | None]:
    if len(stock.outputs) != len(patched.outputs):
        return 0.0, Difference(f"{where}: {len(patched.outputs)} outputs, expected {len(stock.outputs)}")
    largest, wrong = 0.0, None
    for i, (want, got) in enumerate(zip(stock.outputs, patched.outputs, strict=True)):
        at = f"{where}, output {i + 1} of {len(stock.outputs)}"
        if want.shape != got.shape or want.dtype != got.dtype:
            found = f"{tuple(got.shape)} {got.dtype}"
            return largest, Difference(f"{at}: found {found}, expected {tuple(want.shape)} {want.dtype}")
        largest = max(largest, _furthest(got, want))
        reference = rules.reference[i] if rules.reference is not None else Expected(want.double().cpu())
        if rules.exact:
            wrong = wrong or _unequal(at, want, got)
        else:
            wrong = wrong or _too_far(at, want, got, reference, stock.tokens, rules.device)
    return largest, wrong


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ~((a == b) | (a.isnan() & b.isnan()))


def _unequal(at: str, want: torch.Tensor, got: torch.Tensor) -> Difference | None:
    differs = _differs(want, got)
    rows = sorted({int(i) for i in differs.nonzero()[:, 0]})
    if not rows:
        return None
    column = int(differs[rows[0]].nonzero()[0, 0])
    found, expected = float(got[rows[0], column]), float(want[rows[0], column])
    many = f"{len(rows)} of {want.shape[0]} tokens differ"
    return Difference(f"{at}, token {rows[0]} ({many}): found {found:.6g}, expected {expected:.6g}")


def _too_far(
    at: str, want: torch.Tensor, got: torch.Tensor, expected: Expected, tokens: int, device: str
) -> Difference | None:
    if expected.sums is not None:
        off = _furthest(got[:tokens, -expected.sums.shape[1] :].cpu(), expected.sums)
        if off > SUMS:
            return Difference(f"{at}: found a log-sum-exp {off:.3g} from float64's, expected at most {SUMS:.3g}")
    reference = expected.values
    got, want, reference = _rows(got, reference, tokens), _rows(want, reference, tokens), reference[:tokens]
    stock = _relative(want, reference)
    allowed, against = WORSE * stock + MARGIN[device], "float64"
    if stock > COARSE:
        reference, allowed, against = want, NEAR, "stock"
    found = _relative(got, reference)
    if found > allowed:
        what = f"a relative error of {found:.3g} against {against}"
        return Difference(f"{at}: found {what}, expected at most {allowed:.3g}")
    return None


def _plans(stock: Taken, patched: Taken, plain: bool, where: str) -> Difference | None:
    if len(stock.plans) != len(patched.plans):
        return Difference(f"{where}: {len(patched.plans)} plan() calls, expected {len(stock.plans)}")
    free = set() if plain else {"indices", "kv_dtype"}
    for i, (want, got) in enumerate(zip(stock.plans, patched.plans, strict=True)):
        for name in (f.name for f in fields(Plan) if f.name not in free):
            expected, found = getattr(want, name), getattr(got, name)
            if expected != found:
                return Difference(f"{where}: plan() {i + 1}: {name} found {found}, expected {expected}"[:300])
    return None


def _runs(stock: list[Run], patched: list[Run], plain: bool, where: str) -> Difference | None:
    if len(stock) != len(patched):
        return Difference(f"{where}: {len(patched)} run() calls, expected {len(stock)}")
    for i, (want, got) in enumerate(zip(stock, patched, strict=True)):
        at = f"{where}: run() {i + 1}"
        for name in ("qo_indptr", "kv_lens", "causal", "sm_scale", *(("indices",) if plain else ())):
            expected, found = getattr(want, name), getattr(got, name)
            if expected != found:
                return Difference(f"{at}: {name} found {found}, expected {expected}"[:300])
        if want.rows.shape != got.rows.shape:
            return Difference(f"{at} read rows {tuple(got.rows.shape)}, expected {tuple(want.rows.shape)}")
        same = not want.rows.numel()
        other = torch.zeros(0) if same else _differs(want.rows, got.rows).any(dim=-1).nonzero()[:, 0]
        if other.numel():
            slot = want.indices[int(other[0])]
            return Difference(
                f"{at} read other rows: {other.numel()} of {len(want.rows)} differ, first that of slot {slot}"
            )
    return None


def _reads(stock: Taken, patched: Taken, where: str) -> Difference | None:
    """Slots that the patched kernels loaded: those of the page table, unless the requests crowd the pool."""
    page = max((plan.page_size or 1 for plan in stock.plans), default=1)
    allowed = {slot // page * page + p for slot in stock.allowed for p in range(page)} if page > 1 else stock.allowed
    extra = patched.reads - allowed
    if not extra or stock.crowded:
        return None
    return Difference(f"{where}: read {len(extra)} slots outside the page table, the first is slot {min(extra)}")
