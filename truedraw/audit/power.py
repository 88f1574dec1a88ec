"""What so many tokens can tell, and how many are needed, when one looks at every token.

Bets are those of prove/goodness.py: factors 1 + lambda (g(y) - E_p g), lambda from a fixed grid, both ways, in several
directions, all started with an equal share. A share has to grow to num_bets / alpha. Against an event A of probability a
under p, and a + shift under the fault, the logarithm of a bet is a sum of independent steps: about normal.

    shift      E g under the fault less E_p g, over the range of g: no total variation smaller than that can cause it
    num_bets   all that share the wealth
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from truedraw.errors import InvalidParameter
from truedraw.types import Probs

LAMBDAS = 2.0 ** -np.arange(10.0)
POWER = 0.95
LEAST_SHIFT = 0.001  # the smallest bet sees nothing below a quarter of this, however many tokens there are


def log_goal(num_bets: int, alpha: float) -> float:
    """What one of the bets must have gained, in nats, for their average to reach 1/alpha. Raises InvalidParameter."""
    if not 0 < alpha < 1:
        raise InvalidParameter("alpha", alpha, "a number between 0 and 1")
    return math.log(num_bets / alpha)


def smallest_shift(num_tokens: int, goal: float, variance: float = 0.25, power: float = POWER) -> float:
    """The smallest shift that is found within num_tokens with that power; 1 where none is.

    variance: of g over its range under p; at most 1/4, which is the worst. goal: from log_goal.
    """
    a = (1 - math.sqrt(max(0.0, 1 - 4 * min(variance, 0.25)))) / 2  # the event with this variance
    low, high = 0.0, 1 - a
    if num_tokens < 1 or not _reaches(num_tokens, high, a, goal, power):
        return 1.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _reaches(num_tokens, middle, a, goal, power) else (middle, high)
    return high


def tokens_needed(shift: float, goal: float, power: float = POWER) -> int:
    """After how many tokens a shift is found with that power, for an event of probability 1/2. Raises InvalidParameter."""
    if not LEAST_SHIFT <= shift <= 0.4:
        raise InvalidParameter("detect", shift, f"a total variation from {LEAST_SHIFT:g} to 0.4")
    low, high = 0, 1
    while not _reaches(high, shift, 0.5, goal, power):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _reaches(middle, shift, 0.5, goal, power) else (middle, high)
    return high


def _reaches(num_tokens: int, shift: float, a: float, goal: float, power: float) -> bool:
    """Whether the best bet of the grid has gained `goal` after so many tokens, with that power."""
    b = min(a + shift, 1.0)
    hit, missed = np.log1p(LAMBDAS * (1 - a)), np.log1p(-LAMBDAS * a)
    mean = b * hit + (1 - b) * missed
    spread = math.sqrt(b * (1 - b)) * (hit - missed)
    z = NormalDist().inv_cdf(power)
    return bool((num_tokens * mean - z * math.sqrt(num_tokens) * spread >= goal).any())


def confidence_bound(total: float, squares: float, num_tokens: int, alpha: float) -> float:
    """On |mean shift|, at confidence 1 - alpha, whenever one stops; at most 1.

    total, squares: sums over the tokens of d = (g(y) - E_p g) / range(g) and of d^2. Whatever the tokens' laws are, with
    c the conditional mean of d, exp(l (sum c - sum d) - (-log(1 - l) - l) sum d^2) is a supermartingale for every l in
    (0, 1) since |d| <= 1 (Fan, Grama and Liu 2015; Howard et al. 2021, arXiv 1810.08240, section 4), and so is the average
    over a grid of l. Both sides take alpha / 2.
    """
    if num_tokens < 1:
        return 1.0
    tilts: Probs = 2.0 ** -np.arange(1.0, 14.0)
    penalty = (-np.log1p(-tilts) - tilts) * squares
    needed = math.log(2 * len(tilts) / alpha)

    low, high = 0.0, 2.0 * num_tokens
    while high - low > 1e-6 * num_tokens:
        middle = (low + high) / 2
        inside = float(np.logaddexp.reduce(tilts * middle - penalty)) <= needed
        low, high = (middle, high) if inside else (low, middle)
    return min(1.0, (abs(total) + high) / num_tokens)
