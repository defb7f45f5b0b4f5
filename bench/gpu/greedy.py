"""The load of one server (prompts of several lengths, a prefix hit, streams), and how outputs are compared."""

from __future__ import annotations

import concurrent.futures
import json
import random
import time
import urllib.request
from typing import Any

NEW_TOKENS = 128
LENGTHS = (512, 8192, 65536)
PREFIX_HIT = 9216
STREAMS = 16


def generate(port: int, input_ids: list[int], new: int) -> tuple[list[float], list[int]]:
    """One greedy streamed generation: arrival time of each chunk (s), output token ids."""
    body = {
        "input_ids": input_ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times: list[float] = []
    ids: list[int] = []
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            text = line.decode().strip()
            if text.startswith("data:") and "[DONE]" not in text:
                times.append(time.perf_counter())
                ids = json.loads(text[5:]).get("output_ids") or ids
    return times, ids


def measure(port: int, lengths: tuple[int, ...], streams: int) -> dict[str, Any]:
    """TPOT at each length, a prefix hit, concurrent streams with a shared prefix; greedy outputs of each."""
    rng = random.Random(0)
    prompts = {length: [rng.randrange(10, 31000) for _ in range(length)] for length in LENGTHS}
    prefix = [rng.randrange(10, 31000) for _ in range(4096)]
    tails = [[rng.randrange(10, 31000) for _ in range(64)] for _ in range(STREAMS)]
    hit = [rng.randrange(10, 31000) for _ in range(PREFIX_HIT + 96)]
    result: dict[str, Any] = {"single": {}, "outputs": {}}
    for length in lengths:
        generate(port, prompts[length], 8)
        began = time.perf_counter()
        times, ids = generate(port, prompts[length], NEW_TOKENS)
        tpot = (times[-1] - times[0]) / (len(ids) - 1)
        result["single"][str(length)] = {"ttft_ms": 1e3 * (times[0] - began), "tpot_ms": 1e3 * tpot}
        result["outputs"][str(length)] = ids
    generate(port, hit[:PREFIX_HIT], 4)
    result["outputs"]["prefix-hit"] = generate(port, hit, 32)[1]
    if streams:
        generate(port, prefix, 8)
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            done = list(pool.map(lambda tail: generate(port, prefix + tail, NEW_TOKENS), tails))
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


def agreement(outputs: dict[str, list[int]], reference: dict[str, list[int]]) -> dict[str, Any]:
    """How many outputs equal the reference's, and where each other one first differs."""
    common = [name for name in outputs if name in reference]
    differing = {}
    for name in common:
        if outputs[name] != reference[name]:
            pairs = zip(outputs[name], reference[name], strict=False)
            differing[name] = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
    return {"equal": len(common) - len(differing), "compared": len(common), "first_difference": differing}
