"""Goodness of fit for H0: every emitted token is drawn from p_t(. | its prefix), the rows being known (ALGORITHMS.md 7).

    g_test                   many tokens from ONE row, nothing known about the fault
    Score, on a direction    any prefixes, a fault that has a direction, one look at the end
    EProcess, on bets        the same, looked at whenever you like; also "within delta of p"
    EProcess, on a law       a fault whose law is known: the exact likelihood ratio
    pit, uniformity_p_value  any prefixes, a fault that moves mass along an ordering of the tokens

Prefixes, and what is bet on them, may depend on all earlier tokens, never on the token tested. A token with p = 0
contradicts the null: p-value 0, e-value infinite (but "within delta of p" allows it). Everywhere:

    p, q    rows, shape (vocab,), probabilities, normalised here; RowError if they are no law
    g       a direction on the whole vocabulary, shape (vocab,), finite, centred or not
    tokens  a token id, or an array of ids drawn one after the other from the same row

InvalidParameter is raised for whatever is out of range, MissingExtra where scipy is needed and not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from truedraw.errors import InvalidParameter, MissingExtra
from truedraw.types import Probs, probabilities

Direction: TypeAlias = Callable[[Probs, Probs, int | None], Probs]  # (p, q, draft token or None) -> g
MIN_EXPECTED = 5.0  # smaller expected counts are pooled: the usual limit of the chi-square approximation
FLOOR = 1e-6  # the logarithm of a smaller probability is taken of this one, so that every direction is bounded
TAIL = 1e-4  # tokens of smaller probability are the tail
LAMBDAS = 2.0 ** -np.arange(7.0)  # sizes of the bets of an e-process; each is made both ways
_TILTS = 2.0 ** np.arange(-14.0, 5.0)  # sizes for Score.safe_p_value: fixed in advance, for g of any usual scale


# ---------------------------------------------------------------- counts, and the probability integral transform


@dataclass(frozen=True, slots=True)
class GTest:
    """statistic: 2 sum O log(O/E), about chi-square with df degrees of freedom; cells: their number after pooling."""

    statistic: float
    df: int
    p_value: float
    cells: int


def g_test(counts: ArrayLike, probs: ArrayLike) -> GTest:
    """Null: counts (vocab,), how often each token came, are multinomial with `probs`. Needs scipy.

    From the smallest p on, cells are merged until each expects MIN_EXPECTED, so that the tail stays visible. With one
    cell left nothing can be seen: p-value 1. The chi-square law is asymptotic (Wilks 1938): for alpha >= 1e-3, not 1e-6.
    """
    stats, p = _scipy_stats(), _law(probs)
    observed = np.asarray(counts, dtype=np.float64)
    _check("counts", observed, p.shape, (observed >= 0) & (observed == np.rint(observed)), "a whole number >= 0")
    if observed[p == 0].any():
        return GTest(math.inf, 0, 0.0, 0)
    order = np.argsort(p, kind="stable")
    expected = p[order] * observed.sum()
    starts = _pool(expected)
    if len(starts) < 2:
        return GTest(0.0, 0, 1.0, len(starts))
    seen, expected = np.add.reduceat(observed[order], starts), np.add.reduceat(expected, starts)
    result = stats.power_divergence(seen, expected * (seen.sum() / expected.sum()), lambda_="log-likelihood")
    return GTest(float(result.statistic), len(starts) - 1, float(result.pvalue), len(starts))


def _pool(expected: Probs) -> list[int]:
    """Where the pooled cells start, for expected counts in rising order; what is left over joins the last one."""
    starts, inside = [0], 0.0
    for i, count in enumerate(expected):
        if inside >= MIN_EXPECTED:
            starts.append(i)
            inside = 0.0
        inside += float(count)
    return starts if inside >= MIN_EXPECTED else starts[: max(1, len(starts) - 1)]


def pit(p: ArrayLike, tokens: ArrayLike, key: ArrayLike, v: ArrayLike) -> Probs:
    """U = F(y-) + v p(y), F cumulated over the tokens in the order of `key` (vocab,), ties by token id.

    Null: the token has law p given the past; then U is uniform on [0, 1] and independent of the past (Rosenblatt 1952,
    randomised for discrete laws). The key is fixed before the token: log_ratio shows faults of speculation, p those of
    temperature. v: a uniform on [0, 1] for each token. Returns a U for each token; NaN for one with p = 0.
    """
    row, order_by, ids = _read(p, key, tokens, "key")
    uniforms = np.atleast_1d(np.asarray(v, dtype=np.float64))
    _check("v", uniforms, ids.shape, (uniforms >= 0) & (uniforms <= 1), "0 <= v <= 1")
    order = np.argsort(order_by, kind="stable")
    below = np.empty_like(row)
    below[order] = np.cumsum(row[order]) - row[order]
    return np.where(row[ids] > 0, np.clip(below[ids] + uniforms * row[ids], 0.0, 1.0), math.nan)


def uniformity_p_value(uniforms: ArrayLike, test: Literal["kstest", "cramervonmises"] = "cramervonmises") -> float:
    """Null: the values (n,), n >= 2, are independent and uniform on [0, 1]; 0 if one is NaN. kstest looks at the largest
    distance of the empirical law from that, cramervonmises at the mean squared one. Needs scipy."""
    stats, values = _scipy_stats(), np.asarray(uniforms, dtype=np.float64)
    _require("test", test, test in ("kstest", "cramervonmises"), "kstest or cramervonmises")
    _require("number of uniforms", values.size, values.size >= 2, ">= 2")
    possible = values[~np.isnan(values)]
    _check("uniforms", possible, (possible.size,), (possible >= 0) & (possible <= 1), "0 to 1")
    return float(getattr(stats, test)(values, "uniform").pvalue) if len(possible) == values.size else 0.0


# ---------------------------------------------------------------- directions and score tests


def residual_direction(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """w = min(1, q/p). "Resample from p after a rejection" has the law p (1 + w - E w): this score is its likelihood
    ratio, and E w is larger by Var_p(w) under it (ALGORITHMS.md 1.5)."""
    return np.divide(q, p, out=np.ones_like(p), where=p > q)


def draft_probability(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """q. A fresh draw after a failed exact match (FAULTS.md N3) has the law p (1 + q - sum p q). Valid under every rule."""
    return np.array(q)


def draft_match(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """1{y = draft}; 0 everywhere without a draft, or for one outside the vocabulary. Only for drafts fixed by the prefix
    (point masses) or independent of y given it. Rules for sampled drafts tie the two together on purpose: there
    P(y = draft) = sum min(p, q), not sum p q, and draft_probability is the direction to take."""
    return np.where(np.arange(len(p)) == (-1 if draft is None else draft), 1.0, 0.0)


def log_p(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """log p: temperature, quantisation, drafts that are dropped because they are unlikely."""
    return np.log(np.maximum(p, FLOOR))


def log_ratio(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """log q/p: output that leans towards the drafter."""
    return np.log(np.maximum(q, FLOOR) / np.maximum(p, FLOOR))


def argmax_q(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """1{y = argmax q}: the drafter's favourite let through."""
    return draft_match(p, q, int(q.argmax()))


