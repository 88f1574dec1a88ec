"""What requests to a server came to: one sample for each, and the figures of many. Pure; load.py does the measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MIN_TAIL = 100  # fewer samples have no 99th percentile to speak of


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a truedraw server tells of one answer; seconds as its engine counted them.

    estimated_plain_seconds  what the answer would have taken without drafts; None where it has no estimate
    """

    steps: int
    proposed: int
    accepted: int
    tokens_per_step: float | None
    seconds: float
    estimated_plain_seconds: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """How a request failed.

    kind          a few words that many failures share, as "429" or "timeout"
    message       what the server or the system said
    wait_seconds  before the next request, as a busy server asks
    """

    kind: str
    message: str
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it.

    outcome            "abandoned": the client cut it off on purpose
    seconds            from sending it to its end
    arrivals           when content came, in seconds since sending; one for each chunk that had any
    prompt_tokens      as the server counts; None where it tells nothing
    completion_tokens  the same
    failure            None unless the outcome is "failed"
    """

    outcome: Literal["done", "failed", "abandoned"]
    seconds: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    speculation: Speculation | None = None
    failure: Failure | None = None

    def mean_gap(self, count: int) -> float | None:
        """From the first content to the last, for each of `count` tokens or chunks after the first; None where there is one."""
        return (self.arrivals[-1] - self.arrivals[0]) / (count - 1) if count > 1 and len(self.arrivals) > 1 else None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds, of n samples; None where there are none, and p99 below MIN_TAIL samples."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Failures:
    """How many of a kind, and what the first of them said."""

    kind: str
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Drafted:
    """Speculation over the answers that tell of it; None where there is nothing to divide by."""

    answers: int
    steps: int
    proposed: int
    accepted: int
    tokens_per_step: float | None
    acceptance_rate: float | None
    estimated_speedup: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests of one run. Tokens, chunks and times are those of the requests that were done.

    unit                "chunks" where the server does not tell tokens: completion_tokens, tokens_per_second and per_token_ms
                        then count chunks
    prompt_tokens       None where the server does not tell
    chunks              those with content
    first_token_ms      from sending a request to its first content
    between_chunks_ms   from one chunk with content to the next, over all requests
    per_token_ms        mean of a request, from its first content to its last, for each token after the first
    whole_request_ms    from sending a request to its end
    client_cpu          of the measuring client, in processors: its processor seconds over the wall seconds
    """

    concurrency: int
    speculation_off: bool
    done: int
    failed: int
    abandoned: int
    failures: tuple[Failures, ...]
    wall_seconds: float
    unit: Literal["tokens", "chunks"]
    prompt_tokens: int | None
    completion_tokens: int
    chunks: int
    tokens_per_second: float | None
    requests_per_second: float | None
    tokens_per_chunk: float | None
    first_token_ms: Percentiles
    between_chunks_ms: Percentiles
    per_token_ms: Percentiles
    whole_request_ms: Percentiles
    speculation: Drafted | None
    client_cpu: float


@dataclass(frozen=True, slots=True)
class Ratios:
    """With speculation over without, at one concurrency: above 1 is better for the throughput, below 1 for times (medians)."""

    concurrency: int
    tokens_per_second: float | None
    first_token: float | None
    between_chunks: float | None
    per_token: float | None
    whole_request: float | None


def figures(
    samples: Sequence[Sample], *, concurrency: int, wall_seconds: float, cpu_seconds: float = 0.0, speculation_off: bool = False
) -> Figures:
    """Everything that is told of one run. wall_seconds: from its first request to the end of its last."""
    done = [sample for sample in samples if sample.outcome == "done"]
    told = bool(done) and all(sample.completion_tokens is not None for sample in done)
    chunks = sum(len(sample.arrivals) for sample in done)
    counts = [(sample, (sample.completion_tokens or 0) if told else len(sample.arrivals)) for sample in done]
    tokens = sum(count for _, count in counts)
    prompts = [sample.prompt_tokens for sample in done if sample.prompt_tokens is not None]
    return Figures(
        concurrency=concurrency,
        speculation_off=speculation_off,
        done=len(done),
        failed=sum(sample.outcome == "failed" for sample in samples),
        abandoned=sum(sample.outcome == "abandoned" for sample in samples),
        failures=failures(samples),
        wall_seconds=wall_seconds,
        unit="tokens" if told else "chunks",
        prompt_tokens=sum(prompts) if prompts and len(prompts) == len(done) else None,
        completion_tokens=tokens,
        chunks=chunks,
        tokens_per_second=_over(tokens, wall_seconds) if done else None,
        requests_per_second=_over(len(done), wall_seconds) if done else None,
        tokens_per_chunk=_over(tokens, chunks) if told else None,
        first_token_ms=percentiles([sample.arrivals[0] for sample in done if sample.arrivals]),
        between_chunks_ms=percentiles([gap for sample in done for gap in np.diff(sample.arrivals).tolist()]),
        per_token_ms=percentiles([gap for sample, count in counts if (gap := sample.mean_gap(count)) is not None]),
        whole_request_ms=percentiles([sample.seconds for sample in done]),
        speculation=drafted([sample.speculation for sample in done if sample.speculation is not None]),
        client_cpu=_over(cpu_seconds, wall_seconds) or 0.0,
    )


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Milliseconds; between two samples on the line through them."""
    n = len(seconds)
    if n == 0:
        return Percentiles(0, None, None, None)
    p50, p95, p99 = (1000 * float(x) for x in np.percentile(seconds, (50, 95, 99)))
    return Percentiles(n, p50, p95, p99 if n >= MIN_TAIL else None)


def failures(samples: Sequence[Sample]) -> tuple[Failures, ...]:
    """By kind, the most frequent first."""
    kinds: dict[str, list[str]] = {}
    for sample in samples:
        if sample.failure is not None:
            kinds.setdefault(sample.failure.kind, []).append(sample.failure.message)
    found = [Failures(kind, len(messages), messages[0]) for kind, messages in kinds.items()]
    return tuple(sorted(found, key=lambda each: -each.count))


def drafted(told: Sequence[Speculation]) -> Drafted | None:
    """None where no answer told of speculation."""
    if not told:
        return None
    counted = [(each.tokens_per_step, each.steps) for each in told if each.tokens_per_step is not None]
    timed = [(each.estimated_plain_seconds, each.seconds) for each in told if each.estimated_plain_seconds is not None]
    proposed, accepted = sum(each.proposed for each in told), sum(each.accepted for each in told)
    return Drafted(
        answers=len(told),
        steps=sum(each.steps for each in told),
        proposed=proposed,
        accepted=accepted,
        tokens_per_step=_over(sum(mean * steps for mean, steps in counted), sum(steps for _, steps in counted)),
        acceptance_rate=_over(accepted, proposed),
        estimated_speedup=_over(sum(plain for plain, _ in timed), sum(seconds for _, seconds in timed)),
    )


def ratios(speculative: Figures, plain: Figures) -> Ratios:
    """Of two runs of the same requests at the same concurrency."""
    return Ratios(
        speculative.concurrency,
        _ratio(speculative.tokens_per_second, plain.tokens_per_second) if speculative.unit == plain.unit else None,
        _ratio(speculative.first_token_ms.p50, plain.first_token_ms.p50),
        _ratio(speculative.between_chunks_ms.p50, plain.between_chunks_ms.p50),
        _ratio(speculative.per_token_ms.p50, plain.per_token_ms.p50),
        _ratio(speculative.whole_request_ms.p50, plain.whole_request_ms.p50),
    )


def _over(amount: float, by: float) -> float | None:
    return amount / by if by > 0 else None


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else _over(ours, theirs)
