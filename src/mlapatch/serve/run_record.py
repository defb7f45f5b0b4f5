"""What is known of a started server, kept beside its log so that `stop` and `logs` find it later. Holds no secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any

from mlapatch.disk import environment_errors, write_atomically
from mlapatch.errors import MlapatchError
from mlapatch.jsontext import parsed_object
from mlapatch.serve.server_options import ServerOptions

STARTING, READY, FAILED, STOPPED = "starting", "ready", "failed", "stopped"
LOGS_ELSEWHERE = "keep them in a folder of yours: mlapatch launch --logs DIR"
_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class RunRecord:
    """One start. `created` is the process's start time: a pid alone may have been given to another process."""

    name: str
    pid: int
    created: float
    session: int
    started: str
    log: str
    command: list[str]
    host: str = "127.0.0.1"
    port: int | None = None
    state: str = STARTING
    sglang: str = ""
    patches: dict[str, str] = field(default_factory=dict)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)  # ServerOptions.facts: what a script runs is not in `command`

    @property
    def path(self) -> Path:
        """The record's own file, beside the log."""
        return Path(self.log).with_suffix(".json")

    def save(self, *, otherwise: Callable[[], object] | None = None) -> None:
        """Write it whole or not at all; MlapatchError (exit 5) where it cannot be, after `otherwise`, a stop."""
        text = json.dumps(asdict(self), indent=2, default=str) + "\n"
        then = "the server was stopped" if otherwise else "the record of the server is not kept"
        try:
            with environment_errors(self.path.parent, then, elsewhere=LOGS_ELSEWHERE):
                write_atomically(self.path, text.encode())
        except MlapatchError:
            if otherwise:
                otherwise()
            raise

    def with_state(
        self, state: str, diagnosis: dict[str, Any] | None = None, *, tell: Callable[[str], None] | None = None
    ) -> RunRecord:
        """Save and return the record with a new state. With `tell`, a full disk is a warning: the server goes on."""
        changed = replace(self, state=state, diagnosis=diagnosis or self.diagnosis)
        try:
            changed.save()
        except MlapatchError as error:
            if tell is None:
                raise
            tell(f"{error.what} ({error.where})")
        return changed


def log_path(folder: Path, name: str, started: str) -> Path:
    """`logs/<name>-<time>.log`, a free one."""
    base = f"{_NAME.sub('-', name).strip('-.') or 'server'}-{started}"
    path, number = folder / f"{base}.log", 1
    while path.exists():
        path, number = folder / f"{base}-{number}.log", number + 1
    return path.absolute()


def load_all(folder: Path) -> list[RunRecord]:
    """Every readable record of a folder, newest first."""
    records = []
    for path in folder.glob("*.json"):
        try:
            records.append(_read(path))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(records, key=lambda record: record.created, reverse=True)


def known_of(log: Path) -> dict[str, str]:
    """What the record beside a log knows of its server where the log may not say it; empty without a record."""
    try:
        if log.suffix != ".log" or not log.with_suffix(".json").is_file():
            return {}
        record = _read(log.with_suffix(".json"))
    except (OSError, ValueError, TypeError):
        return {}
    said = record.facts or ServerOptions.of([str(word) for word in record.command]).facts
    return {name: value for name, value in said.items() if isinstance(value, str)}


_FORM: dict[type | UnionType, tuple[str, ...]] = {
    str: ("name", "started", "host", "state", "sglang"),
    int: ("pid", "session"),
    float | int: ("created",),
    int | None: ("port",),
    list: ("command",),
    dict: ("patches", "diagnosis", "facts"),
}


def _read(path: Path) -> RunRecord:
    """A record; ValueError or TypeError where it is damaged: `stop` must not signal what a wrong number names.

    The log is the file beside it, wherever the folder is now; nothing else that a record names is read or written.
    """
    record = replace(RunRecord(**parsed_object(path.read_bytes())), log=str(path.absolute().with_suffix(".log")))
    for kind, names in _FORM.items():
        for name in names:
            found = getattr(record, name)
            if not isinstance(found, kind) or isinstance(found, bool):
                raise TypeError(f"{name}: {found!r:.60}")
    if not 0 < record.pid < 1 << 31 or not abs(record.created) < 1e12:
        raise ValueError("no process")
    return record