def tail(p: Probs, q: Probs, draft: int | None = None) -> Probs:
    """1{p(y) < TAIL}: truncation forgotten, or made twice."""
    return np.where(p < TAIL, 1.0, 0.0)


DIRECTIONS: tuple[Direction, ...] = (residual_direction, draft_probability, draft_match, log_p, log_ratio, argmax_q, tail)


@dataclass(slots=True)
class Score:
    """Sums over `count` tokens of g(y) - E_p g, the excess, and of Var_p g, for one direction.

    Null: each token has law p given the past. Then `excess` is a martingale with predictable variance `variance`, and
    z is about standard normal (Brown 1971). bound: the largest |g - E_p g| on the support of any row so far.
    violations: tokens with p = 0.
    """

    count: int = 0
    excess: float = 0.0
    variance: float = 0.0
    bound: float = 0.0
    violations: int = 0

    def add(self, p: ArrayLike, g: ArrayLike, tokens: ArrayLike) -> None:
        """Take in tokens drawn from row p."""
        row, values, ids = _read(p, g, tokens)
        centred = values - row @ values
        self.count += len(ids)
        self.excess += float(centred[ids].sum())
        self.variance += len(ids) * float(row @ centred**2)
        self.bound = max(self.bound, float(np.abs(centred[row > 0]).max()))
        self.violations += int((row[ids] == 0).sum())

    @property
    def z(self) -> float:
        """In standard deviations; 0 while nothing random has been seen."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def p_value(self) -> float:
        """Two-sided, by the normal approximation, whose tail at z is off by a factor of up to about
        exp(z^3 bound / (6 sqrt variance)): 1e-6 (z = 4.9) is to be believed from variance = 400 bound^2 on."""
        return 0.0 if self.violations else math.erfc(abs(self.z) / math.sqrt(2))

    @property
    def safe_p_value(self) -> float:
        """Two-sided, and honest at every alpha, number of tokens, skewness and stopping time.

        E exp(l d) <= exp(l^2 Var d / (2 (1 - l bound / 3))) (Bernstein; martingales: Freedman 1975), so exp(l excess)
        over the product of these is a supermartingale for each l fixed in advance, and so is the average over a grid of
        +-l. By Markov its inverse is a p-value. 1e-6 takes z = 6.4 instead of 4.9 if variance > 400 bound^2, else more.
        """
        slack = 1 - _TILTS * self.bound / 3
        penalty = (_TILTS**2 * self.variance / 2)[slack > 0] / slack[slack > 0]
        gain = _TILTS[slack > 0] * self.excess
        log_e = float(np.logaddexp.reduce(np.concatenate([gain - penalty, -gain - penalty]))) - math.log(2 * len(_TILTS))
        return 0.0 if self.violations else math.exp(-max(log_e, 0.0))


def moments(p: ArrayLike, g: ArrayLike) -> tuple[float, float]:
    """(E_p g, Var_p g)."""
    row, values, _ids = _read(p, g, ())
    return (mean := float(row @ values)), float(row @ (values - mean) ** 2)


def support_violations(p: ArrayLike, tokens: ArrayLike) -> int:
    """How many of the tokens have p = 0: under the null none, with certainty."""
    row, _values, ids = _read(p, p, tokens)
    return int((row[ids] == 0).sum())


# ---------------------------------------------------------------- e-processes


@dataclass(slots=True)
class EProcess:
    """num_bets bets against the null, each started with 1 and multiplied by a factor at every token.

    Under the null E[factor | past] <= 1, so their average, the e-value, is a nonnegative supermartingale: the probability
    that it EVER reaches 1/alpha is at most alpha (Ville 1939; Ramdas et al. 2210.01948), however often one looks.
    log_wealth: (num_bets,), in nats. log_maximum: of the largest e-value so far.
    """

    num_bets: int = 2 * len(LAMBDAS)
    log_wealth: Probs = field(init=False)
    log_maximum: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        _require("num_bets", self.num_bets, self.num_bets >= 1, ">= 1")
        self.log_wealth = np.zeros(self.num_bets)

    def add(self, factors: ArrayLike) -> None:
        """factors: (num_bets, tokens), >= 0, from `bets` or `likelihood_ratio`; their rows may be stacked."""
        array = np.asarray(factors, dtype=np.float64)
        _require("shape of factors", array.shape, array.ndim == 2 and len(array) == self.num_bets, f"({self.num_bets}, tokens)")
        _require("the smallest factor", float(array.min(initial=1)), bool((array >= 0).all()), ">= 0")
        if array.size:
            with np.errstate(divide="ignore", invalid="ignore"):
                path = self.log_wealth[:, None] + np.cumsum(np.log(array), axis=1)
            path[np.isnan(path)] = math.inf  # a contradiction stands, also for a bet that has lost all
            self.log_wealth = path[:, -1].copy()
            self.log_maximum = max(self.log_maximum, float(np.logaddexp.reduce(path).max()) - math.log(self.num_bets))

    @property
    def e_value(self) -> float:
        """The wealth now: under the null at most 1 on average, whenever one stops."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.log_wealth).mean())

    @property
    def p_value(self) -> float:
        """One over the largest e-value so far, valid whenever one stops."""
        return math.exp(-self.log_maximum)

    def rejects(self, alpha: float) -> bool:
        """Has the e-value ever reached 1/alpha?"""
        _require("alpha", alpha, 0 < alpha < 1, "0 < alpha < 1")
        return self.log_maximum >= -math.log(alpha)


