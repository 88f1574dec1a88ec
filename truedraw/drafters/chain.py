"""Several drafters, the one with most to gain first."""

from __future__ import annotations

from collections.abc import Sequence

from truedraw.protocols import Drafter, DraftRequest, Forecast, Outcome
from truedraw.types import Proposal


class ChainDrafter(Drafter):
    """For each request the drafter whose forecast is worth most. Those that cannot forecast are asked
    in the order given, before that one if they stand before it: the first proposal that is not empty counts.

    Exact with sampled drafts too: forecasts are made before anything is drawn, and a member proposes
    nothing only for reasons it knows before drawing, which every drafter must keep to anyway.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.samples = any(drafter.samples for drafter in self.drafters)
        self.trees = any(drafter.trees for drafter in self.drafters)
        self.hidden = tuple(dict.fromkeys(layer for drafter in self.drafters for layer in drafter.hidden))
        self.forecasts = all(drafter.forecasts for drafter in self.drafters)

    def forecast(self, requests: Sequence[DraftRequest]) -> list[Forecast | None]:
        """The best of its members' forecasts for each request."""
        forecasts = [drafter.forecast(requests) for drafter in self.drafters]
        best = self._best(requests, forecasts)
        return [None if chosen is None else forecasts[chosen][i] for i, chosen in enumerate(best)]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = [Proposal() for _ in requests]
        best = self._best(requests, [drafter.forecast(requests) for drafter in self.drafters])
        for number, drafter in enumerate(self.drafters):
            open_ = [i for i in range(len(requests)) if not len(proposals[i])]
            if drafter.forecasts:
                asked = [i for i in open_ if best[i] == number]
            else:
                asked = [i for i in open_ if (chosen := best[i]) is None or number <= chosen]
            if asked:
                for i, proposal in zip(asked, drafter.propose([requests[i] for i in asked]), strict=True):
                    proposals[i] = proposal
        return proposals

    def _best(self, requests: Sequence[DraftRequest], forecasts: Sequence[Sequence[Forecast | None]]) -> list[int | None]:
        """For each request the member whose drafts gain most; None where none is worth one."""
        best: list[int | None] = []
        for i, request in enumerate(requests):
            known = [(number, forecast) for number, each in enumerate(forecasts) if (forecast := each[i]) is not None]
            worths = [(request.worth(forecast), number) for number, forecast in known]
            drafting = [(worth.gain, -number) for worth, number in worths if worth.length > 0]
            best.append(-max(drafting)[1] if drafting else None)
        return best

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for drafter in self.drafters:
            drafter.observe(outcomes)

    def save(self) -> None:
        for drafter in self.drafters:
            drafter.save()

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()
