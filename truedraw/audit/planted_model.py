"""Faults that are planted in the user's own engine, to show that the audit would see them: a rule that is wrong in a share of
its steps, that share being what makes the shift as large as was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.prove.goodness import naive_resample_law
from truedraw.sampling import TargetRows
from truedraw.types import Probs, Proposal, Verdict
from truedraw.verify import Rule, lossy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token was decided: its rows (q None: nothing was drafted there), whether the proposal was a chain, and whether
    it is the first token of its step."""

    p: Probs
    q: Probs | None
    chain: bool
    first: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """make: the faulty rule, from the right one. shift: total variation of a token's law under it, from p."""

    name: str
    make: Callable[[Rule], Rule]
    shift: Callable[[Place], float]


def _naive(rule: Rule) -> Rule:
    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        return (lossy.biased_resample if len(proposal) and proposal.is_chain else rule)(proposal, rows, noise)

    return verify


def _favourite(rule: Rule) -> Rule:
    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        verdict = rule(proposal, rows, noise)
        if verdict.origin == "residual":
            return verdict
        p = rows[verdict.path[-1] + 1 if verdict.path else 0]
        return Verdict(verdict.path, int(p.argmax()), verdict.origin)

    return verify


def _unchecked(rule: Rule) -> Rule:
    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        if not len(proposal) or not proposal.is_chain or not 0 <= proposal.tokens[0] < len(rows[0]):
            return rule(proposal, rows, noise)
        return Verdict((0,), rows.race(1, noise.race(noise.start + 1)), "bonus" if len(proposal) == 1 else "residual")

    return verify


def _naive_shift(at: Place) -> float:
    return 0.0 if at.q is None or not at.chain else _tv(at.p, naive_resample_law(at.p, at.q / at.q.sum()))


def _favourite_shift(at: Place) -> float:
    return 1 - float(at.p.max()) if at.q is None else 0.0


def _unchecked_shift(at: Place) -> float:
    return 0.0 if at.q is None or not at.chain or not at.first else _tv(at.p, at.q)


def _tv(p: Probs, law: Probs) -> float:
    return float(np.abs(p - law).sum()) / 2


FAULTS: tuple[Fault, ...] = (
    Fault("after a rejected draft, a draw from the target's whole row", _naive, _naive_shift),
    Fault("the most likely token where nothing was drafted", _favourite, _favourite_shift),
    Fault("the first draft is never checked", _unchecked, _unchecked_shift),
)


@dataclass(slots=True)
class Sizes:
    """Sums over tokens of what each fault, at full strength, shifts."""

    count: int = 0
    totals: list[float] = field(default_factory=lambda: [0.0] * len(FAULTS))

    def add(self, place: Place) -> None:
        self.count += 1
        for i, fault in enumerate(FAULTS):
            self.totals[i] += fault.shift(place)

    def choose(self, size: float) -> tuple[Fault, float]:
        """The first fault that is as large as `size` a token, else the largest; and its size at full strength."""
        means = [total / max(self.count, 1) for total in self.totals]
        large = [i for i, mean in enumerate(means) if mean >= size]
        best = large[0] if large else int(np.argmax(means))
        return FAULTS[best], means[best]


def in_a_share(right: Rule, wrong: Rule, share: float, seed: int) -> Rule:
    """`wrong` in that share of the steps, chosen by chance and by nothing else."""
    chance = np.random.default_rng(seed)

    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        return (wrong if chance.random() < share else right)(proposal, rows, noise)

    return verify
