"""Token-level rejection sampling: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1 and
appendix A.1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2."""

from __future__ import annotations

from truedraw.protocols import StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, inverse_cdf, residual
from truedraw.types import Proposal, Verdict
from truedraw.verify import plain, require_chain, rows_for


def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
    """Keep draft x with probability min(1, p(x)/q(x)); after the first rejection draw from
    max(p - q, 0); after k acceptances draw the bonus token from p.

    Written as u q(x) < p(x) with u in [0, 1): no division, and p(x) = 0 is never accepted.
    Raises ProposalError for a tree, RowError for target rows that are no laws.
    """
    require_chain(proposal, "token")
    rows = rows_for(proposal, target_rows)
    k = len(proposal)
    if k == 0:
        return plain(rows, noise)
    for i, x in enumerate(proposal.tokens):
        q = proposal.q
        if not noise.uniform(Purpose.ACCEPT, i) * q.prob(i, x) < rows.prob(i, x):
            p = rows[i]
            correction = residual(p, q.row(i, x, len(p)))
            return Verdict(tuple(range(i)), inverse_cdf(correction, noise.uniform(Purpose.RESIDUAL, i)), "residual")
    return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus")
