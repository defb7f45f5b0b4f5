"""Copy a server's output to its log without secrets; a process of its own, so that it outlives a detached launcher.

`python -m mlapatch.serve.log_pump LOG SECRETS_FD`: output on stdin, a JSON list of secrets on the descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mlapatch.serve import redact

_IDLE = 0.2  # seconds after which an unfinished line, such as a progress bar, is written
_LIMIT = 1 << 20
_BREAK = re.compile(rb"(?<=[\n\r])")


class Filter:
    """Bytes in, bytes without secrets out; a secret that is cut by a read is still found."""

    def __init__(self, values: Sequence[str]) -> None:
        self._values = values
        self._carry = b""

    def feed(self, data: bytes) -> bytes:
        """The whole lines so far."""
        pieces = _BREAK.split(self._carry + data)
        self._carry = pieces.pop()
        if len(self._carry) > _LIMIT:
            return b"".join(map(self._clean, pieces)) + self.flush()
        return b"".join(map(self._clean, pieces))

    def flush(self) -> bytes:
        """The unfinished line, except an end that may be the beginning of a secret."""
        keep = 0
        for value in self._values:
            raw = value.encode()
            keep = max(keep, next((n for n in range(len(raw) - 1, 0, -1) if self._carry.endswith(raw[:n])), 0))
        cut = len(self._carry) - keep
        done, self._carry = self._carry[:cut], self._carry[cut:]
        return self._clean(done)

    def close(self) -> bytes:
        """All that is left."""
        done, self._carry = self._carry, b""
        return self._clean(done)

    def _clean(self, line: bytes) -> bytes:
        text = line.decode("utf-8", "surrogateescape")
        return redact.text(text, self._values).encode("utf-8", "surrogateescape")


def pump(source: int, log: Path, values: Sequence[str]) -> None:
    """Copy until the last writer of the pipe is gone, also on a full disk: a server must not die of its log."""
    stream, out = Filter(values), _Log(log)
    while True:
        ready, _, _ = select.select([source], [], [], _IDLE)
        if not ready:
            out.write(stream.flush())
            continue
        data = os.read(source, 1 << 16)
        if not data:
            out.write(stream.close())
            out.close()
            return
        out.write(stream.feed(data))


class _Log:
    """A file that takes what it can: what a full disk refuses is left out, and a line says how much that was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._lost, self._middle = 0, False

    def write(self, data: bytes) -> None:
        if self._lost and data:
            self._own_up()
        if self._lost:
            self._lost += len(data)
        else:
            self._all(data, count=True)

    def _own_up(self) -> None:
        note = f"[mlapatch] {self._lost} bytes of the server's output are missing: the log could not be written\n"
        if self._all(b"\n" * self._middle + note.encode()):
            self._lost = 0

    def _all(self, data: bytes, *, count: bool = False) -> bool:
        """Whether everything was written; what was not counts as lost."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            while data:
                done = os.write(self._file, data)
                self._middle = data[done - 1 : done] != b"\n"
                data = data[done:]
        except OSError:
            self._lost += len(data) * count
        return not data

    def close(self) -> None:
        if self._lost:
            self._own_up()
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)


def main() -> None:
    """Entry point of the process."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # it ends when the server's output ends
        signal.signal(name, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[2]), "rb") as secrets:
        values = json.loads(secrets.read())
    pump(sys.stdin.fileno(), Path(sys.argv[1]), values)


if __name__ == "__main__":
    main()
