"""How many tokens to draft."""

from __future__ import annotations

from collections.abc import Sequence

from truedraw.errors import InvalidParameter
from truedraw.protocols import PointProposal, RowStatistics, SequenceState, StepTiming


class FixedLength:
    """The same draft length at every step; 0 is plain decoding."""

    def __init__(self, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InvalidParameter("draft_length", length, "an integer >= 0, or 'auto'")
        self.length = length

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        return [self.length] * len(batch)

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        return True

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        return [len(proposal.tokens) for proposal in batch]

    def observe(self, step: StepTiming) -> None:
        return None
