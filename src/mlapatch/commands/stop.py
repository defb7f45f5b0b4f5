"""`stop`: end a server that `launch` started, with its whole process tree."""

from __future__ import annotations

from pathlib import Path

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome, Text, Warn
from mlapatch.serve.processes import Tree, find
from mlapatch.serve.run_record import STOPPED, RunRecord, load_all


def stop(*, name: str = "", logs: Path = Path("logs"), every: bool = False, grace: float = 10.0) -> Outcome:
    """Stop the running server of that name or pid, the only one, or every one.

    One that runs no more is no error, so that stopping twice is none; a name that was never started from here is a
    misspelt one (exit 2).
    """
    records = load_all(logs)
    meant = [record for record in records if not name or name in (record.name, str(record.pid))]
    if name and not meant:
        raise MlapatchError(
            Exit.USAGE,
            f"no server called {name} was started from here",
            where=str(logs),
            found=", ".join(dict.fromkeys(record.name for record in records)) or "none",
            next="mlapatch logs --list",
        )
    running = [(record, tree) for record in meant if (tree := alive(record)) is not None]
    if not running:
        which = f"called {name} " if name else ""
        return Outcome(data={"stopped": []}, blocks=[Text((f"no server {which}is running (records in {logs})",))])
    if len(running) > 1 and not every:
        raise MlapatchError(
            Exit.USAGE,
            "more than one server is running",
            found=", ".join(f"{record.name} (pid {record.pid})" for record, _ in running),
            next="mlapatch stop NAME or PID, or mlapatch stop --all",
        )
    lines, stopped, warnings = [], [], list[str]()
    for record, tree in running:
        killed = tree.stop(grace=grace)
        record.with_state(STOPPED, tell=warnings.append)
        how = f"; {len(killed)} of its processes did not end by themselves and were killed" if killed else ""
        lines.append(f"stopped {record.name} (pid {record.pid}){how}")
        stopped.append({"name": record.name, "pid": record.pid, "killed": killed, "log": record.log})
    return Outcome(data={"stopped": stopped}, blocks=[*(Warn(text) for text in warnings), Text(lines)])


def alive(record: RunRecord) -> Tree | None:
    """The process tree of a record, where it still runs."""
    return find(record.pid, record.created, record.session)
