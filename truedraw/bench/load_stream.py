"""The streamed answer of an OpenAI-compatible server: bytes to events, events to what a sample needs of them."""

from __future__ import annotations

import json
from typing import Any

from truedraw.bench.load_figures import Failure, Speculation

MAX_EVENT_BYTES = 8 << 20


class AnswerFailed(Exception):
    """A request that failed, and how."""

    def __init__(self, kind: str, message: str, wait_seconds: float = 0.0) -> None:
        self.failure = Failure(kind, " ".join(message.split())[:300], wait_seconds)
        super().__init__(message)


class EventSplitter:
    """Cuts an event stream, as it comes in pieces, into the data of its events. Lines end in LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises AnswerFailed for an event without end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise AnswerFailed("not JSON", f"an event is larger than {MAX_EVENT_BYTES >> 20} MiB")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class Answer:
    """Collects one answer. arrivals: seconds, as `take` was told, of the chunks with content."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.ended = False  # a finish_reason or [DONE] came
        self._usage: dict[str, Any] = {}
        self._speculation: dict[str, Any] | None = None

    def take(self, event: bytes, now: float) -> None:
        """Raises AnswerFailed for an error event and for what is no event of a completion."""
        if event == b"[DONE]":
            self.ended = True
            return
        try:
            found = json.loads(event)
            error = found.get("error")
            choice: dict[str, Any] = (found.get("choices") or ({},))[0]
            delta = choice.get("delta") or {}
            # servers of reasoning models stream thoughts beside the content, under one of two names
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            self._usage = found.get("usage") or self._usage
            self._speculation = found.get("speculation") or self._speculation
        except (ValueError, AttributeError, TypeError, KeyError, IndexError):
            raise AnswerFailed("not JSON", f"an event that is no chunk of a completion: {event[:80]!r}") from None
        if error:
            raise AnswerFailed("error event", error_message(found))
        if text:
            self.arrivals.append(now)
        if choice.get("finish_reason"):
            self.ended = True

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self._usage, "prompt_tokens")

    @property
    def completion_tokens(self) -> int | None:
        return _count(self._usage, "completion_tokens")

    @property
    def speculation(self) -> Speculation | None:
        """None where the server tells none, or not all of it."""
        told = self._speculation
        counts = [_count(told, name) for name in ("steps", "proposed", "accepted")]
        seconds = _number(told, "seconds")
        if seconds is None or counts[0] is None or counts[1] is None or counts[2] is None:
            return None
        plain = _number(told, "estimated_plain_seconds")
        return Speculation(counts[0], counts[1], counts[2], _number(told, "tokens_per_step"), seconds, plain)


def error_message(found: object) -> str:
    """What an error body says, as OpenAI's {"error": {"message"}} or another JSON value."""
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(message)


def _number(told: object, name: str) -> float | None:
    value = told.get(name) if isinstance(told, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(told: object, name: str) -> int | None:
    value = told.get(name) if isinstance(told, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
