"""`mlapatch trace`: where a decode step's time goes, and the KV-pool cast in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import trace as finding
from mlapatch.measure import tracefile, tracereport
from mlapatch.measure.kernels import short
from mlapatch.measure.progress import bar
from mlapatch.measure.runs import Store
from mlapatch.measure.units import percent, size
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text, Warn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mlapatch.measure.trace import RankTrace


def trace(
    *,
    files: Sequence[Path],
    layers: int | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    top: int = 12,
    label: str = "",
    keep: bool = False,
    db: Path | None = None,
) -> Outcome:
    """Read traces of one profile, a file a rank, and name the cast."""
    hints = finding.Hints(layers=layers, steps=steps, tokens=tokens)
    data, metrics, blocks = read_all(files, hints, top)
    if keep and not data["one_profile"]:
        raise MlapatchError(
            Exit.USAGE,
            "a run keeps one profile, and several of these traces are of the same rank",
            found=", ".join(f"{rank['file']} (rank {rank['rank']})" for rank in data["ranks"][:8]),
            next="mlapatch trace FILE --keep --label NAME, once for each profile",
        )
    if keep:
        first = data["ranks"][0]
        facts = {"gpu": first["gpu"]} | ({"pool_tokens": tokens} if tokens else {})
        with Store(db) as store:
            run = store.start("trace", {"server": facts, "files": [str(file) for file in files]}, label)
            store.finish(run, {"trace": data, "metrics": metrics})
        data["run"] = run
    return Outcome(data=data, blocks=blocks)


def read_all(
    files: Sequence[Path], hints: finding.Hints, top: int
) -> tuple[dict[str, Any], list[dict[str, object]], list[Block]]:
    """The findings as data, as metrics, and as blocks for people."""
    chosen, left_out = choose(files)
    ranks: list[RankTrace] = []
    with bar("reading", sum(file.stat().st_size for file in chosen), unit="bytes") as advance:
        for file in chosen:
            ranks += finding.analyse(tracefile.read(file, advance), hints)
    ranks.sort(key=lambda rank: (len(rank.rank), rank.rank))
    blocks: list[Block] = [Warn(f"{file.name} is a prefill trace and was left out") for file in left_out]
    return tracereport.as_data(ranks, top), tracereport.metrics(ranks), blocks + _blocks(ranks, top)


def choose(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files to read, and those left out: prefill stages next to decode ones. A folder stands for its traces."""
    found: list[Path] = []
    for file in files:
        if file.is_dir():
            inside = sorted([*file.glob("*.trace.json.gz"), *file.glob("*.trace.json")])
            separate = [one for one in inside if not one.name.startswith("merged-")]
            found += separate or inside
            if not inside:
                raise MlapatchError(
                    Exit.USAGE,
                    "no trace in this folder",
                    where=str(file),
                    expected="*.trace.json.gz",
                    next="mlapatch profile --url URL records one",
                )
        elif not file.exists():
            raise MlapatchError(
                Exit.USAGE,
                "no such trace",
                where=str(file),
                next="traces are on the server's file system: inside its container, if it runs in one",
            )
        else:
            found.append(file)
    decode = [file for file in found if "-EXTEND" not in file.name]
    return (decode, [file for file in found if file not in decode]) if decode else (found, [])


def _blocks(ranks: Sequence[RankTrace], top: int) -> list[Block]:
    if same := tracereport.repeated(ranks):
        return _apart(ranks, same)
    slowest = max(ranks, key=lambda rank: rank.timing.wall)
    fastest = min(ranks, key=lambda rank: rank.timing.wall)
    blocks: list[Block] = [
        Warn(f"rank {rank.rank}: {note}") for rank in ranks for note in (*rank.file.notes, *rank.notes)
    ]
    blocks.append(Pairs(_facts(slowest, many=len(ranks) > 1)))
    if len(ranks) > 1:
        blocks.append(_rank_table(ranks))
        skew = slowest.timing.wall - fastest.timing.wall
        share = skew / slowest.timing.wall if slowest.timing.wall else 0.0
        blocks.append(
            Text(
                [
                    (
                        f"Slowest rank {slowest.rank}, fastest rank {fastest.rank}: "
                        f"{skew / 1e3:.2f} ms apart ({percent(share)})."
                    )
                ]
            )
        )
    blocks += [_families(slowest), _kernels(slowest, top), Text(tracereport.advice(slowest), style="bold")]
    return blocks


