"""How many tokens the requests of a batch draft together: as many as pay by the times of the passes so far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

KEPT = 256
"""Passes that the estimate is made from."""

LEAST_PASSES = 8
"""Before so many were timed, nothing is drafted but a try each PROBE passes."""

PROBE = 16
_PRIOR_SLOPE = 0.1  # of a plain pass, for each further token; worth _PRIOR_WEIGHT of these
_PRIOR_WEIGHT = 4.0
_OUTLIER = 4.0
MARGIN = 1.02
"""A step with drafts has to promise so much more than a plain one."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass as it was timed: requests in it, tokens that it read, seconds."""

    requests: int
    size: int
    seconds: float


class PassTimes:
    """Seconds of a pass by its size: a line through the latest passes, each against the median of plain ones.

    A pass takes base x (1 + slope x (size - requests)) for a batch of so many requests, where base is that batch's plain
    pass: what other requests cost is in it, and only further tokens are to be judged.
    """

    def __init__(self) -> None:
        self._passes: deque[Pass] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._passes)

    def observe(self, this: Pass) -> None:
        """A pass that took several times what each of its further tokens as a pass of its own would have taken had something
        else in it, and is left out."""
        plain = self.plain(this.requests)
        if plain is None or this.seconds < _OUTLIER * plain * (1 + this.size - this.requests):
            self._passes.append(this)

    def plain(self, requests: int) -> float | None:
        """Seconds of a pass without drafts, of the batch size nearest to this one; None: none was timed."""
        medians = self._medians()
        return medians[_nearest(medians, requests)] if medians else None

    def _medians(self) -> dict[int, float]:
        """Seconds of plain passes by the number of requests."""
        plain: dict[int, list[float]] = {}
        for this in self._passes:
            if this.size == this.requests:
                plain.setdefault(this.requests, []).append(this.seconds)
        return {requests: float(np.median(seconds)) for requests, seconds in plain.items()}

    @property
    def slope(self) -> float:
        """What each further token costs, in plain passes."""
        medians = self._medians()
        weight, above = _PRIOR_WEIGHT, _PRIOR_WEIGHT * _PRIOR_SLOPE
        for this in self._passes if medians else ():
            if this.size > this.requests:
                weight += this.size - this.requests
                above += this.seconds / medians[_nearest(medians, this.requests)] - 1
        return max(above / weight, 0.0)


def _nearest(counts: Iterable[int], wanted: int) -> int:
    return min(counts, key=lambda count: abs(math.log(count / wanted)))


def lengths(survivals: Sequence[Sequence[float]], slope: float) -> list[int]:
    """How many tokens each request drafts, so that the batch gets the most tokens in the time of a pass.

    survivals  of each request, for each depth the probability that the draft there and all before it are right: falling
    slope      what each further token costs, in plain passes
    Drafts are taken in the order of their survival, which keeps the depths of a request in order.
    """
    ranked = sorted(((alive, request) for request, alone in enumerate(survivals) for alive in alone), reverse=True)
    batch = len(survivals)
    expected, best, chosen = float(batch), MARGIN * batch, 0
    for count, (alive, _) in enumerate(ranked, 1):
        expected += alive
        rate = expected / (1 + slope * count)
        if rate > best:
            best, chosen = rate, count
    taken = [0] * batch
    for _, request in ranked[:chosen]:
        taken[request] += 1
    return taken
