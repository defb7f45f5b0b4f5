"""`--patience weights=900`: seconds without a new line, by phase."""

from __future__ import annotations

from collections.abc import Iterable

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.serve.rules import load

_ALIASES = {
    "distributed": "distributed-init",
    "init": "distributed-init",
    "pool": "kv-pool",
    "kv": "kv-pool",
    "capture": "graph-capture",
    "graphs": "graph-capture",
    "warmup": "warm-up",
}


def read(words: Iterable[str]) -> dict[str, float]:
    """Parse `PHASE=SECONDS`; 0 waits for ever.

    Raises:
        MlapatchError: no such phase or no number (exit 2).
    """
    phases = [phase.id for phase in load().phases]
    chosen = {}
    for word in words:
        name, _, seconds = word.partition("=")
        phase = name.strip().lower().replace("_", "-").replace(" ", "-")
        phase = _ALIASES.get(phase, phase)
        try:
            value = float(seconds)
        except ValueError:
            value = -1.0
        if phase not in phases or not 0 <= value < 1e9:
            raise MlapatchError(
                Exit.USAGE,
                "--patience is not understood",
                found=word,
                expected=f"PHASE=SECONDS with a phase of {', '.join(phases)}",
                next="mlapatch launch --patience weights=900",
            )
        chosen[phase] = value
    return chosen
