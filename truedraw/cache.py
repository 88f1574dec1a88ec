"""CachedModel: a runner and the tokens that its KV cache holds; the only caller of rollback.

One rule covers rejected drafts, the bonus token that a draft model never saw, a draft cache that
lags, prompt reuse between chat turns, a cancelled request and an exception in the middle of a
step: keep the longest common prefix of what the slot holds and what is asked, forget the rest,
feed what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from truedraw.protocols import Chunk, ModelRunner, Rows
from truedraw.types import TokenArray

LEAST_COPIED = 16
"""Tokens that a slot must gain to take over what another slot holds, or to wait for what another is reading."""


class TokenBuffer:
    """A growing array of token ids. `array` is a read-only view, valid until the next change."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        initial = np.fromiter(tokens, dtype=np.int32)
        self._data = np.empty(max(64, 2 * len(initial)), dtype=np.int32)
        self._data[: len(initial)] = initial
        self._length = len(initial)

    def __len__(self) -> int:
        return self._length

    @property
    def array(self) -> TokenArray:
        view = self._data[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, tokens: Sequence[int] | TokenArray) -> None:
        length = self._length + len(tokens)
        if length > len(self._data):
            grown = np.empty(2 * length, dtype=np.int32)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._data[self._length : length] = tokens
        self._length = length

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)


def common_prefix(left: TokenArray, right: TokenArray) -> int:
    """The number of leading tokens that agree."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class CachedModel:
    """Next-token rows for whole contexts, computing only what the cache lacks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._held = [TokenBuffer() for _ in range(runner.num_slots)]
        self._owners = [""] * runner.num_slots
        self._unsure: set[int] = set()
        """Slots whose cache may hold more than is known: a change of theirs did not come to its end."""

    def max_fed(self, hidden: tuple[str, ...]) -> int:
        """The most tokens of one pass when these layers are asked for."""
        return self.runner.max_rows if hidden else self.runner.max_pass_size

    def num_cached(self, slot: int, context: TokenArray) -> int:
        """How many leading tokens of `context` the slot holds."""
        return common_prefix(self._held[slot].array, context)

    def held(self, slot: int) -> TokenArray:
        """The tokens that the slot's KV cache holds: a view."""
        return self._held[slot].array

    def assign(self, slot: int, owner: str) -> None:
        """The slot serves `owner` from now on: another one's text is forgotten."""
        if self._owners[slot] != owner:
            self.forget(slot)
            self._owners[slot] = owner

    def owner(self, slot: int) -> str:
        return self._owners[slot]

    def forget(self, slot: int) -> None:
        """Start the slot anew."""
        self._unsure.add(slot)
        self._held[slot].truncate(0)
        self.runner.rollback(slot, 0)
        self._unsure.discard(slot)

    def adopt(self, slot: int, tokens: TokenArray, at_least: int = LEAST_COPIED) -> int:
        """Take over the longest beginning of `tokens` that another slot of the same owner holds, if it is longer
        than what this one holds by `at_least` tokens. Says how many tokens that gained."""
        if not self.runner.can_copy:
            return 0
        own = self.num_cached(slot, tokens)
        others = [other for other, owner in enumerate(self._owners) if owner == self._owners[slot] and other != slot]
        source = max(others, key=lambda other: self.num_cached(other, tokens), default=slot)
        length = self.num_cached(source, tokens)
        if length - own < at_least:
            return 0
        self._unsure.add(slot)
        self._held[slot].truncate(0)
        self.runner.copy(source, slot, length)
        self._held[slot].extend(tokens[:length])
        self._unsure.discard(slot)
        return length - own

    def logits(
        self,
        contexts: Sequence[tuple[int, TokenArray]],
        last: Sequence[int],
        parents: Sequence[tuple[int, ...] | None] | None = None,
        hidden: Sequence[tuple[str, ...]] | None = None,
    ) -> list[Rows]:
        """The next-token rows after each of the last `last[i]` tokens of `contexts[i]`.

        contexts  (slot, tokens); each slot at most once
        last      0 feeds the context and keeps no row
        parents   for trees: of each of the last len(parents[i]) tokens, as in Chunk
        hidden    layers wanted with the rows of each

        One pass, unless more is missing than a pass takes: then all but the end goes ahead in
        passes of its own. The rows are views, valid until the next call. Raises what the runner
        raises; the tokens held then never exceed what the cache really holds.
        """
        trees = parents if parents is not None else [None] * len(contexts)
        layers = hidden if hidden is not None else [()] * len(contexts)
        limit = min(self.max_fed(wanted) for wanted in layers) if layers else 0
        starts = [self._keep(slot, tokens, n, tree) for (slot, tokens), n, tree in zip(contexts, last, trees, strict=True)]
        missing_in_all = sum(len(tokens) - start for (_, tokens), start in zip(contexts, starts, strict=True))
        fair = limit if missing_in_all <= limit else limit // len(contexts)
        chunks: list[Chunk | None] = []
        for (slot, tokens), start, n, tree, wanted in zip(contexts, starts, last, trees, layers, strict=True):
            needed = max(n, len(tree or ()))
            share = max(fair, needed)
            while len(tokens) - start > share:
                ahead = min(share, len(tokens) - start - needed)
                self._forward([Chunk(slot, tokens[start : start + ahead], 0)])
                start = len(self._held[slot])
            missing = tokens[start:]
            chunks.append(Chunk(slot, missing, n, tree, wanted) if len(missing) else None)
        answers = iter(self._forward([chunk for chunk in chunks if chunk is not None]))
        return [Rows(np.empty((0, self.runner.vocab_size), np.float32)) if chunk is None else next(answers) for chunk in chunks]

    def _keep(self, slot: int, tokens: TokenArray, last: int, tree: tuple[int, ...] | None) -> int:
        """Roll the slot back to what can stay, and say how much that is."""
        keep = min(self.num_cached(slot, tokens), len(tokens) - max(last, len(tree or ())))
        if keep < len(self._held[slot]) or slot in self._unsure:
            if not self.runner.can_rollback:
                keep = 0
            self._unsure.add(slot)
            self._held[slot].truncate(keep)
            self.runner.rollback(slot, keep)
            self._unsure.discard(slot)
        return keep

    def _forward(self, chunks: list[Chunk]) -> list[Rows]:
        if not chunks:
            return []
        self._unsure.update(chunk.slot for chunk in chunks)  # until the end: an error or Ctrl-C may come at any instant
        rows = self.runner.forward(chunks)
        for chunk in chunks:
            linear = len(chunk.tokens) - len(chunk.parents or ())  # behind it the cache holds branches, not a text
            self._held[chunk.slot].extend(chunk.tokens[:linear])
            if chunk.parents:
                self.runner.rollback(chunk.slot, len(self._held[chunk.slot]))
        self._unsure.difference_update(chunk.slot for chunk in chunks)
        return rows

    def close(self) -> None:
        self.runner.close()