def bets(p: ArrayLike, g: ArrayLike, tokens: ArrayLike, *, delta: float = 0.0) -> Probs:
    """Factors 1 + lambda (+-(g(y) - E_p g) - delta range(g)), shape (2 len(LAMBDAS), tokens): up, then down.

    Null: the token's law r has TV(r, p) <= delta given the past (0: it is p). Fair, because E_r g - E_p g
    = sum (r - p)(g - min g) <= sum max(r - p, 0) range(g) <= delta range(g), and so for -g: E_r factor <= 1.
    Before the token is seen, lambda is cut to what keeps the row's smallest factor >= 0.
    """
    row, values, ids = _read(p, g, tokens)
    _require("delta", delta, 0 <= delta < 1, "0 <= delta < 1")
    centred = values - row @ values
    gains = np.stack([centred, -centred]) - delta * np.ptp(values)
    with np.errstate(divide="ignore"):
        stakes = np.minimum(LAMBDAS, 1 / np.abs(gains.min(axis=1, keepdims=True)))
    factors = np.maximum(1 + stakes[:, :, None] * gains[:, None, ids], 0.0).reshape(-1, len(ids))
    return np.where(row[ids] > 0, factors, math.inf) if delta == 0 else factors


def likelihood_ratio(p: ArrayLike, alternative: ArrayLike, tokens: ArrayLike) -> Probs:
    """Factors alternative(y) / p(y), shape (1, tokens). Against that very law no bet grows faster: its logarithm by
    KL(alternative || p) a token (Kelly 1956)."""
    row, other, ids = _read(p, _law(alternative), tokens, "alternative")
    ratios = np.divide(other, row, out=np.full_like(row, math.inf), where=row > 0)
    return ratios[None, ids]


