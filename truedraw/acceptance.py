"""How often drafts are accepted, by depth and by what their drafter thinks of them: learned from what verifications tell."""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraw.protocols import Tested

PRIOR_WEIGHT = 4.0
"""Drafts of a sequence that weigh as much as what was seen of all."""

_FORGET = 0.999
_REMEMBERED = 256  # sequences


@dataclass(slots=True)
class _Depths:
    reached: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def add(self, tested: Tested) -> None:
        for depth, (reached, kept) in enumerate(tested):
            if depth == len(self.reached):
                self.reached.append(0.0)
                self.kept.append(0.0)
            self.reached[depth] += reached
            self.kept[depth] += kept


class Acceptance:
    """Acceptance by depth of one drafter.

    prior  of a draft before anything was seen
    """

    def __init__(self, prior: float = 0.7) -> None:
        self._prior = prior
        self._reached = self._kept = 0.0
        self._sequences: OrderedDict[int, _Depths] = OrderedDict()

    def observe(self, sequence: int, tested: Tested) -> None:
        """Take in one verification."""
        if not tested:
            return
        self._sequences.setdefault(sequence, _Depths()).add(tested)
        self._sequences.move_to_end(sequence)
        while len(self._sequences) > _REMEMBERED:
            self._sequences.popitem(last=False)
        self._reached = _FORGET * self._reached + sum(reached for reached, _ in tested)
        self._kept = _FORGET * self._kept + sum(kept for _, kept in tested)

    def survival(self, sequence: int, length: int, least: float = 0.0) -> tuple[float, ...]:
        """For each of up to `length` drafts: that it and all before it are accepted; ends below `least`."""
        seen = self._sequences.get(sequence, _Depths())
        overall = (self._kept + PRIOR_WEIGHT * self._prior) / (self._reached + PRIOR_WEIGHT)
        own = (sum(seen.kept) + PRIOR_WEIGHT * overall) / (sum(seen.reached) + PRIOR_WEIGHT)
        alive, survival = 1.0, []
        for depth in range(length):
            known = depth < len(seen.reached)
            reached, kept = (seen.reached[depth], seen.kept[depth]) if known else (0.0, 0.0)
            alive *= (kept + PRIOR_WEIGHT * own) / (reached + PRIOR_WEIGHT)
            if alive < least:
                break
            survival.append(alive)
        return tuple(survival)


class Confidence:
    """Acceptance of drafts by the probability that their drafter gave them: it tells most of what can be known of a draft
    before it is verified (EAGLE-2, arXiv 2406.16858, section 3.1)."""

    EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)

    def __init__(self) -> None:
        self._reached = [PRIOR_WEIGHT] * (len(self.EDGES) + 1)
        self._kept = [PRIOR_WEIGHT * (low + high) / 2 for low, high in zip((0.0, *self.EDGES), (*self.EDGES, 1.0), strict=True)]

    def observe(self, probabilities: Sequence[float], tested: Tested) -> None:
        """Take in one verification. probabilities: of each draft, by its drafter."""
        for probability, (reached, kept) in zip(probabilities, tested, strict=False):
            place = bisect(self.EDGES, probability)
            self._reached[place] = _FORGET * self._reached[place] + reached
            self._kept[place] = _FORGET * self._kept[place] + kept

    def acceptance(self, probability: float) -> float:
        """Of a draft that its drafter gave this probability, where all before it are accepted."""
        place = bisect(self.EDGES, probability)
        return self._kept[place] / self._reached[place]
