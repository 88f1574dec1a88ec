"""How often drafts are accepted, by depth: learned from what verifications tell, sequence by sequence."""

from __future__ import annotations

from collections import OrderedDict
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
