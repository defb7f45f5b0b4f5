"""Who listens on a TCP port of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Listener:
    """A process that listens; `created` in seconds since the epoch."""

    pid: int
    name: str
    created: float


def listener(port: int) -> Listener | None:
    """The process that listens on `port`; None where there is none, or where this user may not know."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
            if listens and connection.pid:
                process = psutil.Process(connection.pid)
                return Listener(process.pid, process.name(), process.create_time())
    except (psutil.Error, OSError):
        pass
    return None
