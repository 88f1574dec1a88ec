"""Copies from prompt and output by a suffix automaton (Blumer et al. 1985; for drafting Hu et al. 2024,
SAM decoding, arXiv 2411.10666): the longest suffix of the text that came up before, in amortised
constant time per token, and what followed it there.

How likely a copy is to be accepted depends on how long the match is, on how often its continuation was
seen to differ, and on how copies of this text fared so far. Every emitted token scores the copy that
would have been proposed for it, proposed or not: nothing is spent on exploring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeAlias

from truedraw.drafters.corpus import Corpus
from truedraw.errors import InvalidParameter
from truedraw.protocols import Drafter, DraftRequest, Outcome
from truedraw.types import PointMass, Proposal


class SuffixAutomaton:
    """All substrings of a growing text, each state a set of end positions.

    match_length  of the longest suffix of the text that also ends earlier
    match_end     where it ended when the walk last met it: its continuation is text[match_end:]
    unanimous     no other token ever followed it
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0
        self._current = 0
        self.match_length = 0
        self.match_end = 0

    def extend(self, token: int) -> None:
        """Append a token: first the match moves on in the text as it stood, then the automaton grows."""
        while self._current and token not in self._next[self._current]:
            self._current = self._link[self._current]
            self.match_length = self._length[self._current]
        if token in self._next[self._current]:
            self._current = self._next[self._current][token]
            self.match_length += 1
        else:
            self.match_length = 0
        self._grow(token)
        self.match_end = self._end[self._current]
        self._end[self._current] = len(self.text)

    @property
    def unanimous(self) -> bool:
        return len(self._next[self._current]) <= 1

    def predicted(self) -> int | None:
        """The token that followed the match; None without one."""
        return self.text[self.match_end] if self.match_length and self.match_end < len(self.text) else None

    def copy(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the match. Where the earlier occurrence reaches up to the end
        itself, the text repeats with that period, and so does the copy."""
        if not self.match_length or self.match_end >= len(self.text):
            return []
        period = len(self.text) - self.match_end
        return [self.text[self.match_end + i % period] for i in range(count)]

    def _grow(self, token: int) -> None:
        self.text.append(token)
        state = self._new(self._length[self._last] + 1, len(self.text))
        p = self._last
        while p >= 0 and token not in self._next[p]:
            self._next[p][token] = state
            p = self._link[p]
        if p >= 0:
            q = self._next[p][token]
            self._link[state] = q if self._length[q] == self._length[p] + 1 else self._split(p, q, token)
        self._last = state

    def _split(self, p: int, q: int, token: int) -> int:
        """The shorter strings of state q, which from now on end in more places, get a state of their own."""
        clone = self._new(self._length[p] + 1, self._end[q])
        self._next[clone] = dict(self._next[q])
        self._link[clone] = self._link[q]
        self._link[q] = clone
        if self._current == q and self.match_length <= self._length[clone]:
            self._current = clone
        while p >= 0 and self._next[p].get(token) == q:
            self._next[p][token] = clone
            p = self._link[p]
        return clone

    def _new(self, length: int, end: int) -> int:
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


# ---------------------------------------------------------------- how likely a copy is right

BUCKETS = (1, 2, 3, 4, 6, 9, 14, 22, 40)
"""Match lengths from which on the next row of the priors holds."""

Priors: TypeAlias = tuple[tuple[float, float], ...]

GREEDY: Priors = (
    (0.19, 0.28),
    (0.20, 0.52),
    (0.20, 0.62),
    (0.22, 0.81),
    (0.22, 0.84),
    (0.50, 0.92),
    (0.76, 0.95),
    (0.78, 0.97),
    (0.80, 0.99),
)
SAMPLED: Priors = (
    (0.13, 0.20),
    (0.20, 0.46),
    (0.20, 0.53),
    (0.20, 0.70),
    (0.20, 0.70),
    (0.50, 0.77),
    (0.60, 0.93),
    (0.70, 0.94),
    (0.75, 0.97),
)
"""P(the continuation of a match is the next token), by match length: where other continuations were
seen, and where there was one only; at temperature 0 and above. From benchmarks/fit_priors.py, the rows
with few tokens evened out."""

PRIOR_WEIGHT = 6.0
"""Tokens of a request that weigh as much as the prior."""

LEAST_SURVIVAL = 0.02
_FORGET = 0.95
_NEIGHBOUR = 0.5  # of what a match of one length tells about the lengths next to it


def bucket(match_length: int) -> int:
    """The row of the priors for a match of this length, which is at least 1."""
    return sum(match_length >= start for start in BUCKETS) - 1


class _Text:
    """The text of one sequence, and how its copies fared."""

    def __init__(self, prompt_length: int, priors: Priors) -> None:
        self.automaton = SuffixAutomaton()
        self._prompt_length = prompt_length
        self._priors = priors
        self._hits = [[0.0, 0.0] for _ in BUCKETS]
        self._tries = [[0.0, 0.0] for _ in BUCKETS]
        self.unread: list[int] = []  # emitted, and not followed yet

    @property
    def answer(self) -> list[int]:
        """The tokens of the output."""
        return (self.automaton.text + self.unread)[self._prompt_length :]

    def follow(self, tokens: Iterable[int]) -> None:
        """Take in emitted tokens; each scores the copy that stood for it."""
        automaton = self.automaton
        for token in tokens:
            predicted = automaton.predicted()
            if predicted is not None and len(automaton.text) > self._prompt_length:
                self._score(bucket(automaton.match_length), automaton.unanimous, predicted == token)
            automaton.extend(token)

    def _score(self, row: int, alone: bool, right: bool) -> None:
        for near in range(max(row - 1, 0), min(row + 2, len(BUCKETS))):
            weight = 1.0 if near == row else _NEIGHBOUR
            kept = 1 - (1 - _FORGET) * weight
            self._hits[near][alone] = kept * self._hits[near][alone] + weight * right
            self._tries[near][alone] = kept * self._tries[near][alone] + weight

    def probability(self, match_length: int) -> float:
        """That the next token of a match of this length is right, given this request's history."""
        row, alone = bucket(match_length), self.automaton.unanimous
        prior = PRIOR_WEIGHT * self._priors[row][alone]
        return (self._hits[row][alone] + prior) / (self._tries[row][alone] + PRIOR_WEIGHT)

    def survival(self, count: int) -> tuple[float, ...]:
        """For each of up to `count` copied tokens: that it and all before it are right. A copy that has been
        right so far is a longer match. Ends where next to nothing survives."""
        alive, survival = 1.0, []
        for i in range(count):
            alive *= self.probability(self.automaton.match_length + i)
            if alive < LEAST_SURVIVAL:
                break
            survival.append(alive)
        return tuple(survival)

    def trust(self, match_length: int, share: float, count: int) -> tuple[float, ...]:
        """The survival of `count` tokens copied from a corpus."""
        rows = [self._priors[bucket(match_length + i)][1] for i in range(count)]
        return tuple(min(share, rows[0]) * prod(rows[1 : i + 1]) for i in range(count))


class SuffixDrafter(Drafter):
    """Copies what followed the longest earlier occurrence of the end of the text, as point masses, with
    an estimate of each token's survival for the policy to decide by.

    min_match  shorter matches propose nothing
    corpus     other texts to copy from; one that learns is given each answer when it has ended
    """

    def __init__(self, min_match: int = 1, *, corpus: Corpus | None = None) -> None:
        if isinstance(min_match, bool) or not isinstance(min_match, int) or min_match < 1:
            raise InvalidParameter("min_match", min_match, "an integer >= 1")
        self.min_match = min_match
        self.corpus = corpus
        self._texts: dict[int, _Text] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Proposal:
        text = self._texts.get(request.sequence)
        if text is None:
            priors = GREEDY if request.params.temperature == 0 else SAMPLED
            text = self._texts[request.sequence] = _Text(request.prompt_length, priors)
        text.follow(request.context[len(text.automaton.text) :].tolist())
        text.unread.clear()
        if self.corpus is not None:
            own = max(text.automaton.match_length, self.min_match - 1)
            match = self.corpus.find(request.context, own + 1)
            if match is not None:
                copied = tuple(self.corpus.copy(match, request.max_draft))
                return Proposal(copied, PointMass(), survival=text.trust(match.length, match.share, len(copied)))
        if text.automaton.match_length < self.min_match:
            return Proposal()
        survival = text.survival(request.max_draft)
        tokens = text.automaton.copy(len(survival))
        return Proposal(tuple(tokens), PointMass(), survival=survival[: len(tokens)])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            text = self._texts.get(outcome.sequence)
            if text is not None:
                text.unread += outcome.tokens
            if text is not None and outcome.finished:
                self._forget(outcome.sequence)

    def _forget(self, sequence: int) -> None:
        text = self._texts.pop(sequence)
        if self.corpus is not None and self.corpus.learning:
            self.corpus.add(text.answer)

    def close(self) -> None:
        for sequence in list(self._texts):
            self._forget(sequence)
        if self.corpus is not None:
            self.corpus.close()
