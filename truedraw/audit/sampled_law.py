"""The law of a verifier that draws its own uniforms: evidence from samples, which may be looked at at any time.

Drafts are drawn here from q, the verifier is asked, and every token it emits is bet on: given the text before it, its place
in the block included, it has law p under every exact rule (of a text with law p, what comes behind a step's end is drawn
from p afresh; so what comes before it is drawn from p too). Half of the stake is on directions (prove/goodness.py), half
on whatever the frequencies seen so far say, place by place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.audit.convention import Answer, Draw, Refused, Request, Subject, impossible
from truedraw.audit.findings import Example, Fired, ModeReport
from truedraw.prove.goodness import (
    LAMBDAS,
    Direction,
    EProcess,
    argmax_q,
    bets,
    draft_probability,
    likelihood_ratio,
    log_p,
    log_ratio,
    residual_direction,
)
from truedraw.types import Probs

BATCH = 128
POWER = 0.95


def order_of_ids(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """The id, from 0 to 1: where one uniform serves twice, draws by inverse CDF lean to one end of the vocabulary."""
    ids: Probs = np.arange(len(p)) / (len(p) - 1)
    return ids


DIRECTIONS: tuple[tuple[Direction, str], ...] = (
    (residual_direction, "tokens that p prefers to q: after a rejection the token is drawn from p instead of max(p - q, 0)"),
    (draft_probability, "tokens that the drafter likes: drafts pass that should not, or a fresh draw follows a failed match"),
    (log_p, "tokens likely or unlikely under p: temperature on one side only, or argmax where a draw is due"),
    (log_ratio, "the output leans towards the drafter or away from it: the ratio, or the residual, is of the wrong rows"),
    (order_of_ids, "low or high ids come too often: the uniform that rejects a draft also draws the token behind it"),
    (argmax_q, "the drafter's favourite is let through, or is refused too often"),
)
BY_PLACE = "the frequencies at single places"
BY_PLACE_USUALLY = "rows of the wrong position, noise that is used twice or repeats, a bonus that is no draw: compare the places"
NUM_BETS = 2 * len(LAMBDAS)
_SHARE = 2 * len(DIRECTIONS) * NUM_BETS
"""One over the stake of the best single bet."""
_GRID_LOSS = 1.2
"""Bets are a factor of 2 apart: the nearest grows at 1/1.2 of the best rate at least."""

Place: TypeAlias = tuple[int, int, int]
"""Which problem, how many tokens the step has emitted before, and the last of them (0 for none)."""

SMALL = 4
"""Frequencies are learnt place by place for vocabularies up to this size: in larger ones the learning costs too much."""
PRIOR = 10.0
"""So many tokens drawn from p are what each place is believed to have shown before the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A target and a drafter whose rows follow from the position in the block and the last token.

    p: (k + 1, vocab, vocab), [position, token before, token]; q: (k, vocab, vocab), None: point masses at `points`
    """

    p: npt.NDArray[np.float64]
    q: npt.NDArray[np.float64] | None
    points: tuple[int, ...] = ()

    @property
    def k(self) -> int:
        return len(self.p) - 1

    def p_row(self, position: int, last: int) -> Probs:
        row: Probs = self.p[position, last]
        return row

    def q_row(self, position: int, last: int) -> Probs:
        """The drafter's row there; p's own behind the last draft, where nothing is drafted."""
        if position == self.k:
            return self.p_row(position, last)
        if self.q is None:
            point: Probs = np.eye(self.p.shape[1])[self.points[position]]
            return point
        row: Probs = self.q[position, last]
        return row

    def request(self, generator: np.random.Generator) -> Request:
        """Drafts drawn from q, and the rows along them."""
        lasts = [0]
        for position in range(self.k):
            cumulative = np.cumsum(self.q_row(position, lasts[-1]))
            lasts.append(int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")))
        p = np.stack([self.p_row(position, last) for position, last in enumerate(lasts)])
        q = None if self.q is None else np.stack([self.q_row(position, lasts[position]) for position in range(self.k)])
        return Request(p, q, tuple(lasts[1:]))


def tables() -> list[Table]:
    """A small vocabulary, a larger one, and point masses. The same at every call."""
    generator = np.random.default_rng(20260101)

    def rows(count: int, vocab: int, sharpness: float) -> npt.NDArray[np.float64]:
        weights = generator.gamma(sharpness, size=(count, vocab, vocab)) + 1e-3
        laws: npt.NDArray[np.float64] = weights / weights.sum(axis=2, keepdims=True)
        return laws

    def drafter(p: npt.NDArray[np.float64], share: float, sharpness: float) -> npt.NDArray[np.float64]:
        return share * p[:-1] + (1 - share) * rows(len(p) - 1, p.shape[1], sharpness)

    small, middle, large, point = rows(3, 3, 1.5), rows(3, 4, 0.8), rows(4, 32, 0.2), rows(3, 4, 1.0)
    return [
        Table(small, drafter(small, 0.3, 1.5)),
        Table(middle, drafter(middle, 0.4, 0.8)),
        Table(large, drafter(large, 0.5, 0.2)),
        Table(point, None, (1, 2)),
    ]


# ---------------------------------------------------------------- how much is needed


def decided_tokens(tv: float, alpha: float) -> int:
    """Tokens at draft positions after which a shift of `tv` is found with 95 % power, if it lies in a direction that is bet on.

    A bet of share 1/M has log-wealth of mean n 2 tv^2 / 1.2 (Pinsker; the grid's loss) and variance n 4 tv^2 at most, and has
    to reach log(M / alpha).
    """
    return math.ceil((_reach(alpha) / tv) ** 2)


def detectable_shift(tokens: int, alpha: float) -> float:
    """The smallest TV that so many tokens find: the inverse of `decided_tokens`."""
    return min(1.0, _reach(alpha) / math.sqrt(max(tokens, 1)))


def _reach(alpha: float) -> float:
    z, needed = 1.6449, math.log(_SHARE / alpha)
    return _GRID_LOSS * (z + math.sqrt(z * z + 2 * needed / _GRID_LOSS)) / 2


# ---------------------------------------------------------------- evidence


@dataclass(slots=True)
class Evidence:
    """Bets on every emitted token. `tokens` counts those at draft positions."""

    tables: list[Table]
    by_direction: list[EProcess] = field(default_factory=lambda: [EProcess(NUM_BETS) for _ in DIRECTIONS])
    by_place: EProcess = field(default_factory=lambda: EProcess(1))
    counts: dict[Place, Probs] = field(default_factory=dict)
    tokens: int = 0
    log_e: float = 0.0
    log_largest: float = 0.0

    def add(self, seen: dict[Place, list[int]]) -> None:
        """A batch: for each place the tokens that came there. Bets on it were fixed before it."""
        for (index, position, last), tokens in seen.items():
            table = self.tables[index]
            p, q = table.p_row(position, last), table.q_row(position, last)
            if position < table.k:
                self.tokens += len(tokens)
                for process, (direction, _usually) in zip(self.by_direction, DIRECTIONS, strict=True):
                    process.add(bets(p, direction(p, q, None), tokens))
            counts = self.counts.setdefault((index, position, last), np.zeros(len(p)))
            if len(p) <= SMALL:
                self.by_place.add(likelihood_ratio(p, (counts + PRIOR * p) / (counts.sum() + PRIOR), tokens))
            counts += np.bincount(tokens, minlength=len(p))
        logs = [math.log(0.5) + _log_e(self.by_place)]
        logs += [math.log(0.5 / len(DIRECTIONS)) + _log_e(process) for process in self.by_direction]
        self.log_e = float(np.logaddexp.reduce(logs))
        self.log_largest = max(self.log_largest, self.log_e)

    def fired(self, alpha: float) -> list[Fired]:
        """The largest first."""
        named = [(_log_e(process), direction.__name__, usually) for process, (direction, usually) in self._directions()]
        named.append((_log_e(self.by_place), BY_PLACE, BY_PLACE_USUALLY))
        named.sort(key=lambda item: -item[0])
        return [
            Fired(name.replace("_", " "), _exp(log_e), usually) for log_e, name, usually in named if log_e >= -math.log(alpha)
        ]

    def _directions(self) -> Iterator[tuple[EProcess, tuple[Direction, str]]]:
        return zip(self.by_direction, DIRECTIONS, strict=True)

    def largest_gap(self) -> str:
        """The place and token whose frequency is farthest from p, in standard deviations."""
        worst, told = 0.0, ""
        for (index, position, last), counts in self.counts.items():
            p, n = self.tables[index].p_row(position, last), counts.sum()
            z = np.abs(counts - n * p) / np.sqrt(n * p * (1 - p) + 1e-300)
            token = int(z.argmax())
            if z[token] > worst:
                worst = float(z[token])
                told = (
                    f"token {token} came {int(counts[token])} times in {int(n)}, {n * p[token]:.1f} expected, as token "
                    f"{position} of a step{f' after token {last}' if position else ''} (problem {index}, p = {p[token]:.4g})"
                )
        return told


def _log_e(process: EProcess) -> float:
    return float(np.logaddexp.reduce(process.log_wealth)) - math.log(process.num_bets)


def _exp(log_e: float) -> float:
    return math.exp(log_e) if log_e < 700 else math.inf


# ---------------------------------------------------------------- the report


def sampled_mode(
    subject: Subject,
    *,
    alpha: float,
    detect: float,
    max_tokens: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> ModeReport:
    """Ask until the evidence reaches 1/alpha, or until a shift of `detect` would have been seen. Raises Lost.

    max_tokens   at draft positions; fewer than needed for `detect` raise the smallest shift that can be seen
    on_progress  told (tokens so far, tokens at most, log10 of the evidence)
    """
    needed = decided_tokens(detect, alpha) if max_tokens is None else min(max_tokens, decided_tokens(detect, alpha))
    evidence = Evidence([table for table in tables() if table.k >= subject.min_drafts])
    generator = np.random.default_rng(seed)
    path: list[tuple[int, float]] = []
    wrong: tuple[str, Request] | None = None
    while evidence.tokens < needed and evidence.log_largest < -math.log(alpha) and wrong is None:
        seen, wrong = _batch(subject, evidence.tables, generator)
        evidence.add(seen)
        path.append((evidence.tokens, evidence.log_e / math.log(10)))
        if on_progress is not None:
            on_progress(min(evidence.tokens, needed), needed, path[-1][1])
    found = wrong is not None or evidence.log_largest >= -math.log(alpha)
    fired = evidence.fired(alpha)
    example: Example | None = None
    if wrong is not None:
        example = Example(wrong[0], subject.reproduce(wrong[1], ()))
        fired = fired or [
            Fired("an impossible answer", math.inf, "a token with p = 0, or no answer to sound rows: see the example")
        ]
    elif found:
        example = Example(evidence.largest_gap())
        fired = fired or [Fired("several directions together", _exp(evidence.log_largest), BY_PLACE_USUALLY)]
    return ModeReport(
        mode="sampled law",
        verdict="fault found" if found else "no evidence",
        asked="is every emitted token, given what the step emitted before it, drawn from p?",
        samples=evidence.tokens,
        unit="tokens at draft positions",
        alpha=alpha,
        e_value=_exp(evidence.log_largest),
        p_value=math.exp(-max(evidence.log_largest, 0.0)),
        detectable=detectable_shift(max(evidence.tokens, 1), alpha),
        floor=0.0,
        fired=tuple(fired),
        example=example,
        path=tuple(path),
        notes=(
            f"at most {needed:,} tokens were planned: enough for a shift of {max(detect, detectable_shift(needed, alpha)):.3g}",
        ),
    )


def _batch(
    subject: Subject, tables: list[Table], generator: np.random.Generator
) -> tuple[dict[Place, list[int]], tuple[str, Request] | None]:
    """Steps on all problems in turn: the tokens by place, and the first answer that nothing can excuse."""
    indices = [i % len(tables) for i in range(BATCH)]
    requests = [tables[index].request(generator) for index in indices]
    uniforms = generator.random((BATCH, max(table.k for table in tables) + 1))
    draws = [_draw(row, generator) for row in uniforms]
    seen: dict[Place, list[int]] = {}
    outcomes = subject.ask_many([(request, subject.draw_from(draw)) for request, draw in zip(requests, draws, strict=True)])
    for index, request, outcome in zip(indices, requests, outcomes, strict=True):
        if not isinstance(outcome, Answer):
            told = "sound rows were answered by an error" if isinstance(outcome, Refused) else "no answer"
            return seen, (f"{told}: {outcome}", request)
        wrong = impossible(request, outcome)
        if wrong is not None:
            return seen, (wrong, request)
        text = (*request.drafts[: outcome.accepted], outcome.token)
        for i, token in enumerate(text):
            seen.setdefault((index, i, text[i - 1] if i else 0), []).append(token)
    return seen, None


def _draw(row: Probs, generator: np.random.Generator) -> Draw:
    """The uniforms of one step; fresh ones behind their end."""
    return lambda i: float(row[i]) if i < len(row) else float(generator.random())
