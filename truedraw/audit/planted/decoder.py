"""A small speculative decoder with a place for every fault: drafts one by one, p/q rule, or the race where a seed is given."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from truedraw.audit.planted.faults import Fault
from truedraw.audit.planted.model import CLASS_OF, Floats, Model, Settings, shape
from truedraw.audit.planted.vocabulary import VOCAB

NUM_DRAFTS = 3


class Row:
    """One law, ready to be drawn from. p: VOCAB floats."""

    def __init__(self, p: Floats) -> None:
        self.array = p
        self.p: list[float] = p.tolist()
        self._edges = _edges(self.p)

    def draw(self, u: float) -> int:
        return bisect_right(self._edges, u)

    @cached_property
    def best(self) -> int:
        return int(self.array.argmax())

    @cached_property
    def ranked(self) -> list[int]:
        """Tokens of positive probability, the most likely first."""
        order: list[int] = np.argsort(-self.array, kind="stable")[: np.count_nonzero(self.array)].tolist()
        return order

    @cached_property
    def logs(self) -> Floats:
        logs: Floats = np.full(VOCAB, -np.inf)
        np.log(self.array, where=self.array > 0, out=logs)
        return logs


def _edges(weights: list[float]) -> list[float]:
    """The distribution function: where it is first above u in [0, 1) is a token of positive weight."""
    edges = list(accumulate(weights))
    total = edges[-1]
    last = max(i for i, weight in enumerate(weights) if weight > 0)
    return [edge / total for edge in edges[:last]] + [1.0] * (len(edges) - last)


class Counted:
    """How often each token is in the text up to a place, which moves along: in the output, and with the prompt. (VOCAB,) each."""

    def __init__(self, tokens: list[int], prompt_length: int) -> None:
        self._tokens, self._place = tokens, prompt_length
        prompt = np.array(tokens[:prompt_length], dtype=np.int64)
        self.output = np.zeros(VOCAB, dtype=np.int64)
        self.seen = np.bincount(prompt, minlength=VOCAB)[:VOCAB]

    def move_to(self, place: int) -> None:
        """Not before the end of the prompt."""
        while self._place != place:
            step = 1 if self._place < place else -1
            token = self._tokens[min(self._place, self._place + step)]
            self.output[token] += step
            self.seen[token] += step
            self._place += step


class Rows:
    """The rows of a model under settings, kept where they depend on the last two tokens alone."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self._settings = settings
        self._tables = (model.target, model.draft)
        self._kept: tuple[dict[int, Row], dict[int, Row]] = ({}, {})

    def at(self, draft: bool, tokens: list[int], end: int, counts: Counted | None = None, counted: int = 0) -> Row:
        """Of the token at place `end`, with penalties for tokens[:counted]. draft: q, not p; counts: needed with penalties."""
        first, second = (CLASS_OF[tokens[end - 2]] if end > 1 else 0), (CLASS_OF[tokens[end - 1]] if end else 0)
        if self._settings.penalised:
            assert counts is not None
            counts.move_to(counted)
            return Row(shape(self._tables[draft][first, second], self._settings, counts.output, counts.seen))
        key = first * len(self._tables[0]) + second
        row = self._kept[draft].get(key)
        if row is None:
            row = self._kept[draft][key] = Row(shape(self._tables[draft][first, second], self._settings))
        return row


@dataclass(frozen=True, slots=True)
class Step:
    """tokens: emitted; drafted: how many of them stood where a draft was; faulty: whether the fault acted."""

    tokens: tuple[int, ...]
    proposed: int
    accepted: int
    drafted: int = 0
    faulty: bool = False


