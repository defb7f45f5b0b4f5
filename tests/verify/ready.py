"""An interpreter that has torch and Triton loaded already: each program that it is given runs in a fork of it.

Run as a program with TRITON_INTERPRET=1 (conftest.py does): `python -m tests.verify.ready SOCKET`. `stand_in` writes an
executable that takes `-c TEXT ARGUMENTS...` or `-m MODULE ARGUMENTS...` as python does and asks for the fork. Loading
the two takes longer than most programs of these tests run; no state is shared but what an import leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import socket
import sys
import traceback
from pathlib import Path

_ASKS = """\
import json, os, socket, sys

asked = json.dumps({"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
with socket.socket(socket.AF_UNIX) as ready:
    ready.connect(sys.argv[1])
    socket.send_fds(ready, [len(asked).to_bytes(4, "big")], [1, 2])
    ready.sendall(asked)
    sys.exit(int(ready.makefile().read() or 70))
"""


def stand_in(folder: Path, python: str, address: Path) -> Path:
    """The executable, in `folder`, of the interpreter that listens there."""
    (folder / "asks.py").write_text(_ASKS)
    path = folder / "python"
    command = " ".join(shlex.quote(str(part)) for part in (python, "-IS", folder / "asks.py", address))
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def main(address: str) -> None:
    import torch  # noqa: F401
    import triton  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            asking, _ = listening.accept()
            if not os.fork():
                listening.close()
                os._exit(_answer(asking))
            asking.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


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
    main(sys.argv[1])
