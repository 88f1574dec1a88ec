"""Relaxed rules: they accept more, or another token, than the target's law allows, and say by how
much. None runs without an explicit option.

Every verdict carries its drift: the total variation and the KL divergence between the law of the
emitted token and p, summed over the positions that a trial decided (bonus tokens are drawn from p).
Over a run the divergences add up (chain rule), and the sum of the variations bounds the variation
of the whole text, both in expectation over the run.

No rule can accept more without drifting: TV(law, p) >= accepted - sum min(p, q) at every position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from truedraw.errors import InvalidParameter
from truedraw.protocols import StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, inverse_cdf
from truedraw.types import Drift, Probs, Proposal, Verdict
from truedraw.verify import Rule, plain, probability, require_chain, rows_for

Keeps: TypeAlias = Callable[[Probs, Probs], Probs]
"""(p, q) -> the probability of keeping each token, shape (vocab,) in [0, 1]."""

Replaces: TypeAlias = Callable[[Probs, Probs, Probs], Probs]
"""(p, q, keep) -> weights of the replacement, shape (vocab,), not normalised."""


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """The rule that keeps draft x ~ q with probability keep(x), else draws from replace."""

    keep: Keeps
    replace: Replaces
    name: str

    def __call__(self, proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
        require_chain(proposal, self.name)
        rows = rows_for(proposal, target_rows)
        k = len(proposal)
        if k == 0:
            return plain(rows, noise)
        drift = Drift(0.0, 0.0)
        for i, x in enumerate(proposal.tokens):
            p = rows[i]
            q = proposal.q.row(i, x, len(p))
            kept = self.keep(p, q)
            weights = self.replace(p, q, kept)
            drift += drift_from(p, output_law(q, kept, weights))
            if not noise.uniform(Purpose.ACCEPT, i) < probability(kept, x):
                return Verdict(tuple(range(i)), inverse_cdf(weights, noise.uniform(Purpose.RESIDUAL, i)), "residual", drift)
        return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus", drift)

    def acceptance(self, p: Probs, q: Probs) -> float:
        """The probability that one trial keeps its draft. Shapes (vocab,)."""
        return float((q * self.keep(p, q)).sum())

    def law(self, p: Probs, q: Probs) -> Probs:
        """The law of the token that one trial decides. Shapes (vocab,)."""
        kept = self.keep(p, q)
        return output_law(q, kept, self.replace(p, q, kept))


def output_law(q: Probs, keep: Probs, weights: Probs) -> Probs:
    """q r + (1 - A) a: the law of the token that one trial decides. Shapes (vocab,).

    q may lack mass (a draft outside the vocabulary): that is rejected.
    """
    accepted = q * keep
    law: Probs = accepted + max(0.0, 1.0 - float(accepted.sum())) * weights / weights.sum()
    return law


def drift_from(p: Probs, law: Probs) -> Drift:
    """TV(law, p) and KL(law || p) in nats, infinite where the law leaves the support of p."""
    inside = law > 0
    with np.errstate(divide="ignore"):
        terms = law[inside] * (np.log(law[inside]) - np.log(p[inside]))
    return Drift(float(np.abs(law - p).sum() / 2), max(0.0, float(terms.sum())))


def _closest(p: Probs, q: Probs, keep: Probs) -> Probs:
    """max(p - q r, 0): of all replacements the one with the least total variation."""
    left = np.maximum(p - q * keep, 0.0)
    return left if left.any() else p  # nothing is left where everything is kept: it is never drawn from


def _ratio(p: Probs, q: Probs) -> Probs:
    """p/q, 1 where q = 0: no draft comes from there."""
    with np.errstate(over="ignore"):  # subnormal numbers: infinity says the same
        return np.divide(p, q, out=np.ones_like(p), where=q > 0)


def _in_unit(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:  # NaN fails too
        raise InvalidParameter(name, value, "a number in (0, 1]")


# ---------------------------------------------------------------- the rules


def lenience(l: float) -> Relaxed:  # noqa: E741  # the paper's letter
    """Keep x with probability min(1, p/(l q)), 0 < l <= 1 (Leviathan et al. 2023, appendix A.5).

    Its drift is the least possible for what it accepts: TV = sum min(q, p/l) - sum min(q, p).
    Raises InvalidParameter.
    """
    _in_unit("l", l)
    return Relaxed(lambda p, q: np.minimum(1.0, _ratio(p, q) / l), _closest, "lenience")


def typical(epsilon: float = 0.3, delta: float = 0.09) -> Relaxed:
    """Keep every x with p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats (Cai et al. 2024,
    Medusa, arXiv 2401.10774, section 2.3.1); else draw from max(p - q r, 0), which drifts least.

    Raises InvalidParameter.
    """
    _in_unit("epsilon", epsilon)
    _in_unit("delta", delta)

    def keep(p: Probs, q: Probs) -> Probs:
        positive = p[p > 0]
        entropy = -float((positive * np.log(positive)).sum())
        return (p > min(epsilon, delta * math.exp(-entropy))).astype(np.float64)

    return Relaxed(keep, _closest, "typical")


def thresholds(accept: float = 1.0, single: float = 1.0) -> Rule:
    """Keep x if p(x) >= single, else with probability min(1, p(x)/accept), whatever q is; a rejected
    draft is replaced from p without it. That is how SGLang's target-only verification words its two
    thresholds; at 1 and 1 it is exact. Drafts count as point masses, and so does the drift.

    Raises InvalidParameter.
    """
    _in_unit("accept", accept)
    _in_unit("single", single)

    def keep(p: Probs, q: Probs) -> Probs:
        return np.where(p >= single, 1.0, np.minimum(1.0, p / accept))

    rule = Relaxed(keep, lambda p, q, kept: _closest(p, q, np.ones_like(p)), "thresholds")
    return lambda proposal, rows, noise: rule(Proposal(proposal.tokens, parents=proposal.parents), rows, noise)


biased_resample = Relaxed(lambda p, q: np.minimum(1.0, _ratio(p, q)), lambda p, q, keep: p, "biased_resample")
"""A common mistake, to study: min(1, p/q), then a draw from p instead of the residual. The law
is min(p, q) + (1 - sum min(p, q)) p: right only where q is a multiple of p on p's support."""
