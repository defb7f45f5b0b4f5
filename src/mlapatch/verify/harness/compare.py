"""Compares what the two sides did in one step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .drive import Taken
from .record import Plan, Run

WORSE = 1.05
"""On a GPU a patched output may be this much further from float64 than stock's."""
FLOOR = 1e-3
"""Errors below this (absolute, outputs are of order 1) are BF16 rounding."""


@dataclass(frozen=True)
class Difference:
    """One line that says what differs and where, and by how much at most."""

    detail: str
    largest: float | None = None


def steps(
    stock: Taken, patched: Taken, exact: bool, plain: bool, reference: list[torch.Tensor] | None
) -> tuple[float, Difference | None]:
    """The largest output difference of a step, and what is wrong, if anything.

    `exact`: outputs must be equal bit for bit, and plans and rows read too; else outputs are judged against `reference` (float64).
    `plain`: the pool is BF16, so the plan's slots and dtype must be stock's as well.
    """
    where = f"step {stock.step + 1}"
    largest, wrong = _outputs(stock, patched, exact, reference, where)
    if exact:
        wrong = (
            wrong or _plans(stock.plans, patched.plans, plain, where) or _runs(stock.runs, patched.runs, plain, where)
        )
    extra = patched.reads - stock.allowed
    if wrong is None and extra and not stock.crowded:
        wrong = Difference(f"{where}: read {len(extra)} slots outside the page table, the first is slot {min(extra)}")
    return largest, wrong


def _outputs(
    stock: Taken, patched: Taken, exact: bool, reference: list[torch.Tensor] | None, where: str
) -> tuple[float, Difference | None]:
    largest = 0.0
    wrong: Difference | None = None
    if len(stock.outputs) != len(patched.outputs):
        return largest, Difference(f"{where}: {len(patched.outputs)} outputs, expected {len(stock.outputs)}")
    for i, (want, got) in enumerate(zip(stock.outputs, patched.outputs)):
        at = f"{where}, output {i + 1} of {len(stock.outputs)}"
        if want.shape != got.shape or want.dtype != got.dtype:
            found = f"found {tuple(got.shape)} {got.dtype}"
            return largest, Difference(f"{at}: {found}, expected {tuple(want.shape)} {want.dtype}")
        off = (want.double() - got.double()).abs()
        off[want.isnan() & got.isnan()] = 0.0
        most = float("inf") if bool(off.isnan().any()) else float(off.max()) if off.numel() else 0.0
        largest = max(largest, most)
        if wrong is not None:
            continue
        if exact and not _same(want, got):
            wrong = _first(at, want, got, most)
        elif not exact and reference is not None:
            wrong = _worse(at, want, got, reference[i], stock.tokens, most)
    return largest, wrong


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.all((a == b) | (a.isnan() & b.isnan())))


def _first(at: str, want: torch.Tensor, got: torch.Tensor, most: float) -> Difference:
    differs = ~((want == got) | (want.isnan() & got.isnan()))
    rows = sorted({int(i) for i in differs.nonzero()[:, 0]})
    row = rows[0]
    column = int(differs[row].nonzero()[0, 0])
    found, expected = float(got[row, column]), float(want[row, column])
    return Difference(
        f"{at}, token {row} ({len(rows)} of {want.shape[0]} differ): found {found:.6g}, expected {expected:.6g}", most
    )


def _worse(
    at: str, want: torch.Tensor, got: torch.Tensor, reference: torch.Tensor, tokens: int, most: float
) -> Difference | None:
    """Errors are of the rows that hold tokens; padding is compared by nothing here."""
    want, got = want[:tokens, : reference.shape[1]].cpu(), got[:tokens, : reference.shape[1]].cpu()
    if bool(got.isnan().any()) and not bool(want.isnan().any()):
        return Difference(f"{at}: found NaN", float("inf"))
    allowed = WORSE * float((want.double() - reference).abs().max() if want.numel() else 0.0) + FLOOR
    error = float((got.double() - reference).abs().max()) if got.numel() else 0.0
    if error > allowed:
        return Difference(f"{at}: found an error of {error:.3g} against float64, expected at most {allowed:.3g}", most)
    return None


def _plans(stock: list[Plan], patched: list[Plan], plain: bool, where: str) -> Difference | None:
    if len(stock) != len(patched):
        return Difference(f"{where}: {len(patched)} plan() calls, expected {len(stock)}")
    free = set() if plain else {"indices", "kv_dtype"}
    for i, (want, got) in enumerate(zip(stock, patched)):
        for f in fields(Plan):
            expected, found = getattr(want, f.name), getattr(got, f.name)
            if f.name not in free and expected != found:
                return Difference(f"{where}: plan() {i + 1}: {f.name} found {found}, expected {expected}"[:300])
    return None


def _runs(stock: list[Run], patched: list[Run], plain: bool, where: str) -> Difference | None:
    if len(stock) != len(patched):
        return Difference(f"{where}: {len(patched)} run() calls, expected {len(stock)}")
    for i, (want, got) in enumerate(zip(stock, patched)):
        for name in ("qo_indptr", "kv_lens", "causal", "sm_scale", *(("indices",) if plain else ())):
            expected, found = getattr(want, name), getattr(got, name)
            if expected != found:
                return Difference(f"{where}: run() {i + 1}: {name} found {found}, expected {expected}"[:300])
        if not _same(want.rows, got.rows):
            rows = (~((want.rows == got.rows) | (want.rows.isnan() & got.rows.isnan()))).any(dim=-1).nonzero()[:, 0]
            slot = want.indices[int(rows[0])]
            return Difference(
                f"{where}: run() {i + 1} read other rows: {len(rows)} of {len(want.rows)} differ, first slot {slot}"
            )
    return None
