"""Less work for the same answers, in the process that runs the tests; conftest.py asks for it before anything else.

Thousands of tests judge and patch the same few files. What the engine says of a file's bytes, a patch and a version
depends on nothing else, and the commands keep a few of these answers already: here more of them are kept. Commands in
a process of their own have the engine as it is.
"""

from __future__ import annotations

import gc
from functools import lru_cache
from types import ModuleType

import typer.testing

from mlapatch.engine import tree, verdict


def remember_answers() -> None:
    """To be called before anyone imports the functions by name."""
    for name in ("apply", "judge", "presence"):
        _remember(verdict, name, 256)
    _remember(tree, "check_exact", 8)
    _remember(typer.testing, "_get_command", 4)  # of one app: an invocation would build all verbs anew


def _remember(module: ModuleType, name: str, most: int) -> None:
    function = getattr(module, name)
    plain = function.__wrapped__ if hasattr(function, "cache_info") else function
    setattr(module, name, lru_cache(maxsize=most)(plain))


def collect_less() -> None:
    """A parsed file is 100,000 objects without a cycle, which the collector would go through again and again."""
    gc.set_threshold(50_000, 20, 50)
