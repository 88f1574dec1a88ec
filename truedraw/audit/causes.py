"""Verifiers in the convention of an audit: one that is right, and the same with the faults that people make.

Two uses: as positive controls, and to name what usually causes what was seen, by comparing laws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.prove.exact import Law, total_variation
from truedraw.types import Probs

Rows: TypeAlias = npt.NDArray[np.float64]
Verify: TypeAlias = Callable[[Rows, Rows | None, Sequence[int], Sequence[float]], tuple[int, int]]

SAME_LAW = 1e-6
NEAR = 0.2
"""A law that is nearer to a known fault's than this share of its distance to the right one resembles it."""


def first_above(weights: Probs, u: float) -> int:
    """The first token whose cumulated weight exceeds u times the total."""
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def excess(p: Probs, q: Probs, x: int) -> Probs:
    """max(p - q, 0), or p where rounding leaves nothing."""
    left = np.maximum(p - q, 0.0)
    return left if left.any() else p


def made(
    *,
    accepts: Callable[[float, Probs, Probs, int, int], bool] = lambda u, p, q, x, i: u * q[x] < p[x],
    correction: Callable[[Probs, Probs, int], Probs] = excess,
    judged_by: Callable[[int, int], int] = lambda i, k: i,
    residual_uniform: Callable[[int, int], int] = lambda i, k: k,
    draws: Callable[[Probs, float], int] = first_above,
    bonus: Callable[[Probs, float], int] = first_above,
    late: bool = False,
) -> Verify:
    """The token rule with pieces to exchange.

    judged_by         (draft index, k) -> the target row it is judged by
    residual_uniform  (draft index, k) -> the uniform that draws the token after a rejection
    late              the rejected draft stays, and the correction comes behind it
    """

    def verify(p: Rows, q: Rows | None, drafts: Sequence[int], uniforms: Sequence[float]) -> tuple[int, int]:
        k = len(drafts)
        for i, x in enumerate(drafts):
            row = p[judged_by(i, k)]
            law = np.eye(p.shape[1])[x] if q is None else q[i]
            if not accepts(uniforms[i], row, law, x, i):
                kept = i + 1 if late else i
                return kept, draws(correction(row, law, x), uniforms[residual_uniform(i, k)])
        return k, bonus(p[k], uniforms[k])

    return verify


def _rest(p: Probs, q: Probs, x: int) -> Probs:
    rest = p.copy()
    rest[x] = 0.0
    return rest if rest.any() else p


def _softmax(p: Probs, q: Probs, x: int) -> Probs:
    weights: Probs = np.exp(np.maximum(p - q, 0.0))
    return weights


def _from_left(weights: Probs, u: float) -> int:
    """The first token whose cumulated weight reaches u: one without weight at u = 0."""
    cumulative = np.cumsum(weights)
    return min(int(np.searchsorted(cumulative, u * cumulative[-1], side="left")), len(weights) - 1)


def _last_unchecked(p: Rows, q: Rows | None, drafts: Sequence[int], uniforms: Sequence[float]) -> tuple[int, int]:
    last = len(drafts) - 1
    return made(accepts=lambda u, row, law, x, i: i == last or u * law[x] < row[x])(p, q, drafts, uniforms)


right: Verify = made()
"""The token rule: Leviathan et al. 2023, algorithm 1."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault with its name, and what to look for in code that has its law."""

    name: str
    verify: Verify
    usually: str


