"""`mlapatch profile`: profile a few decode steps of a running server, and read the traces."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlapatch.commands.bench import set_up
from mlapatch.commands.trace import read_all
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import profiling, trace
from mlapatch.measure import server as serving
from mlapatch.measure.keeping import keeping
from mlapatch.measure.units import seconds
from mlapatch.outcome import Block, Outcome, Text, Warn

if TYPE_CHECKING:
    from collections.abc import Sequence


def profile(
    *,
    url: str = "http://127.0.0.1:30000",
    key: str | None = None,
    steps: int = 8,
    activities: Sequence[str] = ("GPU",),
    input_tokens: int = 512,
    output: int = 256,
    concurrency: int = 1,
    vocabulary: int = 31_000,
    output_dir: Path | None = None,
    timeout: float = 600.0,
    top: int = 12,
    label: str = "",
    keep: bool = True,
    db: Path | None = None,
    sglang: Path | None = None,
    python: str | None = None,
) -> Outcome:
    """Profile, wait for every rank's file, and analyse them; the files stay in `output_dir`."""
    if steps < 2 or min(input_tokens, output - steps, concurrency) < 1:
        raise MlapatchError(
            Exit.USAGE,
            "this cannot be profiled",
            expected="at least 2 steps, and an answer longer than that",
            next="mlapatch profile --steps 8 -o 256",
        )
    server = serving.probe(url, "sglang", key)
    base = output_dir or Path(tempfile.gettempdir())
    plan = profiling.Plan(
        folder=base / f"mlapatch-profile-{time.strftime('%Y%m%d-%H%M%S')}",
        steps=steps,
        activities=tuple(activities),
        input=input_tokens,
        output=output,
        concurrency=concurrency,
        timeout=timeout,
        vocabulary=vocabulary,
    )
    setup = set_up(server, sglang, python)
    setup["load"] = {"input": input_tokens, "output": output, "concurrency": concurrency}
    setup["profile"] = {"steps": steps, "activities": list(activities)}
    with keeping(keep, db, "profile", setup, label) as kept:
        found = profiling.profile(server, plan, _say)
        hints = trace.Hints(tokens=server.facts.get("pool_tokens"))
        data, metrics, blocks = read_all(found.files, hints, top)
        kept.result |= {"trace": data, "metrics": metrics, "folder": str(plan.folder)}
        kept.result["notes"] = [*serving.describe(server), *found.notes, *_distortion(found, data)]
    closing = [f"The traces are in {plan.folder}."]
    if kept.run is not None:
        then = f"Next: apply a patch, restart, profile, then mlapatch compare {kept.run} last."
        closing.append(f"Kept as run {kept.run}. {then}")
    shown: list[Block] = [Warn(note) for note in kept.result["notes"]]
    return Outcome(data={"run": kept.run, "setup": setup, **kept.result}, blocks=[*shown, *blocks, Text(closing)])


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _distortion(found: profiling.Profile, data: dict[str, Any]) -> list[str]:
    """How much slower the profiled steps are than the same load without the profiler."""
    ranks = data["ranks"]
    if found.tpot is None or not ranks:
        return []
    profiled = max(rank["step_ms"] for rank in ranks) / 1e3
    ratio = profiled / found.tpot
    if not 1.15 < ratio < 10:
        return []
    return [
        (
            f"profiled steps take {seconds(profiled)}, the same load took {seconds(found.tpot)} a token before: "
            "compare shares, and take times from mlapatch bench"
        )
    ]
