"""An OpenAI-compatible server as an audit sees it: prompts in, drawn tokens out, with all that the server tells of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from truedraw.errors import RunError

MAX_WAIT = 10.0
RETRIES = 4
_WORD = re.compile(r"\s*\S+|\s+")


class ServerFailed(RunError):
    """The server cannot be audited any further; the message says what it did."""


@dataclass(frozen=True, slots=True)
class Token:
    """One drawn token as the server told it.

    key      what tells it from others: its id, else its text
    logprob, top  as reported, natural logarithms; None and empty where nothing was
    """

    key: int | str
    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `told` is False where the tokens are words of the text, since the server named none."""

    text: str
    tokens: tuple[Token, ...]
    finish: str | None
    told: bool
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """Where requests go, and what is added to them.

    extra  fields of the body, as {"speculation": {"off": true}}
    """

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server was found to do.

    path          /v1/completions, or /v1/chat/completions where there are no completions
    num_logprobs  alternatives that it tells with each token; None: no log-probabilities
    raw           they are the model's before temperature; None: could not be told
    digits        decimals that it prints
    """

    path: str = "/v1/completions"
    num_logprobs: int | None = None
    raw: bool | None = None
    digits: int | None = None
    ids: bool = False
    seeds: bool = True


class Client:
    """Sends requests to the arms of an audit, so many at a time."""

    def __init__(self, headers: Mapping[str, str], *, concurrency: int, timeout: float = 60.0) -> None:
        self.concurrency = concurrency
        limits = httpx.Limits(max_connections=concurrency + 2, max_keepalive_connections=concurrency + 2)
        self._http = httpx.AsyncClient(headers=dict(headers), timeout=httpx.Timeout(timeout, connect=10.0), limits=limits)
        self.num_tokens = 0
        self.num_requests = 0
        self.num_busy = 0
        self.num_with_statistics = 0

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Raises ServerFailed."""
        try:
            response = await self._http.get(f"{url}/v1/models")
        except httpx.HTTPError as error:
            raise ServerFailed(f"{url} cannot be reached ({_told(error)}): is the server running?") from None
        if response.status_code in (401, 403):
            raise ServerFailed(f"{url} answers {response.status_code}: give a key with --header 'Authorization: Bearer KEY'")
        try:
            models: list[dict[str, Any]] = response.json()["data"]
            assert all(isinstance(model["id"], str) for model in models)
        except Exception:
            raise ServerFailed(
                f"{url}/v1/models answers {response.status_code} and no list of models: an OpenAI-compatible server is needed"
            ) from None
        return models

    def body(self, arm: Arm, abilities: Abilities, prompt: str, settings: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        """What is sent for one answer."""
        body: dict[str, Any] = {"model": arm.model, "max_tokens": max_tokens, "stream": True, **settings, **arm.extra}
        count = abilities.num_logprobs
        if abilities.path.startswith("/v1/chat"):
            body["messages"] = [{"role": "user", "content": prompt}]
            if count is not None:
                body |= {"logprobs": True, "top_logprobs": count}
        else:
            body["prompt"] = prompt
            if count is not None:
                body["logprobs"] = count
        if abilities.ids:
            body["return_token_ids"] = True
        return body

    async def draw(
        self, arm: Arm, abilities: Abilities, prompt: str, settings: Mapping[str, Any], max_tokens: int
    ) -> list[Answer]:
        """The choices of one request. Waits where the server is busy. Raises ServerFailed."""
        body = self.body(arm, abilities, prompt, settings, max_tokens)
        for attempt in range(RETRIES + 1):
            try:
                answers = await self._stream(arm.url + abilities.path, body, abilities)
            except _Busy as busy:
                self.num_busy += 1
                if attempt == RETRIES:
                    raise ServerFailed(f"{arm.url} was busy {RETRIES + 1} times in a row (429): lower --concurrency") from None
                await asyncio.sleep(min(busy.seconds, MAX_WAIT))
                continue
            self.num_requests += 1
            self.num_tokens += sum(len(answer.tokens) for answer in answers)
            return answers
        raise AssertionError

    async def refuses(self, arm: Arm, path: str, body: Mapping[str, Any]) -> str | None:
        """Why the server does not take a body; None: it takes it. Raises ServerFailed where it does not answer at all."""
        try:
            await self._stream(arm.url + path, {**body, "model": arm.model, "stream": True, "max_tokens": 1}, Abilities(path))
        except _Busy:
            return None
        except _Refused as error:
            return str(error)
        return None

    async def _stream(self, url: str, body: Mapping[str, Any], abilities: Abilities) -> list[Answer]:
        parts: dict[int, _Parts] = {}
        ended = False
        try:
            async with self._http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    raise await _failure(url, response)
                async for event in _events(response):
                    if event is None:  # and read on: a connection that is left early cannot be used again
                        ended = True
                        continue
                    if "error" in event:
                        raise ServerFailed(f"{url} ended an answer with an error: {_message(event)}")
                    self.num_with_statistics += "speculation" in event
                    served = event.get("model")
                    if isinstance(served, str) and served != body["model"]:
                        raise ServerFailed(
                            f"{url} answered as {served[:60]!r} where {body['model']!r} was asked for: the model has changed"
                        )
                    for choice in event.get("choices") or ():
                        parts.setdefault(int(choice.get("index", 0)), _Parts()).add(choice)
        except httpx.HTTPError as error:
            raise ServerFailed(f"{url} broke off ({_told(error)})") from None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ServerFailed(f"{url} sent what is no stream of events ({' '.join(str(error).split())[:80]})") from None
        if not parts or not (ended or all(part.finish for part in parts.values())):
            raise ServerFailed(f"{url} ended a stream before its answer")
        return [parts[index].answer(abilities) for index in sorted(parts)]


class _Busy(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__("429")
        self.seconds = seconds


class _Refused(ServerFailed):
    """A status that says that the request was wrong."""


async def _failure(url: str, response: httpx.Response) -> Exception:
    with contextlib.suppress(httpx.HTTPError):
        await response.aread()
    if response.status_code == 429:
        told = response.headers.get("retry-after", "")
        return _Busy(float(told) if told.isdecimal() else 1.0)
    try:
        message = _message(response.json())
    except Exception:
        message = response.reason_phrase
    kind = _Refused if 400 <= response.status_code < 500 else ServerFailed
    return kind(f"{url} answers {response.status_code}: {message}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200]


def _told(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream; None at its [DONE]."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            yield None
            continue
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is {data[:40]!r}")
        yield event


@dataclass(slots=True)
class _Parts:
    """One choice while it comes."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    num_chunks: int = 0

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.text.append(choice.get("text") or delta.get("content") or "")
        self.finish = choice.get("finish_reason") or self.finish
        self.ids += choice.get("token_ids") or ()
        self.tokens += _tokens(choice.get("logprobs"))
        self.num_chunks += 1

    def answer(self, abilities: Abilities) -> Answer:
        text, tokens = "".join(self.text), self.tokens
        if abilities.num_logprobs is not None and not tokens and text:
            raise ServerFailed("the server told no log-probabilities where it did before")
        if self.ids and len(self.ids) == len(tokens):
            tokens = [replace(token, key=key) for token, key in zip(tokens, self.ids, strict=True)]
        elif self.ids and not tokens:
            tokens = [Token(key, "") for key in self.ids]
        told = bool(tokens) or not text
        if not told:
            tokens = [Token(word, word) for word in _WORD.findall(text)]
        return Answer(text, tuple(tokens), self.finish, told, len(tokens) if told else None)


def _tokens(logprobs: Any) -> list[Token]:
    """Of a chunk's logprobs, in the form of completions, of chats, or of llama.cpp's completions."""
    if not logprobs:
        return []
    if logprobs.get("content") is not None:
        return [
            Token(
                each["token"],
                each["token"],
                float(each["logprob"]),
                tuple((top["token"], float(top["logprob"])) for top in each.get("top_logprobs") or ()),
            )
            for each in logprobs["content"]
        ]
    values = logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [{}] * len(values)
    return [
        Token(text, text, None if value is None else float(value), tuple((key, float(top[key])) for key in top or {}))
        for text, value, top in zip(logprobs["tokens"], values, tops, strict=True)
    ]


def digits(values: Sequence[float]) -> int | None:
    """Decimals that all of these are printed with at most; None: as many as a float has."""
    shown = [repr(value).partition(".")[2] for value in values if value == value and "e" not in repr(value)]
    most = max(map(len, shown), default=16)
    return None if most > 9 else most
