"""From steps to what a client is told of them: text without stop strings and half characters, log-probabilities, an end."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

from truedraw.audit.planted.asked import Asked
from truedraw.audit.planted.decoder import Decoder, Row, Rows
from truedraw.audit.planted.faults import Fault
from truedraw.audit.planted.vocabulary import END, token_bytes

LEAST = -9999.0
"""What is told for the logarithm of 0."""


@dataclass(frozen=True, slots=True)
class Told:
    """A log-probability and those of the most likely tokens."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to a choice. finish: "stop" or "length" with the last piece."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Told, ...]
    finish: str | None
    proposed: int
    accepted: int


class Logprobs:
    """The log-probabilities that are told.

    raw     the rows before any parameter; None: those of the tokens' own law
    digits  after the point; None: all
    """

    def __init__(self, raw: Rows | None, digits: int | None, count: int) -> None:
        self._raw, self._digits, self._count = raw, digits, count

    def told(self, decoder: Decoder, place: int, draft: bool) -> Told:
        """Of the token at `place`. draft: under the draft model."""
        row = decoder.row(draft, place) if self._raw is None else self._raw.at(draft, decoder.tokens, place)
        token = decoder.tokens[place]
        return Told(token, self._printed(row, token), tuple((i, self._printed(row, i)) for i in row.ranked[: self._count]))

    def _printed(self, row: Row, token: int) -> float:
        value = max(float(row.logs[token]), LEAST)
        return value if self._digits is None else round(value, self._digits)


def pieces(decoder: Decoder, asked: Asked, logprobs: Logprobs | None, fault: Fault | None) -> Iterator[Piece]:
    """Until a stop string, the end token or max_tokens."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    place = len(decoder.tokens)
    last = place + asked.max_tokens
    text, finish, stopped = "", None, False
    for step in decoder.steps():
        first = place
        late_stop = step.faulty and fault is not None and fault.late_stop
        overrun = step.faulty and fault is not None and fault.overrun
        told_by_draft = step.drafted if step.faulty and fault is not None and fault.draft_logprobs else 0
        for i, token in enumerate(step.tokens):
            place += 1
            if token == END and not asked.ignore_eos:
                finish = "stop"
                break
            text += utf8.decode(token_bytes(token))
            at_end = i == len(step.tokens) - 1
            cut = _stop_at(text, asked.stop, only_at_end=late_stop) if asked.stop and (at_end or not late_stop) else None
            if cut is not None:
                text, finish, stopped = text[:cut], "stop", True
                break
            if place >= last and (at_end or not overrun):
                finish = "length"
                break
        if finish and not stopped:
            text += utf8.decode(b"", final=True)
        safe = len(text) if finish else len(text) - _held_back(text, asked.stop)
        told = (
            ()
            if logprobs is None
            else tuple(logprobs.told(decoder, at, at - first < told_by_draft) for at in range(first, place))
        )
        yield Piece(text[:safe], tuple(step.tokens[: place - first]), told, finish, step.proposed, step.accepted)
        text = text[safe:]
        if finish:
            return


def _stop_at(text: str, stops: tuple[str, ...], *, only_at_end: bool) -> int | None:
    """Where the first stop string begins."""
    if only_at_end:
        return min((len(text) - len(stop) for stop in stops if text.endswith(stop)), default=None)
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop) - 1, len(text)) + 1) if stop.startswith(text[-size:])),
        default=0,
    )
