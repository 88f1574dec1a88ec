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
MAX_BYTES = 8_000_000
"""Of one response: an answer of an audit takes a thousandth of it."""
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
    """One choice.

    told        False where the tokens are words of the text, since the server named none
    num_silent  tokens that the text has, as far as one can tell, and the report of log-probabilities has not
    ids         of its tokens, where they were told
    """

    text: str
    tokens: tuple[Token, ...]
    finish: str | None
    told: bool
    num_silent: int = 0
    ids: tuple[int, ...] = ()

    @property
    def bare(self) -> Answer:
        """Without log-probabilities, and so without what they leave out: its ids, or the words of its text."""
        tokens = tuple(Token(key, str(key)) for key in self.ids) or tuple(Token(word, word) for word in _WORD.findall(self.text))
        return replace(self, tokens=tokens, num_silent=0)


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
    neutral       parameters that it takes, at the values that change nothing: servers have defaults of their own
    """

    path: str = "/v1/completions"
    num_logprobs: int | None = None
    raw: bool | None = None
    digits: int | None = None
    ids: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)


class Client:
    """Sends requests to the arms of an audit, so many at a time."""

    def __init__(self, headers: Mapping[str, str], *, concurrency: int, timeout: float = 60.0) -> None:
        self.concurrency, self._seconds = concurrency, timeout
        limits = httpx.Limits(max_connections=concurrency + 2, max_keepalive_connections=concurrency + 2)
        self._http = httpx.AsyncClient(headers=dict(headers), timeout=httpx.Timeout(None, connect=10.0), limits=limits)
        self.num_tokens = 0
        self.num_requests = 0
        self.num_busy = 0
        self.num_with_statistics = 0
        self.num_proposed: int | None = None
        """Drafts, as far as the server tells of them; None: it tells nothing."""
        self.num_accepted = 0
        self._builds: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Raises ServerFailed."""
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._http.get(f"{url}/v1/models")
        except (httpx.HTTPError, TimeoutError) as error:
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
        body: dict[str, Any] = {"model": arm.model, "max_tokens": max_tokens, "stream": True}
        body |= {**abilities.neutral, **settings, **arm.extra}
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
            except _Dropped as dropped:  # a kept connection that the server has closed meanwhile
                if attempt == RETRIES:
                    raise ServerFailed(str(dropped)) from None
                continue
            self.num_requests += 1
            self.num_tokens += sum(len(answer.tokens) for answer in answers)
            return answers
        raise AssertionError

    async def refuses(self, arm: Arm, path: str, body: Mapping[str, Any]) -> str | None:
        """Why the server does not take a body; None: it takes it. Raises ServerFailed where it does not answer at all."""
        try:
            await self._stream(
                arm.url + path, {**body, **arm.extra, "model": arm.model, "stream": True, "max_tokens": 1}, Abilities(path)
            )
        except (_Busy, _Dropped):
            return None
        except _Refused as error:
            return str(error)
        return None

    async def _stream(self, url: str, body: Mapping[str, Any], abilities: Abilities) -> list[Answer]:
        parts: dict[int, _Parts] = {}
        usage: Mapping[str, Any] = {}
        begun = ended = False
        try:
            async with asyncio.timeout(self._seconds), self._http.stream("POST", url, json=body) as response:
                begun = True
                if response.status_code != 200:
                    raise await _failure(url, response)
                async for event in _events(response):
                    if event is None:  # and read on: a connection that is left early cannot be used again
                        ended = True
                        continue
                    if "error" in event:
                        raise ServerFailed(f"{url} ended an answer with an error: {_message(event)}")
                    self.num_with_statistics += "speculation" in event
                    self._count_drafts(event)
                    self._check_same(url, body["model"], event)
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        parts.setdefault(int(choice.get("index", 0)), _Parts()).add(choice)
        except TimeoutError:
            raise ServerFailed(f"{url} broke off: no whole answer within {self._seconds:g} s (--timeout allows more)") from None
        except httpx.HTTPError as error:
            told = f"{url} broke off ({_told(error)})"
            raise ServerFailed(told) if begun or isinstance(error, httpx.ConnectError) else _Dropped(told) from None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ServerFailed(f"{url} sent what is no stream of events ({' '.join(str(error).split())[:80]})") from None
        if not parts or not (ended or all(part.finish for part in parts.values())):
            raise ServerFailed(f"{url} ended a stream before its answer")
        count = usage.get("completion_tokens") if isinstance(usage, dict) and len(parts) == 1 else None
        return [parts[index].answer(abilities, count if isinstance(count, int) else 0) for index in sorted(parts)]

    def _count_drafts(self, event: Mapping[str, Any]) -> None:
        """As truedraw and llama.cpp tell of them at the end of an answer."""
        for part, proposed, accepted in (("speculation", "proposed", "accepted"), ("timings", "draft_n", "draft_n_accepted")):
            told = event.get(part)
            if isinstance(told, dict) and isinstance(told.get(proposed), int):
                self.num_proposed = (self.num_proposed or 0) + told[proposed]
                self.num_accepted += int(told.get(accepted) or 0)
            elif isinstance(told, dict) and part == "timings":  # it leaves them out where there are none
                self.num_proposed = self.num_proposed or 0

    def _check_same(self, url: str, model: str, event: Mapping[str, Any]) -> None:
        """Raises ServerFailed if it is another model, or another build of it, that answers."""
        served, build = event.get("model"), event.get("system_fingerprint")
        if isinstance(served, str) and served != model:
            raise ServerFailed(f"{url} answered as {served[:60]!r} where {model!r} was asked for: the model has changed")
        if isinstance(build, str) and build and self._builds.setdefault((url, model), build) != build:
            raise ServerFailed(
                f"{url} answered with system_fingerprint {build[:60]!r}, and with {self._builds[url, model][:60]!r} before: "
                "the model has changed"
            )


