"""One position in numbers: a target row p, a draft row q, and what every rule makes of them.

The rules are the shipped ones, and so are the functions that say what they accept: of one draft drawn
from q, or of two candidates. Where they replace a rejected draft, the law of the token is summed up,
accepted + (1 - acceptance) replacement; coupled emits the target's own draw, and a rule of several
candidates is right for each of them in turn, so that their law is p as it stands (`prove.exact`
enumerates it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import RowError
from truedraw.types import Drift, Probs, probabilities
from truedraw.verify import coupled, lossy, multidraft

ROUNDING = 1e-12
"""Laws closer than this, in total variation, count as equal: what sums of float64 leave."""

NAIVE = "biased_resample"

Reason: TypeAlias = Literal["equal", "disjoint", "multiple"]
"""Why the naive rule is exact: p = q, no token in common, or q = alpha p wherever p > 0."""


@dataclass(frozen=True, slots=True, eq=False)
class RuleOutcome:
    """What a rule does at one position: how often it keeps a draft, and the law of the token, shape (vocab,).

    drift  of that law from p; the rounding of an exact rule is none
    """

    name: str
    exact: bool
    num_candidates: int
    acceptance: float
    law: Probs
    drift: Drift


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Two rows, shape (vocab,), each normalised, and every rule on them. Arrays have one number for each token."""

    p: Probs
    q: Probs
    rules: tuple[RuleOutcome, ...]

    @property
    def keep(self) -> Probs:
        """min(1, p/q); 1 where q = 0, though no draft comes from there."""
        return _keep(self.p, self.q)

    @property
    def residual(self) -> Probs | None:
        """max(p - q, 0), normalised; None where p = q: nothing is ever rejected."""
        if self.total_variation <= ROUNDING:
            return None
        excess = np.maximum(self.p - self.q, 0.0)
        normalised: Probs = excess / excess.sum()
        return normalised

    @property
    def alpha(self) -> float:
        """sum min(p, q): the most that an exact rule can keep of one draft."""
        return min(1.0, float(np.minimum(self.p, self.q).sum()))

    @property
    def total_variation(self) -> float:
        """Of p and q, 1 - alpha."""
        return float(np.abs(self.p - self.q).sum() / 2)

    @property
    def a_star(self) -> float:
        """min over p > 0 of q/p: the most that an exact rule can keep which replaces from p itself."""
        return _a_star(self.p, self.q)

    @property
    def two_draft_bound(self) -> float:
        """The most that an exact rule can keep of two independent drafts."""
        with np.errstate(over="ignore"):
            return multidraft.optimal_acceptance(self.p, self.q, 2)

    def rule(self, name: str) -> RuleOutcome:
        return next(rule for rule in self.rules if rule.name == name)

    @property
    def naive(self) -> RuleOutcome:
        """min(1, p/q), and after a rejection a draw from p."""
        return self.rule(NAIVE)

    @property
    def bias(self) -> Probs:
        """What the naive rule adds to p: p (min(1, q/p) - alpha)."""
        return self.naive.law - self.p

    @property
    def why_unbiased(self) -> Reason | None:
        """The naive rule is exact if and only if min(1, q/p) is the same for all tokens with p > 0; None where it is not."""
        if self.naive.drift.total_variation > ROUNDING:
            return None
        return "equal" if self.total_variation <= ROUNDING else "disjoint" if self.alpha <= ROUNDING else "multiple"

    def top(self, count: int) -> list[int]:
        """The token ids with the largest max(p, q), in that order; all of them in their own order if they are that few."""
        if len(self.p) <= count:
            return list(range(len(self.p)))
        return [int(token) for token in np.argsort(-np.maximum(self.p, self.q), kind="stable")[:count]]


def explain(p: npt.ArrayLike, q: npt.ArrayLike) -> Explanation:
    """Every rule on a target row p and a draft row q, each normalised.

    Raises RowError, naming the model and the token, for a row that is no law, and for rows of different length.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # told by name; and a ratio may be infinite
        target, draft = probabilities(p, "target row p"), probabilities(q, "draft row q")
        if len(target) != len(draft):
            raise RowError(
                f"the target row p has {len(target)} tokens and the draft row q has {len(draft)}: one vocabulary is needed"
            )
        target, draft = target / target.sum(), draft / draft.sum()
        return Explanation(target, draft, tuple(_outcomes(target, draft)))


def _outcomes(p: Probs, q: Probs) -> list[RuleOutcome]:
    keep = _keep(p, q)
    excess = np.maximum(p - q, 0.0)
    token = lossy.output_law(q, keep, excess if excess.any() else p)
    kept_by_ratio = np.minimum(1.0, np.divide(_a_star(p, q) * p, q, out=np.zeros(len(p)), where=q > 0))
    resampled = lossy.output_law(q, kept_by_ratio, p)
    kept = float((q * keep).sum())
    return [
        _exact("token", kept, token, p),
        _exact("block", kept, token, p),  # of one draft: the same
        _exact("coupled", coupled.race_acceptance(p, q), p, p),
        _exact("resample_from_target", float((q * kept_by_ratio).sum()), resampled, p),
        _exact("multidraft, without replacement", multidraft.without_replacement_acceptance(p, q), p, p, candidates=2),
        _exact("multidraft, greedy draft", multidraft.greedy_draft_acceptance(p, q, 2), p, p, candidates=2),
        _lossy(NAIVE, lossy.biased_resample, p, q),
        _lossy("lenience:0.5", lossy.lenience(0.5), p, q),
        _lossy("typical:0.3,0.09", lossy.typical(0.3, 0.09), p, q),
    ]


def _exact(name: str, acceptance: float, law: Probs, p: Probs, candidates: int = 1) -> RuleOutcome:
    drift = lossy.drift_from(p, law)
    assert drift.total_variation <= ROUNDING, f"{name} is off by {drift.total_variation}"
    return RuleOutcome(name, True, candidates, min(1.0, acceptance), law, Drift(0.0, 0.0))


def _lossy(name: str, rule: lossy.Relaxed, p: Probs, q: Probs) -> RuleOutcome:
    law = rule.law(p, q)
    return RuleOutcome(name, False, 1, min(1.0, rule.acceptance(p, q)), law, lossy.drift_from(p, law))


def _keep(p: Probs, q: Probs) -> Probs:
    with np.errstate(over="ignore"):
        return np.minimum(1.0, np.divide(p, q, out=np.ones(len(p)), where=q > 0))


def _a_star(p: Probs, q: Probs) -> float:
    inside = p > 0
    with np.errstate(over="ignore"):
        return min(1.0, float((q[inside] / p[inside]).min()))