def naive_resample_law(p: ArrayLike, q: ArrayLike) -> Probs:
    """min(p, q) + (1 - alpha) p with alpha = sum min(p, q): what "resample from p after a rejection" emits."""
    row, draft, _ids = _read(p, _law(q), (), "q")
    kept = np.minimum(row, draft)
    return kept + (1 - float(kept.sum())) * row


# ---------------------------------------------------------------- power, and many tests


def score_sample_size(
    mean_shift: float, variance: float, alpha: float, power: float, *, variance_under_fault: float | None = None, sides: int = 2
) -> int:
    """Tokens after which a score test of size alpha (Score.p_value has 2 sides) finds a fault with that power.

    mean_shift: E g under the fault less E_p g, for each token. variance: Var_p g; that of g under the fault is the same if
    not given. By the normal approximation n = (z_alpha sd + z_power sd_fault)^2 / shift^2: some points of power short where
    an event is looked at and few are expected. For "resample from p" and residual_direction, shift and variance are both
    Var_p(w).
    """
    fault = variance if variance_under_fault is None else variance_under_fault
    _require("sides", sides, sides in (1, 2), "1 or 2")
    _require("mean_shift", mean_shift, math.isfinite(mean_shift) and mean_shift != 0, "a finite number other than 0")
    _require("variance", (variance, fault), all(0 <= value < math.inf for value in (variance, fault)), "finite and >= 0")
    z_alpha, z_power = _quantiles(alpha, power, sides)
    reach = max(0.0, z_alpha * math.sqrt(variance) + z_power * math.sqrt(fault))
    return max(1, math.ceil((reach / mean_shift) ** 2))


