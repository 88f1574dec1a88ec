"""Shared race noise: Daliri, Musco and Suresh 2024 (arXiv 2408.07978).

The target's own draw is always emitted, so the text is that of plain decoding, whatever the
drafter proposes and however it came to propose it. Where the drafter draws by the race with the
same noise, both agree with probability `race_acceptance(p, q)`; a point mass at x is accepted with
probability p(x), as by every rule.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.randomness import RACE_BLOCK
from truedraw.sampling import TargetRows
from truedraw.types import Probs, Proposal, Verdict
from truedraw.verify import children, rows_for


def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
    """Draw from p at each position with its race noise, and go on while a draft is that token.

    Trees are walked from the root. q is never looked at.
    """
    rows = rows_for(proposal, target_rows)
    path: list[int] = []
    node = -1
    while True:
        y = rows.race(node + 1, noise.race(noise.start + len(path)))
        candidates = children(proposal, node)
        match = next((i for i in candidates if proposal.tokens[i] == y), None)
        if match is None:
            break
        path.append(match)
        node = match
    origin: Literal["residual", "bonus", "plain"] = "residual" if candidates else "bonus" if path else "plain"
    return Verdict(tuple(path), y, origin)


def acceptance(p: Probs, q: Probs) -> float:
    """How often a race over p and one over q with the same noise, in one level, have the same winner:
    sum_i 1 / sum_j max(p_j/p_i, q_j/q_i), which lies in [(1 - TV)/(1 + TV), 1 - TV].

    Shapes (vocab,), of any totals. O(vocab log vocab).
    """
    return float(_same_winner(p, q).sum())


def race_acceptance(p: Probs, q: Probs, block: int = RACE_BLOCK) -> float:
    """The same of `sampling.race`, in two levels: both go to the same block, and inside it, with noise of
    its own, to the same token. One block is one level. Shapes (vocab,)."""
    starts = np.arange(0, len(p), block)
    same_block = _same_winner(np.add.reduceat(p, starts), np.add.reduceat(q, starts))
    return sum(
        float(share) * acceptance(p[start : start + block], q[start : start + block])
        for start, share in zip(starts, same_block, strict=True)
        if share > 0
    )


def _same_winner(p: Probs, q: Probs) -> Probs:
    """For each token P(it wins both races). Shapes (vocab,), of any totals.

    Sorted by q/p, each maximum is p_j/p_i up to i and q_j/q_i behind.
    """
    shared = np.flatnonzero((p > 0) & (q > 0))
    only_p, only_q = float(p[q == 0].sum()), float(q[p == 0].sum())
    with np.errstate(over="ignore"):  # subnormal numbers: infinity sorts as well
        order = shared[np.argsort(q[shared] / p[shared])]
    a, b = p[order] / p.sum(), q[order] / q.sum()
    up_to, behind = np.cumsum(a), np.cumsum(b[::-1])[::-1] - b
    both = np.zeros(len(p))
    with np.errstate(over="ignore"):
        both[order] = 1.0 / ((up_to + only_p / p.sum()) / a + (behind + only_q / q.sum()) / b)
    return both
