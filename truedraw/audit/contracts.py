"""What a server promises by taking a parameter: checked on the tokens it draws. One token that is forbidden convicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truedraw.audit.client import Answer
from truedraw.audit.heads import head_of

Check = Callable[[Sequence[Answer], Mapping[str, Any], bool, int | None], str | None]
"""What is wrong with the answers to one request; None: nothing. raw, digits: of the log-probabilities."""

MARGIN = 0.05
"""Relative width within which a token on a boundary is nobody's fault: kernels shift rows."""


@dataclass(frozen=True, slots=True)
class Contract:
    """A parameter, how it is set, and what must then hold."""

    name: str
    settings: Mapping[str, Any]
    check: Check
    max_tokens: int = 24
    needs_logprobs: bool = False


def _inside_head(answers: Sequence[Answer], settings: Mapping[str, Any], raw: bool, digits: int | None) -> str | None:
    for answer in answers:
        for place, token in enumerate(answer.tokens):
            head = head_of(token, settings, raw=raw, digits=digits)
            if head is None or not head.contradicted:
                continue
            if _near(token.logprob, dict(token.top), settings):
                continue
            best = ", ".join(f"{text!r} {math.exp(value):.3f}" for text, value in token.top[:3])
            told = f"token {place + 1} is {token.text!r}, of probability {math.exp(token.logprob or 0):.4f}"
            return f"{told}, which {_shown(settings)} forbids: {best}"
    return None


def _near(logprob: float | None, top: Mapping[str, float], settings: Mapping[str, Any]) -> bool:
    """On the boundary, as far as kernels go."""
    if logprob is None:
        return True
    values = sorted(top.values(), reverse=True)
    count = settings.get("top_k") or (1 if settings.get("temperature") == 0 else 0)
    if 0 < count <= len(values):
        return math.exp(logprob) >= math.exp(values[count - 1]) * (1 - MARGIN)
    if settings.get("min_p"):
        return math.exp(logprob) >= float(settings["min_p"]) * math.exp(values[0]) * (1 - MARGIN)
    if settings.get("top_p", 1) < 1:
        above = sum(math.exp(value) for value in values if value > logprob)
        return above < float(settings["top_p"]) + MARGIN * (1 - float(settings["top_p"]))
    return False


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("seed", "n"))


def _no_stop(answers: Sequence[Answer], settings: Mapping[str, Any], raw: bool, digits: int | None) -> str | None:
    for answer in answers:
        found = [stop for stop in settings["stop"] if stop in answer.text]
        if found:
            return f"the text holds the stop string {found[0]!r}: {answer.text[:80]!r}"
    return None


def _budget(limit: int) -> Check:
    def check(answers: Sequence[Answer], settings: Mapping[str, Any], raw: bool, digits: int | None) -> str | None:
        for answer in answers:
            if answer.told and len(answer.tokens) > limit:
                return f"{len(answer.tokens)} tokens came where max_tokens is {limit}"
        return None

    return check


def _choices(count: int) -> Check:
    def check(answers: Sequence[Answer], settings: Mapping[str, Any], raw: bool, digits: int | None) -> str | None:
        if len(answers) != count:
            return f"{len(answers)} choices came where n is {count}"
        if len({answer.text for answer in answers}) == 1 and all(len(answer.tokens) > 12 for answer in answers):
            return f"all {count} choices are the same text at temperature 1: {answers[0].text[:60]!r}"
        return None

    return check


def _logprobs(answers: Sequence[Answer], settings: Mapping[str, Any], raw: bool, digits: int | None) -> str | None:
    for answer in answers:
        for place, token in enumerate(answer.tokens):
            shown = f"token {place + 1}, {token.text!r},"
            if token.logprob is None or math.isnan(token.logprob) or token.logprob > 1e-3:
                return f"{shown} has the log-probability {token.logprob}"
            told = dict(token.top).get(token.text)
            if told is not None and abs(told - token.logprob) > 1e-2 * max(1.0, abs(told)):
                return f"{shown} has the log-probability {token.logprob:.4f}, and {told:.4f} among the alternatives"
            least = min((value for _, value in token.top), default=math.inf)
            if told is None and token.top and token.logprob > least + 1e-2:
                return f"{shown} is likelier ({token.logprob:.3f}) than an alternative ({least:.3f}) and not among them"
    return None


def contracts(frequent: Sequence[int], stop: str | None) -> list[Contract]:
    """frequent: ids of tokens that came often; stop: a text that came often."""
    listed = [
        Contract("temperature 0", {"temperature": 0}, _inside_head, needs_logprobs=True),
        Contract("top-k", {"temperature": 1, "top_k": 2}, _inside_head, needs_logprobs=True),
        Contract("top-p", {"temperature": 1, "top_p": 0.5}, _inside_head, needs_logprobs=True),
        Contract("min-p", {"temperature": 1, "min_p": 0.3}, _inside_head, needs_logprobs=True),
        Contract("logprobs", {"temperature": 1}, _logprobs, needs_logprobs=True),
        Contract("max_tokens", {"temperature": 1}, _budget(5), max_tokens=5),
        Contract("n", {"temperature": 1, "n": 3}, _choices(3)),
    ]
    if stop:
        listed.append(Contract("stop", {"temperature": 1, "stop": [stop]}, _no_stop, max_tokens=48))
    if frequent:
        banned = {str(token): -100 for token in frequent}

        def not_banned(answers: Sequence[Answer], settings: Mapping[str, Any], raw: bool, digits: int | None) -> str | None:
            for answer in answers:
                hit = next((token for token in answer.tokens if token.key in frequent), None)
                if hit is not None:
                    return f"token {hit.text!r} (id {hit.key}) came, which logit_bias -100 bans"
            return None

        listed.append(Contract("logit_bias", {"temperature": 1, "logit_bias": banned}, not_banned))
    return listed


def first_difference(left: Answer, right: Answer) -> tuple[int, float | None] | None:
    """Where two answers part, and by how much the two likeliest tokens differ there (nats); None: they are the same."""
    if left.text == right.text and [token.key for token in left.tokens] == [token.key for token in right.tokens]:
        return None
    pairs = zip(left.tokens, right.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a.key != b.key), min(len(left.tokens), len(right.tokens)))
    margin = None
    if place < len(left.tokens) and len(left.tokens[place].top) > 1:
        first, second, *_ = sorted((value for _, value in left.tokens[place].top), reverse=True)
        margin = first - second
    return place, margin
