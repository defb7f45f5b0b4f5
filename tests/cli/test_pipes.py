"""A reader that closes the pipe early changes no exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlapatch
from tests.conftest import TreeFactory


def test_a_closed_pipe_is_no_finding(install_tree: TreeFactory) -> None:
    site = install_tree("0.5.9")
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(Path(mlapatch.__file__).parents[1])}
    command = [sys.executable, "-m", "mlapatch", "diff", "active-cast", "--sglang", str(site)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
