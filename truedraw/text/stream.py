"""The incremental detokenizer: bytes in, whole characters out, stop strings wherever they fall."""

from __future__ import annotations

import codecs
from collections.abc import Callable

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one sequence, fed one token at a time.

    Text is released once it cannot belong to a stop string any more, in whole characters; bytes
    that are no UTF-8 become U+FFFD, an unfinished character at the very end does so once. A token
    is released when text of it has been (or, without text, when its place in the text is passed).
    After a stop string the released tokens are the shortest prefix whose text contains the
    released text.

    stop_after  tokens before which no stop string may begin (min_tokens)
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop_strings: tuple[str, ...] = (), stop_after: int = 0) -> None:
        self._token_bytes = token_bytes
        self._stops = tuple(stop.encode() for stop in stop_strings)
        self._stop_after = stop_after
        self._decoder = _UTF8("replace")
        self._num_tokens = 0
        self._held = b""  # not released yet: may begin a stop string
        self._held_starts: list[int] = []  # of each token not released yet, its offset in _held
        self._num_released = 0
        self._text: list[str] = []
        self._stopped = False

    def feed(self, token: int, *, silent: bool = False) -> bool:
        """Take in a token; True if it completes a stop string. `silent`: it ends the text and has none."""
        assert not self._stopped, "a token after the end of the text"
        data = b"" if silent else self._token_bytes(token)
        self._held_starts.append(len(self._held))
        self._held += data
        self._num_tokens += 1
        if self._num_tokens <= self._stop_after or not self._stops:
            self._release(len(self._held))
            self._num_released += len(self._held_starts)
            self._held_starts.clear()
            return False
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._stopped = True
            self._release(min(found))
            self._held = b""
            return True
        self._release(len(self._held) - self._longest_stop_prefix())
        return False

    def _longest_stop_prefix(self) -> int:
        """The length of the longest end of the held bytes that begins a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)

    def _release(self, length: int) -> None:
        """Release the first `length` held bytes, and each token that begins before their end."""
        if length:
            self._text.append(self._decoder.decode(self._held[:length]))
            self._held = self._held[length:]
            passed = sum(start < length for start in self._held_starts)
            self._num_released += passed
            self._held_starts = [start - length for start in self._held_starts[passed:]]

    def finish(self) -> None:
        """The text ends here: release what is held, unless a stop string cut it off. Idempotent."""
        if not self._stopped:
            self._release(len(self._held))
            self._num_released += len(self._held_starts)
            self._stopped = True
        self._held_starts = []
        self._text.append(self._decoder.decode(b"", final=True))

    @property
    def num_released(self) -> int:
        """Tokens released so far."""
        return self._num_released

    def take(self) -> str:
        """The text released since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text
