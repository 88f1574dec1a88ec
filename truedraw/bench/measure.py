"""Plain and speculative decoding of the same prompts, alternating in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from truedraw.bench.bounds import hindsight_seconds, loop_share
from truedraw.engine import Engine, Request
from truedraw.protocols import Forecast, LengthPolicy, PointProposal, RowStatistics, SequenceState, StepTiming, Worth
from truedraw.text.prompt import Prompt
from truedraw.types import Result, SamplingParams, Stats

HALF_WIDTH = 0.01
"""Repeat until the interval of the ratio is this narrow to either side."""

_RESAMPLES = 1000


class Stopwatch(LengthPolicy):
    """A policy that another one decides for, and that keeps the time of every step."""

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy = policy
        self.steps: list[StepTiming] = []

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        return self.policy.limits(batch)

    def worth(self, sequence: SequenceState, forecast: Forecast) -> Worth:
        return self.policy.worth(sequence, forecast)

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        return self.policy.more(sequence, row)

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        return self.policy.cut(batch)

    def observe(self, step: StepTiming) -> None:
        self.steps.append(step)
        self.policy.observe(step)


@dataclass(slots=True)
class Times:
    """Seconds of one way of decoding, by what they were spent on."""

    wall: float = 0.0
    target: float = 0.0
    draft: float = 0.0
    verify: float = 0.0

    def add(self, wall: float, steps: Sequence[StepTiming]) -> None:
        self.wall += wall
        self.target += sum(step.target_seconds for step in steps)
        self.draft += sum(step.draft_seconds for step in steps)
        self.verify += sum(step.verify_seconds for step in steps)

    @property
    def other(self) -> float:
        return max(0.0, self.wall - self.target - self.draft - self.verify)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts decoded both ways: seconds after the prompts, and tokens."""

    plain_seconds: float
    plain_tokens: int
    spec_seconds: float
    spec_tokens: int


@dataclass(slots=True)
class Workload:
    """What came out of one workload."""

    name: str
    pairs: list[Pair] = field(default_factory=list)
    plain: Times = field(default_factory=Times)
    spec: Times = field(default_factory=Times)
    stats: Stats = field(default_factory=Stats)
    texts: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    @property
    def plain_tps(self) -> float:
        return sum(pair.plain_tokens for pair in self.pairs) / sum(pair.plain_seconds for pair in self.pairs)

    @property
    def spec_tps(self) -> float:
        return sum(pair.spec_tokens for pair in self.pairs) / sum(pair.spec_seconds for pair in self.pairs)

    @property
    def ratio(self) -> float:
        return self.spec_tps / self.plain_tps

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """A bootstrap interval of the ratio, over pairs."""
        table = np.array([(p.plain_seconds, p.plain_tokens, p.spec_seconds, p.spec_tokens) for p in self.pairs])
        chosen = np.random.default_rng(0).integers(0, len(table), size=(_RESAMPLES, len(table)))
        sums = table[chosen].sum(axis=1)
        ratios = (sums[:, 3] / sums[:, 2]) / (sums[:, 1] / sums[:, 0])
        low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    @property
    def ideal_ratio(self) -> float | None:
        """With the same acceptance and nothing but target passes to pay for, plain and speculative alike."""
        if not self.spec.target or not self.plain.target:
            return None
        plain = self.plain.target / sum(pair.plain_tokens for pair in self.pairs)
        return plain / (self.spec.target / sum(pair.spec_tokens for pair in self.pairs))

    def hindsight_ratio(self, seconds: Sequence[float]) -> float:
        """What copying reaches when each step's length is chosen knowing what will be accepted.

        seconds: of passes of 0, 1, 2, ... tokens.
        """
        plain = sum(len(output) for _, output in self.texts) * seconds[1]
        return plain / sum(hindsight_seconds(prompt, output, seconds) for prompt, output in self.texts)

    @property
    def loop_share(self) -> float:
        tokens = sum(len(output) for _, output in self.texts)
        return sum(loop_share(output) * len(output) for _, output in self.texts) / tokens if tokens else 0.0


def run(
    engine: Engine,
    name: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    concurrency: int,
    repeats: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Workload]:
    """Decode the prompts both ways, again and again, and yield what is known after each pair.

    Requests have a seed if `params` has one, another in each round: a drafter that draws has other rules with a seed and
    without. Stops when the ratio's interval is narrower than +-0.01, after `repeats` rounds or `seconds`.
    """
    told = Workload(name)
    watch = Stopwatch(engine.policy)
    engine.policy = watch
    started = clock()
    try:
        for number in range(repeats):
            for first in range(0, len(prompts), concurrency):
                batch = prompts[first : first + concurrency]
                seeded = params if params.seed is None else replace(params, seed=params.seed + number)
                order = (0, None) if (number + first) % 2 == 0 else (None, 0)
                done = {limit: _decode(engine, watch, batch, seeded, limit, clock) for limit in order}
                (plain_wall, plain, plain_steps), (spec_wall, spec, spec_steps) = done[0], done[None]
                told.plain.add(plain_wall, plain_steps)
                told.spec.add(spec_wall, spec_steps)
                told.pairs.append(Pair(plain_wall, _tokens(plain), spec_wall, _tokens(spec)))
                for result in spec:
                    told.stats += result.stats
                if number == 0:
                    told.texts += [(tuple(engine.encode(p)), r.tokens) for p, r in zip(batch, spec, strict=True)]
                yield told
            if number + 1 >= 3:
                low, high = told.interval()
                if high - low < 2 * HALF_WIDTH or clock() - started > seconds:
                    break
    finally:
        engine.policy = watch.policy


def _decode(
    engine: Engine,
    watch: Stopwatch,
    batch: Sequence[Prompt],
    params: SamplingParams,
    limit: int | None,
    clock: Callable[[], float],
) -> tuple[float, list[Result], list[StepTiming]]:
    """Seconds without the prompts, results, and the time of each step."""
    requests: list[Request] = [engine.submit(prompt, params, max_draft=limit) for prompt in batch]
    watch.steps.clear()
    started: float | None = None
    while not all(request.finished for request in requests):
        before = clock()
        emitted = engine.step()
        if started is None and emitted:
            started = before
    ended = clock()
    results = [result for request in requests for result in request.results if result is not None]
    for result in results:
        if result.error is not None:
            raise result.error
    return ended - (started if started is not None else ended), results, list(watch.steps)


def _tokens(results: Sequence[Result]) -> int:
    return sum(len(result.tokens) for result in results)
