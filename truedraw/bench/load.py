"""Sends a server requests, so many at a time, and keeps how each went. Closed loop: as one ends, the next is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from truedraw.bench.load_client import CUT, NO_CONNECTION, REFUSED, Client
from truedraw.bench.load_figures import Figures, Sample, figures
from truedraw.bench.load_prompts import Messages, as_text
from truedraw.errors import RunError

MAX_WAIT = 10.0  # seconds before the next request, whatever a busy server asks for


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. Request i has prompt i, from the first again behind the last.

    raw       completions of texts; else chat
    seed      request i is sent with seed + i; None: without any
    requests  of each run
    seconds   of a run, after which no request is sent; those under way end
    abandon   share of the requests that the client cuts off
    """

    prompts: Sequence[str | Messages]
    model: str
    raw: bool = False
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    requests: int = 32
    seconds: float = 30.0
    abandon: float = 0.0

    @property
    def path(self) -> str:
        return "/v1/completions" if self.raw else "/v1/chat/completions"

    def body(self, number: int, *, off: bool) -> dict[str, Any]:
        """Of request `number`, from 0; off: without speculation, an option that truedraw servers know."""
        prompt = self.prompts[number % len(self.prompts)]
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.raw:
            body["prompt"] = as_text(prompt)
        else:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.seed is not None:
            body["seed"] = self.seed + number
        if off:
            body["speculation"] = {"off": True}
        return body

    def cuts(self) -> dict[int, float]:
        """The requests that are cut off, each with its moment as a share, in [0, 1), of what a request usually takes.

        The same for the same seed (0 where none is given).
        """
        random = Random(self.seed or 0)
        chosen = random.sample(range(self.requests), round(self.abandon * self.requests))
        return {number: random.random() for number in chosen}


@dataclass(slots=True)
class Run:
    """One concurrency, with speculation or without, as far as it came: whatever ends it, the samples are here."""

    concurrency: int
    off: bool = False
    samples: list[Sample] = field(default_factory=list)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def figures(self) -> Figures:
        return figures(
            self.samples,
            concurrency=self.concurrency,
            wall_seconds=self.wall_seconds,
            cpu_seconds=self.cpu_seconds,
            speculation_off=self.off,
        )


def runs(concurrency: Sequence[int], *, off: bool, compare: bool) -> list[Run]:
    """In the order of measuring. compare: each concurrency twice, and by turns speculation or plain decoding comes first."""
    if not compare:
        return [Run(each, off) for each in concurrency]
    return [Run(each, plain) for i, each in enumerate(concurrency) for plain in ((False, True) if i % 2 == 0 else (True, False))]


async def warm_up(client: Client, load: Load, *, off: bool) -> Sample:
    """The first request, which is not counted.

    Raises RunError where every further one would fail the same way: not for a server that is busy or has an error of its own.
    """
    sample = await client.send(load.path, load.body(0, off=off))
    failure = sample.failure
    if failure is None:
        return sample
    if failure.kind in ("401", "403"):
        raise RunError(f"{client.url} answers {failure.kind}: give a key of the server with --api-key")
    await asyncio.sleep(min(failure.wait_seconds, MAX_WAIT))
    if failure.kind not in ("429", "error event") and not failure.kind.startswith("5"):
        raise RunError(f"{client.url}: the first request failed, {failure.kind}: {failure.message}")
    return sample


async def measure(
    client: Client, load: Load, run: Run, *, usual_seconds: float, on_sample: Callable[[Sample], None] = lambda sample: None
) -> None:
    """Fill one run. usual_seconds: of a request, until this run knows better; on_sample: called as each ends.

    Raises RunError where the server is there no longer; the run then holds what came before.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    workers = _Workers(client, load, run, usual_seconds, started + load.seconds, on_sample)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(run.concurrency):
                group.create_task(workers.work())
    finally:
        run.wall_seconds = time.perf_counter() - started
        run.cpu_seconds = time.process_time() - cpu_started
    if workers.server_gone:
        raise RunError(f"{client.url} is there no longer: it went away after {len(run.samples)} requests of this run")


class _Workers:
    """What the workers of a run share: the next request, the deadline, and whether the server is still there."""

    def __init__(
        self, client: Client, load: Load, run: Run, usual_seconds: float, deadline: float, on_sample: Callable[[Sample], None]
    ) -> None:
        self.server_gone = False
        self._client, self._load, self._run = client, load, run
        self._usual_seconds, self._deadline, self._on_sample = usual_seconds, deadline, on_sample
        self._numbers: Iterator[int] = iter(range(load.requests))
        self._cuts = load.cuts()

    async def work(self) -> None:
        """One request after the other."""
        while not self.server_gone and time.perf_counter() < self._deadline:
            number = next(self._numbers, None)
            if number is None:
                return
            body = self._load.body(number, off=self._run.off)
            sample = await self._client.send(self._load.path, body, cut_after=self._cut_after(number))
            self._run.samples.append(sample)
            self._on_sample(sample)
            if sample.failure is not None:
                await self._after(sample.failure.kind, sample.failure.wait_seconds)

    async def _after(self, kind: str, wait_seconds: float) -> None:
        if kind in (REFUSED, NO_CONNECTION, CUT) and not self.server_gone and not await self._client.is_there():
            self.server_gone = True
        if wait_seconds:
            await asyncio.sleep(min(wait_seconds, MAX_WAIT, max(self._deadline - time.perf_counter(), 0.0)))

    def _cut_after(self, number: int) -> float | None:
        """Seconds; None for requests that may end."""
        if number not in self._cuts:
            return None
        done = [sample.seconds for sample in self._run.samples if sample.outcome == "done"]
        return self._cuts[number] * (sum(done) / len(done) if done else self._usual_seconds)
