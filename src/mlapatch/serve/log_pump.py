"""Copy a server's output to its log without secrets; a process of its own, so that it outlives a detached launcher.

`python -m mlapatch.serve.log_pump LOG SECRETS_FD`: output on stdin, a JSON list of secrets on the descriptor.
"""

from __future__ import annotations

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
    """Copy until the last writer of the pipe is gone."""
    stream = Filter(values)
    with log.open("ab", buffering=0) as out:
        while True:
            ready, _, _ = select.select([source], [], [], _IDLE)
            if not ready:
                out.write(stream.flush())
                continue
            data = os.read(source, 1 << 16)
            if not data:
                out.write(stream.close())
                return
            out.write(stream.feed(data))


def main() -> None:
    """Entry point of the process."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # it ends when the server's output ends
        signal.signal(name, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[2]), "rb") as secrets:
        values = json.loads(secrets.read())
    pump(sys.stdin.fileno(), Path(sys.argv[1]), values)


if __name__ == "__main__":
    main()
