"""The acceptance rules: pure functions of (proposal, target rows, noise), all with this signature.

    verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict

rows[0] is the target's law after the context, rows[i + 1] after draft token i, so that k drafts
need k + 1 rows. Nothing is changed in place, and the same numbers give the same verdict.

An empty proposal is plain decoding under every rule: one race at the step's position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from truedraw.errors import ProposalError, RowError
from truedraw.protocols import StepNoise
from truedraw.sampling import TargetRows
from truedraw.types import Probs, Proposal, Verdict

Rule: TypeAlias = Callable[[Proposal, TargetRows, StepNoise], Verdict]


def probability(row: Probs, token: int) -> float:
    """p(token); 0 for an id outside the vocabulary, -1 included."""
    return float(row[token]) if 0 <= token < len(row) else 0.0


def rows_for(proposal: Proposal, target_rows: TargetRows) -> TargetRows:
    """The target's rows, checked: laws, of one vocabulary, one more than drafts. Raises RowError."""
    rows = TargetRows.of(target_rows)
    if len(rows) <= len(proposal):
        raise RowError(f"{len(rows)} target rows for {len(proposal)} draft tokens: {len(proposal) + 1} are needed")
    return rows


def plain(rows: TargetRows, noise: StepNoise) -> Verdict:
    """What every rule answers to an empty proposal."""
    return Verdict((), rows.race(0, noise.race(noise.start)), "plain")


def require_chain(proposal: Proposal, rule: str) -> None:
    """Raises ProposalError for a tree."""
    if not proposal.is_chain:
        raise ProposalError(
            f"the rule {rule} verifies chains, and this proposal is a tree: take coupled, multidraft or traversal"
        )


def children(proposal: Proposal, node: int) -> list[int]:
    """The indices of a node's children in the order in which they were proposed; -1 is the root."""
    return [i for i in range(node + 1, len(proposal)) if proposal.parent(i) == node]
