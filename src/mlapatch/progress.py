"""A progress line for downloads: one that moves on a terminal, one a step in a pipe."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Called with what is being fetched and its bytes so far and in all (None: not known)."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.drawn = 0.0
        self.said: set[str] = set()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Draw at most ten times a second on a terminal; elsewhere say each thing once."""
        size = f" of {total / 1e6:.1f} MB" if total else " MB"
        if not sys.stderr.isatty():
            if what not in self.said:
                self.said.add(what)
                print(f"fetching {what}", file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        if now - self.drawn < 0.1 and done != total:
            return
        self.drawn = now
        print(f"\r\x1b[Kfetching {what}: {done / 1e6:.1f}{size}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.drawn and sys.stderr.isatty():
            print(file=sys.stderr)
