"""How many tokens to draft: always the same, or as many as pay on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import InvalidParameter
from truedraw.profile import Profile
from truedraw.protocols import LengthPolicy, PointProposal, RowStatistics, SequenceState, StepTiming

Seconds: TypeAlias = npt.NDArray[np.float64]

LONGEST = 31
"""Drafts of one sequence: a pass of 32 tokens is where the profile ends."""

CAUTION = 1.2
"""What a copy costs counts so many times: estimates are off, and a lost gain weighs less than a loss.
Replaying ninety answers of three weight types, the worst ratio of open chat and of temperature 1 went
from 0.958 to 0.978 with it, and copying workloads kept 0.78 of what hindsight reaches (0.79 without)."""

_POOL = 0.999
_LEAST_SURVIVAL = 0.02


class FixedLength(LengthPolicy):
    """The same draft length at every step; 0 is plain decoding."""

    def __init__(self, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InvalidParameter("draft_length", length, "an integer >= 0, or 'auto'")
        self.length = length

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        return [self.length] * len(batch)

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        return True

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        return [len(proposal.tokens) for proposal in batch]

    def observe(self, step: StepTiming) -> None:
        return None


class PassCosts:
    """Seconds of a pass by its size: a profile, corrected by the passes that were really made.

    Each size has a factor, the ratio of what was seen to what the profile says, forgotten with a half
    life of some twenty passes; a size that was not seen takes the factor of the nearest one that was.
    """

    _RATE = 0.1
    _CLAMP = 0.25  # a single pass that took far longer says little: another program ran

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._factors: dict[int, float] = {}
        self._tables: dict[tuple[int, int, int], Seconds] = {}

    def table(self, up_to: int, cached: int, sequences: int) -> Seconds:
        """Seconds of passes of 0 .. up_to tokens, shape (up_to + 1,)."""
        place = (up_to, cached // 64, sequences)
        if place not in self._tables:
            self._tables[place] = self._profile.curve(cached, sequences).table(up_to)
        corrected: Seconds = self._tables[place] * self._correction(up_to)
        return corrected

    def _correction(self, up_to: int) -> Seconds:
        if not self._factors:
            return np.ones(up_to + 1)
        seen = sorted(self._factors)
        return np.interp(np.arange(up_to + 1), seen, [self._factors[size] for size in seen])

    def observe(self, size: int, cached: int, sequences: int, seconds: float) -> None:
        expected = float(self._profile.curve(cached, sequences).table(size)[size])
        ratio = math.log(seconds / expected) if seconds > 0 else 0.0
        before = math.log(self._factors.get(size, 1.0))
        step = min(max(ratio - before, -self._CLAMP), self._CLAMP)
        self._factors[size] = math.exp(before + (self._RATE if size in self._factors else 0.5) * step)


class Controller(LengthPolicy):
    """Drafts what pays: the length that maximises, over the WHOLE cost curve,

        sum of S_i over the drafts  -  rate x (seconds of the pass with them - seconds without)

    with S_i the estimated probability that draft i survives, and rate the tokens per second of the run
    so far, never below plain decoding's (a renewal reward rate, tracked as Dinkelbach's iteration does).
    The curve is concave at its start, so a rule that adds drafts while each pays for itself would stop
    at none. In a batch all sequences share one pass: their drafts are taken in the order of their
    survival, and one number of drafts is chosen for all.

    Point masses with an estimate of their own: `cut` decides. All others, drawn drafts first of all:
    `limits` decides before anything is drawn, from acceptance by depth in the past. After `probe_every`
    steps without a draft one is tried, so that a bad start is no verdict for ever: at most one pass of two
    tokens and one draft in so many steps of the engine.

    draws  the drafter's drafts are drawn
    """

    def __init__(self, profile: Profile, *, draws: bool = False, probe_every: int = 256, prior: float = 0.7) -> None:
        self.costs = PassCosts(profile)
        self._blind = draws  # nobody estimates survival: it is learned from what was verified
        self._probe_every = self._since_probe = probe_every
        self._prior = prior
        self._tried = self._kept = 0.0
        self._emitted = self._seconds = 0.0
        self._draft_seconds = 0.0

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        if not self._blind or not batch:
            return [LONGEST] * len(batch)
        chosen = self._choose(batch, [self._by_depth(state) for state in batch], self._draft_seconds)
        if any(chosen):
            self._since_probe = 0
        elif self._since_probe >= self._probe_every:
            self._since_probe = 0
            chosen[0] = 1
        else:
            self._since_probe += 1
        return chosen

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        return True

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        if batch and all(proposal.survival is None for proposal in batch):
            known, self._blind = self._blind, True
            return [len(proposal.tokens) if known else min(1, len(proposal.tokens)) for proposal in batch]
        survivals = [
            self._by_depth(proposal.state)[: len(proposal.tokens)] if proposal.survival is None else proposal.survival
            for proposal in batch
        ]
        return self._choose([proposal.state for proposal in batch], survivals, 0.0, CAUTION)

    def _choose(
        self, batch: Sequence[SequenceState], survivals: Sequence[Sequence[float]], draft_seconds: float, caution: float = 1.0
    ) -> list[int]:
        """How many drafts of each: the best number for all, taken by survival."""
        plain = len(batch)
        ranked = sorted(((s, i) for i, each in enumerate(survivals) for s in each), key=lambda item: -item[0])
        if not ranked:
            return [0] * plain
        cached = max(state.length for state in batch)
        table = self.costs.table(plain + len(ranked), cached, plain)
        gains = np.cumsum([0.0, *(s for s, _ in ranked)])
        deepest = np.arange(len(ranked) + 1) if plain == 1 else _depths(ranked)
        rate = self._rate(float(table[plain]), plain)
        values = gains - caution * rate * (table[plain:] - table[plain] + draft_seconds * deepest)
        counts = [0] * plain
        for _, i in ranked[: int(values.argmax())]:
            counts[i] += 1
        return counts

    def _rate(self, plain_seconds: float, sequences: int) -> float:
        plain = sequences / plain_seconds
        return max(plain, self._emitted / self._seconds) if self._seconds > 0 else plain

    def _by_depth(self, state: SequenceState) -> list[float]:
        """Estimated survival by depth: what was seen of this sequence, with a prior worth four drafts, which is
        what was seen of all sequences, with one of its own."""
        overall = (self._kept + 4 * self._prior) / (self._tried + 4)
        tested = state.accepted + _rejections(state)
        own = (state.accepted + 4 * overall) / (tested + 4)
        survival, alive = [], 1.0
        for depth in range(LONGEST):
            tried, kept = _at_depth(state, depth)
            alive *= (kept + 4 * own) / (tried + 4)
            if alive < _LEAST_SURVIVAL:
                break
            survival.append(alive)
        return survival

    def observe(self, step: StepTiming) -> None:
        if not step.states:
            return
        cached = max(state.length for state in step.states)
        self.costs.observe(step.pass_size, cached, len(step.states), step.target_seconds)
        self._emitted = 0.98 * self._emitted + sum(step.num_accepted) + len(step.states)
        self._seconds = 0.98 * self._seconds + step.draft_seconds + step.target_seconds + step.verify_seconds
        longest = max(step.num_proposed, default=0)
        if not self._blind or not longest:
            return
        for proposed, accepted in zip(step.num_proposed, step.num_accepted, strict=True):
            self._tried = _POOL * self._tried + min(proposed, accepted + 1)
            self._kept = _POOL * self._kept + accepted
        each = step.draft_seconds / longest
        self._draft_seconds = each if not self._draft_seconds else 0.9 * self._draft_seconds + 0.1 * each


def _depths(ranked: Sequence[tuple[float, int]]) -> Seconds:
    """How deep the deepest sequence drafts when the first n are taken, shape (len(ranked) + 1,)."""
    counts: dict[int, int] = {}
    deepest = [0]
    for _, i in ranked:
        counts[i] = counts.get(i, 0) + 1
        deepest.append(max(deepest[-1], counts[i]))
    return np.asarray(deepest, dtype=np.float64)


def _at_depth(state: SequenceState, depth: int) -> tuple[int, int]:
    """How often a draft of this sequence was tested at a depth, and how often kept."""
    if depth >= len(state.proposed_by_depth):
        return 0, 0
    reached = state.accepted_by_depth[depth - 1] if depth else state.proposed_by_depth[0]
    return min(state.proposed_by_depth[depth], reached), state.accepted_by_depth[depth]


def _rejections(state: SequenceState) -> int:
    """Drafts that were tested and rejected."""
    pairs = [_at_depth(state, depth) for depth in range(len(state.proposed_by_depth))]
    return sum(tried - kept for tried, kept in pairs)
