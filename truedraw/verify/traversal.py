"""Traversal verification of trees of drawn drafts: Weng et al. 2025 (arXiv 2505.12398).

Leaves are tried first, as block verification tries long prefixes first; a chain gives exactly that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, inverse_cdf
from truedraw.types import Probs, Proposal, Verdict
from truedraw.verify import children, plain, probability, rows_for


@dataclass(slots=True)
class _Node:
    """What the rejections below have left of a node: its children, its law and the probability of
    accepting the text that ends at it."""

    children: list[int]
    worth: float
    law: Probs | None = None
    touched: bool = False


def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
    """Take the first leaf in depth-first order and accept its path with probability W; else remove it
    from its parent, whose law p becomes max(W p - q, 0), normalised by S, and whose W becomes
    S / (S + 1 - W). The root is always accepted. The token comes from the accepted node's law.

    W(child) = min(1, W(parent) p(x)/q(x)), with each child's own row as q: the children of a node are
    drawn independently, or without replacement, and a subtree only from rows of its own. Raises
    RowError for target rows that are no laws.
    """
    rows = rows_for(proposal, target_rows)
    if len(proposal) == 0:
        return plain(rows, noise)
    nodes = {-1: _Node(children(proposal, -1), 1.0)}

    def law(node: int) -> Probs:
        state = nodes[node]
        if state.law is None:
            state.law = rows[node + 1]
        return state.law

    while True:
        node = -1
        while nodes[node].children:
            parent, node = node, nodes[node].children[0]
            if node not in nodes:
                x = proposal.tokens[node]
                worth = min(1.0, nodes[parent].worth * probability(law(parent), x) / proposal.q.prob(node, x))
                nodes[node] = _Node(children(proposal, node) if worth > 0 else [], worth)
        state = nodes[node]
        if node == -1 or noise.uniform(Purpose.ACCEPT, node) < state.worth:
            purpose = Purpose.RESIDUAL if state.touched else Purpose.BONUS
            y = inverse_cdf(law(node), noise.uniform(purpose, node + 1))
            return Verdict(proposal.path(node), y, "residual" if state.touched else "bonus")
        parent = proposal.parent(node)
        above = nodes[parent]
        p = law(parent)
        excess = np.maximum(above.worth * p - proposal.q.row(node, proposal.tokens[node], len(p)), 0.0)
        total = float(excess.sum())
        above.children.remove(node)
        above.touched = True
        if total > 0:
            above.law, above.worth = excess / total, total / (total + (1.0 - above.worth))  # at worth 1 exactly 1
        elif above.worth < 1:
            above.worth = 0.0  # at worth 1 nothing is left only by rounding: the law stays
