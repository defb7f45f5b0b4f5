"""One streamed generation, timed as sglang.bench_serving does.

TTFT is the time to the first token. TPOT is (latency - TTFT) / (output tokens - 1). ITL is a chunk's gap divided by its
tokens. Chunks are only stamped while they arrive and parsed afterwards, so that parsing delays no other stream.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlapatch.measure.server import Server

Prompt = list[int] | str


@dataclass
class Stream:
    """One request's timing in seconds. `cached` is the prefix that the radix cache held."""

    error: str = ""
    begun: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    tokens: int = 0
    first_tokens: int = 0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached: int | None = None
    accept_length: float | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


def body(server: Server, prompt: Prompt, output: int, *, usage: bool = True) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy generation of exactly `output` tokens."""
    if server.api == "sglang":
        sampling = {"max_new_tokens": output, "temperature": 0.0, "ignore_eos": True}
        key = "text" if isinstance(prompt, str) else "input_ids"
        return "/generate", {key: prompt, "sampling_params": sampling, "stream": True}
    wanted: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    if usage:
        wanted["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return "/v1/completions", wanted


async def generate(
    client: httpx.AsyncClient,
    server: Server,
    prompt: Prompt,
    output: int,
    *,
    usage: bool = True,
    arrived: Callable[[], None] = lambda: None,
) -> Stream:
    """Send one request and read its stream to the end; failures are in `error`, never raised.

    `arrived` is called for each block of the answer, for who must act in the middle of a generation.
    """
    path, wanted = body(server, prompt, output, usage=usage)
    content = orjson.dumps(wanted)
    headers = {**server.headers, "Content-Type": "application/json"}
    stamped: list[tuple[float, bytes]] = []
    begun = time.perf_counter()
    try:
        async with client.stream("POST", server.url + path, content=content, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                return Stream(error=f"HTTP {response.status_code}: {text[:300]}", begun=begun)
            async for block in response.aiter_bytes():
                stamped.append((time.perf_counter(), block))
                arrived()
    except httpx.HTTPError as error:
        return Stream(error=f"{type(error).__name__}: {error}", begun=begun)
    return parse(stamped, begun, output)


def lines(stamped: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Payloads of `data:` lines, each with the time at which its last byte arrived."""
    found, rest = [], b""
    for at, block in stamped:
        *whole, rest = (rest + block).split(b"\n")
        found += [(at, line.strip()[5:].strip()) for line in whole if line.lstrip().startswith(b"data:")]
    if rest.lstrip().startswith(b"data:"):
        found.append((stamped[-1][0], rest.strip()[5:].strip()))
    return found


def parse(stamped: Sequence[tuple[float, bytes]], begun: float, asked: int) -> Stream:
    """Timing out of an answer's blocks."""
    result = Stream(begun=begun)
    seen = last = 0
    at_last = begun
    for at, payload in lines(stamped):
        result.latency = at - begun
        if payload == b"[DONE]":
            continue
        try:
            data = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return Stream(error=f"a chunk is not JSON: {payload[:80]!r}", begun=begun)
        if not isinstance(data, dict):
            continue
        if data.get("error"):
            return Stream(error=f"the server reports {str(data['error'])[:300]}", begun=begun)
        seen = _tokens(data, seen, result)
        if seen <= last:
            continue
        if last == 0:
            result.ttft, result.first_tokens = at - begun, seen
        else:
            result.itl += [(at - at_last) / (seen - last)] * (seen - last)
        last, at_last = seen, at
    result.tokens = last
    if last == 0:
        result.error = f"an answer without tokens ({asked} were asked for)"
    return result


def _tokens(data: dict[str, Any], seen: int, result: Stream) -> int:
    """Tokens so far after this chunk."""
    meta = data.get("meta_info")
    if isinstance(meta, dict):  # SGLang
        result.cached = meta.get("cached_tokens", result.cached)
        result.prompt_tokens = meta.get("prompt_tokens", result.prompt_tokens)
        result.accept_length = meta.get("spec_accept_length", result.accept_length)
        return int(meta.get("completion_tokens") or seen)
    usage = data.get("usage")
    choices = data.get("choices")
    if isinstance(usage, dict):
        result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            result.cached = details.get("cached_tokens", result.cached)
        counted = int(usage.get("completion_tokens") or 0)
        if choices or not seen:  # the closing summary has no choices: it corrects, and is no token
            return max(counted, seen)
        return seen
    if isinstance(choices, list) and choices and choices[0].get("text"):
        return seen + 1  # no usage: one token a chunk is the best there is
    return seen
