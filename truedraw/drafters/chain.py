"""Several drafters in order of preference."""

from __future__ import annotations

from collections.abc import Sequence

from truedraw.protocols import Drafter, DraftRequest, Outcome
from truedraw.types import Proposal


class ChainDrafter(Drafter):
    """For each request the first proposal that is not empty.

    Exact with sampled drafts too as long as a member proposes nothing for reasons it knows before
    drawing, which every drafter must keep to anyway.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.samples = any(drafter.samples for drafter in self.drafters)
        self.trees = any(drafter.trees for drafter in self.drafters)
        self.hidden = tuple(dict.fromkeys(layer for drafter in self.drafters for layer in drafter.hidden))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = [Proposal() for _ in requests]
        for drafter in self.drafters:
            open_ = [i for i, proposal in enumerate(proposals) if not len(proposal)]
            if not open_:
                break
            for i, proposal in zip(open_, drafter.propose([requests[i] for i in open_]), strict=True):
                proposals[i] = proposal
        return proposals

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for drafter in self.drafters:
            drafter.observe(outcomes)

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()
