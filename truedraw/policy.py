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

MARGIN = 0.5
"""Tokens that a step of copies must be expected to gain: below it, estimates are off by as much, and
nothing is tried. Replaying ninety answers, the worst ratio of open chat and of temperature 1 went from
0.984 to 0.995 with it, and the mean of the others stayed."""

DEFAULT_SURVIVAL = 0.5
"""Of a draft token nobody has an estimate for."""


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

    Point masses: everything is known, and `cut` decides. Drawn drafts: `limits` decides before anything
    is drawn, from acceptance by depth in the past. Every `probe_every` steps without a drawn draft one
    draft is tried, so that a bad start is no verdict for ever: at most one pass of two tokens and one
    draft in so many steps.
    """

    def __init__(self, profile: Profile, *, draws: bool = False, probe_every: int = 64, prior: float = 0.7) -> None:
        self.costs = PassCosts(profile)
        self._draws = draws
        self._probe_every = probe_every
        self._prior = prior
        self._emitted = self._seconds = 0.0
        self._draft_seconds = 0.0
        self._since_probe: dict[int, int] = {}

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        if not self._draws:
            return [LONGEST] * len(batch)
        survivals = [self._by_depth(state) for state in batch]
        chosen = self._choose(batch, survivals, self._draft_seconds)
        for i, state in enumerate(batch):
            waited = self._since_probe.get(state.sequence, 0)
            if chosen[i] == 0 and waited >= self._probe_every:
                chosen[i] = 1
            self._since_probe[state.sequence] = 0 if chosen[i] else waited + 1
        return chosen

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        return True

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        survivals = [
            proposal.survival
            if proposal.survival is not None
            else tuple(DEFAULT_SURVIVAL ** (i + 1) for i in range(len(proposal.tokens)))
            for proposal in batch
        ]
        return self._choose([proposal.state for proposal in batch], survivals, 0.0, MARGIN)

    def _choose(
        self, batch: Sequence[SequenceState], survivals: Sequence[Sequence[float]], draft_seconds: float, margin: float = 0.0
    ) -> list[int]:
        """How many drafts of each: the best number for all, taken by survival."""
        if not batch:
            return []
        plain = len(batch)
        ranked = sorted(((s, i) for i, each in enumerate(survivals) for s in each), key=lambda item: -item[0])
        if not ranked:
            return [0] * plain
        cached = max(state.length for state in batch)
        table = self.costs.table(plain + len(ranked), cached, plain)
        gains = np.cumsum([0.0, *(s for s, _ in ranked)])
        deepest = np.arange(len(ranked) + 1) if plain == 1 else _depths(ranked)
        rate = self._rate(float(table[plain]), plain)
        values = gains - rate * (table[plain:] - table[plain] + draft_seconds * deepest)
        best = int(values.argmax())
        if values[best] < margin:
            return [0] * plain
        counts = [0] * plain
        for _, i in ranked[:best]:
            counts[i] += 1
        return counts

    def _rate(self, plain_seconds: float, sequences: int) -> float:
        plain = sequences / plain_seconds
        return max(plain, self._emitted / self._seconds) if self._seconds > 0 else plain

    def _by_depth(self, state: SequenceState) -> list[float]:
        """Estimated survival by depth: what was seen of this sequence, with a prior worth four drafts."""
        survival, alive = [], 1.0
        for depth in range(LONGEST):
            reached = state.accepted_by_depth[depth - 1] if 0 < depth <= len(state.accepted_by_depth) else None
            tried = state.proposed_by_depth[depth] if depth < len(state.proposed_by_depth) else 0
            tried = tried if reached is None else min(tried, reached)
            kept = state.accepted_by_depth[depth] if depth < len(state.accepted_by_depth) else 0
            overall = (state.accepted + 4 * self._prior) / (state.accepted + _rejections(state) + 4)
            alive *= (kept + 4 * overall) / (tried + 4)
            survival.append(alive)
        return survival

    def observe(self, step: StepTiming) -> None:
        if not step.states:
            return
        cached = max(state.length for state in step.states)
        self.costs.observe(step.pass_size, cached, len(step.states), step.target_seconds)
        emitted = sum(step.num_accepted) + len(step.states)
        total = step.draft_seconds + step.target_seconds + step.verify_seconds
        self._emitted = 0.98 * self._emitted + emitted
        self._seconds = 0.98 * self._seconds + total
        longest = max(step.num_proposed, default=0)
        if self._draws and longest:
            each = step.draft_seconds / longest
            self._draft_seconds = each if not self._draft_seconds else 0.9 * self._draft_seconds + 0.1 * each


def _depths(ranked: Sequence[tuple[float, int]]) -> Seconds:
    """How deep the deepest sequence drafts when the first n are taken, shape (len(ranked) + 1,)."""
    counts: dict[int, int] = {}
    deepest = [0]
    for _, i in ranked:
        counts[i] = counts.get(i, 0) + 1
        deepest.append(max(deepest[-1], counts[i]))
    return np.asarray(deepest)


def _rejections(state: SequenceState) -> int:
    """Drafts that were tested and rejected: at most one a proposal."""
    return max(
        0,
        (state.proposed_by_depth[0] if state.proposed_by_depth else 0)
        - (state.accepted_by_depth[-1] if state.accepted_by_depth else 0),
    )
