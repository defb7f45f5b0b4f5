"""Which interpreter `verify` runs the backend in, and what it says where none has what that needs."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from mlapatch.commands import verify
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.target import Target


def without(folder: Path, missing: str) -> Target:
    """An SGLang whose interpreter says that it lacks something."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho '{missing}'\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return Target(folder / "sglang", "wheel", None, str(python))


@pytest.mark.parametrize(
    ("device", "missing", "following"),
    [
        ("cpu", "torch, triton", "pip install torch triton numpy, or --python an interpreter that has them"),
        ("cpu", "triton", "pip install triton, or --python an interpreter that has them"),
        ("cuda", "flashinfer", "pip install flashinfer-python, or --python an interpreter that has them; "),
        ("cuda", "torch, flashinfer", "pip install torch flashinfer-python numpy, or --python "),
        ("cuda", "a GPU that torch can use", "where torch sees no GPU: --device cpu"),
    ],
)
def test_what_is_missing_is_what_is_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: verify.Device, missing: str, following: str
) -> None:
    target = without(tmp_path, missing)
    monkeypatch.setattr(sys, "executable", target.python)
    with pytest.raises(MlapatchError) as caught:
        verify._interpreter(target, device)
    assert (caught.value.exit, caught.value.found) == (Exit.ENVIRONMENT, f"without {missing}")
    assert caught.value.next.startswith(following)
