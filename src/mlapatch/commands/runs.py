"""`mlapatch runs`: the experiments that were kept."""

from __future__ import annotations

import sys
from collections import Counter
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import orjson

from mlapatch.disk import environment_errors, write_output
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import metrics, outcomes
from mlapatch.measure.runs import KINDS, Run, Store
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def runs(
    *,
    run: str | None = None,
    kind: str | None = None,
    limit: int = 30,
    export: Path | None = None,
    take_in: Path | None = None,
    delete: Sequence[str] = (),
    db: Path | None = None,
) -> Outcome:
    """List runs, show one, export all as JSON lines, take in an export, or delete some."""
    if delete and (run or kind or export or take_in):
        raise MlapatchError(Exit.USAGE, "--delete goes with nothing else", next="mlapatch runs --delete 3 --delete 4")
    with Store(db) as store:
        if delete:
            gone = store.delete(delete)
            names = ", ".join(f"{one.kind} {one.title}" for one in gone)
            return Outcome(
                data={"db": str(store.path), "deleted": [one.id for one in gone]},
                blocks=[Text([f"Deleted from {store.path}: {names}"])],
            )
        if take_in is not None:
            added = store.add(_read(take_in))
            return Outcome(data={"added": added}, blocks=[Text([f"{added} new runs in {store.path}"])])
        if kind is not None:
            _known(kind, store)
        if export is not None:
            return _export(store.all(kind), export)
        if run is not None:
            return _show(store.get(run))
        found = store.all(kind, limit)
        rows = [
            [str(one.id), one.kind, one.label, one.state, one.started[:19].replace("T", " "), one.host, _headline(one)]
            for one in found
        ]
        columns = ["run", "kind", "label", "state", "started (UTC)", "host", "result"]
        empty = [] if rows else [Text([_none(kind, store)])]
        return Outcome(
            data={"db": str(store.path), "runs": [one.as_dict() for one in found]},
            blocks=[Table(columns, rows)] if rows else empty,
        )


def _known(kind: str, store: Store) -> None:
    """MlapatchError (exit 2) for a kind that no run can have; an export of a later mlapatch may have brought others."""
    kinds = dict.fromkeys([*KINDS, *(run.kind for run in store.all())])
    if kind not in kinds:
        near = get_close_matches(kind, kinds, n=1)
        raise MlapatchError(
            Exit.USAGE,
            f"there is no kind of run {kind!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            expected=", ".join(kinds),
            found=kind,
            next=f"mlapatch runs --kind {near[0] if near else KINDS[0]}",
        )


def _none(kind: str | None, store: Store) -> str:
    others = Counter(run.kind for run in store.all())
    if not others:
        return f"No runs yet in {store.path}. Next: mlapatch bench"
    there = ", ".join(f"{count} {name}" for name, count in others.items())
    return f"No {kind} in {store.path} ({there}). Next: mlapatch runs"


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise MlapatchError(
            Exit.USAGE,
            "cannot read the export",
            where=str(path),
            found=str(error),
            next="mlapatch runs --export FILE writes one",
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = orjson.loads(line)
            found.append({**entry, "uid": entry["uid"], "kind": entry["kind"]})
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise MlapatchError(
                Exit.USAGE,
                "this is not an export of runs",
                where=f"{path}, line {number}",
                found=str(error),
                next="mlapatch runs --export FILE writes one",
            ) from None
    return found


def _export(found: list[Run], path: Path) -> Outcome:
    lines = b"".join(orjson.dumps(run.as_dict(), default=str) + b"\n" for run in reversed(found))
    if str(path) == "-":
        sys.stdout.write(lines.decode())
        return Outcome()
    then = "no new export is there, or a whole one"
    with environment_errors(path.parent, then, elsewhere="name a file in a folder of yours: --export FILE"):
        write_output(path, lines)
    return Outcome(data={"exported": len(found), "file": str(path)}, blocks=[Text([f"{len(found)} runs in {path}"])])


def _show(run: Run) -> Outcome:
    rows = [("run", run.title), ("kind", run.kind), ("state", run.state), ("started", run.started)]
    rows += [("finished", run.finished or "not"), ("host", run.host), ("mlapatch", run.mlapatch)]
    rows += sorted(metrics.flatten(run.setup).items())
    rows += [("log", str(run.result["log"]))] if run.result.get("log") else []
    figures = [[metric.case, metric.name, metric.text()] for metric in metrics.of(run.result)]
    blocks: list[Block] = [Pairs(rows)]
    if found := outcomes.flat(run.result):
        blocks.append(Table(["what came out", "is"], sorted(found.items())))
    if figures or not found:
        blocks.append(Table(["case", "figure", "median"], figures))
    notes = [str(note) for note in [*(run.result.get("notes") or []), run.result.get("error")] if note]
    return Outcome(data=run.as_dict(), blocks=[*blocks, Text(notes)])


def _headline(run: Run) -> str:
    found, said = metrics.of(run.result), run.result.get("error") or run.result.get("summary")
    if said or not found:
        return str(said or "")[:80]
    return f"{found[0].case + ': ' if found[0].case else ''}{found[0].name} {found[0].text()}"
