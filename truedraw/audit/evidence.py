"""Evidence on whether tokens are drawn from p, the rows being known: bets in several directions, looked at as often as one likes.

    p, q   (vocab,): the target's law, and the one a draft was drawn from (a point mass is a law); None where nothing was drafted

A direction is a function g of the token that p and q fix before it is drawn. Only tokens with p > 0 are bet on; any other
contradicts the null at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from truedraw.audit.findings import DirectionReport, Fired
from truedraw.audit.power import LAMBDAS, confidence_bound, log_goal, smallest_shift
from truedraw.prove import goodness
from truedraw.types import Probs

CONFIDENCE = 0.95  # of the bounds on all directions together
_FLAT = 1e-12  # a direction that varies less says nothing about this row
_SAME = 1e-9  # total variation below which two rows are one
_PATH = 400  # points of the path that are kept at most


@dataclass(frozen=True, slots=True)
class Direction:
    """g(p, q) of the token that comes out.

    drafted      of positions with a draft, or of those without, where q is p
    more, less   what usually causes it when such tokens come more often, or less often, than p says
    """

    name: str
    values: Callable[[Probs, Probs], Probs]
    drafted: bool
    more: str
    less: str


def _likes_more(p: Probs, q: Probs) -> Probs:
    return np.where(q > p, 1.0, 0.0)


def _favourite(p: Probs, q: Probs) -> Probs:
    return goodness.argmax_q(p, p)


def _greedily_verified(p: Probs, q: Probs) -> Probs:
    """How much likelier a token is where a draft is kept if and only if it is the most likely token (FAULTS.md B16), and the
    residual takes its place else; 1 where the two rows are one."""
    left = np.maximum(p - q, 0.0)
    if left.sum() < _SAME:
        return np.ones_like(p)
    best = int(p.argmax())
    law = (1 - q[best]) * left / left.sum()
    law[best] += q[best]
    ratio: Probs = law / p
    return ratio


_LENIENT = "drafts are accepted without a check, or too readily; the check compares with another position's row"
_STRICT = "drafts are rejected too often without the replacement making up for it"
_SHARP = "a temperature that is too low, or the most likely token taken where one should be drawn"
_BLUNT = "a temperature that is too high, or one that is not applied everywhere; a kernel or quantisation that flattens"
_CUT = "truncation (top-p, top-k, min-p) where none was asked for, or twice"
_UNCUT = "truncation forgotten somewhere; noise that is too coarse for small probabilities"

DIRECTIONS: tuple[Direction, ...] = (
    Direction(
        "tokens that would be kept if drafted", goodness.residual_direction, True,
        "after a rejected draft the replacement is drawn from the target's whole row instead of what the draft left of it",
        "the replacement leaves out more than the draft had a claim to",
    ),
    Direction("tokens that the drafter likes more than the target does", _likes_more, True, _LENIENT, _STRICT),
    Direction(
        "tokens that the drafter finds likely", goodness.draft_probability, True,
        "a second chance for the draft: a fresh draw after a failed match; " + _LENIENT, _STRICT,
    ),
    Direction(
        "tokens that the drafter finds many times likelier than the target does", goodness.log_ratio, True, _LENIENT, _STRICT
    ),
    Direction(
        "tokens that are the drafter's favourite", goodness.argmax_q, True,
        "drafts that are the drafter's favourite but said to be drawn; " + _LENIENT, _STRICT,
    ),
    Direction(
        "tokens that a greedy verification would emit", _greedily_verified, True,
        "a draft is kept only if it is the target's most likely token, though temperature is above 0", _LENIENT,
    ),
    Direction("likely tokens", goodness.log_p, True, _SHARP + "; unlikely drafts that are dropped", _BLUNT),
    Direction("tokens that are the target's favourite", _favourite, True, "verification by the most likely token", _BLUNT),
    Direction("tokens with a probability below 1 in 10,000", goodness.tail, True, _UNCUT, _CUT),
    Direction("likely tokens, where nothing was drafted", goodness.log_p, False, _SHARP, _BLUNT),
    Direction(
        "tokens that are the target's favourite, where nothing was drafted", _favourite, False,
        "the token after an accepted block is the most likely one instead of a drawn one", _BLUNT,
    ),
    Direction("tokens with a probability below 1 in 10,000, where nothing was drafted", goodness.tail, False, _UNCUT, _CUT),
)  # fmt: skip

NUM_BETS = 2 * len(LAMBDAS) * len(DIRECTIONS)


@dataclass(slots=True)
class Evidence:
    """The null: each token has law p given the past. Under it the probability that `log_e` EVER reaches log(1/alpha) is at
    most alpha (Ville 1939): it is the average of bets that are fair, as in goodness.EProcess.

    count        tokens looked at; drafted: those with a draft
    violations   tokens with p = 0; informative: tokens whose row has more than one
    """

    alpha: float
    count: int = 0
    drafted: int = 0
    violations: int = 0
    informative: int = 0
    log_maximum: float = 0.0
    _log_wealth: NDArray[np.float64] = field(init=False)  # (directions, up and down, bets)
    _best: NDArray[np.float64] = field(init=False)  # (directions,): the largest log of each one's own average so far
    _sums: NDArray[np.float64] = field(init=False)  # (directions, 4): tokens, d, d^2, variance of d under p
    _path: list[tuple[int, float]] = field(init=False)
    _every: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        log_goal(1, self.alpha)
        self._log_wealth = np.zeros((len(DIRECTIONS), 2, len(LAMBDAS)))
        self._best = np.zeros(len(DIRECTIONS))
        self._sums = np.zeros((len(DIRECTIONS), 4))
        self._path = [(0, 0.0)]

    def add(self, p: Probs, q: Probs | None, token: int) -> None:
        """Take in one token, drawn (the null says) from p. p: sums to 1 within rounding."""
        self.count += 1
        self.drafted += q is not None
        if not 0 <= token < len(p) or not p[token] > 0:
            self.violations += 1
            self._log_wealth[:] = math.inf
            self._best[:] = math.inf
        else:
            possible = p > 0
            if not possible.all():
                token = int(np.count_nonzero(possible[:token]))
                p, q = p[possible], None if q is None else q[possible]
            if len(p) > 1:
                self.informative += 1
                row = p / p.sum()
                self._bet(row, row if q is None else q, q is not None, token)
        log_e = self.log_e
        self.log_maximum = max(self.log_maximum, log_e)
        self._remember(log_e)

    def _bet(self, p: Probs, q: Probs, drafted: bool, token: int) -> None:
        for i, direction in enumerate(DIRECTIONS):
            if direction.drafted != drafted:
                continue
            g = direction.values(p, q)
            low, high, mean = float(g.min()), float(g.max()), _mean(p, g)
            if high - low < _FLAT:
                continue
            gain = float(g[token]) - mean
            for way, (won, worst) in enumerate(((gain, mean - low), (-gain, high - mean))):
                stakes = np.minimum(LAMBDAS, 1 / worst) if worst > 0 else LAMBDAS
                with np.errstate(divide="ignore"):
                    self._log_wealth[i, way] += np.log(np.maximum(1 + stakes * won, 0.0))
            average = float(np.logaddexp.reduce(self._log_wealth[i], axis=None)) - math.log(2 * len(LAMBDAS))
            self._best[i] = max(self._best[i], average)
            width = high - low
            self._sums[i] += 1, gain / width, (gain / width) ** 2, _mean(p, (g - mean) ** 2) / width**2

    def _remember(self, log_e: float) -> None:
        """Points of the path, thinned out where there are many; the last is always there."""
        if self.count % self._every == 0:
            self._path.append((self.count, log_e))
        if len(self._path) > _PATH:
            self._path, self._every = self._path[::2], 2 * self._every

    @property
    def log_e(self) -> float:
        """The logarithm of the e-value now."""
        return float(np.logaddexp.reduce(self._log_wealth, axis=None)) - math.log(NUM_BETS)

    @property
    def rejects(self) -> bool:
        return self.log_maximum >= -math.log(self.alpha)

    @property
    def e_value(self) -> float:
        """The largest so far; infinite after a token that p forbids."""
        return math.exp(self.log_maximum) if self.log_maximum < 700 else math.inf

    @property
    def path(self) -> tuple[tuple[int, float], ...]:
        """(tokens, log10 of the e-value)."""
        points = list(self._path)
        if points[-1][0] != self.count:
            points.append((self.count, self.log_e))
        return tuple((count, log_e / math.log(10)) for count, log_e in points)

    def fired(self) -> tuple[Fired, ...]:
        """The directions whose own e-value reached 1/alpha, the strongest first, where the null is rejected at all; none
        after a forbidden token, which has no direction."""
        if self.violations or not self.rejects:
            return ()
        strong = [i for i in np.argsort(-self._best, kind="stable") if self._best[i] >= -math.log(self.alpha)]
        told = []
        for i in strong:
            direction, more = DIRECTIONS[i], self._sums[i, 1] >= 0
            name = f"too {'many' if more else 'few'} {direction.name}"
            told.append(Fired(name, _exp(self._best[i]), direction.more if more else direction.less))
        return tuple(told)

    def directions(self) -> tuple[DirectionReport, ...]:
        """What is known of each direction that could be looked at."""
        goal = log_goal(NUM_BETS, self.alpha)
        share = (1 - CONFIDENCE) / len(DIRECTIONS)
        told = []
        for i, direction in enumerate(DIRECTIONS):
            count, total, squares, variance = (float(x) for x in self._sums[i])
            if count:
                told.append(
                    DirectionReport(
                        direction.name,
                        samples=int(count),
                        e_value=_exp(self._best[i]),
                        shift=total / count,
                        bound=confidence_bound(total, squares, int(count), share),
                        detectable=smallest_shift(int(count), goal, variance / count),
                    )
                )
        return tuple(told)


def _mean(p: Probs, values: Probs) -> float:
    """E_p of the values. Shapes (vocab,)."""
    return float((p * values).sum())


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf
