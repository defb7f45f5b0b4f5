"""The load of one server: prompts of several lengths, a prefix hit, streams; timed, or with log-probabilities."""

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
ENDINGS, ENDING_LENGTH, ENDING_TOKENS = 4, 16, 8
BEST = 5
LENGTHS = (512, 8192, 65536)
PREFIX_HIT = 9216
STREAMS = 16


def greedy(port: int, input_ids: list[int], new: int, **more: Any) -> urllib.request.Request:
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


def scored(port: int, input_ids: list[int], new: int) -> list[Any]:
    """One greedy generation: [log-probability, token id, the best few] of each output token (differences.py).

    ValueError if one is missing or not finite.
    """
    request = greedy(port, input_ids, new, return_logprob=True, top_logprobs_num=BEST)
    with urllib.request.urlopen(request, timeout=300) as response:
        facts = json.loads(response.read())["meta_info"]
    tokens, best = facts["output_token_logprobs"], facts["output_top_logprobs"]
    if not len(tokens) == len(best) == new:
        raise ValueError(f"{len(tokens)} and {len(best)} of {new} log-probabilities came")
    if not all(value is not None and math.isfinite(value) for value, *_ in tokens):
        raise ValueError("a log-probability is no number")
    few = [[[value, other] for value, other, *_ in step] for step in best]
    return [[token[0], token[1], candidates] for token, candidates in zip(tokens, few, strict=True)]


@dataclass(frozen=True)
class Prompts:
    """The same for every server."""

    single: dict[int, list[int]]
    prefix: list[int]
    tails: list[list[int]]
    hit: list[int]
    endings: list[list[int]]

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
            [ids(ENDING_LENGTH) for _ in range(ENDINGS)],
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


def scores(port: int, prompts: Prompts, lengths: tuple[int, ...], streams: int) -> dict[str, list[Any]]:
    """Log-probabilities of greedy tokens: each prompt alone, and the streams together.

    Each prompt is sent once before: from then on it is a prefix hit, so that a repetition computes the same.
    """
    tails = [prompts.prefix + tail for tail in prompts.tails[:streams]]
    found: dict[str, list[Any]] = {}
    for length in lengths:
        scored(port, prompts.single[length], 1)
        found[str(length)] = scored(port, prompts.single[length], SCORED_TOKENS)
    if tails:
        scored(port, prompts.prefix, 1)
        with concurrent.futures.ThreadPoolExecutor(len(tails)) as pool:
            list(pool.map(lambda tail: scored(port, tail, 1), tails))
            many = pool.map(lambda tail: scored(port, tail, SCORED_TOKENS), tails)
            found |= {f"stream-{index}": score for index, score in enumerate(many)}
    return found


def ending_scores(port: int, prompts: Prompts, lengths: tuple[int, ...]) -> dict[str, list[Any]]:
    """The same of short outputs after other endings of each prompt, one at a time: more tokens after equal texts."""
    return {
        f"{length}/{index}": scored(port, prompts.single[length][:-ENDING_LENGTH] + ending, ENDING_TOKENS)
        for length in lengths
        for index, ending in enumerate(prompts.endings)
    }
