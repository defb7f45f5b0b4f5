"""`logs`: the log of a server that `launch` started, to its present end or followed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mlapatch.commands.stop import alive
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Block, Outcome, Table, Text
from mlapatch.serve.log_stream import LineSplitter, clean
from mlapatch.serve.run_record import RunRecord, load_all

_CHUNK = 1 << 20


def logs(
    *,
    name: str = "",
    folder: Path = Path("logs"),
    follow: bool = False,
    lines: int = 40,
    listing: bool = False,
    out: Callable[[str], None] = print,
) -> Outcome:
    """Print the last lines of the newest log of that name; `follow` goes on until the server ends."""
    records = load_all(folder)
    if listing:
        return _list(records)
    chosen = [record for record in records if not name or name in (record.name, str(record.pid), Path(record.log).name)]
    if not chosen:
        known = ", ".join(dict.fromkeys(record.name for record in records)) or "none"
        raise MlapatchError(
            Exit.USAGE,
            f"no server {'called ' + name + ' ' if name else ''}was started from here",
            where=str(folder),
            found=known,
            next="mlapatch logs --list",
        )
    record = chosen[0]
    path = Path(record.log)
    try:
        offset = _show_end(path, lines, out)
        while follow:
            running = alive(record) is not None
            offset = _show_from(path, offset, out)
            if not running:
                break
            time.sleep(0.25)
    except OSError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT, "the log cannot be read", where=record.log, found=str(error), next="mlapatch logs --list"
        ) from None
    return Outcome(
        data={"name": record.name, "pid": record.pid, "log": record.log, "running": alive(record) is not None}
    )


def _list(records: list[RunRecord]) -> Outcome:
    rows = [
        (record.name, str(record.pid), "running" if alive(record) else record.state, record.started, record.log)
        for record in records
    ]
    blocks: list[Block] = [Table(("name", "pid", "state", "started", "log"), rows)] if rows else [Text(("none",))]
    keys = ("name", "pid", "state", "started", "log")
    return Outcome(data={"runs": [dict(zip(keys, row, strict=True)) for row in rows]}, blocks=blocks)


def _show_end(path: Path, lines: int, out: Callable[[str], None]) -> int:
    """The last lines, found from the end: the log may be large. Returns the offset of what comes next."""
    with path.open("rb") as log:
        size = log.seek(0, 2)
        start, tail = size, b""
        while start > 0 and tail.count(b"\n") <= lines:
            start = max(0, start - _CHUNK)
            log.seek(start)
            tail = log.read(size - start)
    for raw in tail.replace(b"\r", b"\n").splitlines()[-lines:] if lines > 0 else []:
        if text := clean(raw):
            out(text)
    return size


def _show_from(path: Path, offset: int, out: Callable[[str], None]) -> int:
    splitter = LineSplitter()
    with path.open("rb") as log:
        log.seek(offset)
        data = log.read()
    whole = splitter.feed(data)
    for raw in whole.splitlines():
        if text := clean(raw):
            out(text)
    return offset + len(whole)