class Decoder:
    """Of one choice of a request.

    rows       under the request's settings; judged: those that the fault judges drafts by
    speculates otherwise one token a step
    strength   the share of steps in which the fault acts
    noise      of this choice, its own
    race_key   (seed, choice): tokens are drawn by race, so that speculation leaves no trace in the text; None: the p/q rule
    The first token of a text is never speculated: it comes with the prompt's own pass.
    """

    def __init__(
        self,
        rows: Rows,
        judged: Rows,
        prompt: list[int],
        *,
        speculates: bool,
        fault: Fault | None,
        strength: float,
        noise: random.Random,
        fresh: random.Random,
        race_key: tuple[int, int] | None,
    ) -> None:
        self._rows, self._judged = rows, judged
        self.tokens = list(prompt)
        self._prompt_length = len(prompt)
        self._speculates, self._fault, self._strength = speculates, fault, strength
        self._noise, self._fresh = noise, fresh
        self._counts = Counted(self.tokens, len(prompt))
        self._race = None if race_key is None else _Race(race_key)

    def steps(self) -> Iterator[Step]:
        """For ever: whoever reads them says when it is enough."""
        yield self._plain()
        while True:
            yield self._speculative() if self._speculates else self._plain()

    def row(self, draft: bool = False, end: int | None = None) -> Row:
        """p of the token at place `end`; by default of the next one."""
        place = len(self.tokens) if end is None else end
        return self._rows.at(draft, self.tokens, place, self._counts, place)

    def _plain(self) -> Step:
        token = self._draw(self.row())
        self.tokens.append(token)
        return Step((token,), 0, 0)

    def _draw(self, row: Row) -> int:
        if self._race is None:
            return row.draw(self._noise.random())
        return self._race.winner(row, len(self.tokens) - self._prompt_length)

    def _speculative(self) -> Step:
        fault = self._fault
        acts = fault is not None and (self._strength >= 1 or self._noise.random() < self._strength)
        if acts and fault is not None and (fault.shows == "law" or (fault.ignores_seed and self._race is not None)):
            return self._faulty(fault, self._fresh if fault.ignores_seed else self._noise)
        step = self._by_rule() if self._race is None else self._by_race()
        return Step(step.tokens, step.proposed, step.accepted, step.drafted, acts)

    def _by_race(self) -> Step:
        """The target's own token each time, for as long as the drafts agree with it."""
        start = len(self.tokens)
        for i in range(NUM_DRAFTS):
            draft = self._draw(self.row(draft=True))
            token = self._draw(self.row())
            self.tokens.append(token)
            if draft != token:
                return Step(tuple(self.tokens[start:]), NUM_DRAFTS, i, i + 1)
        self.tokens.append(self._draw(self.row()))
        return Step(tuple(self.tokens[start:]), NUM_DRAFTS, NUM_DRAFTS, NUM_DRAFTS)

    def _by_rule(self) -> Step:
        """Leviathan et al. 2023, algorithm 1, a draft at a time."""
        tokens, uniform = self.tokens, self._noise.random
        start = len(tokens)
        for i in range(NUM_DRAFTS):
            p, q = self.row(), self.row(draft=True)
            draft = q.draw(uniform())
            if uniform() * q.p[draft] >= p.p[draft]:
                tokens.append(_replacement(p, q, "residual", uniform()))
                return Step(tuple(tokens[start:]), NUM_DRAFTS, i, i + 1)
            tokens.append(draft)
        tokens.append(self.row().draw(uniform()))
        return Step(tuple(tokens[start:]), NUM_DRAFTS, NUM_DRAFTS, NUM_DRAFTS)

    def _faulty(self, fault: Fault, noise: random.Random) -> Step:
        tokens, uniform = self.tokens, noise.random
        start = len(tokens)
        for i in range(NUM_DRAFTS):
            end = len(tokens)
            place = end - 1 if fault.shifted_row and i else end
            counted = start if fault.stale_penalties else place
            p = self._judged.at(False, tokens, place, self._counts, counted)
            q = self.row(draft=True)
            draft = q.draw(uniform())
            u = uniform()
            if fault.threshold is not None:
                accepted = p.p[draft] > fault.threshold * q.p[draft]
            else:
                accepted = u * q.p[draft] < p.p[draft] or (fault.unchecked_first and i == 0)
            if not accepted:
                if fault.late_rejection:
                    tokens.append(draft)
                tokens.append(_replacement(p, q, fault.correction, u if fault.correction == "shared noise" else uniform()))
                return Step(tuple(tokens[start:]), NUM_DRAFTS, i, len(tokens) - start, True)
            tokens.append(p.best if fault.greedy_accepted else draft)
        bonus = self.row()
        tokens.append(bonus.best if fault.greedy_bonus else bonus.draw(uniform()))
        return Step(tuple(tokens[start:]), NUM_DRAFTS, NUM_DRAFTS, NUM_DRAFTS, True)


def _replacement(p: Row, q: Row, correction: str, u: float) -> int:
    if correction == "target":
        return p.draw(u)
    if correction == "absolute difference":
        weights = [abs(a - b) for a, b in zip(p.p, q.p, strict=True)]
    else:
        weights = [a - b if a > b else 0.0 for a, b in zip(p.p, q.p, strict=True)]
    return bisect_right(_edges(weights), u) if any(weights) else p.draw(u)


class _Race:
    """Gumbel noise for each place of the output, the same whoever asks: the largest log p + noise wins."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._generator = np.random.default_rng([key[0] % 2**64, key[1]])
        self._noise = np.empty((0, VOCAB))

    def winner(self, row: Row, place: int) -> int:
        while place >= len(self._noise):
            self._noise = np.concatenate([self._noise, self._generator.gumbel(size=(64, VOCAB))])
        return int((row.logs + self._noise[place]).argmax())
