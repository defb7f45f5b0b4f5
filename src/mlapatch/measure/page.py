"""The report: one HTML page out of kept runs, that opens anywhere and fetches nothing."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

from mlapatch import __version__
from mlapatch.measure import charts, metrics
from mlapatch.measure.kernels import IDLE
from mlapatch.measure.metrics import factor
from mlapatch.measure.runs import now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlapatch.measure.runs import Run

Cell: TypeAlias = str | tuple[str, str]  # text, or text and a verdict


def render(runs: Sequence[Run], title: str) -> str:
    """The page for `runs`, the first of each kind being the one before."""
    benches = [run for run in runs if run.kind == "bench" and metrics.of(run.result)]
    steps = [run for run in runs if run.result.get("trace")]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{len(runs)} runs, written by mlapatch {__version__} on {_minute(now())} UTC</p>',
        _headline(benches, steps),
        *_obstacles(benches or steps),
        _breakdown(steps),
        _tpot(benches),
        _throughput(benches),
        _changes(benches, "Figures"),
        _changes(steps, "Decode step"),
        _setup(runs),
        _notes(runs),
    ]
    style = files("mlapatch.measure").joinpath("report.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n<main>\n{chr(10).join(part for part in body if part)}\n</main>\n</body>\n</html>\n"
    )


def name(run: Run) -> str:
    """How the page calls a run: its label, and the patches that were applied."""
    applied = run.setup.get("patches", {}).get("applied")
    patches = ", ".join(applied) if isinstance(applied, list) and applied != ["none"] else ""
    label = run.label or f"run {run.id}"
    return f"{label} ({patches})" if patches and patches != label else label


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _headline(benches: Sequence[Run], steps: Sequence[Run]) -> str:
    items = []
    for runs, figure, _wanted in (
        (benches, "TPOT", ""),
        (benches, "output", ""),
        (steps, "step", ""),
        (steps, "KV-pool cast", ""),
    ):
        if len(runs) < 2:
            continue
        found = metrics.changes(metrics.of(runs[0].result), metrics.of(runs[-1].result))
        fit = [change for change in found if change.a.name == figure and change.verdict != "noise"]
        if not fit:
            continue
        best = max(fit, key=lambda change: abs(change.ratio - 1) if change.ratio > 1 else 1 / max(change.ratio, 1e-9))
        items.append(
            f"<li><b>{metrics.number(best.a.middle)} → {metrics.number(best.b.middle)} {escape(best.a.unit)}</b>"
            f'{escape(figure)}, {factor(best.ratio)} <span class="soft">{escape(best.a.case)}</span></li>'
        )
    return f'<ul class="headline">{"".join(items)}</ul>' if items else ""


def _obstacles(runs: Sequence[Run]) -> list[str]:
    if len(runs) < 2:
        return []
    found = []
    for other in runs[1:]:
        for why in metrics.obstacles(runs[0].setup, other.setup):
            text = f"{name(runs[0])} and {name(other)} should not be compared: {why}"
            found.append(f'<p class="warning" role="note">{escape(text)}</p>')
    return found


def _slowest(run: Run) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = run.result["trace"]["ranks"]
    return max(ranks, key=lambda rank: float(rank["step_ms"]))


def _breakdown(steps: Sequence[Run]) -> str:
    if not steps:
        return ""
    bars = []
    for run in steps:
        rank = _slowest(run)
        summed = sum(part["ms_per_step"] for part in rank["families"]) or 1.0
        scale = min(1.0, rank["busy_ms"] / summed)  # what overlaps is shown once
        parts = [(part["name"], part["ms_per_step"] * scale) for part in rank["families"]]
        parts.append((IDLE, max(rank["step_ms"] - rank["busy_ms"], 0.0)))
        bars.append(charts.Bar(f"{name(run)}, rank {rank['rank']}", rank["step_ms"], parts))
    sizes: dict[str, float] = {}
    for bar in bars:
        for part, ms in bar.parts:
            sizes[part] = max(sizes.get(part, 0.0), ms)
    names = sorted(sizes, key=lambda part: (part == IDLE, -sizes[part]))
    rows = []
    for part in names:
        cells = [dict(bar.parts).get(part, 0.0) for bar in bars]
        rows.append([part, *(f"{ms:.3f}" if ms else "-" for ms in cells)])
    table = _table(["part, ms a step", *(name(run) for run in steps)], rows, numbers=True)
    return (
        "<h2>Where a decode step goes</h2>"
        f"{charts.stacked(bars)}<details><summary>As a table</summary>{table}</details>"
        '<p class="soft">From traces of the slowest rank. Profiled steps are a little slower than others.</p>'
    )


def _points(run: Run, figure: str, fixed: str, value: int, axis: str) -> list[tuple[str, float, float, float]]:
    found = {metric.case: metric for metric in metrics.of(run.result) if metric.name == figure}
    points = []
    for case in sorted(run.result.get("cases") or [], key=lambda case: int(case[axis])):
        metric = found.get(case["case"])
        if metric is not None and case[fixed] == value:
            points.append((f"{case[axis]:,}", metric.middle, min(metric.values), max(metric.values)))
    return points


def _chart(benches: Sequence[Run], figure: str, fixed: str, axis: str, title: str, x_title: str) -> str:
    """Lines for the value of `fixed` that most cases share; nothing where `axis` takes one value only."""
    cases = [case for run in benches for case in run.result.get("cases") or []]
    if not cases:
        return ""
    spread = {case[fixed]: {c[axis] for c in cases if c[fixed] == case[fixed]} for case in cases}
    value = max(spread, key=lambda key: (len(spread[key]), -int(key)))
    series = [
        charts.Series(name(run), points) for run in benches if (points := _points(run, figure, fixed, value, axis))
    ]
    if not series:
        return ""
    unit = next(metric.unit for run in benches for metric in metrics.of(run.result) if metric.name == figure)
    what = f"{value} stream{'s' if value != 1 else ''}" if fixed == "concurrency" else f"{value:,} prompt tokens"
    drawn = charts.lines(series, title=f"{title}, {what}", unit=unit, x_title=x_title)
    return f'<h2>{escape(title)}</h2><p class="soft">{escape(what)}; whiskers span the repeats</p>{drawn}'


def _tpot(benches: Sequence[Run]) -> str:
    return _chart(benches, "TPOT", "concurrency", "input", "TPOT by prompt length", "prompt tokens")


def _throughput(benches: Sequence[Run]) -> str:
    streams = {case["concurrency"] for run in benches for case in run.result.get("cases") or []}
    if len(streams) < 2:
        return ""
    return _chart(benches, "output", "input", "concurrency", "Throughput by concurrency", "streams at once")


def _changes(runs: Sequence[Run], title: str) -> str:
    if not runs:
        return ""
    first = metrics.of(runs[0].result)
    rows: list[list[Cell]] = []
    for metric in first:
        row: list[Cell] = [metric.case, metric.name, metric.text()]
        for other in runs[1:]:
            change = next(iter(metrics.changes([metric], metrics.of(other.result))), None)
            row.append((change.b.text(), change.verdict) if change else "-")
        rows.append(row)
    return f"<h2>{escape(title)}</h2>" + _table(["case", "figure", *(name(run) for run in runs)], rows)


def _setup(runs: Sequence[Run]) -> str:
    flat = [
        metrics.flatten(run.setup) | {"started (UTC)": run.started[:19].replace("T", " "), "host": run.host}
        for run in runs
    ]
    keys = sorted({key for one in flat for key in one})
    different = [key for key in keys if len({one[key] for one in flat if key in one}) > 1]
    heads = [f"{name(run)}: {run.kind}" for run in runs]
    parts = ["<h2>Set-up</h2>"]
    if different:
        rows = [[key, *(one.get(key, "-") for one in flat)] for key in different]
        parts.append("<h3>What differs</h3>" + _table(["", *heads], rows))
    rows = [[key, next(one[key] for one in flat if key in one)] for key in keys if key not in different]
    if rows:
        parts.append("<h3>The same in all runs that state it</h3>" + _table(["", "value"], rows))
    return "".join(parts)


def _notes(runs: Sequence[Run]) -> str:
    items = []
    for run in runs:
        found = [*(run.result.get("notes") or []), *((run.result.get("trace") or {}).get("advice") or [])]
        items += [f"<li>{escape(name(run))}: {escape(str(note))}</li>" for note in found]
    return f"<h2>Notes</h2><ul>{''.join(items)}</ul>" if items else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, numbers: bool = False) -> str:
    kinds = ["number" if numbers and i else "wide" for i in range(len(columns))]
    head = "".join(f'<th scope="col" class="{kind}">{escape(c)}</th>' for c, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell, kind: str) -> str:
    text, verdict = (cell, "") if isinstance(cell, str) else cell
    word = {"noise": "within noise", "changed": "changed"}.get(verdict, verdict)
    mark = f' <span class="{verdict if verdict in ("better", "worse") else "soft"}">{word}</span>' if word else ""
    return f'<td class="{kind}">{escape(text)}{mark}</td>'
