"""Which text a row of vLLM's batch holds: found again by its tokens.

`propose` is told rows and no names of requests. A row moves when others end, and comes back after a preemption, so that
what is known of a text belongs to the text: whoever has these tokens continues it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from truedraw.drafters.evidence import SAMPLED, History
from truedraw.drafters.suffix import Text

Row = npt.NDArray[np.int32]


@dataclass(eq=False)
class Known:
    """What is known of one text.

    tokens  of the text as it was last seen, and how many of them were there when it was first seen
    drafts  proposed behind them, with the probability of each that it and those before it are right
    new     tokens that came since the drafts were made
    last    the latest call that had the text in its batch; seen: the one before
    learned its answer is in the corpus
    """

    tokens: Row
    start: int
    text: Text
    drafts: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    new: Row = field(default_factory=lambda: np.empty(0, np.int32))
    seen: int = -1
    last: int = -1
    learned: bool = False

    @property
    def answer(self) -> Row:
        return self.tokens[self.start :]

    @property
    def accepted(self) -> int:
        """How many of the drafts were emitted."""
        length = min(len(self.drafts), len(self.new))
        right = np.asarray(self.drafts[:length]) == self.new[:length]
        return length if right.all() else int(right.argmin())


LEFT = 16
"""Calls without a text after which it counts as ended; it is found again all the same."""


class Texts:
    """The texts of the batch and the most recent others: `max_texts` and `max_tokens` at most, but for what the batch holds.

    reach  tokens that a text may have grown by since it was seen; one that grew by more is read anew
    """

    def __init__(self, max_texts: int, reach: int, max_tokens: int = 1_000_000) -> None:
        self._max_texts, self._max_tokens, self._reach = max_texts, max_tokens, reach
        self._num_tokens = self._calls = 0
        self._known: OrderedDict[int, Known] = OrderedDict()  # by identity, the longest unseen first
        self._by_length: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, rows: Sequence[tuple[Row, int]]) -> tuple[list[Known], list[Known]]:
        """For each row (tokens, and how many of them are prompt) what is known of its text, brought up to date; and the
        texts that were forgotten to make room. No two rows share one."""
        self._calls += 1
        taken: set[int] = set()
        found = []
        for tokens, prompt_length in rows:
            known = self._match(tokens, taken)
            if known is None:
                known = self._begin(tokens, prompt_length)
            else:
                self._take_out(known)
                known.new = tokens[len(known.tokens) :].copy()
                known.text.follow(known.new.tolist())
                known.tokens = tokens.copy()
                self._put_in(known)
            known.seen, known.last, known.learned = known.last, self._calls, False
            taken.add(id(known))
            self._known.move_to_end(id(known))
            found.append(known)
        forgotten = []
        while len(self._known) > len(taken) and (len(self._known) > self._max_texts or self._num_tokens > self._max_tokens):
            forgotten.append(self._forget())
        return found, forgotten

    def ended(self) -> Iterator[Known]:
        """Texts that were in no batch lately, the longest unseen first."""
        return takewhile(lambda known: self._calls - known.last > LEFT, self._known.values())

    def _match(self, tokens: Row, taken: set[int]) -> Known | None:
        """The longest known text that these tokens begin with."""
        for length in range(len(tokens), len(tokens) - self._reach - 1, -1):
            for key in self._by_length.get(length, ()):
                if key not in taken and np.array_equal(self._known[key].tokens, tokens[:length]):
                    return self._known[key]
        return None

    def _begin(self, tokens: Row, prompt_length: int) -> Known:
        text = Text(prompt_length, History(SAMPLED))
        text.follow(tokens.tolist())
        known = Known(tokens.copy(), prompt_length, text)
        self._known[id(known)] = known
        self._put_in(known)
        return known

    def _forget(self) -> Known:
        _, known = self._known.popitem(last=False)
        self._take_out(known)
        return known

    def _put_in(self, known: Known) -> None:
        self._num_tokens += len(known.tokens)
        self._by_length.setdefault(len(known.tokens), set()).add(id(known))

    def _take_out(self, known: Known) -> None:
        self._num_tokens -= len(known.tokens)
        same = self._by_length[len(known.tokens)]
        same.discard(id(known))
        if not same:
            del self._by_length[len(known.tokens)]
