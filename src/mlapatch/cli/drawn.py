"""Progress of a long command, on stderr: bars on a terminal, a line now and then in a pipe (a CI log)."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS_BETWEEN_LINES = 2.0


class Drawn:
    """Stages, steps and downloads (the `Watch` of `mlapatch.compat`). Use it in a `with`; safe from several threads."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._stage: TaskID | None = None
        self._transfers: dict[str, TaskID] = {}
        self._title, self._total, self._done = "", 0, 0
        self._last_line = 0.0

    def __enter__(self) -> Drawn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, line: str) -> None:
        """What is about to be done, at once; before the first bar."""
        print(line, file=sys.stderr, flush=True)

    def begin(self, title: str, total: int) -> None:
        """A stage of `total` steps starts."""
        with self._lock:
            self._title, self._total, self._done = title, total, 0
            self._last_line = time.monotonic()
            if not self._terminal:
                print(f"{title}: {total}", file=sys.stderr, flush=True)
                return
            bars = self._started()
            if self._stage is not None:
                bars.remove_task(self._stage)
            self._stage = bars.add_task(title, total=total, unit=f"0 of {total}")

    def step(self, done: str) -> None:
        """One step is done."""
        with self._lock:
            self._done += 1
            if self._bars is not None and self._stage is not None:
                self._bars.update(self._stage, advance=1, unit=f"{self._done} of {self._total}")
                if done in self._transfers:
                    self._bars.remove_task(self._transfers.pop(done))
            elif not self._terminal and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
                self._last_line = time.monotonic()
                print(f"{self._title}: {self._done} of {self._total} ({done})", file=sys.stderr, flush=True)

    def transfer(self, label: str, done: int, total: int | None) -> None:
        """Bytes of a download."""
        if not self._terminal:
            return
        with self._lock:
            bars = self._started()
            if label not in self._transfers:
                self._transfers[label] = bars.add_task(label, total=None, unit="")
            megabytes = f"{done / 1e6:.1f}" + (f"/{total / 1e6:.1f}" if total else "") + " MB"
            # The announced size is rounded: the bar must not run over it.
            total = max(total, done) if total else None
            bars.update(self._transfers[label], completed=done, total=total, unit=megabytes)

    def _started(self) -> Progress:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[unit]}"))
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        return self._bars
