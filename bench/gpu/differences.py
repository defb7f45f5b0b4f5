"""How far a server's greedy outputs and their log-probabilities are from another's, and why outputs differ.

A scored token is [log-probability, token id, [[log-probability, token id] of the best few]]. The first token of an
output comes from prefill, the others from decode; two outputs are compared up to the first token that differs, since
after it the two servers answer different questions.
"""

from __future__ import annotations

import statistics
from typing import Any

Scores = dict[str, list[Any]]


def logprob(scored: list[Any], token: int) -> float | None:
    """Of one candidate at one step, None if it is not among those that came."""
    if scored[1] == token:
        return float(scored[0])
    best = scored[2] if len(scored) > 2 else ()  # runs before 2026-11-30 kept none
    return next((float(value) for value, other in best if other == token), None)


def apart(found: Scores, reference: Scores) -> dict[str, Any]:
    """How far log-probabilities of the same token after the same text are apart, in prefill and in decode.

    LookupError if the two did not answer the same prompts.
    """
    if found.keys() != reference.keys():
        raise LookupError(f"answers to {sorted(found)} and to {sorted(reference)}")
    prefill, decode, unknown = [], [], 0
    for name in found:
        for step, (mine, theirs) in enumerate(zip(found[name], reference[name], strict=False)):
            value = logprob(mine, theirs[1])
            if value is None:
                unknown += 1  # the other's best is not even among the best few: further apart than any below
            else:
                (decode if step else prefill).append(abs(value - theirs[0]))
            if mine[1] != theirs[1]:
                break
    return {
        "tokens": len(decode),
        "median": statistics.median(decode) if decode else None,
        "nine_of_ten": sorted(decode)[len(decode) * 9 // 10] if decode else None,
        "largest": max(decode, default=None),
        "not_among_the_best": unknown,
        "prefill_tokens": len(prefill),
        "prefill_largest": max(prefill, default=None),
    }


def by_load(found: Scores, reference: Scores) -> dict[str, dict[str, Any]]:
    """`apart` for each prompt length (with its endings), and for the streams, whose batches differ from run to run."""
    loads: dict[str, tuple[Scores, Scores]] = {}
    for side, scores in enumerate((found, reference)):
        for name, tokens in scores.items():
            load = "streams" if name.startswith("stream-") else name.partition("/")[0]
            loads.setdefault(load, ({}, {}))[side][name] = tokens
    return {load: apart(*sides) for load, sides in loads.items()}


def summary(loads: dict[str, dict[str, Any]]) -> str:
    """`by_load` in one line: of decoded tokens, the median, nine of ten and the largest."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    return "; ".join(
        f"{load}: {' / '.join(number(fact[key]) for key in ('median', 'nine_of_ten', 'largest'))} of {fact['tokens']}"
        + (f" (+ {fact['not_among_the_best']} not among the best)" if fact["not_among_the_best"] else "")
        + f", prefill {number(fact['prefill_largest'])}"
        for load, fact in loads.items()
    )


def parting(output: list[int], reference: list[int]) -> int | None:
    """Where two outputs first differ; None as far as both go."""
    pairs = enumerate(zip(output, reference, strict=False))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), None)


def explained(found: Scores, reference: Scores) -> list[dict[str, Any]]:
    """The first token that differs of each output, with both candidates' log-probabilities on both servers.

    `margin` is by how much the reference preferred its own; `moved` by how much the two candidates moved against each
    other between the servers. A near tie has a margin that is below what log-probabilities of equal tokens are apart.
    """
    rows = []
    for name in found:
        step = parting([token[1] for token in found[name]], [token[1] for token in reference[name]])
        if step is None:
            continue
        mine, theirs = found[name][step], reference[name][step]
        row: dict[str, Any] = {"prompt": name, "step": step, "ids": [theirs[1], mine[1]]}
        row["reference"] = [theirs[0], logprob(theirs, mine[1])]
        row["found"] = [logprob(mine, theirs[1]), mine[0]]
        values = [*row["reference"], *row["found"]]
        row["margin"] = None if values[1] is None else values[0] - values[1]
        row["moved"] = None if None in values else (values[0] - values[1]) - (values[2] - values[3])
        rows.append(row)
    return rows


def margins(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of `explained`: median and largest of each kind, and how many were not near enough to be among the best few."""
    found: dict[str, Any] = {"outputs": len(rows), "unknown": sum(row["moved"] is None for row in rows)}
    for key in ("margin", "moved"):
        known = [abs(row[key]) for row in rows if row[key] is not None]
        found[key] = [statistics.median(known), max(known)] if known else None
    return found


def in_words(row: dict[str, Any]) -> str:
    """One difference in words."""

    def text(value: float | None) -> str:
        return "further down" if value is None else f"{value:.3f}"

    theirs, mine = row["ids"]
    return (
        f"{row['prompt']}, token {row['step']}: {theirs} ({text(row['reference'][0])}; here {text(row['found'][0])}), "
        f"here {mine} ({text(row['reference'][1])}; here {text(row['found'][1])}); "
        f"margin {text(row['margin'])}, moved {text(row['moved'])}"
    )


def agreement(outputs: dict[str, list[int]], reference: dict[str, list[int]]) -> dict[str, Any]:
    """How many outputs equal the reference's, and where each other one first differs."""
    common = [name for name in outputs if name in reference]
    differing = {}
    for name in common:
        if outputs[name] != reference[name]:
            step = parting(outputs[name], reference[name])
            differing[name] = -1 if step is None else step
    return {"equal": len(common) - len(differing), "compared": len(common), "first_difference": differing}


def ids(scores: Scores) -> dict[str, list[int]]:
    """The outputs that were scored."""
    return {name: [token[1] for token in tokens] for name, tokens in scores.items()}
