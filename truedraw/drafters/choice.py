"""Several drafters side by side: each request has the one that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truedraw.errors import InvalidParameter
from truedraw.protocols import Drafter, DraftRequest, Forecast, Outcome
from truedraw.types import Proposal


class ChoiceDrafter(Drafter):
    """drafters: by name; default: the name that requests without one have. Members may share parts."""

    def __init__(self, drafters: Mapping[str, Drafter], default: str) -> None:
        self.drafters, self.default = dict(drafters), default
        self.samples = any(drafter.samples for drafter in self.drafters.values())
        self.trees = any(drafter.trees for drafter in self.drafters.values())
        self.hidden = tuple(dict.fromkeys(layer for drafter in self.drafters.values() for layer in drafter.hidden))
        self.forecasts = all(drafter.forecasts for drafter in self.drafters.values())

    def named(self, name: str) -> Drafter:
        """Raises InvalidParameter for a name that is none of them."""
        if name not in self.drafters:
            raise InvalidParameter("drafter", name, f"one of {', '.join(self.drafters)}")
        return self.drafters[name]

    def forecast(self, requests: Sequence[DraftRequest]) -> list[Forecast | None]:
        forecasts: list[Forecast | None] = [None] * len(requests)
        for drafter, places in self._groups(requests):
            for place, forecast in zip(places, drafter.forecast([requests[i] for i in places]), strict=True):
                forecasts[place] = forecast
        return forecasts

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = [Proposal()] * len(requests)
        for drafter, places in self._groups(requests):
            for place, proposal in zip(places, drafter.propose([requests[i] for i in places]), strict=True):
                proposals[place] = proposal
        return proposals

    def _groups(self, requests: Sequence[DraftRequest]) -> list[tuple[Drafter, list[int]]]:
        """The drafters that are asked, each with the places of its requests."""
        places: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            places.setdefault(request.drafter or self.default, []).append(i)
        return [(self.drafters[name], members) for name, members in places.items()]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for drafter in self.drafters.values():
            drafter.observe(outcomes)

    def save(self) -> None:
        for drafter in self.drafters.values():
            drafter.save()

    def close(self) -> None:
        for drafter in self.drafters.values():
            drafter.close()
