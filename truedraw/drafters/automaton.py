"""A suffix automaton over a growing text (Blumer et al. 1985; for drafting Hu et al. 2024, SAM decoding,
arXiv 2411.10666): the longest suffix that came up before, what followed it there, and how often, in
amortised constant time per token.
"""

from __future__ import annotations

_COUNTED_SUFFIXES = 32


class SuffixAutomaton:
    """All substrings of the text; strings that end in the same places share a state.

    match_length  of the longest suffix of the text that also ends earlier
    match_end     where it ended when the walk last met it: its continuation is text[match_end:]
    match_state   its state
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._count = [0]
        self._last = 0
        self.match_state = 0
        self.match_length = 0
        self.match_end = 0

    def extend(self, token: int) -> None:
        """Append a token: first the match moves on in the text as it stood, then the automaton grows."""
        while self.match_state and token not in self._next[self.match_state]:
            self.match_state = self._link[self.match_state]
            self.match_length = self._length[self.match_state]
        if token in self._next[self.match_state]:
            self.match_state = self._next[self.match_state][token]
            self.match_length += 1
        else:
            self.match_length = 0
        self._grow(token)
        self.match_end = self._end[self.match_state]
        self._end[self.match_state] = len(self.text)

    def followers(self, state: int) -> dict[int, int]:
        """How often each token followed the strings of a state. Empty behind the end of the text alone.

        Counts are of the 32 longest suffixes at each place: short strings of a text that repeats itself
        throughout are counted low, which keeps the time per token constant.
        """
        return {token: self._count[after] for token, after in self._next[state].items()}

    def only_follower(self, state: int) -> int | None:
        """The one token that ever followed the strings of a state; None if there are several."""
        after = self._next[state]
        return next(iter(after)) if len(after) == 1 else None

    def count(self, state: int, token: int) -> int:
        """How often `token` followed the strings of a state."""
        after = self._next[state].get(token)
        return 0 if after is None else self._count[after]

    def walk(self, state: int, token: int) -> int:
        """The state of the longest of its suffixes, with `token` appended, that something followed; the
        empty string's, 0, if there is none."""
        state = self._next[state].get(token, 0)
        while state and not self._next[state]:
            state = self._link[state]
        return state

    def predicted(self) -> int | None:
        """The token that followed the match; None without one."""
        return self.text[self.match_end] if self.match_length and self.match_end < len(self.text) else None

    def copy(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the match. Where the earlier occurrence reaches up to the end
        itself, the text repeats with that period, and so does the copy."""
        known = self.match_length and self.match_end < len(self.text)
        return [self.copied(self.match_end, i) for i in range(count)] if known else []

    def copied(self, start: int, index: int) -> int:
        """Token `index` of the text from `start` on, which goes on with the period that it ends in."""
        return self.text[start + index % (len(self.text) - start)]

    def _grow(self, token: int) -> None:
        self.text.append(token)
        state = self._new(self._length[self._last] + 1, len(self.text))
        p = self._last
        while p >= 0 and token not in self._next[p]:
            self._next[p][token] = state
            p = self._link[p]
        if p >= 0:
            q = self._next[p][token]
            self._link[state] = q if self._length[q] == self._length[p] + 1 else self._split(p, q, token)
        self._last = state
        for _ in range(_COUNTED_SUFFIXES):
            if state <= 0:
                break
            self._count[state] += 1
            state = self._link[state]

    def _split(self, p: int, q: int, token: int) -> int:
        """The shorter strings of state q, which from now on end in more places, get a state of their own."""
        clone = self._new(self._length[p] + 1, self._end[q])
        self._next[clone] = dict(self._next[q])
        self._count[clone] = self._count[q]
        self._link[clone] = self._link[q]
        self._link[q] = clone
        if self.match_state == q and self.match_length <= self._length[clone]:
            self.match_state = clone
        while p >= 0 and self._next[p].get(token) == q:
            self._next[p][token] = clone
            p = self._link[p]
        return clone

    def _new(self, length: int, end: int) -> int:
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        self._count.append(0)
        return len(self._next) - 1