def sample_size(epsilon: float, alpha: float, power: float, p_event: float = 0.5) -> int:
    """Tokens after which a one-sided binomial test finds that an event of probability p_event has epsilon more: the best
    that can be done against a TV of epsilon, its event being known. The larger of the two variances is taken for both,
    which gives (z_alpha + z_power)^2 / (4 epsilon^2) for p_event = 1/2."""
    _require("p_event", p_event, 0 < p_event < 1, "0 < p_event < 1")
    _require("epsilon", epsilon, 0 < epsilon < 1 - p_event, f"0 < epsilon < 1 - p_event = {1 - p_event:g}")
    variance = max(event * (1 - event) for event in (p_event, p_event + epsilon))
    return score_sample_size(epsilon, variance, alpha, power, sides=1)


def detectable(n: int, alpha: float, power: float) -> float:
    """The smallest TV that n tokens find with that power, in a known direction with p_event = 1/2: about 2/sqrt(n) at alpha
    .01 and power .95. A pass says nothing about smaller ones, nor about other directions."""
    _require("n", n, n >= 1, ">= 1")
    return min(1.0, max(0.0, sum(_quantiles(alpha, power))) / (2 * math.sqrt(n)))


def _quantiles(alpha: float, power: float, sides: int = 1) -> tuple[float, float]:
    """What a standard normal exceeds with probability alpha / sides, and what it stays below with probability power."""
    for name, value in (("alpha", alpha), ("power", power)):
        _require(name, value, 0 < value < 1, f"0 < {name} < 1")
    return -NormalDist().inv_cdf(alpha / sides), NormalDist().inv_cdf(power)


def power_table(alpha: float = 0.01, power: float = 0.95) -> dict[float, int]:
    """TV -> sample_size, for TVs that matter."""
    return {epsilon: sample_size(epsilon, alpha, power) for epsilon in (0.1, 0.03, 0.01, 0.003, 0.001)}


def holm(p_values: Sequence[float], alpha: float) -> tuple[bool, ...]:
    """Which nulls are rejected: any of them wrongly with probability <= alpha, however they depend on each other (Holm 1979)."""
    values = np.asarray(p_values, dtype=np.float64)
    _require("alpha", alpha, 0 < alpha < 1, "0 < alpha < 1")
    _check("p_values", values, (len(p_values),), (values >= 0) & (values <= 1), "0 to 1")
    order = np.argsort(values, kind="stable")
    rejected = np.zeros(len(values), dtype=bool)
    rejected[order] = np.logical_and.accumulate(values[order] <= alpha / np.arange(len(values), 0, -1))
    return tuple(rejected.tolist())


# ---------------------------------------------------------------- what comes in


def _read(p: ArrayLike, g: ArrayLike, tokens: ArrayLike, name: str = "g") -> tuple[Probs, Probs, NDArray[np.integer[Any]]]:
    """The row, the values (called `name` in errors) and the token ids, checked."""
    row, values = _law(p), np.asarray(g, dtype=np.float64)
    _check(name, values, row.shape, True, "a finite number")
    ids = np.atleast_1d(np.asarray(tokens, dtype=None if np.size(tokens) else np.int64))
    _require("type of tokens", str(ids.dtype), ids.dtype.kind in "iu", "whole numbers")
    _check("tokens", ids, (ids.size,), (ids >= 0) & (ids < len(row)), f"0 to {len(row) - 1}")
    return row, values, ids


def _law(row: ArrayLike) -> Probs:
    """A row that sums to 1 within 1e-9, not only within the tolerance for rows: the errors of many tokens would add up."""
    checked = probabilities(row, "row")
    return checked if abs(checked.sum() - 1) < 1e-9 else checked / float(checked.sum())


def _check(name: str, array: NDArray[Any], shape: tuple[int, ...], good: Any, allowed: str) -> None:
    """Raises InvalidParameter, in one line, for the wrong shape or for the first element that is not good."""
    _require(f"shape of {name}", array.shape, array.shape == shape, str(shape))
    for i in np.flatnonzero(~(good & np.isfinite(array)))[:1]:
        raise InvalidParameter(f"{name}[{i}]", array[i].item(), allowed)


def _require(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise InvalidParameter(name, value, allowed)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise MissingExtra("scipy", "audit") from None
    return stats
