"""How many tokens to draft: always the same, or as many as pay on this machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.acceptance import Acceptance
from truedraw.errors import InvalidParameter
from truedraw.profile import Profile
from truedraw.protocols import Forecast, LengthPolicy, PointProposal, RowStatistics, SequenceState, StepTiming, Worth

Seconds: TypeAlias = npt.NDArray[np.float64]

LONGEST = 31
"""Drafts of one sequence: a pass of 32 tokens is where the profile ends."""

LOSS_SHARE = 0.01
START_LOSS = 2.0
SHARED_LOSS = 1.0
MOST_CREDIT = 20.0
"""What speculation may have cost, net of what it has won: so much of the time, and so many plain steps of
each text, fewer where it shares its passes; and how many plain steps of winnings it may lose again. See Ledger."""

PROBE_SHARE = 1 / 256
"""Of the time that may go into drafts that are not expected to pay."""

PLAIN_EVERY = 128
"""Steps with drafts in a row after which one is plain, or a few, unless drafts win much: what a plain pass takes is then
known from passes that were made, and not from a profile of another hour."""

_PLAIN_MOST = 6  # plain steps in a row, while what they take is not what was expected
_MUCH = 1.5  # times plain decoding's speed
_LEAST_SURVIVAL = 0.02
_SLOWEST = 1.5  # of what the curve says: a pass that took longer stood beside another program


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
        self._tables: dict[tuple[int, int], Seconds] = {}
        self._correction = np.ones(1)

    def table(self, up_to: int, cached: int, sequences: int) -> Seconds:
        """Seconds of passes of 0 .. up_to tokens, shape (up_to + 1,)."""
        base = self._base(up_to, cached, sequences)
        if up_to >= len(self._correction):
            self._correct(len(base))
        corrected: Seconds = base[: up_to + 1] * self._correction[: up_to + 1]
        return corrected

    def _base(self, up_to: int, cached: int, sequences: int) -> Seconds:
        """What the profile says, of so many tokens at least."""
        place = (cached // 64, sequences)
        table = self._tables.get(place)
        if table is None or up_to >= len(table):
            table = self._tables[place] = self._profile.curve(cached, sequences).table(max(up_to, LONGEST + sequences))
        return table

    def _correct(self, length: int) -> None:
        seen = sorted(self._factors)
        self._correction = np.interp(np.arange(length), seen, [self._factors[size] for size in seen]) if seen else np.ones(length)

    def observe(self, size: int, cached: int, sequences: int, seconds: float) -> None:
        expected = float(self._base(size, cached, sequences)[size])
        ratio = math.log(seconds / expected) if seconds > 0 else 0.0
        before = math.log(self._factors.get(size, 1.0))
        step = min(max(ratio - before, -self._CLAMP), self._CLAMP)
        self._factors[size] = math.exp(before + (self._RATE if size in self._factors else 0.5) * step)
        self._correct(max(len(self._correction), size + 1))


class Ledger:
    """What speculation has won and lost, in plain steps, so that its losses are bounded whatever the
    estimates are worth: drafts whose cost is not covered, were all of them rejected, are not verified.

    There is one account for the engine, which holds START_LOSS at least when a text begins, and, where several
    sequences share a pass, one for each of them: the drafts of one make the pass longer for all. By induction
    the time of n texts from the start on is at most (plain + n x START_LOSS steps) / (1 - LOSS_SHARE), that of a
    text, from any moment on, (plain + MOST_CREDIT steps) / (1 - LOSS_SHARE), and that of a sequence in a batch
    (plain + SHARED_LOSS steps) / (1 - LOSS_SHARE) in steps of its batch; as passes cost what the curve says.
    """

    def __init__(self) -> None:
        self.steps = START_LOSS
        self._each: dict[int, float] = {}

    def admit(self, batch: Sequence[SequenceState]) -> None:
        """The batch of the next step; a text that was not in the one before begins."""
        if any(state.sequence not in self._each for state in batch):
            self.steps = max(self.steps, START_LOSS)

    def covered(self, batch: Sequence[SequenceState]) -> float:
        """Plain steps that may be lost in the next pass."""
        if len(batch) < 2:
            return self.steps
        return min(self.steps, *(self._each.get(state.sequence, SHARED_LOSS) for state in batch))

    def book(self, step: StepTiming, plain_steps: float, *, decided: bool) -> None:
        """A step was made, in the time of so many plain ones. decided: there was something to draft."""
        lost = (1 - LOSS_SHARE * decided) * plain_steps
        sequences = len(step.states)
        self.steps = min(self.steps + 1 + sum(step.num_accepted) / sequences - lost, MOST_CREDIT)
        accounts = ((state.sequence, self._each.get(state.sequence, SHARED_LOSS)) for state in step.states)
        self._each = {
            sequence: min(account + 1 + accepted - lost, MOST_CREDIT)
            for (sequence, account), accepted in zip(accounts, step.num_accepted, strict=True)
        }


class Controller(LengthPolicy):
    """Drafts what pays: the length that maximises, over the WHOLE cost curve,

        sum of S_i over the drafts  -  rate x (seconds of the pass with them - seconds without)

    with S_i the estimated probability that draft i survives, and rate the tokens per second of the run
    so far, never below plain decoding's (a renewal reward rate, tracked as Dinkelbach's iteration does).
    The curve is concave at its start, so a rule that adds drafts while each pays for itself would stop
    at none. In a batch all sequences share one pass: their drafts are taken in the order of their
    survival, and one number of drafts is chosen for all.

    Drafts that come with an estimate (point masses; all under the coupled rule): `cut` decides. Drafters that
    can forecast: `worth` decides before anything is drawn, and again behind drafts that are drawn and stay, and
    takes what the other sequences of the batch drafted lately for what they will draft now. All others: `limits`
    decides before anything is drawn, from acceptance by depth in the past. A ledger bounds what wrong estimates
    can cost. Where drafts cost something and none pays, one is tried from time to time, so that a bad start is no
    verdict for ever: probes take PROBE_SHARE of the time at most; and where all steps draft, a plain one from time
    to time tells whether that still is a gain.

    blind  the drafters, by the name that sequences know them by, that estimate no survival: it is learned from
           what was verified
    """

    def __init__(self, profile: Profile, *, blind: Collection[str] = (), prior: float = 0.7) -> None:
        self.costs = PassCosts(profile)
        self.ledger = Ledger()
        self._prior = prior
        self._blind = {name: Acceptance(prior) for name in blind}
        self._emitted = self._seconds = 0.0
        self._newly_blind: set[str] = set()
        self._draft_seconds = 0.0
        self._drafted = 0.0  # tokens that a sequence drafts in a step, lately
        self._batch: Sequence[SequenceState] = ()  # of this step
        self._decided = False  # there was something to draft in it
        self._probe_seconds = math.inf  # that may be spent on the next probe; the first is free
        self._probing: int | None = None  # the sequence that probes in this step
        self._since_plain = 0  # steps since a plain pass was timed

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        self._batch = batch
        self._decided = False
        self.ledger.admit(batch)
        self._probing = None
        if self._wants_plain_pass(batch):
            return [0] * len(batch)
        blind = [i for i, state in enumerate(batch) if state.drafter in self._blind]
        limits = [LONGEST] * len(batch)
        if not blind:
            return limits
        survivals = [self._blind[batch[i].drafter].survival(batch[i].sequence, LONGEST, _LEAST_SURVIVAL) for i in blind]
        chosen = self._choose([batch[i] for i in blind], survivals, self._draft_seconds)
        if not any(chosen) and self._may_probe(batch[blind[0]], self._draft_seconds):
            chosen[0] = 1
        for i, length in zip(blind, chosen, strict=True):
            limits[i] = length
        return limits

    def _wants_plain_pass(self, batch: Sequence[SequenceState]) -> bool:
        if self._since_plain < PLAIN_EVERY or not batch:
            return False
        plain = float(self.costs.table(len(batch), max(state.length for state in batch), len(batch))[-1])
        return self._emitted * plain < _MUCH * self._seconds * len(batch)

    def worth(self, sequence: SequenceState, forecast: Forecast) -> Worth:
        self._decided = True
        gains = np.cumsum([0.0, *forecast.survival])
        drafts = np.arange(len(gains))
        sequences = max(len(self._batch), 1)
        others = sequences + round(self._drafted * (sequences - 1))
        table = self.costs.table(others + len(forecast.survival), sequence.length, sequences)
        seconds = table[others:] - table[others] + forecast.seconds * drafts + forecast.start * (drafts > 0)
        values = gains - self._rate(float(table[sequences]), sequences) * seconds
        values[seconds > self.ledger.covered(self._batch) * table[sequences]] = -math.inf
        if forecast.drawn:
            rest = values[forecast.drawn :]
            length = forecast.drawn + int(rest.argmax())
            return Worth(length, max(0.0, float(rest.max() - rest[0])) if math.isfinite(rest[0]) else 0.0)
        length = int(values.argmax())
        if length == 0 and forecast.survival and forecast.seconds > 0:
            length = int(self._may_probe(sequence, forecast.seconds + forecast.start))
        return Worth(length, max(0.0, float(values[length])))

    def _may_probe(self, sequence: SequenceState, draft_seconds: float) -> bool:
        """One sequence in a step, once the share of time that probes may take covers it, and the ledger does."""
        sequences = max(len(self._batch), 1)
        table = self.costs.table(sequences + 1, sequence.length, sequences)
        seconds = float(table[-1] - table[-2]) + draft_seconds
        if seconds > self._probe_seconds or seconds > self.ledger.covered(self._batch) * float(table[-2]):
            return False
        if self._probing is None:
            self._probing = sequence.sequence
        return self._probing == sequence.sequence

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        return True

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        lengths = [len(proposal.tokens) for proposal in batch]
        estimated: list[tuple[int, Sequence[float]]] = []
        for i, proposal in enumerate(batch):
            if proposal.survival is not None:
                estimated.append((i, proposal.survival))
            elif proposal.state.drafter not in self._blind:  # from the next step on `limits` decides
                self._newly_blind.add(proposal.state.drafter)
                lengths[i] = min(1, lengths[i])
        chosen = self._choose([batch[i].state for i, _ in estimated], [survival for _, survival in estimated], 0.0)
        for (i, _), length in zip(estimated, chosen, strict=True):
            lengths[i] = length
        return lengths

    def _choose(self, batch: Sequence[SequenceState], survivals: Sequence[Sequence[float]], draft_seconds: float) -> list[int]:
        """How many drafts of each: the best number for all, taken by survival."""
        if not batch:
            return []
        self._decided = True
        plain = max(len(self._batch), len(batch))
        cached = max(state.length for state in batch)
        single = len(batch) == 1
        ranked = [] if single else sorted(((s, i) for i, each in enumerate(survivals) for s in each), key=lambda item: -item[0])
        best_first = survivals[0] if single else [s for s, _ in ranked]
        table = self.costs.table(plain + len(best_first), cached, plain)
        rate = self._rate(float(table[plain]), plain)
        if not best_first or sum(best_first) <= rate * float(table[plain + 1] - table[plain]):
            return [0] * len(batch)  # no number of drafts can pay
        deepest = np.arange(len(best_first) + 1) if single else _depths(ranked)
        seconds = table[plain:] - table[plain] + draft_seconds * deepest
        values = np.cumsum([0.0, *best_first]) - rate * seconds
        values[seconds > self.ledger.covered(self._batch) * table[plain]] = -math.inf
        number = int(values.argmax())
        if single:
            return [number]
        counts = [0] * len(batch)
        for _, i in ranked[:number]:
            counts[i] += 1
        return counts

    def _rate(self, plain_seconds: float, sequences: int) -> float:
        plain = sequences / plain_seconds
        return max(plain, self._emitted / self._seconds) if self._seconds > 0 else plain

    def pass_seconds(self, batch: Sequence[SequenceState], num_drafts: int) -> float | None:
        """By the curve, as corrected so far."""
        if not batch:
            return None
        return float(self.costs.table(len(batch) + num_drafts, max(state.length for state in batch), len(batch))[-1])

    def observe(self, step: StepTiming) -> None:
        if not step.states:
            return
        cached = max(state.length for state in step.states)
        sequences, drafts = len(step.states), sum(step.num_proposed)
        target_seconds = step.target_seconds
        unsettled = abs(math.log(max(target_seconds, 1e-9) / float(self.costs.table(sequences, cached, sequences)[-1]))) > 0.1
        if step.num_read:  # prompts went along: what it would have taken without them is not known
            target_seconds = float(self.costs.table(sequences + drafts, cached, sequences)[-1])
        else:
            self.costs.observe(step.pass_size, cached, sequences, target_seconds)
        seconds = step.draft_seconds + target_seconds + step.verify_seconds
        self._emitted = 0.98 * self._emitted + sum(step.num_accepted) + sequences
        self._seconds = 0.98 * self._seconds + seconds
        table = self.costs.table(sequences + drafts, cached, sequences)
        taken = 1.0
        if drafts:
            pass_seconds = min(max(target_seconds, float(table[-1])), _SLOWEST * float(table[-1]))
            taken = (pass_seconds + step.draft_seconds) / float(table[sequences])
        self.ledger.book(step, taken, decided=self._decided)
        if drafts or step.num_read or (PLAIN_EVERY <= self._since_plain < PLAIN_EVERY + _PLAIN_MOST and unsettled):
            self._since_plain += 1
        else:
            self._since_plain = 0
        self._drafted = 0.9 * self._drafted + 0.1 * sum(step.num_proposed) / len(step.states)
        self._probe_seconds += PROBE_SHARE * seconds
        if any(state.sequence == self._probing and n for state, n in zip(step.states, step.num_proposed, strict=True)):
            self._probe_seconds = 0.0
        for name in self._newly_blind:
            self._blind[name] = Acceptance(self._prior)
        self._newly_blind.clear()
        blind = [i for i, state in enumerate(step.states) if state.drafter in self._blind]
        longest = max((step.num_proposed[i] for i in blind), default=0)
        if not longest:
            return
        for i in blind:
            self._blind[step.states[i].drafter].observe(step.states[i].sequence, step.tested[i])
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
