"""Charts for the report, as HTML and SVG text: no scripts, no fonts, nothing fetched."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from mlapatch.measure.kernels import CAST, IDLE
from mlapatch.measure.metrics import number

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = 9
OURS = "mlapatch"
REST = "the rest"


@dataclass(frozen=True)
class Bar:
    """A step of one run: its parts in ms; `total` is its wall time."""

    label: str
    total: float
    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Series:
    """One run's figures by x label: (x, median, lowest, highest)."""

    label: str
    points: Sequence[tuple[str, float, float, float]]


def gathered(bars: Sequence[Bar], keep: int = COLOURS - 2) -> list[Bar]:
    """Bars whose smallest parts are one part, so that each part that is left has a colour of its own."""
    sizes: dict[str, float] = {}
    for bar in bars:
        for name, ms in bar.parts:
            sizes[name] = max(sizes.get(name, 0.0), ms)
    fixed = [name for name in (CAST, IDLE, OURS) if name in sizes]
    large = sorted((name for name in sizes if name not in fixed), key=lambda name: -sizes[name])
    order = [name for name in (CAST, OURS) if name in sizes] + large[:keep]
    found = []
    for bar in bars:
        held = dict(bar.parts)
        parts = [(name, held[name]) for name in order if name in held]
        rest = sum(ms for name, ms in bar.parts if name in large[keep:])
        parts += [(REST, rest)] if rest else []
        parts += [(IDLE, held[IDLE])] if IDLE in held else []
        found.append(Bar(bar.label, bar.total, parts))
    return found


def colours(bars: Sequence[Bar]) -> dict[str, str]:
    """A colour for each part: the cast's, mlapatch's and idle time's are always the same."""
    chosen = {CAST: "var(--c0)", OURS: f"var(--c{COLOURS - 1})", IDLE: "var(--idle)", REST: "var(--soft)"}
    for name in dict.fromkeys(name for bar in bars for name, _ in bar.parts):
        chosen.setdefault(name, f"var(--c{len(chosen) - 3})")
    return chosen


def stacked(bars: Sequence[Bar]) -> str:
    """Bars on one scale, so that lengths compare between runs, and a legend."""
    bars = gathered(bars)
    longest = max(bar.total for bar in bars) or 1.0
    palette = colours(bars)
    rows, used = [], list[str]()
    for bar in bars:
        spans = []
        for name, ms in bar.parts:
            if ms <= 0:
                continue
            used += [] if name in used else [name]
            text = escape(f"{name}: {ms:.2f} ms")
            width = f"flex: 0 0 {100 * ms / longest:.3f}%; background: {palette[name]}"
            spans.append(f'<span style="{width}" title="{text}"></span>')
        label = ", ".join(f"{name} {ms:.2f} ms" for name, ms in bar.parts)
        rows.append(
            f'<div class="bar"><div class="name"><span>{escape(bar.label)}</span><b>{bar.total:.2f} ms</b></div>'
            f'<div class="track" role="img" aria-label="{escape(label)}">{"".join(spans)}</div></div>'
        )
    keys = "".join(f'<li><i style="background: {palette[name]}"></i>{escape(name)}</li>' for name in used)
    return f'<div class="bars">{"".join(rows)}</div><ul class="legend">{keys}</ul>'


def lines(series: Sequence[Series], *, title: str, unit: str, x_title: str) -> str:
    """Lines over labelled places, with whiskers for the repeats; drawn twice, for wide and for narrow screens."""
    keys = "".join(
        f'<li><i style="background: {_line_colour(i)}"></i>{escape(one.label)}</li>' for i, one in enumerate(series)
    )
    drawn = "".join(
        _draw(series, kind, width, height, title, unit, x_title)
        for kind, width, height in (("wide", 760, 320), ("narrow", 340, 280))
    )
    return f'<figure>{drawn}<figcaption><ul class="legend">{keys}</ul></figcaption></figure>'


def _line_colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


def _ticks(highest: float) -> list[float]:
    """Round values from 0 to above `highest`, at most seven."""
    scale = 10.0 ** (len(str(int(highest))) - 1) if highest >= 1 else 0.1
    step = next(scale * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10) if highest / (scale * part) <= 6)
    count = 1
    while step * count < highest:
        count += 1
    return [step * i for i in range(count + 1)]


def _draw(series: Sequence[Series], kind: str, width: int, height: int, title: str, unit: str, x_title: str) -> str:
    left, right, top, bottom = 46, 18, 26, 44
    labels = list(dict.fromkeys(point[0] for one in series for point in one.points))
    ticks = _ticks(max(point[3] for one in series for point in one.points) * 1.08)
    gap = (width - left - right) / max(len(labels), 1)
    xs = {label: left + gap * (i + 0.5) for i, label in enumerate(labels)}

    def y(value: float) -> float:
        return height - bottom - (height - top - bottom) * value / ticks[-1]

    parts = [f'<text class="soft" x="4" y="14">{escape(unit)}</text>']
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="soft" x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for label, at in xs.items():
        parts.append(f'<text x="{at:.1f}" y="{height - bottom + 18}" text-anchor="middle">{escape(label)}</text>')
    parts.append(
        f'<text class="soft" x="{(left + width - right) / 2:.0f}" y="{height - 6}" text-anchor="middle">'
        f"{escape(x_title)}</text>"
    )
    taken: list[tuple[float, float]] = []
    for index, one in enumerate(series):
        colour = _line_colour(index)
        path = " ".join(f"{xs[x]:.1f},{y(middle):.1f}" for x, middle, _, _ in one.points)
        parts.append(f'<polyline class="series" points="{path}" style="stroke: {colour}"/>')
        for x, middle, low, high in one.points:
            parts.append(
                f'<line x1="{xs[x]:.1f}" x2="{xs[x]:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" '
                f'style="stroke: {colour}; stroke-width: 2"/>'
                f'<circle cx="{xs[x]:.1f}" cy="{y(middle):.1f}" r="4" style="fill: {colour}"/>'
            )
            place = next(
                (
                    at
                    for at in (y(high) - 8, y(low) + 18)
                    if top - 14 < at < height - bottom and _free(xs[x], at, taken)
                ),
                None,
            )
            if place is not None:
                taken.append((xs[x], place))
                parts.append(f'<text x="{xs[x]:.1f}" y="{place:.1f}" text-anchor="middle">{number(middle)}</text>')
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _free(x: float, y: float, taken: Sequence[tuple[float, float]]) -> bool:
    return all(abs(x - other) > 1 or abs(y - place) > 13 for other, place in taken)
