"""An interpreter that has loaded already what takes long to load: each program that it is given runs in a fork of it.

`started` runs it (`python -m tests.ready SOCKET PROGRAM`, where PROGRAM loads) and gives an executable that takes
`-c TEXT ARGUMENTS...` or `-m MODULE ARGUMENTS...` as python does. No state is shared but what the loading leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_ASKS = """\
import json, os, socket, sys

asked = json.dumps({"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
with socket.socket(socket.AF_UNIX) as ready:
    ready.connect(sys.argv[1])
    socket.send_fds(ready, [len(asked).to_bytes(4, "big")], [1, 2])
    ready.sendall(asked)
    sys.exit(int(ready.makefile().read() or 70))
"""


@contextlib.contextmanager
def started(python: str, program: str, **environment: str) -> Iterator[str]:
    """The executable that stands in for `python` with `program` run."""
    folder = Path(tempfile.mkdtemp(prefix="mlapatch-ready-"))  # a socket's path must be short
    address = str(folder / "socket")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **environment}
    command, pipe = [python, "-m", "tests.ready", address, program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True) as ready:
        try:
            assert ready.stdout is not None
            assert ready.stdout.readline() == b"ready\n"
            yield str(_stand_in(folder, python, address))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ready.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def _stand_in(folder: Path, python: str, address: str) -> Path:
    (folder / "asks.py").write_text(_ASKS)
    path = folder / "python"
    command = " ".join(shlex.quote(str(part)) for part in (python, "-IS", folder / "asks.py", address))
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def main(address: str, program: str) -> None:
    exec(compile(program, "<loads>", "exec"), {"__name__": "__main__"})  # noqa: S102
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:  # its end is the end of who started it
            asking, _ = listening.accept()
            if not os.fork():
                listening.close()
                os._exit(_answer(asking))
            asking.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    shutil.rmtree(Path(address).parent, ignore_errors=True)


def _answer(asking: socket.socket) -> int:
    """Runs the program with the asker's arguments, environment, folder and output, and says how it ended."""
    head, outputs, _, _ = socket.recv_fds(asking, 4, 2)
    with asking.makefile("rb") as sent:
        asked = json.loads(sent.read(int.from_bytes(head, "big")))
    for output, descriptor in zip(outputs, (1, 2), strict=True):
        os.dup2(output, descriptor)
        os.close(output)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    code = _ended(*asked["arguments"])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    asking.sendall(str(code).encode())
    return code


def _ended(kind: str, program: str, *arguments: str) -> int:
    """What the interpreter would exit with."""
    sys.argv = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c` does
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
