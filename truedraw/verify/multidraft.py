"""Several candidates for one position: recursive rejection (Miao et al. 2023, SpecInfer,
arXiv 2305.09781; without replacement Jeon et al. 2024, arXiv 2402.14160), and the greedy draft of
Hu et al. 2025 (arXiv 2502.18779).

Candidates are the children of one node of a tree. One rule verifies them however they were drawn,
because each carries the row it was really drawn from, given the candidates before it:

    without replacement  q, then q without the first candidate, ... each renormalised
    greedy draft         one drawn from q without its n - 1 most likely tokens, then those as point masses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Literal

import numpy as np

from truedraw.errors import InvalidParameter
from truedraw.protocols import StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, draw_distinct, inverse_cdf, residual
from truedraw.types import Probs, Proposal, Verdict
from truedraw.verify import children, plain, probability, rows_for


def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
    """From the root down: try a node's children in order, each against what the rejections before it
    left of p; go down into the first that is kept.

    A child x is kept with probability min(1, p(x)/q(x)); after a rejection p becomes max(p - q, 0),
    normalised. When all are rejected the token is drawn from what is left, and where that is a
    child's token (a point mass behind a rejected draw) the walk goes on below that child, whose
    subtree has seen none of the noise spent so far. Raises RowError for target rows that are no laws.
    """
    rows = rows_for(proposal, target_rows)
    if len(proposal) == 0:
        return plain(rows, noise)
    path: list[int] = []
    node = -1
    while True:
        left = rows[node + 1]
        candidates = children(proposal, node)
        if not candidates:
            return Verdict(tuple(path), inverse_cdf(left, noise.uniform(Purpose.BONUS, node + 1)), "bonus")
        kept: int | None = None
        for child in candidates:
            x = proposal.tokens[child]
            if noise.uniform(Purpose.ACCEPT, child) * proposal.q.prob(child, x) < probability(left, x):
                kept = child
                break
            left = residual(left, proposal.q.row(child, x, len(left)))
            left = left / left.sum()
        if kept is None:
            y = inverse_cdf(left, noise.uniform(Purpose.RESIDUAL, node + 1))
            kept = next((child for child in candidates if proposal.tokens[child] == y), None)
            if kept is None:
                return Verdict(tuple(path), y, "residual")
        path.append(kept)
        node = kept


# ---------------------------------------------------------------- drawing candidates


def without_replacement(row: Probs, uniforms: Sequence[float]) -> tuple[list[int], list[Probs]]:
    """Distinct tokens drawn one after the other from `row`, and the row that each was drawn from.

    row       shape (vocab,), sums to 1
    uniforms  one for each candidate, in [0, 1); fewer tokens come back where `row` has fewer
    """
    return draw_distinct(row, [partial(inverse_cdf, u=u) for u in uniforms])


def greedy_draft(row: Probs, n: int, u: float) -> tuple[list[int], list[Probs]]:
    """One token drawn from `row` without its n - 1 most likely tokens, then those, best first.

    Shapes and ties as everywhere: row (vocab,), the smaller token id first. Where `row` has no mass
    behind its n - 1 best there is no drawn token.
    """
    best = np.argsort(-row, kind="stable")[: n - 1]
    best = best[row[best] > 0]
    rest = row.copy()
    rest[best] = 0.0
    tokens, rows = ([], []) if not rest.any() else without_replacement(rest, [u])
    for token in best:
        tokens.append(int(token))
        rows.append(point_row(int(token), len(row)))
    return tokens, rows


def point_row(token: int, vocab: int) -> Probs:
    """A point mass as a row, shape (vocab,)."""
    row = np.zeros(vocab)
    row[token] = 1.0
    return row


Drawing = Literal["without-replacement", "greedy"]


def draw_candidates(row: Probs, n: int, method: Drawing, noise: StepNoise, first: int) -> tuple[list[int], list[Probs]]:
    """n candidates from `row` with the draft noise of the tree's nodes `first`, `first` + 1, ..."""
    if method == "greedy":
        return greedy_draft(row, n, noise.uniform(Purpose.DRAFT, first))
    return without_replacement(row, [noise.uniform(Purpose.DRAFT, first + i) for i in range(n)])


