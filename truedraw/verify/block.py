"""Block verification: Sun et al. 2025 (arXiv 2403.10444), algorithm 2: the whole block is judged
together, and accepts at least as many tokens in expectation as the token rule, with the same law.

    P_0 = 1,  P_i = min(1, P_{i-1} p(x_i)/q(x_i))          what a prefix of i drafts is worth
    S_i = sum_y max(P_i p(y) - q(y), 0)                    rows behind x_i
    h_i = S_i / (S_i + 1 - P_i) for i < k,  h_k = P_k      P(the accepted prefix is x_1..x_i | not longer)

Why the law is p: suppose P(accepted length >= i, x_1..x_i) = q(x_1..x_i) P_i. Longer prefixes take
min(q, P_i p) of that for each next token y, and the residual max(P_i p - q, 0) gives the rest of P_i p(y).
"""

from __future__ import annotations

from truedraw import kernels
from truedraw.protocols import StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, inverse_cdf, residual
from truedraw.types import Proposal, Verdict
from truedraw.verify import plain, require_chain, rows_for


def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
    """Accept the longest prefix whose own coin says so, then draw from max(P p - q, 0), or the
    bonus token from p.

    The prefixes are tried from the longest down, so that whole rows are summed only from the end
    back to where the verdict falls. Any draft length that was fixed before its last token was
    drawn is fine. Raises ProposalError for a tree, RowError for target rows that are no laws.
    """
    require_chain(proposal, "block")
    rows = rows_for(proposal, target_rows)
    if len(proposal) == 0:
        return plain(rows, noise)
    worth = prefix_worths(proposal, rows)
    length = len(worth) - 1
    if noise.uniform(Purpose.ACCEPT, length - 1) < worth[length]:
        return Verdict(tuple(range(length)), inverse_cdf(rows[length], noise.uniform(Purpose.BONUS, length)), "bonus")
    for i in range(length - 1, 0, -1):
        p, q = rows[i], proposal.q.row(i, proposal.tokens[i], len(rows[i]))
        excess, masses = kernels.excess(p, q, worth[i])
        total = kernels.total(masses)
        if noise.uniform(Purpose.ACCEPT, i - 1) * (total + 1 - worth[i]) < total:
            return Verdict(tuple(range(i)), inverse_cdf(excess, noise.uniform(Purpose.RESIDUAL, i), masses), "residual")
    correction = residual(rows[0], proposal.q.row(0, proposal.tokens[0], len(rows[0])))
    return Verdict((), inverse_cdf(correction, noise.uniform(Purpose.RESIDUAL, 0)), "residual")


def prefix_worths(proposal: Proposal, rows: TargetRows) -> list[float]:
    """P_0 .. P_n, n <= k: up to the first 0, behind which nothing can be accepted."""
    worth = [1.0]
    for i, x in enumerate(proposal.tokens):
        worth.append(min(1.0, worth[-1] * rows.prob(i, x) / proposal.q.prob(i, x)))
        if worth[-1] == 0.0:
            break
    return worth
