"""Experiments in one SQLite file: every launch, verify, bench, profile and trace, written safely by several processes.

A run is written when it starts and again when it ends, each in a transaction of its own: a kill in between leaves the
run marked as unfinished and everything else as it was.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlapatch import __version__
from mlapatch.disk import make_folder
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure.cells import object_in, text, written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BUSY_SECONDS = 30.0
KINDS = ("bench", "profile", "trace", "launch", "verify")

# Append only: PRAGMA user_version counts how many of these a file has seen.
MIGRATIONS: list[str] = [
    """
    CREATE TABLE runs (
      id INTEGER PRIMARY KEY AUTOINCREMENT,
      uid TEXT NOT NULL UNIQUE,
      kind TEXT NOT NULL,
      label TEXT NOT NULL DEFAULT '',
      status TEXT NOT NULL,
      started TEXT NOT NULL,
      finished TEXT,
      host TEXT NOT NULL,
      pid INTEGER NOT NULL,
      mlapatch TEXT NOT NULL,
      setup TEXT NOT NULL,
      result TEXT NOT NULL
    );
    CREATE INDEX runs_by_label ON runs (label) WHERE label != '';
    """,
]

_COLUMNS = "id, uid, kind, label, status, started, finished, host, pid, mlapatch, setup, result"


@dataclass(frozen=True)
class Run:
    """One experiment. `setup` is what it was done with, `result` what came out."""

    id: int
    uid: str
    kind: str
    label: str
    status: str
    started: str
    finished: str | None
    host: str
    pid: int
    mlapatch: str
    setup: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """`status`, but `lost` for a run of this machine whose process is gone."""
        if self.status == "running" and self.host == socket.gethostname() and not _alive(self.pid):
            return "lost"
        return self.status

    @property
    def title(self) -> str:
        """How a table names it."""
        return f"{self.id} ({self.label})" if self.label else str(self.id)

    @property
    def decided(self) -> bool:
        """Whether it came to a result: a verify that fails did, one that was broken off did not."""
        return self.status == "done" or (self.status == "failed" and "error" not in self.result)

    def as_dict(self) -> dict[str, Any]:
        """The run as one JSON object."""
        return {**self.__dict__, "state": self.state}


def _alive(pid: int) -> bool:
    if pid <= 0:  # no process has it: an export without one, and to `kill` it is a group
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def default_path() -> Path:
    """`runs.sqlite3` in the user's data folder for mlapatch."""
    import platformdirs

    return Path(platformdirs.user_data_dir("mlapatch")) / "runs.sqlite3"


