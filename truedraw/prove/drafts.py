"""Ways to draft, for the certificates: every one is honest, and draws with the shipped draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from truedraw.drafters.drawing import row_statistics
from truedraw.protocols import RowStatistics, StepNoise
from truedraw.prove.exact import Context, Draft, Problem
from truedraw.sampling import draw_draft
from truedraw.types import DenseRows, PointMass, Probs, Proposal
from truedraw.verify.multidraft import Drawing, draw_candidates

More = Callable[[Context, RowStatistics], bool]
"""(context and the drafts so far, the next q row before anything is drawn from it) -> go on?"""


def chain(problem: Problem, context: Context, k: int, noise: StepNoise, more: More = lambda seen, row: True) -> Proposal:
    """k draft tokens from q by the shipped draw, with the rows they were drawn from, or point masses."""
    tokens: list[int] = []
    rows: list[Probs] = []
    for i in range(k):
        prefix = (*context, *tokens)
        row = problem.float_row("q", prefix)
        if not more(prefix, row_statistics(row, i + 1)):
            break
        tokens.append(int(row.argmax()) if problem.point else draw_draft(row, noise, i, coupled=False))
        rows.append(row)
    return Proposal(tuple(tokens), PointMass() if problem.point else DenseRows(tuple(rows)))


def watchful(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
    """A chain whose length looks at all that a policy may: everything emitted, the drafts so far, and
    the q row of the next, before it is drawn. It drafts nothing, one token or many."""

    def more(seen: Context, row: RowStatistics) -> bool:
        return row.entropy < 0.9 + 0.1 * (sum(seen) % 3) and (row.depth == 1 or seen[-1] != 0 or row.margin > 0.3)

    return chain(problem, context, k, noise, more)


def tree(method: Drawing, width: int, depth: int = 2) -> Draft:
    """`width` candidates for the first position, and below each a chain: `k` nodes at most, level by
    level. With depth 2 and k >= 2 width the tree is full."""

    def draft(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
        tokens: list[int] = []
        rows: list[Probs] = []
        parents: list[int] = []
        frontier: list[tuple[int, Context]] = [(-1, context)]
        for level in range(depth):
            grown: list[tuple[int, Context]] = []
            for node, prefix in frontier:
                count = min(width if level == 0 else 1, k - len(tokens))
                if count < 1:
                    continue
                row = problem.float_row("q", prefix)
                drawn, laws = draw_candidates(row, count, method if level == 0 else "without-replacement", noise, len(tokens))
                for token, law in zip(drawn, laws, strict=True):
                    grown.append((len(tokens), (*prefix, token)))
                    tokens.append(token)
                    rows.append(law)
                    parents.append(node)
            frontier = grown
        return Proposal(tuple(tokens), DenseRows(tuple(np.asarray(row) for row in rows)), tuple(parents))

    return draft
