"""Texts to copy from besides prompt and output: earlier answers and files, in one suffix array.

The array sorts the places of the texts by the tokens before them, read backwards, DEPTH tokens deep (prefix
doubling, Karp, Miller and Rosenberg 1972; suffix arrays: Manber and Myers 1993). The places behind which the
end of a context came up are then one interval of it, found by bisection. What a text is copied from never
changes it: copies are drafts, and drafts are verified.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import InvalidParameter
from truedraw.types import TokenArray

DEPTH = 32
"""The longest match that is told: from some ten tokens on a longer one hardly raises what a copy is worth."""

LIMIT = 1_000_000
LARGEST = 100_000_000
"""Tokens of a corpus: by default, and at most. A token takes about 16 bytes of memory, 4 on disk."""

SAMPLE = 256
"""Of a match with more occurrences so many are looked at."""

_SPREAD = np.arange(SAMPLE) + np.arange(SAMPLE) * (5**0.5 - 1) / 2 % 1
# one in each equal part, at no fixed distance: tables and lists repeat with one

PENDING = 4096
"""The least number of tokens that make it worth to sort again."""

_BORDER = -1
_WIDTH = 4  # bytes of a token in what is compared


@dataclass(frozen=True, slots=True)
class Match:
    """Where the end of a context came up in a corpus. Holds until the next `add`.

    length       tokens that agree, 1 .. DEPTH
    occurrences  how often they came up with a token behind them
    share        of the occurrences, those followed by the most frequent next token; of ties the one that came
                 last. Counted over all of up to SAMPLE occurrences, else over so many of them
    start        where the latest of those goes on, as an index for `copy`
    """

    length: int
    occurrences: int
    share: float
    start: int


class Index:
    """The places of some texts, sorted. Never changes.

    tokens  (n,) the texts, a border before and behind each
    """

    def __init__(self, texts: Iterable[TokenArray]) -> None:
        border = np.array([_BORDER], dtype=np.int32)
        self.tokens: TokenArray = np.concatenate([border, *(part for text in texts for part in (text, border))])
        backwards = self.tokens[::-1] + 1  # a border is 0, the lowest, in both orders: of numbers and of bytes
        inside = backwards > 0
        wanted = np.concatenate([[False], inside[1:] & inside[:-1]])  # a token before the place and one behind it
        places = _sorted_places(backwards)
        self._places = _WIDTH * places[wanted[places]].astype(np.int32)  # where their bytes begin
        self._view = memoryview(self._places)  # indexed by bisect: plain integers, three times as fast as NumPy's
        self._bytes = backwards.astype(">i4").tobytes() + bytes(_WIDTH * DEPTH)

    def find(self, context: TokenArray, at_least: int = 1) -> Match | None:
        """The longest end of the context that some text holds with a token behind it; None if it is shorter than
        `at_least`, which is 1 or more."""
        query = (context[-DEPTH:][::-1] + 1).astype(">i4").tobytes()
        near = bisect_left(self._view, query, key=self._run(len(query)))
        length = max((self._agreement(place, query) for place in self._view[max(near - 1, 0) : near + 1]), default=0)
        return self._count(length, *self._interval(near, query[: _WIDTH * length])) if length >= at_least else None

    def _interval(self, near: int, query: bytes) -> tuple[int, int]:
        """The places behind the query, some of which are beside `near`: in steps that double, since most are few."""
        view, run, step = self._view, self._run(len(query)), 1
        while step <= near and run(view[near - step]) == query:
            step *= 2
        low = bisect_left(view, query, max(near - step, 0), near - step // 2, key=run)
        step = 1
        while near + step <= len(view) and run(view[near + step - 1]) == query:
            step *= 2
        return low, bisect_right(view, query, near + step // 2, min(near + step - 1, len(view)), key=run)

    def _count(self, length: int, low: int, high: int) -> Match:
        places = self._places[low:high]
        if len(places) > SAMPLE:
            places = places[(_SPREAD * (len(places) / SAMPLE)).astype(np.intp)]
        starts = np.sort(len(self.tokens) - places // _WIDTH)
        following = self.tokens[starts].tolist()
        counts = Counter(following)
        most = max(counts.values())
        latest = next(i for i in range(len(following) - 1, -1, -1) if counts[following[i]] == most)
        return Match(length, high - low, most / len(following), int(starts[latest]))

    def copy(self, start: int, count: int) -> list[int]:
        """Up to `count` tokens from there on, up to the border."""
        tokens: list[int] = self.tokens[start : start + count].tolist()
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens

    def _run(self, size: int) -> Callable[[int], bytes]:
        """The first `size` bytes of what stands before a place, backwards."""
        data = self._bytes
        return lambda place: data[place : place + size]

    def _agreement(self, place: int, query: bytes) -> int:
        """How many tokens of the query stand before that place."""
        difference = int.from_bytes(self._run(len(query))(place)) ^ int.from_bytes(query)
        return (len(query) - (difference.bit_length() + 7) // 8) // _WIDTH


def _sorted_places(backwards: TokenArray) -> npt.NDArray[np.intp]:
    """All places of a row of numbers >= 0, in the order of the DEPTH numbers from each on, which end at a 0: what
    follows one decides nothing.

    As many numbers as go into 64 bits are sorted at once, and every further sort doubles how far places are told
    apart.
    """
    n = len(backwards)
    bits = max(int(backwards.max()).bit_length(), 1)
    span = min(64 // bits, DEPTH)
    padded = np.zeros(n + DEPTH, dtype=np.uint64)
    padded[:n] = backwards
    key = padded[:n].copy()
    for i in range(1, span):
        key = (key << np.uint64(bits)) | padded[i : n + i]
    while True:
        order = np.argsort(key, kind="stable")
        if span >= DEPTH:
            return order
        ordered = key[order]
        rank = np.zeros(n + span, dtype=np.int64)  # of what lies behind the end: 0
        rank[order] = 1 + np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        key = (rank[:n] * (n + 1) + rank[span:]).astype(np.uint64)
        span *= 2


Store: TypeAlias = "Callable[[Corpus], None]"


class Corpus:
    """Texts of one tokenizer, of bounded size: some that stay, and some that are added and go, oldest first.

    texts     stay
    added     as if given to `add` in this order, and known to the store
    limit     tokens at most, a border after each text counted
    learning  finished answers are to be added
    store     called by `close` if something was added; None: nothing is kept
    Raises InvalidParameter.
    """

    def __init__(
        self,
        texts: Iterable[Sequence[int] | TokenArray] = (),
        *,
        added: Iterable[Sequence[int] | TokenArray] = (),
        limit: int = LIMIT,
        learning: bool = False,
        store: Store | None = None,
    ) -> None:
        self.limit = check_limit(limit)
        self.learning = learning
        self._store = store
        self._fixed = [_checked(text) for text in texts]
        self._room = limit - sum(len(text) + 1 for text in self._fixed)
        if self._room < 0:
            raise InvalidParameter("limit", limit, f"at least the {limit - self._room} tokens of the texts that stay")
        self._added: dict[bytes, bool] = {}  # in the order of their ages, with whether the store lacks them
        self._size_added = 0
        self._pending = 0
        for text in added:
            self._take(_checked(text), new=False)
        self._reindex()

    @property
    def size(self) -> int:
        """Tokens of all texts, with a border after each."""
        return self.limit - self._room + self._size_added

    def find(self, context: TokenArray, at_least: int = 1) -> Match | None:
        """Where the longest end of the context came up, of DEPTH tokens at most, with a token behind it; None where
        not even `at_least` tokens did. Searches what the last sort has seen. context: (n,), read only."""
        return self._index.find(context, at_least)

    def copy(self, match: Match, count: int) -> list[int]:
        """Up to `count` tokens that followed the match, up to the end of their text."""
        return self._index.copy(match.start, count)

    def add(self, tokens: Sequence[int] | TokenArray) -> None:
        """Take in a text. The oldest added ones go where there is no room; of a text that is longer than all the
        room its end stays; one that is there already becomes the newest.

        It is found from the next sort on, which comes when what is pending exceeds PENDING tokens and an eighth of
        the index: every token is then sorted about eight times at most, whatever the size.
        """
        self._take(_checked(tokens), new=True)
        if self._pending > max(PENDING, len(self._index.tokens) // 8):
            self._reindex()

    def _take(self, text: TokenArray, *, new: bool) -> None:
        text = text[max(len(text) - max(self._room - 1, 0), 0) :]
        if len(text) < 2:  # nothing follows anything
            return
        key = text.tobytes()
        lacking = self._added.pop(key, None)
        if lacking is None:
            self._size_added += len(text) + 1
            self._pending += len(text) + 1
        self._added[key] = new if lacking is None else lacking
        while self._size_added > self._room:
            oldest = next(iter(self._added))
            del self._added[oldest]
            self._size_added -= len(oldest) // _WIDTH + 1

    def _reindex(self) -> None:
        self._index = Index([*self._fixed, *self.added()])
        self._pending = 0

    def added(self, *, only_new: bool = False) -> list[TokenArray]:
        """The added texts, oldest first: all, or those that the store lacks."""
        return [np.frombuffer(key, dtype=np.int32) for key, new in self._added.items() if new or not only_new]

    def close(self) -> None:
        """Hand what was added to the store. Idempotent. Raises what the store raises."""
        if self._store is not None and any(self._added.values()):
            self._store(self)
            self._added = dict.fromkeys(self._added, False)


def check_limit(limit: int) -> int:
    """Raises InvalidParameter."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= LARGEST:
        raise InvalidParameter("corpus_size", limit, f"a number of tokens in [1, {LARGEST}]")
    return limit


def _checked(text: Sequence[int] | TokenArray) -> TokenArray:
    array = np.asarray(text, dtype=np.int32).reshape(-1)
    if len(array) and int(array.min()) < 0:
        raise InvalidParameter("corpus token", int(array.min()), "a token id >= 0")
    return array
