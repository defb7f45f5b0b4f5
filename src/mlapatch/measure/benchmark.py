"""Cases of a bench: fixed lengths at a concurrency, repeated, each repeat one value of each figure."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import httpx

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure.metrics import Metric
from mlapatch.measure.server import Server, settings
from mlapatch.measure.stream import Prompt, Stream, generate

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Load:
    """What to send. `shared` tokens at the start are the same in all prompts of a case; ids are below `vocabulary`."""

    inputs: tuple[int, ...] = (512,)
    output: int = 128
    concurrency: tuple[int, ...] = (1,)
    repeats: int = 3
    requests: int | None = None
    shared: int = 0
    warmup: int = 1
    flush: bool = False
    text: bool = False
    vocabulary: int = 31_000
    seed: int = 0

    def count(self, concurrency: int) -> int:
        """Requests in one repeat."""
        return self.requests or concurrency


@dataclass
class Case:
    """One input length at one concurrency, and what came out of each repeat."""

    input: int
    output: int
    concurrency: int
    waves: list[list[Stream]] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`512 in, 128 out, 1 stream`."""
        many = "1 stream" if self.concurrency == 1 else f"{self.concurrency} streams"
        return f"{self.input:,} in, {self.output} out, {many}"

    def metrics(self) -> list[Metric]:
        """TPOT, TTFT, ITL and throughput: the median over a repeat's requests is one value."""
        good = [[one for one in wave if not one.error] for wave in self.waves]
        tpot = [median(values) * 1e3 for wave in good if (values := [s.tpot for s in wave if s.tpot is not None])]
        ttft = [median(s.ttft for s in wave) * 1e3 for wave in good if wave]
        itl = [sorted(gap for s in wave for gap in s.itl) for wave in good]
        p99 = [gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] * 1e3 for gaps in itl if gaps]
        rate = [sum(s.tokens for s in w) / wall for w, wall in zip(good, self.walls, strict=True) if w and wall]
        rows = [
            ("TPOT", "ms", "lower", tpot),
            ("TTFT", "ms", "lower", ttft),
            ("ITL p99", "ms", "lower", p99),
            ("output", "tok/s", "higher", rate),
        ]
        return [Metric(self.name, name, unit, better, tuple(values)) for name, unit, better, values in rows if values]

    def notes(self) -> list[str]:
        """What these figures rest on: cached prefixes, short answers, failures, wide first chunks."""
        streams = [one for wave in self.waves for one in wave]
        good = [one for one in streams if not one.error]
        failed = [one.error for one in streams if one.error]
        notes = [f"{self.name}: {len(failed)} of {len(streams)} requests failed: {failed[0]}"] if failed else []
        cached = [one.cached for one in good if one.cached is not None]
        if any(cached):
            notes.append(
                f"{self.name}: the radix cache held {median(cached):,.0f} of {self.input:,} prompt tokens (median); "
                "a hit shortens TTFT, and on stock its extend pass casts the pool too"
            )
        short = [one.tokens for one in good if one.tokens != self.output]
        if short:
            notes.append(f"{self.name}: {len(short)} answers had {median(short):.0f} tokens instead of {self.output}")
        wide = [one.first_tokens for one in good if one.first_tokens > 1]
        if wide:
            notes.append(
                f"{self.name}: the first chunk held {median(wide):.0f} tokens, so TPOT reads a little low "
                "(as it does in sglang.bench_serving)"
            )
        accepted = [one.accept_length for one in good if one.accept_length]
        if accepted:
            notes.append(f"{self.name}: accept length {median(accepted):.2f}")
        odd = [n for one in good if (n := one.prompt_tokens) is not None and abs(n - self.input) > 1]
        if odd:
            notes.append(f"{self.name}: the server counted {median(odd):,.0f} prompt tokens")
        return notes


class Prompts:
    """Random prompts, so that none finds another's prefix in the radix cache unless it should."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._random = random.Random(load.seed) if load.seed else random.SystemRandom()  # noqa: S311

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(1000, self._load.vocabulary) for _ in range(count)]

    def make(self, length: int, shared: list[int]) -> Prompt:
        """One prompt of `length` tokens that begins with `shared`."""
        ids = shared[:length] + self._ids(max(length - len(shared), 0))
        return " ".join(f"w{n}" for n in ids) if self._load.text else ids

    def shared(self) -> list[int]:
        """The common beginning of a case's prompts."""
        return self._ids(self._load.shared)


def measure(server: Server, load: Load, advance: Callable[[float], None] = lambda _: None) -> list[Case]:
    """Run all cases.

    Raises:
        MlapatchError: not one request of a warm-up or of a case is answered (exit 6).
    """
    return asyncio.run(_measure(server, load, advance))


async def _measure(server: Server, load: Load, advance: Callable[[float], None]) -> list[Case]:
    prompts = Prompts(load)
    cases = []
    async with httpx.AsyncClient(**settings(server.url)) as client:
        usage = await _usage(client, server, prompts)
        for length in load.inputs:
            for concurrency in load.concurrency:
                case = Case(length, load.output, concurrency)
                await _case(client, server, load, case, prompts, usage=usage, advance=advance)
                cases.append(case)
    return cases


async def _usage(client: httpx.AsyncClient, server: Server, prompts: Prompts) -> bool:
    """The very first request: it also tells whether an OpenAI endpoint takes `stream_options`."""
    for usage in (True, False):
        first = await generate(client, server, prompts.make(16, []), 2, usage=usage)
        if not first.error:
            return usage
        if server.api == "sglang" or "HTTP 4" not in first.error:
            break
    raise MlapatchError(
        Exit.SERVER,
        "the server does not answer a small request",
        where=server.url,
        found=first.error,
        next="try --text, for endpoints that take no token ids" if server.api == "openai" else "mlapatch logs",
    )


async def _case(
    client: httpx.AsyncClient,
    server: Server,
    load: Load,
    case: Case,
    prompts: Prompts,
    *,
    usage: bool,
    advance: Callable[[float], None],
) -> None:
    if load.flush and server.api == "sglang":
        await client.post(server.url + "/flush_cache", headers=server.headers)
    shared = prompts.shared()
    for _ in range(load.warmup):  # autotuning, JIT and a graph's first replay belong to no result
        texts = [prompts.make(case.input, shared) for _ in range(case.concurrency)]
        await _wave(client, server, texts, min(load.output, 8), case.concurrency, usage)
    for _ in range(load.repeats):
        texts = [prompts.make(case.input, shared) for _ in range(load.count(case.concurrency))]
        begun = time.perf_counter()
        streams = await _wave(client, server, texts, load.output, case.concurrency, usage, advance)
        case.walls.append(time.perf_counter() - begun)
        case.waves.append(streams)
        if all(one.error for one in streams):
            raise MlapatchError(
                Exit.SERVER,
                f"no request was answered ({case.name})",
                where=server.url,
                found=streams[0].error,
                next="mlapatch logs",
            )


async def _wave(
    client: httpx.AsyncClient,
    server: Server,
    prompts: list[Prompt],
    output: int,
    concurrency: int,
    usage: bool,
    advance: Callable[[float], None] = lambda _: None,
) -> list[Stream]:
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt) -> Stream:
        async with gate:
            stream = await generate(client, server, prompt, output, usage=usage)
        advance(1)
        return stream

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
