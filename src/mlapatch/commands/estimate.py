"""`mlapatch estimate`: what a model, pool and GPU cost on paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import estimate as paper
from mlapatch.measure import gpus, shape
from mlapatch.measure.units import both, percent, seconds, size
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text

if TYPE_CHECKING:
    from pathlib import Path

#: Beyond these no number is one of a GPU, a model or a server, and arithmetic ends in infinity.
_TINY, _HUGE = 1e-12, 1e15


def estimate(
    *,
    preset: str | None = None,
    model: Path | None = None,
    tokens: int = 495_552,
    page_size: int | None = None,
    tp: int = 8,
    gpu: str | None = None,
    bandwidth: float | None = None,
    memory: float | None = None,
    context: int = 8192,
    batch: int = 1,
    measured_tpot: float | None = None,
    measured_cast: float | None = None,
    mem_fraction: float = 0.9,
    weights: float | None = None,
) -> Outcome:
    """Compute the cost of the whole-pool cast and of each patch.

    Units at this level are those of the command line: `bandwidth` TB/s, `memory` and `weights` GB, TPOT and cast ms.
    """
    _check(preset, model, tokens=tokens, tp=tp, context=context, batch=batch, mem_fraction=mem_fraction)
    _check_measures(page_size, bandwidth, memory, measured_tpot, measured_cast, weights)
    what = shape.read(model) if model else shape.preset(preset or "glm-5")
    card = _card(gpu, bandwidth, memory)
    assumed = gpu is None and bandwidth is None
    pool = paper.Pool(what, tokens, page_size or (64 if what.index_bytes else 1))
    live = context * batch
    if live > tokens:
        fitting = f"--context {max(tokens // batch, 1)} --batch {min(batch, tokens)}"
        raise MlapatchError(
            Exit.USAGE,
            "the pool does not hold the live tokens",
            expected=f"--context times --batch of at most {tokens:,} (--tokens)",
            found=f"{context:,} x {batch:,} = {live:,}",
            next=f"mlapatch estimate --tokens {tokens} {fitting}",
        )
    tpot = None if measured_tpot is None else measured_tpot / 1e3
    cast = None if measured_cast is None else measured_cast / 1e3
    stock = cast if cast is not None else paper.cast_seconds(pool, card) * what.layers
    shortest = stock - paper.cast_error(stock, card, measured=cast is not None)
    if tpot is not None and shortest >= tpot:
        raise MlapatchError(
            Exit.USAGE,
            "the measured TPOT is shorter than the cast alone would take",
            expected=f"more than {seconds(shortest)} for {tokens:,} tokens on {card.title}",
            found=seconds(tpot),
            next="check --tokens and --gpu, or whether that server casts at all: mlapatch trace FILE",
        )
    rows = paper.costs(pool, card, live, tpot, cast)
    floor = paper.floor_seconds(pool, card, live)
    shadow = paper.shadow(pool, card, mem_fraction, None if weights is None else weights * 1e9)
    data: dict[str, object] = {
        "model": {
            "name": what.name,
            "layers": what.layers,
            "width": what.width,
            "index_bytes": what.index_bytes,
            "heads_per_rank": what.heads // tp,
        },
        "gpu": {
            "name": card.name,
            "sm": card.sm,
            "bandwidth": card.bandwidth,
            "memory": card.memory,
            "cast_rate": card.cast_rate,
            "assumed": assumed,
        },
        "pool": {
            "tokens": tokens,
            "page_size": pool.page_size,
            "kv_bytes": pool.kv_bytes,
            "raw_bytes": pool.raw_bytes,
            "workspace_bytes": pool.workspace_bytes,
        },
        "cast": {
            "elements_per_layer": pool.cast_elements,
            "bytes_per_layer": pool.cast_bytes,
            "bytes_per_step": pool.step_bytes,
            "seconds_per_layer": stock / what.layers,
            "seconds_per_step": stock,
            "lower_bound": card.cast_rate is None and cast is None,
            "share_of_tpot": None if tpot is None else stock / tpot,
        },
        "live_tokens": live,
        "floor_seconds_per_step": floor,
        "shadow": {"bytes": shadow.needed, "free": shadow.free, "fits": shadow.fits, "basis": shadow.basis},
        "patches": [
            {
                "name": row.name,
                "prepare_bytes_per_layer": row.prepare_bytes,
                "read_bytes_per_layer": row.read_bytes,
                "seconds_per_layer": row.layer_seconds,
                "seconds_per_step": row.step_seconds,
                "predicted_tpot_seconds": row.tpot,
                "predicted_tpot_low_seconds": row.low,
                "predicted_tpot_high_seconds": row.high,
                "note": row.note,
            }
            for row in rows
        ],
    }
    shown = _blocks(pool, card, live, rows, floor, shadow, tpot, stock, tp, cast is not None, assumed)
    return Outcome(data=data, blocks=shown)


def _check(
    preset: str | None, model: Path | None, *, tokens: int, tp: int, context: int, batch: int, mem_fraction: float
) -> None:
    if preset and model:
        raise MlapatchError(Exit.USAGE, "give --preset or --model, not both", next="mlapatch estimate --preset glm-5")
    for option, value in (("--tokens", tokens), ("--tp", tp), ("--context", context), ("--batch", batch)):
        if not 1 <= value <= _HUGE:
            what = f"{option} must be at least 1" + (f" and at most {_HUGE:.0e}" if value > _HUGE else "")
            raise MlapatchError(Exit.USAGE, what, found=str(value)[:40], next=f"mlapatch estimate {option} 8")
    if not 0 < mem_fraction <= 1:
        raise MlapatchError(
            Exit.USAGE,
            "--mem-fraction is a share of the memory",
            expected="0 to 1",
            next="mlapatch estimate --mem-fraction 0.9",
        )


def _check_measures(
    page_size: int | None,
    bandwidth: float | None,
    memory: float | None,
    tpot: float | None,
    cast: float | None,
    weights: float | None,
) -> None:
    """Each of these is left out or makes sense: not a number, or no bandwidth, would be figures that look like any."""
    for option, value, least, sense, example in (
        ("--bandwidth", bandwidth, _TINY, "TB/s, more than 0", "1.8 --memory 96"),
        ("--memory", memory, _TINY, "GB, more than 0", "96 --bandwidth 1.8"),
        ("--measured-tpot", tpot, _TINY, "ms, more than 0", "71"),
        ("--measured-cast", cast, _TINY, "ms, more than 0", "66.25"),
        ("--weights", weights, 0, "GB, 0 or more", "55"),
        ("--page-size", page_size, 1, "tokens, 1 or more", "64"),
    ):
        if value is not None and not least <= value <= _HUGE:  # not a number compares as false
            raise MlapatchError(
                Exit.USAGE,
                f"{option} makes no sense",
                expected=f"a number of {sense}, at most {_HUGE:.0e}",
                found=str(value)[:40],
                next=f"mlapatch estimate {option} {example}",
            )


def _card(name: str | None, bandwidth: float | None, memory: float | None) -> gpus.Gpu:
    if name is None and bandwidth is None and memory is None:
        return gpus.find("rtx-pro-6000")
    if name is not None:
        known = gpus.find(name)
        other = gpus.other_form(name, known)
        if other and bandwidth is not None and memory is not None:
            return gpus.Gpu(name, name, known.sm, bandwidth * 1e12, memory * 1e9)
        if other:
            raise MlapatchError(
                Exit.USAGE,
                f"the figures of the {known.title} are not those of {name!r}",
                expected=f"the {known.title}: {known.bandwidth / 1e12:.2f} TB/s, {known.memory / 1e9:.0f} GB",
                found=", ".join(other),
                next="give --bandwidth and --memory: mlapatch estimate --bandwidth TB/S --memory GB",
            )
        if bandwidth is None and memory is None:
            return known
        rate = None if bandwidth is not None else known.cast_rate
        wide = known.bandwidth if bandwidth is None else bandwidth * 1e12
        return gpus.Gpu(known.name, known.title, known.sm, wide, known.memory if memory is None else memory * 1e9, rate)
    if bandwidth is None or memory is None:
        raise MlapatchError(
            Exit.USAGE,
            "a GPU that mlapatch does not know needs both --bandwidth (TB/s) and --memory (GB)",
            next="mlapatch estimate --bandwidth 1.8 --memory 96, or --gpu NAME",
        )
    return gpus.Gpu("custom", "this GPU", 0, bandwidth * 1e12, memory * 1e9)


def _blocks(
    pool: paper.Pool,
    card: gpus.Gpu,
    live: int,
    rows: list[paper.Cost],
    floor: float,
    shadow: paper.Shadow,
    tpot: float | None,
    stock: float,
    tp: int,
    cast_given: bool,
    assumed: bool,
) -> list[Block]:
    model = pool.model
    rate = f"{card.bandwidth / 1e12:.2f} TB/s"
    if card.cast_rate and not cast_given:
        rate += f"; the stock cast reached {card.cast_rate / 1e12:.2f} TB/s ({card.source})"
    bound = "at least " if card.cast_rate is None and not cast_given else ""
    index = f" + {model.index_bytes} index bytes" if model.index_bytes else ""
    pairs = [
        ("model", f"{model.name}: {model.layers} layers x {model.width}{index}, {model.heads // tp or 1} heads a rank"),
        (
            "GPU",
            f"{card.title}, {rate}, {card.memory / 1e9:.0f} GB"
            + (" (assumed: give yours with --gpu)" if assumed else ""),
        ),
        ("pool", f"{pool.tokens:,} tokens, FP8: {both(pool.raw_bytes)} a rank; tensor parallelism does not divide it"),
        (
            "cast, one layer",
            (
                f"{pool.cast_elements / 1e6:.1f} M elements x 3 bytes = {size(pool.cast_bytes)}, "
                f"{bound}{seconds(stock / model.layers)}"
            ),
        ),
        ("cast, one step", f"{size(pool.step_bytes)}, {bound}{seconds(stock)}"),
    ]
    if tpot is not None:
        pairs.append(("cast's share", f"{percent(stock / tpot)} of the measured {seconds(tpot)} a token"))
    pairs += [
        ("FP8 floor", f"{seconds(floor)} a step to read {live:,} live tokens once"),
        ("workspace", f"{size(pool.workspace_bytes)} for active-cast, as large as stock's transient copy"),
        (
            "BF16 shadow",
            f"{both(shadow.needed)}; {size(shadow.free)} free {shadow.basis}: "
            + ("fits" if shadow.fits else "does not fit"),
        ),
    ]
    columns = ["patch", "cast a layer", "time a layer", "time a step", "attention reads a layer"]
    if tpot is not None:
        columns.append("predicted TPOT")
    table = [
        [
            row.name,
            size(row.prepare_bytes),
            seconds(row.layer_seconds),
            seconds(row.step_seconds),
            size(row.read_bytes),
            *([] if row.tpot is None else [_predicted(row)]),
            row.note,
        ]
        for row in rows
    ]
    notes = ["Patch times are bytes over full bandwidth, so a floor: with many live tokens they take longer."]
    if tpot is not None:
        notes += _of_predictions(card, stock, tpot, cast_given)
    return [Pairs(pairs), Table([*columns, "note"], table, f"For {live:,} live tokens"), Text(notes)]


def _predicted(row: paper.Cost) -> str:
    if row.tpot is None or row.high is None:
        return ""
    if row.low is None:
        return f"at most {seconds(row.high)}"
    return seconds(row.tpot) if row.low == row.high else f"{seconds(row.low)} to {seconds(row.high)}"


def _of_predictions(card: gpus.Gpu, stock: float, tpot: float, cast_given: bool) -> list[str]:
    """How far a predicted TPOT can be trusted."""
    rest = "the rest is taken to last as long as before, which holds while CUDA graphs are on."
    lines = [f"A predicted TPOT is the measured one without the cast, with the patch's floor; {rest}"]
    narrower = "Give the cast's own time with --measured-cast MS: mlapatch trace FILE has it."
    if not cast_given and card.cast_rate is None:
        lines.append(f"Nobody measured the cast on this GPU: it takes {seconds(stock)} or longer. {narrower}")
    elif not cast_given:
        off = paper.cast_error(stock, card, measured=False)
        lines.append(
            f"The cast's time is known to {off / stock:.0%} ({seconds(stock)}, {seconds(off)} more or less) and is "
            f"{percent(stock / tpot)} of the TPOT, hence the ranges. {narrower}"
        )
    return lines
