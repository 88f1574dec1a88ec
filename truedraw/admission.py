"""Who goes next, and into which slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from truedraw.cache import CachedModel
from truedraw.sequence import ActiveSequence
from truedraw.types import TokenArray


def fairest(waiting: Sequence[tuple[str, int]], running: Iterable[ActiveSequence]) -> int:
    """The place in the queue of what goes next: of the owner with the fewest running choices; then of the request
    with the fewest; then first come, first served.

    waiting  owner and request of each, in the order of their arrival; at least one
    """
    owners: Counter[str] = Counter()
    requests: Counter[int] = Counter()
    for sequence in running:
        owners[sequence.owner] += 1
        requests[sequence.request] += 1
    return min(range(len(waiting)), key=lambda i: (owners[waiting[i][0]], requests[waiting[i][1]], i))


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

        The one whose cache holds most of the prompt, unless more would be lost of it than is kept: then, and where none
        holds anything, the one that was free for longest (what the other holds is copied: CachedModel.adopt).
        """
        free = [slot for slot in range(len(self._last_used)) if slot not in self._taken]
        slot = max(free, key=lambda slot: (self._kept(slot, prompt, owner), -self._last_used[slot]))
        self._taken.add(slot)
        self._target.assign(slot, owner)
        return slot

    def _kept(self, slot: int, prompt: TokenArray, owner: str) -> int:
        if self._target.owner(slot) != owner:
            return 0
        kept = self._target.num_cached(slot, prompt)
        return kept if not self._target.runner.can_copy or 2 * kept >= len(self._target.held(slot)) else 0

    def free(self, slot: int) -> None:
        self._time += 1
        self._last_used[slot] = self._time
        self._taken.discard(slot)
