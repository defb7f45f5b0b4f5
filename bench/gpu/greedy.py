"""The load of one server (prompts of several lengths, a prefix hit, streams), and how outputs are compared."""

from __future__ import annotations

import concurrent.futures
import json
import math
import random
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

NEW_TOKENS, SCORED_TOKENS = 128, 32
LENGTHS = (512, 8192, 65536)
PREFIX_HIT = 9216
STREAMS = 16


def greedy(port: int, input_ids: list[int], new: int, **more: bool) -> urllib.request.Request:
    """The request for `new` greedy tokens, whatever they are."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": sampling, **more}
    return urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def generate(port: int, input_ids: list[int], new: int) -> tuple[list[float], list[int]]:
    """One greedy streamed generation: arrival time of each chunk (s), output token ids. ValueError if not all come."""
    times: list[float] = []
    ids: list[int] = []
    with urllib.request.urlopen(greedy(port, input_ids, new, stream=True), timeout=300) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data:") and "[DONE]" not in text:
                times.append(time.perf_counter())
                ids = json.loads(text[5:]).get("output_ids") or ids
    if len(ids) != new:
        raise ValueError(f"{len(ids)} of {new} tokens came")
    return times, ids


def scored(port: int, input_ids: list[int], new: int) -> list[list[float]]:
    """One greedy generation: [log-probability, token id] of each output token. ValueError if one is not finite."""
    with urllib.request.urlopen(greedy(port, input_ids, new, return_logprob=True), timeout=300) as response:
        tokens = json.loads(response.read())["meta_info"]["output_token_logprobs"]
    if len(tokens) != new or not all(token[0] is not None and math.isfinite(token[0]) for token in tokens):
        raise ValueError(f"{len(tokens)} of {new} log-probabilities came, or one is no number")
    return [[token[0], token[1]] for token in tokens]


@dataclass(frozen=True)
class Prompts:
    """The same for every server."""

    single: dict[int, list[int]]
    prefix: list[int]
    tails: list[list[int]]
    hit: list[int]

    @classmethod
    def seeded(cls) -> Prompts:
        """Random token ids."""
        rng = random.Random(0)

        def ids(count: int) -> list[int]:
            return [rng.randrange(10, 31000) for _ in range(count)]

        return cls(
            {length: ids(length) for length in LENGTHS},
            ids(4096),
            [ids(64) for _ in range(STREAMS)],
            ids(PREFIX_HIT + 96),
        )


def timed(port: int, prompts: Prompts, lengths: tuple[int, ...], streams: int) -> dict[str, Any]:
    """TPOT at each length, a prefix hit, concurrent streams with a shared prefix; greedy outputs of each."""
    result: dict[str, Any] = {"single": {}, "outputs": {}}
    for length in lengths:
        generate(port, prompts.single[length], 8)
        began = time.perf_counter()
        times, ids = generate(port, prompts.single[length], NEW_TOKENS)
        tpot = (times[-1] - times[0]) / (len(ids) - 1)
        result["single"][str(length)] = {"ttft_ms": 1e3 * (times[0] - began), "tpot_ms": 1e3 * tpot}
        result["outputs"][str(length)] = ids
    generate(port, prompts.hit[:PREFIX_HIT], 4)
    result["outputs"]["prefix-hit"] = generate(port, prompts.hit, 32)[1]
    if streams:
        generate(port, prompts.prefix, 8)
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            done = list(pool.map(lambda tail: generate(port, prompts.prefix + tail, NEW_TOKENS), prompts.tails))
        elapsed = time.perf_counter() - began
        firsts = [times[0] - began for times, _ in done]
        ends = [times[-1] - began for times, _ in done]
        result["streams"] = {
            "count": streams,
            "tok_s": streams * NEW_TOKENS / elapsed,
            "first_token_s": [min(firsts), max(firsts)],
            "last_token_s": [min(ends), max(ends)],
        }
        for index, (_, ids) in enumerate(done):
            result["outputs"][f"stream-{index}"] = ids
    return result


def scores(port: int, prompts: Prompts, lengths: tuple[int, ...], streams: int) -> dict[str, list[list[float]]]:
    """Log-probabilities of the greedy tokens: random weights repeat a few tokens, but not their probabilities."""
    found = {str(length): scored(port, prompts.single[length], SCORED_TOKENS) for length in lengths}
    with concurrent.futures.ThreadPoolExecutor(max(streams, 1)) as pool:
        tails = prompts.tails[:streams]
        many = pool.map(lambda tail: scored(port, prompts.prefix + tail, SCORED_TOKENS), tails)
        found |= {f"stream-{index}": score for index, score in enumerate(many)}
    return found


def apart(found: dict[str, list[list[float]]], reference: dict[str, list[list[float]]]) -> dict[str, float]:
    """Largest difference of the log-probabilities up to the first token that differs, and over how many tokens.

    LookupError if the two did not answer the same prompts.
    """
    if found.keys() != reference.keys():
        raise LookupError(f"answers to {sorted(found)} and to {sorted(reference)}")
    largest, tokens = 0.0, 0
    for name in found:
        for (mine, token), (theirs, other) in zip(found[name], reference[name], strict=False):
            largest, tokens = max(largest, abs(mine - theirs)), tokens + 1
            if token != other:
                break
    return {"largest": largest, "tokens": tokens}


def agreement(outputs: dict[str, list[int]], reference: dict[str, list[int]]) -> dict[str, Any]:
    """How many outputs equal the reference's, and where each other one first differs."""
    common = [name for name in outputs if name in reference]
    differing = {}
    for name in common:
        if outputs[name] != reference[name]:
            pairs = zip(outputs[name], reference[name], strict=False)
            differing[name] = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
    return {"equal": len(common) - len(differing), "compared": len(common), "first_difference": differing}
