"""Copies from prompt and output: what followed the longest earlier occurrence of the end of the text.

Where drafts are drawn (temperature above 0), and several tokens followed the match, they are drawn from
how often each did: under the coupled rule by the race with the target's own noise, which then falls on
the same token more often than a point mass would; under the p/q rules with the step's draft noise, and
the counts travel with the drafts as their q.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.drafters.automaton import SuffixAutomaton
from truedraw.drafters.corpus import Corpus
from truedraw.drafters.evidence import ALONE, ELSEWHERE, GREEDY, MIXED, RESUMED, SAMPLED, Evidence, History
from truedraw.errors import InvalidParameter
from truedraw.protocols import Drafter, DraftRequest, Forecast, Outcome, RaceNoise, StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import inverse_cdf, sparse_race
from truedraw.types import PointMass, Probs, Proposal, SparseRows

TokenIds: TypeAlias = npt.NDArray[np.int64]

LEAST_SURVIVAL = 0.05
MOST_FOLLOWERS = 64

AHEAD = 12
"""An interrupted copy is taken up again at most so many tokens further on, and so many tokens later."""

_OWN_MATCH = 3  # tokens: such a match is trusted more than the place where a copy was interrupted
_CAUGHT_UP = 14  # tokens of a copy taken up again; by then it is the longest match itself
_BORROWED = 64  # tokens that are looked up in a corpus at a time


@dataclass(frozen=True, slots=True)
class Copy:
    """What to copy behind a match of `length` tokens: text[start:], or tokens from elsewhere.

    state  of the match in the automaton; None where a copy is taken up again
    tokens, count, share  from a corpus, how often the first followed the match, and its share there
    """

    start: int
    length: int
    state: int | None
    tokens: tuple[int, ...] = ()
    count: int = 1
    share: float = 1.0


class Text:
    """The text of one sequence, what to copy for its next token, and how such copies fared."""

    def __init__(self, prompt_length: int, history: History) -> None:
        self.automaton = SuffixAutomaton()
        self.history = history
        self.copy: Copy | None = None
        self.unread: list[int] = []  # emitted, and not followed yet
        self._prompt_length = prompt_length
        self._ahead: int | None = None  # where the copy that was right last would go on
        self._resumed: Copy | None = None
        self._borrowed: Copy | None = None
        self._since = 0  # tokens emitted after that copy's last right one

    @property
    def answer(self) -> list[int]:
        """The tokens of the output."""
        return [*self.automaton.text, *self.unread][self._prompt_length :]

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in emitted tokens; each scores the copy that stood for it, as a point mass."""
        text = self.automaton.text
        self.unread.clear()
        for token in tokens:
            position = len(text)
            self._since += 1
            self._resumed = None
            if self.copy is not None and not self.copy.tokens:
                self._score(self.copy, token)
            if self._borrowed is not None:
                self._borrowed = self._score_borrowed(self._borrowed, token)
            self.automaton.extend(token)
            if position + 1 >= self._prompt_length:
                self.copy = self._choose()

    def _score(self, copy: Copy, token: int) -> None:
        drafted, seen = self._next(copy, copy.state, 0)
        self.history.score(seen, drafted == token)
        if self.automaton.text[copy.start] == token and (copy.length > 1 or copy.state is None):
            self._ahead, self._since = copy.start + 1, 0
            if copy.state is None and copy.length + 1 < _CAUGHT_UP:
                self._resumed = Copy(copy.start + 1, copy.length + 1, None)

    def _score_borrowed(self, copy: Copy, token: int) -> Copy | None:
        right = copy.tokens[0] == token
        self.history.score(Evidence(ELSEWHERE, copy.length, copy.count), right)
        left = copy.tokens[1:]
        return Copy(0, copy.length + 1, None, left, copy.count) if right and left else None

    def borrow(self, corpus: Corpus, at_least: int) -> None:
        """Look for a match in the corpus that is longer than the own one, unless there is one already."""
        longer = max(at_least, 1 + (self.copy.length if self.copy is not None else 0))
        if self._borrowed is None and (match := corpus.find(np.array(self.automaton.text[-_BORROWED:], np.int32), longer)):
            count = round(match.occurrences * match.share)
            tokens = tuple(corpus.copy(match, _BORROWED))
            self._borrowed = Copy(0, match.length, None, tokens, max(count, 1), match.share)
        self.copy = self._choose()

    def _choose(self) -> Copy | None:
        own, borrowed = self._choose_own(), self._borrowed
        return borrowed if borrowed is not None and (own is None or borrowed.length > own.length) else own

    def _choose_own(self) -> Copy | None:
        automaton = self.automaton
        matched = automaton.match_length if automaton.predicted() is not None else 0
        own = Copy(automaton.match_end, matched, automaton.match_state) if matched else None
        resumed = self._resumed
        if resumed is not None and (matched < max(resumed.length, _OWN_MATCH) or automaton.match_end == resumed.start):
            return resumed
        if matched < _OWN_MATCH and self._ahead is not None and 0 < self._since <= AHEAD:
            return self._take_up(self._ahead) or own or self._behind_a_substitute(self._ahead)
        return own

    def _take_up(self, ahead: int) -> Copy | None:
        """Where the last token comes up next, shortly behind the place where the copy was interrupted."""
        text = self.automaton.text
        end = next((end for end in range(ahead, min(ahead + AHEAD + 1, len(text) - 1)) if text[end] == text[-1]), None)
        if end is None:
            return None
        length = 1
        while length < _OWN_MATCH and length <= end and text[end - length] == text[-1 - length]:
            length += 1
        return Copy(end + 1, length, None)

    def _behind_a_substitute(self, ahead: int) -> Copy | None:
        """As if the last token stood for the one that was to be copied."""
        return Copy(ahead + 1, 0, None) if self._since == 1 and ahead + 1 < len(self.automaton.text) else None

    def drafts(self, noise: StepNoise | None = None) -> Iterator[tuple[int, Evidence]]:
        """The tokens to propose, and what is known of each. Where several followed, the latest, or with
        noise the one that wins the race over their counts."""
        copy = self.copy
        if copy is None:
            return
        state, depth = copy.state, 0
        while not copy.tokens or depth < len(copy.tokens):
            race = None if noise is None else noise.race(noise.start + depth)
            token, seen = self._next(copy, state, depth, race)
            yield token, seen
            if state is not None:
                state = self.automaton.walk(state, token)
                if state == 0:
                    return
            depth += 1

    def _next(self, copy: Copy, state: int | None, depth: int, noise: RaceNoise | None = None) -> tuple[int, Evidence]:
        """The token that is drafted at a depth of a copy whose drafts so far led to `state`."""
        if copy.tokens:
            return copy.tokens[depth], Evidence(ELSEWHERE, copy.length + depth, copy.count)
        if state is None:
            return self.automaton.copied(copy.start, depth), Evidence(RESUMED, copy.length + depth)
        only = self.automaton.only_follower(state)
        if only is not None:
            return only, Evidence(ALONE, copy.length + depth, self.automaton.count(state, only))
        if noise is None:
            token = self._latest(copy, state, depth)
        else:
            ids, counts = self.followers(state)
            token = int(ids[sparse_race(ids, counts, noise)])
        return token, Evidence(MIXED, copy.length + depth, self.automaton.count(state, token))

    def _latest(self, copy: Copy, state: int, depth: int) -> int:
        """What followed the match's latest occurrence, where the state is still on it."""
        token = self.automaton.copied(copy.start, depth)
        if self.automaton.count(state, token):
            return token
        followers = self.automaton.followers(state)
        return max(followers, key=followers.__getitem__)

    def followers(self, state: int) -> tuple[TokenIds, Probs]:
        """The tokens that followed a state, ascending, and their shares: shapes (n,), n <= MOST_FOLLOWERS."""
        counts = list(self.automaton.followers(state).items())
        most = sorted(
            counts if len(counts) <= MOST_FOLLOWERS else heapq.nlargest(MOST_FOLLOWERS, counts, key=lambda item: item[1])
        )
        ids = np.array([token for token, _ in most], dtype=np.int64)
        shares = np.array([count for _, count in most], dtype=np.float64)
        return ids, shares / shares.sum()

    def survival(self, count: int, noise: StepNoise | None = None) -> tuple[list[int], list[float], bool]:
        """Up to `count` drafts, for each the probability that it and all before it are right, and whether
        anything else could have been drafted. Ends where next to nothing survives."""
        alive = 1.0 if self.copy is None else self.copy.share
        tokens, survival, mixed = [], [], False
        for token, seen in islice(self.drafts(noise), count):
            alive *= self.history.probability(seen)
            if alive < LEAST_SURVIVAL:
                break
            tokens.append(token)
            survival.append(alive)
            mixed = mixed or seen.kind == MIXED
        return tokens, survival, mixed

    def rows(self, tokens: Sequence[int]) -> SparseRows:
        """What each of the tokens of a copy was drawn from."""
        assert self.copy is not None
        state = self.copy.state
        ids: list[TokenIds] = []
        shares: list[Probs] = []
        for token in tokens:
            these, share = (np.array([token], np.int64), np.ones(1)) if state is None else self.followers(state)
            ids.append(these)
            shares.append(share)
            state = None if state is None else self.automaton.walk(state, token)
        return SparseRows(tuple(ids), tuple(shares))

    def draw(self, noise: StepNoise, count: int) -> list[int]:
        """Up to `count` tokens, each drawn from what followed those before it, with the step's draft noise."""
        copy = self.copy
        tokens: list[int] = []
        state = None if copy is None else copy.state
        while copy is not None and len(tokens) < count:
            if copy.tokens and len(tokens) == len(copy.tokens):
                break
            if state is None:
                tokens.append(self._next(copy, None, len(tokens))[0])
                continue
            ids, shares = self.followers(state)
            if not len(ids):
                break
            tokens.append(int(ids[inverse_cdf(shares, noise.uniform(Purpose.DRAFT, len(tokens)))]))
            state = self.automaton.walk(state, tokens[-1])
            if state == 0:
                break
        return tokens


