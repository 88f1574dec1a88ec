"""Shared race noise: Daliri, Musco and Suresh 2024 (arXiv 2408.07978).

The target's own draw is always emitted, so the text is that of plain decoding, whatever the
drafter proposes and however it came to propose it. Where the drafter draws by the race with the
same noise, both agree with probability sum_i 1 / sum_j max(p_j/p_i, q_j/q_i); a point mass at x is
accepted with probability p(x), as by every rule.
"""

from __future__ import annotations

from typing import Literal

from truedraw.protocols import StepNoise
from truedraw.sampling import TargetRows
from truedraw.types import Proposal, Verdict


def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
    """Draw from p at each position with its race noise, and go on while a draft is that token.

    Trees are walked from the root. q is never looked at.
    """
    rows = TargetRows.of(target_rows)
    path: list[int] = []
    node = -1
    while True:
        y = rows.race(node + 1, noise.race(noise.start + len(path)))
        children = [i for i in range(node + 1, len(proposal)) if proposal.parent(i) == node]
        match = next((i for i in children if proposal.tokens[i] == y), None)
        if match is None:
            break
        path.append(match)
        node = match
    origin: Literal["residual", "bonus", "plain"] = "residual" if children else "bonus" if path else "plain"
    return Verdict(tuple(path), y, origin)