# ---------------------------------------------------------------- how much can be accepted


def optimal_acceptance(p: Probs, q: Probs, n: int) -> float:
    """The most that any rule accepts of n independent drafts from q: the optimal-transport bound
    min over H of p(H) + 1 - q(H)^n, attained by a prefix of the tokens sorted by q/p, largest first
    (Hu et al. 2025, section 3). Shapes (vocab,); O(vocab log vocab)."""
    if n < 1:
        raise InvalidParameter("n", n, "an integer >= 1")
    ratio = np.divide(q, p, out=np.where(q > 0, np.inf, 0.0), where=p > 0)
    order = np.argsort(-ratio, kind="stable")
    p_inside = np.concatenate([[0.0], np.cumsum(p[order])])
    q_inside = np.minimum(np.concatenate([[0.0], np.cumsum(q[order])]), 1.0)
    return float(min(1.0, (p_inside + 1.0 - q_inside**n).min()))


def optimal_acceptance_of(p: Probs, sets: Mapping[frozenset[int], float]) -> float:
    """The most that any rule accepts of candidates that form the set S with probability sets[S]:
    min over H of p(H) + P(S not inside H). For small vocabularies: tries all 2**vocab sets H."""
    tokens = range(len(p))
    return min(
        sum(float(p[y]) for y in inside) + sum(mass for drawn, mass in sets.items() if not drawn <= set(inside))
        for size in range(len(p) + 1)
        for inside in combinations(tokens, size)
    )


def greedy_draft_acceptance(p: Probs, q: Probs, n: int) -> float:
    """What the greedy draft accepts at one position: p(T) + sum over the rest of min(p, q'), with T
    the n - 1 most likely tokens of q and q' the rest of q, renormalised. It is the most that any
    rule can with these candidates. Shapes (vocab,)."""
    best = np.argsort(-q, kind="stable")[: n - 1]
    best = best[q[best] > 0]
    rest = q.copy()
    rest[best] = 0.0
    if rest.any():
        rest /= rest.sum()
    outside = np.minimum(p, rest)
    outside[best] = 0.0
    return float(p[best].sum() + outside.sum())


def without_replacement_acceptance(p: Probs, q: Probs) -> float:
    """What two candidates drawn without replacement accept at one position. Shapes (vocab,);
    O(vocab log vocab).

    The first, x, is kept with sum min(p, q). Whatever it was, a rejection leaves p' = max(p - q, 0),
    normalised, to be tried against q without x: of y is kept min(p'(y), q(y)/(1 - q(x))), where x itself,
    with q(x) > p(x), has p' = 0. That is p'(y) for all x with q(x) >= 1 - q(y)/p'(y). The likeliest x is
    tried by itself: behind it 1 - q(x) may be nothing but rounding.
    """
    accepted = float(np.minimum(p, q).sum())
    left = np.maximum(p - q, 0.0)
    if not left.any():
        return min(1.0, accepted)
    left /= left.sum()
    rejected = np.maximum(q - p, 0.0)
    likeliest = int(q.argmax())
    others = q.copy()
    others[likeliest] = 0.0
    if others.any():
        accepted += float(rejected[likeliest] * np.minimum(left, others / others.sum()).sum())
    rejected[likeliest] = 0.0
    x = np.flatnonzero(rejected)
    x = x[np.argsort(q[x])]
    y = np.flatnonzero((left > 0) & (q > 0))
    whole = np.searchsorted(q[x], 1.0 - q[y] / left[y])  # from this x on all of p'(y) is kept
    below = np.concatenate([[0.0], np.cumsum(rejected[x] / (1.0 - q[x]))])[whole]
    above = np.concatenate([np.cumsum(rejected[x][::-1])[::-1], [0.0]])[whole]
    return min(1.0, accepted + float((q[y] * below + left[y] * above).sum()))
