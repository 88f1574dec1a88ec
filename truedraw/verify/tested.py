"""What a verification tells of acceptance by depth: where the rule allows it not the coin, but its probability,
given the rows that were looked at anyway.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from truedraw.protocols import Tested
from truedraw.sampling import TargetRows
from truedraw.types import Probs, Proposal
from truedraw.verify.block import prefix_worths
from truedraw.verify.coupled import acceptance

HEAD = 1e-3
"""Tokens that are less likely in both laws are left out of the coupled estimate: sorting whole rows would
cost more than it tells."""


def tested(rule: str, proposal: Proposal, rows: TargetRows, path: tuple[int, ...]) -> Tested:
    """For each depth with what probability it was reached, and with what probability its draft was accepted too.

    token    given that depth d was reached, sum over y of min(p, q)
    block    P_d and P_{d+1}: E[accepted tokens] is the sum of E[P_d] over d >= 1 (Sun et al. 2025)
    coupled  drawn drafts: the probability that two races over p and q with the same noise agree (Daliri et al. 2024)
    Point masses, greedy decoding, trees and all other rules: what happened.
    """
    if proposal.q.sampled and proposal.is_chain and not rows.is_point(0):
        if rule == "block":
            worth = prefix_worths(proposal, rows)
            return tuple(pairwise(worth))
        if rule in ("token", "coupled"):
            match = overlap if rule == "token" else agreement
            seen = range(min(len(path) + 1, len(proposal)))
            laws = ((rows[i], proposal.q.row(i, proposal.tokens[i], len(rows[i]))) for i in seen)
            return tuple((1.0, match(p, q)) for p, q in laws)
    depth = max((len(proposal.path(i)) for i in range(len(proposal))), default=0)
    return tuple((1.0, float(d < len(path))) for d in range(min(len(path) + 1, depth)))


def overlap(p: Probs, q: Probs) -> float:
    """sum of min(p, q): how often the token rule accepts. Shapes (vocab,)."""
    return float(np.minimum(p, q).sum())


def agreement(p: Probs, q: Probs) -> float:
    """How often races over p and q with the same noise agree, by their likelier tokens. Shapes (vocab,)."""
    head = np.flatnonzero((p > HEAD) | (q > HEAD))
    return acceptance(p[head], q[head])