CAUSES: tuple[Cause, ...] = (
    Cause(
        "resample from p after a rejection",
        made(correction=lambda p, q, x: p),
        "the token after a rejection is drawn from p; it has to come from max(p - q, 0), normalised",
    ),
    Cause(
        "residual p without the draft, though the draft was drawn",
        made(correction=_rest),
        "the rejected token is struck from p; that is right for drafts that were not drawn (argmax, n-gram), else max(p - q, 0)",
    ),
    Cause(
        "residual through softmax",
        made(correction=_softmax),
        "max(p - q, 0) goes through a softmax; it has to be divided by its sum",
    ),
    Cause(
        "residual with a floor",
        made(correction=lambda p, q, x: np.maximum(p - q, 0.01)),
        "the residual is clamped to a small positive number before it is normalised; exact zeros have to stay zero",
    ),
    Cause(
        "residual upside down",
        made(correction=lambda p, q, x: excess(q, p, x)),
        "the residual is max(q - p, 0): the two rows changed places",
    ),
    Cause(
        "u <= p/q accepts p = 0",
        made(accepts=lambda u, p, q, x, i: u * q[x] <= p[x]),
        "the comparison is <=: at u = 0 a token with p = 0 passes; it has to be u q < p with u in [0, 1)",
    ),
    Cause(
        "everything accepted",
        made(accepts=lambda u, p, q, x, i: p[x] > 0),
        "the acceptance uniform is constant 0, or the comparison is never false",
    ),
    Cause(
        "ratio upside down",
        made(accepts=lambda u, p, q, x, i: u * p[x] < q[x]),
        "the draft is kept with probability q/p: the two rows changed places",
    ),
    Cause(
        "ratio over the largest p",
        made(accepts=lambda u, p, q, x, i: u * p.max() < p[x]),
        "p(x) is divided by the largest p, not by q(x)",
    ),
    Cause(
        "accepted with probability p, resampled from p - q",
        made(accepts=lambda u, p, q, x, i: u < p[x]),
        "the draft is judged as a point mass (kept with p(x)) and corrected as a drawn one: both have to be one or the other",
    ),
    Cause(
        "verified by argmax",
        made(accepts=lambda u, p, q, x, i: x == int(p.argmax())),
        "drafts are compared with the target's most likely token although the request samples",
    ),
    Cause(
        "a threshold on p/q",
        made(accepts=lambda u, p, q, x, i: p[x] > 0.9 * q[x]),
        "drafts are kept by a fixed threshold on p/q: that is a relaxed rule",
    ),
    Cause(
        "lenient ratio",
        made(accepts=lambda u, p, q, x, i: u * 0.8 * q[x] < p[x]),
        "the ratio is multiplied by a constant (lenience): that is a relaxed rule",
    ),
    Cause(
        "first draft never checked",
        made(accepts=lambda u, p, q, x, i: i == 0 or u * q[x] < p[x]),
        "the loop begins at the second draft, or compares draft i with the row behind it",
    ),
    Cause(
        "last draft never checked",
        _last_unchecked,
        "the loop ends one draft too early",
    ),
    Cause(
        "target rows one too far",
        made(judged_by=lambda i, k: min(i + 1, k)),
        "draft i is judged by the row behind it: rows[0] belongs to the first draft",
    ),
    Cause(
        "target rows one behind",
        made(judged_by=lambda i, k: max(i - 1, 0)),
        "draft i is judged by the row before its own: rows[0] belongs to the first draft",
    ),
    Cause(
        "shared noise",
        made(residual_uniform=lambda i, k: i),
        "the token after a rejection is drawn with the uniform that rejected the draft: each needs its own",
    ),
    Cause(
        "bonus by argmax",
        made(bonus=lambda p, u: int(p.argmax())),
        "the token after k accepted drafts is the most likely one instead of a draw",
    ),
    Cause(
        "rejection one position late",
        made(late=True),
        "the rejected draft stays in the output, and its correction comes behind it",
    ),
    Cause(
        "a draw that can hit tokens without mass",
        made(draws=_from_left, bonus=_from_left),
        "the inverse CDF takes the first token whose cumulated mass reaches u (>=): at u = 0 one with p = 0; it has to exceed u",
    ),
)


BY_NAME = {cause.name: cause for cause in CAUSES}
UNKNOWN = "no fault that is known here has this law: look at the texts that come too often and too rarely"


def likely_causes(
    seen: Sequence[Law], right_laws: Sequence[Law], known: Callable[[Cause], Sequence[Law]]
) -> tuple[list[Cause], bool]:
    """The causes whose laws are those that were seen (True), or else the one that they resemble, if any.

    seen, right_laws, known(cause): one law for each problem.
    """
    off = max(total_variation(law, target) for law, target in zip(seen, right_laws, strict=True))
    apart = [max(total_variation(law, other) for law, other in zip(seen, known(cause), strict=True)) for cause in CAUSES]
    same = [cause for cause, distance in zip(CAUSES, apart, strict=True) if distance <= Fraction(SAME_LAW)]
    if same:
        return same, True
    nearest = min(range(len(CAUSES)), key=lambda i: apart[i])
    return ([CAUSES[nearest]] if apart[nearest] <= Fraction(NEAR) * off else []), False