def _apart(ranks: Sequence[RankTrace], same: str) -> list[Block]:
    """Traces of several profiles: each for itself, and nothing that compares ranks."""
    names = tracereport.files(ranks)
    notes = [
        Warn(f"{name}: {note}")
        for name, rank in zip(names, ranks, strict=True)
        for note in (*rank.file.notes, *rank.notes)
    ]
    count = sum(rank.rank == same for rank in ranks)
    why = f"{count} of these are traces of rank {same}, so they are several profiles: each is told for itself."
    more = "Next: mlapatch trace FILE shows where a step of one goes."
    table = _rank_table(ranks, names)
    return [*notes, Text([why]), table, Text([*tracereport.by_file(ranks), more], style="bold")]


def _facts(rank: RankTrace, *, many: bool) -> list[tuple[str, str]]:
    timing, cast = rank.timing, rank.cast
    how = "CUDA graphs" if rank.steps.graphs else "eager"
    sizes = ", ".join(f"{count} of batch {n}" for n, count in sorted(rank.file.batches.items()))
    known = f"{rank.steps.count}, {how}, found by {rank.steps.found_by}" if rank.steps.count else "not told apart"
    rows = [
        ("trace", f"{rank.file.path} ({rank.file.events:,} events, {size(rank.file.bytes)})"),
        ("rank", rank.rank + (", the slowest" if many else "") + (f", {rank.gpu}" if rank.gpu else "")),
        ("decode steps", known + (f" ({sizes})" if sizes else "")),
        ("step", f"{timing.wall / 1e3:.2f} ms, GPU busy {timing.busy / 1e3:.2f} ms, idle {percent(rank.idle)}"),
    ]
    if cast is None:
        return [*rows, ("KV-pool cast", "none found")]
    times = f"{cast.layers} layers x {rank.steps.count} steps" if cast.layers else "steps unknown"
    extra = cast.group.count - cast.calls
    calls = f"{cast.group.count:,} calls = {times}" + (f" + {extra} elsewhere" if cast.layers and extra else "")
    shape = "not recorded"
    if cast.shape is not None:
        shape = f"{list(cast.shape)}" + (", FP8" if cast.sure else "")
    elif cast.elements:
        shape = f"not recorded; the grid covers {cast.elements / 1e6:.1f} M elements, {cast.elements // 576:,} x 576"
    rows += [
        ("KV-pool cast", f"{timing.cast / 1e3:.2f} ms a step, {percent(rank.share)} of it"),
        ("cast calls", f"{calls}, {cast.group.total / cast.group.count:.1f} us each"),
        ("cast kernel", f"{short(cast.group.name)}, grid {cast.group.grid_text}"),
        ("pool shape", shape),
    ]
    if cast.elements:
        moved = f"{size(cast.bytes)} a call" + (f", {size(cast.bytes * cast.layers)} a step" if cast.layers else "")
        rows.append(("cast bytes", f"{moved}, {cast.rate / 1e12:.2f} TB/s"))
    return rows


def _rank_table(ranks: Sequence[RankTrace], files: Sequence[str] = ()) -> Table:
    rows = [
        [
            rank.rank,
            str(rank.steps.count),
            f"{rank.timing.wall / 1e3:.2f}",
            f"{rank.timing.busy / 1e3:.2f}",
            f"{rank.timing.cast / 1e3:.2f}" if rank.cast else "-",
            percent(rank.share) if rank.cast else "-",
        ]
        for rank in ranks
    ]
    columns = ["rank", "steps", "step ms", "busy ms", "cast ms", "cast share"]
    if files:
        return Table(["file", *columns], [[file, *row] for file, row in zip(files, rows, strict=True)], "Traces")
    return Table(columns, rows, "Ranks")


def _families(rank: RankTrace) -> Table:
    wall = rank.timing.wall or 1.0
    rows = [[label, f"{dur / 1e3:.3f}", percent(dur / wall), str(n)] for label, dur, n in rank.timing.families]
    rows.append(["GPU idle", f"{max(wall - rank.timing.busy, 0) / 1e3:.3f}", percent(rank.idle), ""])
    return Table(["part of a step", "ms", "share", "kernels"], rows, "Where a step goes (sums; overlap counts twice)")


def _kernels(rank: RankTrace, top: int) -> Table:
    groups = rank.track.groups
    rows = [
        [
            short(groups[index].name),
            groups[index].grid_text,
            f"{groups[index].count:,}",
            f"{groups[index].total / groups[index].count:.1f}",
            f"{dur / 1e3:.3f}",
        ]
        for index, dur in rank.timing.kernels[:top]
    ]
    return Table(["kernel", "grid", "calls", "us each", "ms a step"], rows, "Longest kernels")