class Store:
    """The open file. Use `with Store(path) as store`."""

    def __init__(self, path: Path | None = None, *, wait: float = BUSY_SECONDS) -> None:
        self.path = path or default_path()
        self._wait = wait
        try:
            make_folder(self.path.parent)
            self._db = sqlite3.connect(self.path, timeout=wait, isolation_level=None)
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(str(error)) from None
        try:
            self._refuse_foreign()
            self._use_wal()
            self._migrate()
        except sqlite3.Error as error:
            self._db.close()
            raise self._unusable(str(error)) from None
        except MlapatchError:
            self._db.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _unusable(self, found: str) -> MlapatchError:
        return MlapatchError(
            Exit.ENVIRONMENT,
            "the file of runs cannot be used",
            where=str(self.path),
            found=found,
            next="give another one with --db PATH",
        )

    def _refuse_foreign(self) -> None:
        """Never change another program's database; nothing is written before this."""
        self._db.execute("BEGIN")  # one look: another process may be making the tables right now
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        version = self._version()
        known = {name for (name,) in self._db.execute("SELECT name FROM pragma_table_info('runs')")}
        self._db.execute("COMMIT")
        if version > len(MIGRATIONS):
            raise self._newer(version)
        whole = version < len(MIGRATIONS) or known >= set(_COLUMNS.split(", "))
        if ("runs" in tables) != (version > 0) or (tables and version <= 0) or not whole:
            raise MlapatchError(
                Exit.ENVIRONMENT,
                "this is the database of another program",
                where=str(self.path),
                expected="the table 'runs' with mlapatch's columns, or an empty file",
                found=", ".join(sorted(tables)[:5]) or "none",
                next="give another one with --db PATH",
            )

    def _use_wal(self) -> None:
        """Readers and a writer side by side. Where the file system cannot do it, the journal stays as it was."""
        deadline = time.monotonic() + self._wait
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:  # the switch does not wait for other processes by itself
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self._db.execute("PRAGMA synchronous = FULL")  # NORMAL may lose the last runs in a power loss

    def _migrate(self) -> None:
        if self._version() < len(MIGRATIONS):
            with self._writing():
                for script in MIGRATIONS[self._version() :]:  # again, now that nobody else writes
                    for statement in script.split(";"):
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        elif (version := self._version()) > len(MIGRATIONS):  # since the look at the start
            raise self._newer(version)

    def _newer(self, version: int) -> MlapatchError:
        return MlapatchError(
            Exit.ENVIRONMENT,
            "the file of runs was written by a newer mlapatch",
            where=str(self.path),
            expected=f"schema {len(MIGRATIONS)} or older",
            found=f"schema {version}",
            next="upgrade mlapatch, or give another file with --db PATH",
        )

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._usable():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite ends it by itself where the disk is full
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None

    def start(self, kind: str, setup: dict[str, Any], label: str = "") -> int:
        """Write down that a run begins; its id is what `finish` takes and what people type."""
        name = label.encode("utf-8", "backslashreplace").decode()
        values = (uuid.uuid4().hex, kind, name, "running", now(), socket.gethostname(), os.getpid(), __version__)
        with self._writing():
            cursor = self._db.execute(
                "INSERT INTO runs (uid, kind, label, status, started, host, pid, mlapatch, setup, result) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '{}')",
                (*values, written(setup)),
            )
        return int(cursor.lastrowid or 0)

    def finish(
        self, run: int, result: dict[str, Any], *, status: str = "done", setup: dict[str, Any] | None = None
    ) -> None:
        """Write down how it ended: `done`, `failed` or `interrupted`. A `setup` replaces the one of the start."""
        with self._writing():
            self._db.execute(
                "UPDATE runs SET status = ?, finished = ?, result = ?, setup = coalesce(?, setup) WHERE id = ?",
                (status, now(), written(result), None if setup is None else written(setup), run),
            )

    def all(self, kind: str | None = None, limit: int | None = None) -> list[Run]:
        """Runs, the newest first."""
        where, values = ("WHERE kind = ?", (kind,)) if kind else ("", ())
        query = f"SELECT {_COLUMNS} FROM runs {where} ORDER BY id DESC LIMIT ?"  # noqa: S608  constants only
        with self._usable():
            rows = self._db.execute(query, (*values, -1 if limit is None else limit)).fetchall()
        return [_run(row) for row in rows]

    def get(self, name: str) -> Run:
        """The run that a person means: an id, a label (its newest), `last`, `last~1`, or the start of a uid.

        Raises:
            MlapatchError: there is none (exit 2).
        """
        runs = self.all()
        if name == "last" or name.startswith("last~"):
            back = int(name[5:]) if name[5:].isdigit() else 0
            found = runs[back] if back < len(runs) else None
        else:
            tests = (lambda run: str(run.id) == name, lambda run: run.label == name, lambda run: _starts(run, name))
            found = next((run for test in tests for run in runs if test(run)), None)
        if found is None:
            known = ", ".join(run.title for run in runs[:8]) or "none yet"
            near = get_close_matches(name, {run.label for run in runs}, n=1)
            what = f"no run {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            raise MlapatchError(Exit.USAGE, what, where=str(self.path), found=known, next="mlapatch runs")
        return found

    def named(self, name: str) -> list[Run]:
        """Like `get`, but a label means the newest finished run of each kind that has it, oldest kind first."""
        newest: dict[str, Run] = {}
        for run in self.all():
            if run.label == name and run.decided:
                newest.setdefault(run.kind, run)
        return sorted(newest.values(), key=lambda run: run.id) or [self.get(name)]

    def add(self, runs: Iterable[dict[str, Any]]) -> int:
        """Take in exported runs; those that are here already (by uid) stay as they are. Returns how many are new."""
        added = 0
        with self._writing():
            for run in runs:
                row = [
                    text(run.get(k) or "") for k in ("uid", "kind", "label", "status", "started", "finished", "host")
                ]
                pid = run.get("pid")
                row += [str(pid if isinstance(pid, int) and 0 < pid < 1 << 31 else 0), text(run.get("mlapatch") or "")]
                cursor = self._db.execute(
                    "INSERT OR IGNORE INTO runs (uid, kind, label, status, started, finished, host, pid, mlapatch, "
                    "setup, result) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *row,
                        *(written(found if isinstance(found := run.get(k), dict) else {}) for k in ("setup", "result")),
                    ),
                )
                added += cursor.rowcount
        return added

    def delete(self, numbers: Sequence[str]) -> list[Run]:
        """Delete runs, all of them or none; a label could mean more than one, so that only numbers are taken.

        Raises:
            MlapatchError: one is not there, or is not over yet on this machine (exit 2).
        """
        with self._writing():
            there = {str(run.id): run for run in self.all()}
            for number in numbers:
                if number not in there:
                    label = next((run for run in there.values() if run.label == number), None)
                    what = f"no run has the number {number!r}"
                    then = f"mlapatch runs --delete {label.id}" if label else "mlapatch runs"
                    found = label.title if label else ", ".join(run.title for run in [*there.values()][:8]) or "none"
                    raise MlapatchError(Exit.USAGE, what, where=str(self.path), found=found, next=then)
                if there[number].state == "running" and there[number].host == socket.gethostname():
                    what = f"run {number} is not over yet"
                    raise MlapatchError(Exit.USAGE, what, where=str(self.path), next="wait for it, or interrupt it")
            chosen = [there[number] for number in dict.fromkeys(numbers)]
            self._db.executemany("DELETE FROM runs WHERE id = ?", [(run.id,) for run in chosen])
        return chosen


def _starts(run: Run, name: str) -> bool:
    return len(name) >= 4 and run.uid.startswith(name)


def _run(row: tuple[Any, ...]) -> Run:
    values: dict[str, Any] = dict(zip(_COLUMNS.split(", "), row, strict=True))
    for key in ("uid", "kind", "label", "status", "started", "host", "mlapatch"):
        values[key] = text(values[key])
    values["finished"] = None if values["finished"] is None else text(values["finished"])
    values["pid"] = values["pid"] if isinstance(values["pid"], int) else 0
    values |= {key: object_in(values[key]) for key in ("setup", "result")}
    return Run(**values)


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
