"""What a request asks for: the fields of OpenAI's interface that are about sampling, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from truedraw.audit.planted.model import Settings
from truedraw.audit.planted.vocabulary import NUM_IDS, VOCAB, chat_prompt, encode

_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
}  # fmt: skip
_INTEGERS = {
    "top_k": (-1, 2**31), "max_tokens": (1, 10_000), "max_completion_tokens": (1, 10_000), "n": (1, 1000),
    "seed": (-(2**63), 2**64 - 1),
}  # fmt: skip
_FLAGS = ("stream", "ignore_eos", "return_token_ids")
_COMMON = {*_NUMBERS, *_INTEGERS, *_FLAGS, "model", "stop", "stream_options", "logit_bias", "logprobs", "user"}
_OWN = {True: {"messages", "top_logprobs"}, False: {"prompt"}}
_DEFAULT_LENGTH = {True: 256, False: 16}
MAX_LOGPROBS = 20


class Refused(Exception):
    """An answer that is no completion."""

    def __init__(self, status: int, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Asked:
    """prompts: token ids, one or more; num_logprobs None: no log-probabilities; off: plain decoding is asked for."""

    chat: bool
    model: str | None
    prompts: tuple[tuple[int, ...], ...]
    settings: Settings
    max_tokens: int
    stop: tuple[str, ...]
    n: int
    seed: int | None
    num_logprobs: int | None
    stream: bool
    include_usage: bool
    ids: bool
    ignore_eos: bool
    off: bool


def read(body: object, *, chat: bool, knows_speculation: bool) -> Asked:
    """Raises Refused, as servers do that name what they don't know."""
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    known = _COMMON | _OWN[chat] | ({"speculation"} if knows_speculation else set())
    for name in given:
        if name not in known:
            raise Refused(400, f"{name} is not supported: leave it out", "unknown_parameter")
    for name, (low, high) in (_NUMBERS | _INTEGERS).items():
        if name in given:
            _number(name, given[name], low, high, whole=name in _INTEGERS)
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise Refused(400, f"{name} is {given[name]!r}: a boolean is needed")
    length = given.get("max_completion_tokens", given.get("max_tokens", _DEFAULT_LENGTH[chat]))
    return Asked(
        chat,
        given.get("model"),
        _chat(given.get("messages")) if chat else _prompts(given.get("prompt")),
        _settings(given),
        int(length),
        _stop(given.get("stop", ())),
        int(given.get("n", 1)),
        given.get("seed"),
        _num_logprobs(given, chat),
        given.get("stream", False),
        bool(_object("stream_options", given).get("include_usage", False)),
        given.get("return_token_ids", False),
        given.get("ignore_eos", False),
        bool(_object("speculation", given).get("off", False)),
    )


def _number(name: str, value: object, low: float, high: float, *, whole: bool) -> None:
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise Refused(400, f"{name} is {value!r}: allowed is {low} to {high}")


def _object(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise Refused(400, f"{name} is {value!r}: an object is needed")
    return value


def _settings(given: Mapping[str, Any]) -> Settings:
    bias = []
    for token, value in _object("logit_bias", given).items():
        if not (token.isascii() and token.isdecimal() and int(token) < VOCAB):
            raise Refused(400, f"logit_bias has the key {token!r}: allowed are token ids below {VOCAB}")
        _number(f"logit_bias[{token}]", value, -100, 100, whole=False)
        bias.append((int(token), float(value)))
    numbers = {name: float(given[name]) for name in _NUMBERS if name in given}
    return Settings(**numbers, top_k=max(int(given.get("top_k", 0)), 0), logit_bias=tuple(sorted(bias)))


def _stop(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise Refused(400, f"stop is {value!r}: a text or a list of texts is needed")
    return tuple(str(text) for text in texts)


def _num_logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    if chat and not isinstance(given.get("logprobs", False), bool):
        raise Refused(400, f"logprobs is {given['logprobs']!r}: a boolean is needed")
    if chat and not given.get("logprobs", False):
        return None
    count = given.get("top_logprobs", 0) if chat else given.get("logprobs")
    if count is not None:
        _number("top_logprobs" if chat else "logprobs", count, 0, MAX_LOGPROBS, whole=True)
    return count


def _chat(messages: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages is empty: a list of messages is needed")
    pairs = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):
            raise Refused(400, "a message has no content: a text is needed")
        pairs.append((str(message.get("role", "user")), content))
    return (tuple(encode(chat_prompt(pairs))),)


def _prompts(prompt: object) -> tuple[tuple[int, ...], ...]:
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return tuple(tuple(encode(each)) if isinstance(each, str) else _checked_ids(each) for each in prompts)


def _checked_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < NUM_IDS for token in ids):
        raise Refused(400, f"prompt is neither a text nor a list of token ids below {NUM_IDS}")
    return tuple(ids)
