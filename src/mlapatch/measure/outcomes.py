"""What is kept of a `verify` and of a `launch`: both are read from what the verb itself says with `--json`.

`metrics` are their seconds; `outcome` is everything that came out and is no figure, so that two runs can be compared.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlapatch.measure import metrics
from mlapatch.measure.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READY = "ready"


def of_verify(patches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A verify's result, from the `patches` of its JSON."""
    outcome: dict[str, Any] = {}
    for patch in patches:
        kinds = [scenario["result"] for scenario in patch["scenarios"]]
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        outcome[patch["name"]] = {"result": patch["result"], "failed": patch["failed"], "scenarios": counts}
    failed = [f"{p['name']} ({', '.join(p['failed'])})" for p in patches if p["result"] != "pass"]
    said = failed or [str(patch["name"]) for patch in patches]
    result = "fail" if failed else "pass"
    return {
        "result": result,
        "summary": f"{result}: {', '.join(said)}",
        "metrics": [Metric(p["name"], "seconds", "s", "lower", (p["seconds"],)).as_dict() for p in patches],
        "outcome": outcome,
        "scenarios": {patch["name"]: patch["scenarios"] for patch in patches},
    }


def of_launch(data: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A launch's result, from its JSON when it is decided, `seconds` after the start: ready, or failed and why."""
    state, phases = str(data["state"]), dict(data.get("phases") or {})
    diagnosis = data.get("diagnosis") or {}
    began = sorted(phases.items(), key=lambda phase: phase[1])
    took = [(name, after - at) for (name, at), (_, after) in pairwise(began)]
    figures = [Metric(name, "seconds in phase", "s", "lower", (round(spent, 1),)) for name, spent in took]
    summary = f"{state} after {seconds:.1f} s"
    if state == READY:
        figures.insert(0, Metric("launch", "seconds to ready", "s", "lower", (seconds,)))
    else:
        summary = f"{summary} in {diagnosis.get('phase')}: {diagnosis.get('rule') or diagnosis.get('cause')}"
    ranks = data.get("ranks") or {}
    outcome: dict[str, Any] = {"state": state}
    if diagnosis:
        outcome["diagnosis"] = {key: diagnosis.get(key) for key in ("rule", "phase", "rank", "cause")}
    if ranks:
        files = {file["path"].rpartition("/")[2]: file["sha256"] for file in ranks["files"]}
        outcome["ranks"] = {name: {sha: _listed(said) for sha, said in heard.items()} for name, heard in files.items()}
    return {
        "state": state,
        "seconds": seconds,
        "summary": summary,
        "metrics": [figure.as_dict() for figure in figures],
        "phases": phases,
        "outcome": outcome,
        "log": data.get("log"),
        "ranks": ranks,
        "diagnosis": dict(diagnosis),
    }


def _listed(ranks: Sequence[str]) -> str:
    return ", ".join(name or "the only rank" for name in ranks)


def flat(result: Mapping[str, Any]) -> dict[str, str]:
    """What came out of a run that is no figure, as dotted keys and text; empty for kinds that have only figures."""
    found = result.get("outcome")
    return metrics.flatten(found) if isinstance(found, dict) else {}
