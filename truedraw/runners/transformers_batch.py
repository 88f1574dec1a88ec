"""Many texts of one transformers model in one padded cache: for generating them at once where nothing is taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from truedraw.errors import RunnerError
from truedraw.protocols import Rows
from truedraw.runners import transformers_cache as caches
from truedraw.types import TokenArray

if TYPE_CHECKING:
    from truedraw.runners.transformers import TransformersRunner

MOST_TEXTS = 128
"""At a time: a pass of 128 texts takes about three times as long as one of a single text, on cores that have AMX."""

MOST_BYTES = 1 << 30
"""Of keys and values, for texts of TYPICAL_TEXT tokens; models that need more for them have fewer texts at a time."""

TYPICAL_TEXT = 256
_MOST_IDLE = 64  # columns at the left that no text needs any more are dropped once there are so many


class TextBatch:
    """See SideBySide. Row i of the cache holds text i, right-aligned: each text ends in the last column, and what stands to
    the left of its beginning is hidden by the attention mask. Positions are counted from the beginning of each text."""

    refill = 8
    """A prompt alone costs more than a third of a step of all texts, and eight of them at once hardly more than that."""

    def __init__(self, runner: TransformersRunner, num_texts: int) -> None:
        self.num_texts = num_texts
        self._runner = runner
        self._cache = runner.new_cache()
        self._starts = np.zeros(num_texts, dtype=np.int64)
        self._columns = 0

    def begin(self, places: Sequence[int], texts: Sequence[TokenArray]) -> None:
        """See TextBatch of the protocols: one pass for all of them."""
        longest = max(len(text) for text in texts)
        starts = longest - np.array([len(text) for text in texts])
        tokens = np.zeros((len(texts), longest), np.int64)
        for row, text in zip(tokens, texts, strict=True):
            row[longest - len(text) :] = text
        fresh = self._runner.new_cache()
        self._runner.compute_texts(fresh, tokens, np.arange(longest) >= starts[:, None])
        if not self._columns:
            caches.widen(self._cache, fresh, self.num_texts)
            self._columns = longest
        if longest > self._columns:
            self._shift(longest - self._columns)
        for i, place in enumerate(places):
            caches.put_row(self._cache, place, fresh, i, self._columns)
            self._starts[place] = self._columns - len(texts[i])

    def step(self, places: Sequence[int], tokens: TokenArray) -> Rows:
        """See TextBatch of the protocols. Other places are computed too, and hold nothing worth knowing afterwards."""
        idle = np.ones(self.num_texts, dtype=bool)
        idle[list(places)] = False
        self._starts[idle] = self._columns
        if self._columns + 1 - self._starts.min() > self._runner.max_length:
            raise RunnerError(f"a text side by side with others would hold more than {self._runner.max_length} tokens")
        fed = np.zeros((self.num_texts, 1), np.int64)
        fed[list(places), 0] = tokens
        seen = np.arange(self._columns + 1) >= self._starts[:, None]
        logits, final = self._runner.compute_texts(self._cache, fed, seen)
        self._columns += 1
        if self._starts.min() >= _MOST_IDLE:
            self._shift(-int(self._starts.min()))
        return Rows(logits[list(places)], {"final": final[list(places)]})

    def _shift(self, columns: int) -> None:
        """Put empty columns at the left of all texts, or take them away."""
        caches.shift(self._cache, columns)
        self._columns += columns
        self._starts += columns


def texts_at_a_time(cache: Any, tokens: int) -> int:
    """How many texts fit, by a cache that holds so many tokens of one."""
    each = caches.held_bytes(cache) / tokens * TYPICAL_TEXT
    return int(max(1, min(MOST_TEXTS, MOST_BYTES / each)))
