"""`mlapatch bench`: TPOT, TTFT, ITL and throughput of a running server, kept with the facts that explain them."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import benchmark
from mlapatch.measure import server as serving
from mlapatch.measure.benchmark import Case, Load
from mlapatch.measure.keeping import keeping
from mlapatch.measure.metrics import GROUNDS
from mlapatch.measure.progress import bar
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text, Warn

if TYPE_CHECKING:
    from collections.abc import Sequence


def bench(
    *,
    url: str = "http://127.0.0.1:30000",
    api: str = "auto",
    key: str | None = None,
    model: str | None = None,
    inputs: Sequence[int] = (512,),
    output: int = 128,
    concurrency: Sequence[int] = (1,),
    repeats: int = 3,
    requests: int | None = None,
    shared_prefix: int = 0,
    warmup: int = 1,
    flush_cache: bool = False,
    text: bool = False,
    vocabulary: int = 31_000,
    seed: int = 0,
    label: str = "",
    keep: bool = True,
    db: Path | None = None,
    sglang: Path | None = None,
    python: str | None = None,
) -> Outcome:
    """Measure each input length at each concurrency, `repeats` times."""
    load = Load(
        inputs=tuple(inputs),
        output=output,
        concurrency=tuple(concurrency),
        repeats=repeats,
        requests=requests,
        shared=shared_prefix,
        warmup=warmup,
        flush=flush_cache,
        text=text,
        vocabulary=vocabulary,
        seed=seed,
    )
    _check(load, api)
    server = serving.probe(url, api, key, model)
    setup = set_up(server, sglang, python) | {"load": {**load.__dict__, "api": server.api}}
    total = sum(load.repeats * load.count(n) for n in load.concurrency) * len(load.inputs)
    with keeping(keep, db, "bench", setup, label) as kept:
        with bar("requests", total) as advance:
            cases = benchmark.measure(server, load, advance)
        kept.result |= _result(cases, serving.describe(server))
    data = {"run": kept.run, "setup": setup, **kept.result}
    return Outcome(data=data, blocks=_blocks(setup, cases, kept.result["notes"], kept.run, label))


def _check(load: Load, api: str) -> None:
    if api not in ("auto", "sglang", "openai"):
        raise MlapatchError(
            Exit.USAGE,
            f"--api {api!r} is not known",
            expected="auto, sglang or openai",
            next="mlapatch bench --api auto",
        )
    counts = (*load.inputs, *load.concurrency, load.repeats, load.output - 1)
    if min(counts) < 1 or load.vocabulary <= 1000 or load.warmup < 0:
        raise MlapatchError(
            Exit.USAGE,
            "this load cannot be measured",
            expected="lengths, concurrency and repeats of at least 1, at least 2 output tokens, a vocabulary over 1000",
            next="mlapatch bench -i 512 -o 128 -c 1 -r 3",
        )


def set_up(server: serving.Server, sglang: Path | None = None, python: str | None = None) -> dict[str, Any]:
    """What a server's figures depend on: its facts, the patches of the SGLang on disk, and the client."""
    facts = {key: value for key, value in server.facts.items() if value is not None}
    setup: dict[str, Any] = {"server": {"url": server.url, "api": server.api, **facts}}
    if server.local:
        setup["patches"] = _patches(sglang, python)
    setup["client"] = {"python": platform.python_version(), "system": platform.system()}
    return setup


def _patches(sglang: Path | None, python: str | None) -> dict[str, Any]:
    """Applied patches by name and the digest of the SGLang on disk; empty where none is found."""
    from mlapatch.commands.status import status

    try:
        data: dict[str, Any] = status(sglang=sglang, python=python).data
    except MlapatchError as error:
        if sglang is not None or python is not None:
            raise
        return {"unknown": error.what}
    applied = [entry["name"] for entry in data.get("patches") or [] if entry.get("verdict") == "applied"]
    return {"applied": applied or ["none"], "digest": data.get("digest")}


def _result(cases: Sequence[Case], notes: list[str]) -> dict[str, Any]:
    return {
        "metrics": [metric.as_dict() for case in cases for metric in case.metrics()],
        "cases": [
            {
                "case": case.name,
                "input": case.input,
                "output": case.output,
                "concurrency": case.concurrency,
                "repeats": len(case.waves),
                "wall_seconds": case.walls,
                "cached_tokens": [one.cached for wave in case.waves for one in wave],
            }
            for case in cases
        ],
        "notes": notes + [note for case in cases for note in case.notes()],
    }


def _blocks(setup: dict[str, Any], cases: Sequence[Case], notes: list[str], run: int | None, label: str) -> list[Block]:
    facts = setup["server"]
    shown = ("version", "model", "gpu", "tp", "pool_tokens", "kv_cache_dtype", "attention_backend", "cuda_graphs")
    rows = [("server", f"{facts['url']} ({facts['api']})")]
    rows += [(key, str(facts[key])) for key in shown if key in facts]
    applied = setup.get("patches", {}).get("applied")
    if applied:
        rows.append(("patches on disk", ", ".join(applied)))
    table = []
    for case in cases:
        found = {metric.name: metric for metric in case.metrics()}
        table.append([case.name, *(found[name].text() if name in found else "-" for name in _FIGURES)])
    blocks: list[Block] = [Warn(note) for note in notes]
    blocks += [Pairs(rows), Table(["case", *_FIGURES], table)]
    why = dict(GROUNDS)["server.pool_tokens"]
    closing = [f"Medians of {len(cases[0].waves)} repeats; ± is half their range. Note: {why}."]
    if run is not None:
        name = label or str(run)
        closing.append(f"Kept as run {run}. Next: mlapatch compare {name} last, after the next bench.")
    return [*blocks, Text(closing)]


_FIGURES = ("TPOT", "TTFT", "ITL p99", "output")
