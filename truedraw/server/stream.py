"""Server-sent events: as they are made, or at an even pace and size."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

Chunk: TypeAlias = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(data: Chunk) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


class SteadyPace:
    """Chunks at an even pace and size, whatever was predictable (after arXiv 2411.01076).

    From the first moment to the last an event of `size` bytes is sent every `interval` seconds: with as much text as
    has been made and fits, and padding (the field `obfuscation`, which OpenAI's clients know and skip). What remains
    to be seen is how long the whole answer took.
    """

    def __init__(self, interval: float = 0.05, size: int = 1536, room: int = 96) -> None:
        self.interval, self.size, self._room = interval, size, room

    async def even(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
        """chunks: with at most one choice each, whose text is cut and joined at will; closes them at its end."""
        waiting: deque[Chunk] = deque()
        failure: list[BaseException] = []
        ended = asyncio.Event()

        async def collect() -> None:
            try:
                async for chunk in chunks:
                    _add(waiting, chunk)
            except Exception as error:
                failure.append(error)
            finally:
                ended.set()

        collector = asyncio.create_task(collect())
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while waiting or not ended.is_set():
                yield self._padded(self._next(waiting))
                due += self.interval
                await asyncio.sleep(max(0.0, due - loop.time()))
            if failure:
                raise failure[0]
        finally:
            collector.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await collector

    def _next(self, waiting: deque[Chunk]) -> Chunk:
        """As much of the first chunk as fits; where there is none, an empty one."""
        if not waiting:
            return {"choices": []}
        first = waiting[0]
        text = _text(first)
        if text is None or len(json.dumps(text, ensure_ascii=False).encode()) <= self._room:
            return waiting.popleft()
        length = self._fitting(text)
        head = _with_text(first, text[:length])
        head["choices"][0]["finish_reason"] = None
        head.pop("speculation", None)
        waiting[0] = _with_text(first, text[length:])
        return head

    def _fitting(self, text: str) -> int:
        size, length = 2, 0
        for character in text:
            size += len(json.dumps(character, ensure_ascii=False).encode()) - 2
            if size > self._room:
                break
            length += 1
        return max(length, 1)

    def _padded(self, chunk: Chunk) -> bytes:
        bare = len(event({**chunk, "obfuscation": ""}))
        return event({**chunk, "obfuscation": "-" * max(0, self.size - bare)})


def _add(waiting: deque[Chunk], chunk: Chunk) -> None:
    """Behind the others, or joined to the last where that is of the same choice and has not ended it."""
    text, last = _text(chunk), _text(waiting[-1]) if waiting else None
    if text is not None and last is not None:
        before, now = waiting[-1]["choices"][0], chunk["choices"][0]
        if before["index"] == now["index"] and before["finish_reason"] is None:
            waiting[-1] = _with_text(chunk, last + text)
            return
    waiting.append(chunk)


def _text(chunk: Chunk) -> str | None:
    """The text of a chunk's one choice; None where it has no choice, or one that only begins."""
    for choice in chunk["choices"]:
        if "text" in choice:
            return str(choice["text"])
        if "role" not in choice["delta"]:
            return str(choice["delta"].get("content", ""))
    return None


def _with_text(chunk: Chunk, text: str) -> Chunk:
    (choice,) = chunk["choices"]
    changed = {"text": text} if "text" in choice else {"delta": {"content": text} if text else {}}
    return {**chunk, "choices": [{**choice, **changed}]}
