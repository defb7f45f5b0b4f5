"""Drive SGLang's profiler: start it in the middle of a generation, keep it fed, wait for every rank's file.

Facts of SGLang 0.4.6 to 0.5.23 that this rests on:
- The body's five fields below exist in all of them. Stacks and shapes default to on, and slow each step down.
- `num_steps` counts forward passes of any kind, so the profile starts once tokens arrive: then all are decode steps.
- With `num_steps` the profiler stops by itself, but an idle server runs no forward pass and would never stop it.
- A second start may answer 200 without effect (0.5.9), so only files in a folder of our own prove anything.
- Files are written on the server's file system, each rank its own, and may take minutes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure.benchmark import Load, Prompts
from mlapatch.measure.server import Server, settings
from mlapatch.measure.stream import Stream, generate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_BLOCKS_FIRST = 4  # of the answer, before the profile starts
_POLL = 0.25
_STILL = 1.5  # seconds without growth: the file is whole


@dataclass(frozen=True)
class Plan:
    """What to profile. `folder` is on the server's file system; `timeout` seconds for the files to be written."""

    folder: Path
    steps: int = 8
    activities: tuple[str, ...] = ("GPU",)
    input: int = 512
    output: int = 256
    concurrency: int = 1
    timeout: float = 600.0
    vocabulary: int = 31_000

    def body(self) -> dict[str, Any]:
        """The body of /start_profile: no stacks, no shapes, few steps."""
        return {
            "output_dir": str(self.folder),
            "num_steps": self.steps,
            "activities": list(self.activities),
            "with_stack": False,
            "record_shapes": False,
        }


@dataclass
class Profile:
    """The files, and the pace of the load before and while the profiler ran (seconds a token)."""

    files: list[Path] = field(default_factory=list)
    tpot: float | None = None
    notes: list[str] = field(default_factory=list)


def expected_files(facts: dict[str, Any]) -> int:
    """Ranks that write on this machine: tensor x pipeline (x data, unless attention only is data parallel)."""
    ranks = int(facts.get("tp") or 1) * int(facts.get("pp") or 1)
    if not facts.get("dp_attention"):
        ranks *= int(facts.get("dp") or 1)
    return max(1, ranks // max(1, int(facts.get("nodes") or 1)))


def profile(server: Server, plan: Plan, say: Callable[[str], None] = lambda _: None) -> Profile:
    """Profile a running SGLang.

    Raises:
        MlapatchError: the server refuses, answers no request, or no file appears in time (exit 6).
    """
    return asyncio.run(_Session(server, plan, say).run())


class _Session:
    """One profile: the load runs beside the requests that start and stop it."""

    def __init__(self, server: Server, plan: Plan, say: Callable[[str], None]) -> None:
        self._server = server
        self._plan = plan
        self._say = say
        self._blocks = 0
        self._streams: list[Stream] = []
        self._over = False
        self._started = 0.0

    async def run(self) -> Profile:
        """Start the load, then the profiler, then wait for the files."""
        begun = False
        async with httpx.AsyncClient(**settings(self._server.url)) as client:
            load = asyncio.create_task(self._load(client))
            try:
                await self._wait_for_tokens(load)
                self._say(f"profiling {self._plan.steps} decode steps")
                begun = True
                self._started = time.perf_counter()
                start = asyncio.create_task(self._start(client))
                files = await self._wait_for_files(start)
                begun = False
            finally:
                self._over = True
                if begun:  # a profiler that is left running slows the server down for good
                    with suppress(httpx.HTTPError):
                        await client.post(self._server.url + "/stop_profile", headers=self._server.headers)
                load.cancel()
                with suppress(asyncio.CancelledError):
                    await load
        return Profile(files, *self._pace())

    async def _load(self, client: httpx.AsyncClient) -> None:
        """Generate until told to stop: the profiler counts forward passes, and idle servers make none."""
        plan = self._plan
        prompts = Prompts(Load(vocabulary=plan.vocabulary))
        while not self._over:
            requests = [
                generate(client, self._server, prompts.make(plan.input, []), plan.output, arrived=self._arrived)
                for _ in range(plan.concurrency)
            ]
            streams = await asyncio.gather(*requests)
            self._streams += streams
            if all(one.error for one in streams):
                return

    def _arrived(self) -> None:
        self._blocks += 1

    async def _wait_for_tokens(self, load: asyncio.Task[None]) -> None:
        self._say("waiting for the first tokens")
        while self._blocks < _BLOCKS_FIRST * self._plan.concurrency:
            if load.done():
                found = self._streams[0].error if self._streams else repr(load.exception())
                raise MlapatchError(
                    Exit.SERVER, "the server answers no request", where=self._server.url, found=found,
                    next="mlapatch logs",
                )  # fmt: skip
            await asyncio.sleep(0.02)

    async def _start(self, client: httpx.AsyncClient) -> None:
        url = self._server.url + "/start_profile"
        answer = await client.post(url, json=self._plan.body(), headers=self._server.headers)
        if answer.status_code != 200:
            busy = "in progress" in answer.text or answer.status_code == 500
            raise MlapatchError(
                Exit.SERVER,
                "the server refuses to profile",
                where=url,
                found=f"HTTP {answer.status_code}: {answer.text.strip()[:300]}",
                next=f"curl -X POST {self._server.url}/stop_profile, then again" if busy else "",
            )

    async def _wait_for_files(self, start: asyncio.Task[None]) -> list[Path]:
        """All ranks' files, none of them growing any more."""
        plan = self._plan
        expected = expected_files(self._server.facts)
        deadline = time.monotonic() + plan.timeout
        sizes: dict[Path, tuple[int, float]] = {}
        while time.monotonic() < deadline:
            if start.done():
                start.result()
            now = time.monotonic()
            for file in plan.folder.glob("*.trace.json*") if plan.folder.is_dir() else ():
                size = file.stat().st_size
                if size != sizes.get(file, (-1, 0.0))[0]:
                    sizes[file] = (size, now)
                    self._say(f"{len(sizes)} of {expected} ranks are writing")
            whole = [file for file, (size, since) in sizes.items() if size and now - since > _STILL]
            if len(whole) >= expected and len(whole) == len(sizes):
                await asyncio.wait([start], timeout=5)
                return sorted(whole)
            await asyncio.sleep(_POLL)
        start.cancel()
        raise MlapatchError(
            Exit.SERVER,
            "not every rank wrote its trace",
            where=str(plan.folder),
            expected=f"{expected} files within {plan.timeout:.0f} s",
            found=f"{len(sizes)}: {', '.join(file.name for file in sorted(sizes)) or 'none'}",
            next="is another profile running? /stop_profile ends it. Does the server share this file system? "
            "If not, copy the files here and run mlapatch trace",
        )

    def _pace(self) -> tuple[float | None, list[str]]:
        """The load's median time a token before the profiler started, from streams that were read to their end."""
        before = []
        for one in self._streams:
            at = one.begun + one.ttft
            for gap in one.itl:
                at += gap
                if at < self._started:
                    before.append(gap)
        failed = [one.error for one in self._streams if one.error]
        return (median(before) if before else None), [f"a request of the load failed: {failed[0]}"] if failed else []