class SuffixDrafter(Drafter):
    """Copies what followed the longest earlier occurrence of the end of the text, with an estimate of each
    token's survival for the policy to decide by.

    min_match  shorter matches propose nothing
    corpus     other texts to copy from; one that learns is given each answer when it has ended
    kept       likewise, of each owner (DraftRequest.owner): nobody else's answers are copied from it
    """

    forecasts = True

    def __init__(
        self, min_match: int = 1, *, corpus: Corpus | None = None, kept: Mapping[str, Corpus] = MappingProxyType({})
    ) -> None:
        if isinstance(min_match, bool) or not isinstance(min_match, int) or min_match < 1:
            raise InvalidParameter("min_match", min_match, "an integer >= 1")
        self.min_match = min_match
        self.corpus = corpus
        self._kept = dict(kept)
        self._texts: dict[int, Text] = {}
        self._owners: dict[int, str] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def forecast(self, requests: Sequence[DraftRequest]) -> list[Forecast | None]:
        return [Forecast(tuple(self._likely(request)[1])) for request in requests]

    def _propose(self, request: DraftRequest) -> Proposal:
        tokens, survival, mixed = self._likely(request)
        text, sampled = self._texts[request.sequence], request.params.temperature > 0
        if sampled and not request.coupled:  # the number is fixed before the first is drawn
            tokens = text.draw(request.noise, self._worth(request, survival))
            return Proposal(tuple(tokens), text.rows(tokens)) if tokens else Proposal()
        if not (sampled and mixed):
            return Proposal(tuple(tokens), PointMass(), survival=tuple(survival))
        if not self._worth(request, survival):  # a race costs as much as all the rest
            return Proposal()
        tokens, survival, _ = text.survival(request.max_draft, request.noise)
        return Proposal(tuple(tokens), text.rows(tokens), survival=tuple(survival)) if tokens else Proposal()

    def _worth(self, request: DraftRequest, survival: Sequence[float]) -> int:
        return request.worth(Forecast(tuple(survival))).length if survival else 0

    def _likely(self, request: DraftRequest) -> tuple[list[int], list[float], bool]:
        """What would be proposed as point masses."""
        text = self._texts.get(request.sequence)
        if text is None:
            history = History(SAMPLED if request.params.temperature > 0 else GREEDY)
            text = self._texts[request.sequence] = Text(request.prompt_length, history)
            self._owners[request.sequence] = request.owner
        text.follow(request.context[len(text.automaton.text) :].tolist())
        for corpus in self._corpora(request.owner):
            text.borrow(corpus, self.min_match)
        if text.copy is None or max(text.copy.length, 1) < self.min_match:
            return [], [], False
        return text.survival(request.max_draft)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.sequence in self._texts:
                self._texts[outcome.sequence].unread += outcome.tokens
                if outcome.finished:
                    self._forget(outcome.sequence)

    def _forget(self, sequence: int) -> None:
        text = self._texts.pop(sequence)
        for corpus in self._corpora(self._owners.pop(sequence)):
            if corpus.learning:
                corpus.add(text.answer)

    def _corpora(self, owner: str) -> list[Corpus]:
        """What an owner's texts may copy from, its own first."""
        return [corpus for corpus in (self._kept.get(owner), self.corpus) if corpus is not None]

    def save(self) -> None:
        for corpus in (self.corpus, *self._kept.values()):
            if corpus is not None:
                corpus.close()

    def close(self) -> None:
        for sequence in list(self._texts):  # what was not finished
            self._forget(sequence)
        self.save()
