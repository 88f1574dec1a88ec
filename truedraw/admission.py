"""Who goes next, and into which slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from truedraw.cache import CachedModel
from truedraw.sequence import ActiveSequence
from truedraw.types import TokenArray


class Turns:
    """Whose turn it is: of the owner with the fewest running choices, or, of several, the one that had its turn
    longest ago; then of the request with the fewest running choices; then first come, first served."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._time = 0

    def next(self, waiting: Sequence[tuple[str, int]], running: Iterable[ActiveSequence]) -> int:
        """The place of what goes next. waiting: owner and request of each, as they came; at least one."""
        owners: Counter[str] = Counter()
        requests: Counter[int] = Counter()
        for sequence in running:
            owners[sequence.owner] += 1
            requests[sequence.request] += 1

        def rank(place: int) -> tuple[int, int, int, int]:
            owner, request = waiting[place]
            return owners[owner], self._last.get(owner, 0), requests[request], place

        place = min(range(len(waiting)), key=rank)
        self._time += 1
        self._last[waiting[place][0]] = self._time
        return place


class Slots:
    """Which slots are free, and what is lost by taking one."""

    def __init__(self, target: CachedModel) -> None:
        self._target = target
        self._taken: set[int] = set()
        self._last_used = [0] * target.runner.num_slots
        self._time = 0

    @property
    def num_free(self) -> int:
        return len(self._last_used) - len(self._taken)

    def take(self, prompt: TokenArray, owner: str) -> int:
        """A free slot for the prompt: from now on it is the owner's.

        The one whose cache begins as the prompt does, if more is kept of it than lost; else the one that loses least,
        by tokens and by how long nobody needed them (what another one holds is copied: CachedModel.adopt).
        """
        free = [slot for slot in range(len(self._last_used)) if slot not in self._taken]
        slot = max(free, key=lambda slot: self._merit(slot, prompt, owner))
        self._taken.add(slot)
        self._target.assign(slot, owner)
        return slot

    def _merit(self, slot: int, prompt: TokenArray, owner: str) -> tuple[int, float]:
        held = len(self._target.held(slot))
        kept = self._target.num_cached(slot, prompt) if self._target.owner(slot) == owner else 0
        worth = (held - kept) / (1 + self._time - self._last_used[slot])
        return kept if 2 * kept >= held or not self._target.runner.can_copy else 0, -worth

    def free(self, slot: int) -> None:
        self._time += 1
        self._last_used[slot] = self._time
        self._taken.discard(slot)
