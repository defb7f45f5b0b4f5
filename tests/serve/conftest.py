"""A release's whole wheel, for tests that read or run SGLang's own code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def release(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """`release("0.5.9")`: the wheel unpacked, under MLAPATCH_TEST_WHEELS where that is set, else from the corpus."""
    local = os.environ.get("MLAPATCH_TEST_WHEELS")
    if local:
        return lambda version: Path(local) / version
    found: Callable[[str], Path] = request.getfixturevalue("wheel_dir")
    return found
