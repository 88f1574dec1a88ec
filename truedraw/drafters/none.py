"""Nothing: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from truedraw.protocols import Drafter, DraftRequest
from truedraw.types import Proposal


class NoDrafter(Drafter):
    """Proposes nothing, so that every step is plain decoding."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal() for _ in requests]