class _Busy(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__("429")
        self.seconds = seconds


class _Dropped(Exception):
    """The connection ended before anything came."""


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
    """The events of a stream; None at its [DONE]. Raises ValueError for what is none."""
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            yield None
            continue
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is {data[:40]!r}")
        yield event


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    rest, total = b"", 0
    async for data in response.aiter_bytes():
        total += len(data)
        if total > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES // 1_000_000} MB")
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


@dataclass(slots=True)
class _Parts:
    """One choice while it comes."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.text.append(choice.get("text") or delta.get("content") or "")
        self.finish = choice.get("finish_reason") or self.finish
        self.ids += choice.get("token_ids") or ()
        self.tokens += _tokens(choice.get("logprobs"))

    def answer(self, abilities: Abilities, count: int) -> Answer:
        """count: of its tokens, as the server counts; 0: it did not say."""
        text, tokens = "".join(self.text), self.tokens
        if abilities.num_logprobs is not None and not tokens and text:
            raise ServerFailed("the server told no log-probabilities where it did before")
        if abilities.num_logprobs is not None:
            tokens = [replace(token, top=_likeliest(token.top, abilities.num_logprobs)) for token in tokens]
        if self.ids and len(self.ids) == len(tokens):
            tokens = [replace(token, key=key) for token, key in zip(tokens, self.ids, strict=True)]
        elif self.ids and not tokens:
            tokens = [Token(key, "") for key in self.ids]
        told = bool(tokens) or not text
        if not told:
            tokens = [Token(word, word) for word in _WORD.findall(text)]
        silent = _num_silent(text, self.tokens, max(count, len(self.ids))) if self.tokens else 0
        return Answer(text, tuple(tokens), self.finish, told, silent, tuple(self.ids))


def _likeliest(top: tuple[tuple[str, float], ...], count: int) -> tuple[tuple[str, float], ...]:
    """Servers add the drawn token where it is not among them: what is looked at must not depend on it."""
    return tuple(sorted(top, key=lambda named: -named[1])[:count])


def _num_silent(text: str, tokens: Sequence[Token], count: int) -> int:
    """Tokens without a report: by their number where that is known, else by what is missing of the text."""
    silent = sum(token.logprob is None or not token.top for token in tokens)
    if count:
        return silent + max(count - len(tokens), 0)
    shown = [token.text for token in tokens]
    whole = all(part and "\ufffd" not in part for part in shown)
    return silent + (whole and len("".join(shown)) < len(text))


def _tokens(logprobs: Any) -> list[Token]:
    """Of a chunk's logprobs, in the form of completions, of chats, or of llama.cpp's completions."""
    if not logprobs:
        return []
    if logprobs.get("content") is not None:
        return [
            Token(
                each["id"] if isinstance(each.get("id"), int) else _name(each),
                _name(each),
                float(each["logprob"]),
                tuple((_name(top), float(top["logprob"])) for top in each.get("top_logprobs") or ()),
            )
            for each in logprobs["content"]
        ]
    values = logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [{}] * len(values)
    return [
        Token(text, text, None if value is None else float(value), tuple((key, float(top[key])) for key in top or {}))
        for text, value, top in zip(logprobs["tokens"], values, tops, strict=True)
    ]


def _name(told: Mapping[str, Any]) -> str:
    """The text of a token; of one that is no text by itself its bytes, where they are told."""
    text: str = told["token"]
    if "\ufffd" in text and told.get("bytes"):
        return bytes(told["bytes"]).decode("utf-8", "backslashreplace")
    return text


def digits(values: Sequence[float]) -> int | None:
    """Decimals that all of these are printed with at most; None: as many as a float has."""
    shown = [repr(value).partition(".")[2] for value in values if value == value and "e" not in repr(value)]
    most = max(map(len, shown), default=16)
    return None if most > 9 else most
