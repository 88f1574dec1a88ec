"""The acceptance rules: pure functions of (proposal, target rows, noise), all with this signature.

    verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict

rows[0] is the target's law after the context, rows[i + 1] after draft token i, so that k drafts
need k + 1 rows. Nothing is changed in place, and the same numbers give the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from truedraw.protocols import StepNoise
from truedraw.sampling import TargetRows
from truedraw.types import Probs, Proposal, Verdict

Rule: TypeAlias = Callable[[Proposal, TargetRows, StepNoise], Verdict]


def probability(row: Probs, token: int) -> float:
    """p(token); 0 for an id outside the vocabulary, -1 included."""
    return float(row[token]) if 0 <= token < len(row) else 0.0
