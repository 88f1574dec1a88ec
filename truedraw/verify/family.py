"""Every exact rule for one position whose replacement does not depend on the rejected token.

A draft x ~ q is kept with probability r(x), else the token is drawn from a. The law is p if and
only if q r + (1 - A) a = p with A = sum q r, so a = (p - q r) / (1 - A), which is a law exactly when
r <= min(1, p/q). The largest r gives Leviathan et al. 2023; a = p gives their "non-iterative" variant
(arXiv 2211.17192, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import RuleError
from truedraw.protocols import StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, inverse_cdf, residual
from truedraw.types import Probs, Proposal, Verdict, probabilities
from truedraw.verify import Rule, plain, probability, require_chain, rows_for

PerToken: TypeAlias = npt.ArrayLike | Callable[[Probs, Probs], npt.ArrayLike]
"""Numbers for each token, shape (vocab,): the array itself, or a function of the rows (p, q)."""

SLACK = 1e-9
"""How far rounding may carry a rule over its bound."""


def family(r: PerToken) -> Rule:
    """The exact rule that keeps a draft x with probability r(x) <= min(1, p(x)/q(x)).

    r  shape (vocab,) in [0, 1]; what it says where q = 0 is never asked
    The rule raises RuleError, with the token and the excess, where r breaks its bound.
    """

    def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
        require_chain(proposal, "family")
        rows = rows_for(proposal, target_rows)
        k = len(proposal)
        if k == 0:
            return plain(rows, noise)
        for i, x in enumerate(proposal.tokens):
            p = rows[i]
            q = proposal.q.row(i, x, len(p))
            keep = _checked(per_token(r, p, q, "r"), p, q)
            if not noise.uniform(Purpose.ACCEPT, i) < probability(keep, x):
                correction = residual(p, q * keep)
                return Verdict(tuple(range(i)), inverse_cdf(correction, noise.uniform(Purpose.RESIDUAL, i)), "residual")
        return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus")

    return verify


def for_replacement(a: PerToken) -> Rule:
    """The exact rule that draws from the law `a` after a rejection, and accepts the most it can:
    A = 1 - max over p > q of (p - q)/a, r = (p - (1 - A) a) / q.

    a  shape (vocab,), sums to 1
    The rule raises RuleError, with the reason, where there is none.
    """

    def r(p: Probs, q: Probs) -> Probs:
        law = probabilities(per_token(a, p, q, "a"), "replacement law a")
        taken = np.maximum(p - largest_rejection(p, q, law) * law, 0.0)
        with np.errstate(over="ignore"):
            return np.minimum(np.divide(taken, q, out=np.zeros_like(p), where=q > 0), 1.0)

    return family(r)


def largest_acceptance(p: Probs, q: Probs, a: Probs) -> float:
    """A = 1 - max over p > q of (p - q)/a: the most that a rule with the replacement law a accepts.

    a = max(p - q, 0) normalised gives 1 - TV(p, q), a = p gives A* = min over p > 0 of q/p.
    Shapes (vocab,). Raises RuleError, with the reason, where no rule has this a.
    """
    return 1.0 - largest_rejection(p, q, a)


def largest_rejection(p: Probs, q: Probs, a: Probs) -> float:
    """The smallest rejection probability M with p - q <= M a <= p everywhere."""
    short = p - q
    uncovered = (short > SLACK) & (a <= 0)
    if uncovered.any():
        y = int(uncovered.argmax())
        raise RuleError(
            f"no rule has this replacement law: token {y} has p = {p[y]:.6g} above q = {q[y]:.6g}, and a gives it nothing"
        )
    covered = a > 0
    need, room = np.full(len(p), -np.inf), np.full(len(p), np.inf)
    with np.errstate(over="ignore"):  # subnormal numbers: infinity says the same
        np.divide(short, a, out=need, where=covered)
        np.divide(p, a, out=room, where=covered)
    most, least = int(need.argmax()), int(room.argmin())
    rejection = max(0.0, float(need[most]))
    if rejection > room[least] + SLACK:
        raise RuleError(
            f"no rule has this replacement law: token {most} asks for rejections with probability {rejection:.6g} at least, "
            f"and token {least} bears {room[least]:.6g} at most"
        )
    return rejection


resample_from_target: Rule = for_replacement(lambda p, q: p)
"""After a rejection the token is drawn from p itself: exact, and accepts A* = min over p > 0 of q/p only."""


def per_token(values: PerToken, p: Probs, q: Probs, name: str) -> Probs:
    """`values` for these rows as an array of the rows' shape. Raises RuleError."""
    array = np.asarray(values(p, q) if callable(values) else values, dtype=np.float64)
    if array.shape != p.shape:
        raise RuleError(f"{name} has shape {array.shape}: one number for each of the {len(p)} tokens is needed")
    return array


def _checked(r: Probs, p: Probs, q: Probs) -> Probs:
    asked = q > 0
    with np.errstate(over="ignore"):
        bound = np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=asked))
    excess = np.where(asked, r - bound, 0.0)
    worst = int(excess.argmax())  # NaN wins every maximum
    if not excess[worst] <= SLACK:
        raise RuleError(
            f"r keeps token {worst} with probability {r[worst]:.6g}, {excess[worst]:.6g} above min(1, p/q) = {bound[worst]:.6g}: "
            "at most that is exact"
        )
    negative = asked & (r < 0)
    if negative.any():
        worst = int(negative.argmax())
        raise RuleError(f"r keeps token {worst} with probability {r[worst]:.6g}: numbers in [0, 1] are needed")
    return np.where(asked, np.minimum(r, bound), 0.0)
