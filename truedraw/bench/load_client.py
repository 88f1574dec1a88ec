"""A client that sends one streamed request and says how it went. It shares the machine with the server, so it does little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Literal

import httpx

from truedraw.bench.load_figures import Failure, Sample
from truedraw.bench.load_stream import Answer, AnswerFailed, EventSplitter, error_message
from truedraw.errors import RunError

USUAL_WAIT = 1.0  # seconds before the next request where a busy server asks for none
REFUSED, NO_CONNECTION, CUT = "connection refused", "no connection", "stream cut"
_LOOK_SECONDS = 10.0  # for a server to say whether it is there
_MAX_ERROR_BYTES = 1 << 20


class Client:
    """An OpenAI-compatible server and how it is asked. An asynchronous context; connections are kept between requests."""

    def __init__(self, url: str, headers: Mapping[str, str], *, connections: int, timeout: float) -> None:
        """url: what stands before /v1; timeout: seconds for a whole request."""
        self.url = url
        self.timeout = timeout
        self._http = httpx.AsyncClient(
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=None,  # bounded as a whole instead
            # an idle connection is given up before servers close it (after 5 s often), which would look like a failure
            limits=httpx.Limits(max_connections=connections + 1, keepalive_expiry=2.0),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names of the models, in the server's order. Raises RunError where this is no such server, or the key is wrong."""
        address = f"{self.url}/v1/models"
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                response = await self._http.get(address)
        except TimeoutError:
            raise RunError(f"{address} did not answer within {_LOOK_SECONDS:g} s") from None
        except httpx.HTTPError as error:
            raise RunError(f"{self.url} cannot be reached: {_broken(error).message}: start the server, or correct URL") from None
        status = response.status_code
        if status in (401, 403):
            raise RunError(f"{address} answers {status}: give a key of the server with --api-key")
        if status != 200:
            raise RunError(f"{address} answers {status}: the address of an OpenAI-compatible server is needed")
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, TypeError, KeyError, IndexError):
            raise RunError(f"{address} answers no list of models: an OpenAI-compatible server is needed") from None

    async def is_there(self) -> bool:
        """Whether the server answers anything at all; asked twice, a second apart."""
        for pause in (0.0, 1.0):
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._http.get(f"{self.url}/v1/models")
                return True
            except (TimeoutError, httpx.HTTPError):
                continue
        return False

    async def send(self, path: str, body: Mapping[str, Any], *, cut_after: float | None = None) -> Sample:
        """One request, to its end or for cut_after seconds. Whatever goes wrong is told in the sample."""
        content = json.dumps(body).encode()
        answer = Answer()
        failure: Failure | None = None
        abandons = cut_after is not None and cut_after < self.timeout
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(cut_after if abandons else self.timeout):
                await self._stream(path, content, answer, sent)
        except TimeoutError:
            if not abandons:
                failure = Failure("timeout", f"no end within {self.timeout:g} s")
        except AnswerFailed as error:
            failure = error.failure
        except httpx.HTTPError as error:
            failure = _broken(error)
        seconds = time.perf_counter() - sent
        outcome: Literal["done", "failed", "abandoned"] = "failed" if failure else "done" if answer.ended else "abandoned"
        return Sample(
            outcome, seconds, tuple(answer.arrivals), answer.prompt_tokens, answer.completion_tokens, answer.speculation, failure
        )

    async def _stream(self, path: str, content: bytes, answer: Answer, sent: float) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", self.url + path, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise await _refusal(response)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise AnswerFailed("no event stream", f"the answer is {kind or 'of no type'}, no stream of events")
            splitter = EventSplitter()
            async for piece in response.aiter_bytes():
                now = time.perf_counter() - sent
                for event in splitter.feed(piece):
                    answer.take(event, now)
        if not answer.ended:
            raise AnswerFailed(CUT, "the stream ended before the answer did")


async def _refusal(response: httpx.Response) -> AnswerFailed:
    status, body = response.status_code, b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _MAX_ERROR_BYTES:
            break
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = response.reason_phrase or "no reason given"
    return AnswerFailed(str(status), message, wait_seconds(response.headers.get("retry-after")) if status in (429, 503) else 0.0)


def wait_seconds(retry_after: str | None) -> float:
    """Of a Retry-After header; USUAL_WAIT where it is absent or no number of seconds."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else USUAL_WAIT


def _broken(error: httpx.HTTPError) -> Failure:
    """A connection that could not be made, or that broke."""
    if not isinstance(error, httpx.ConnectError):
        return Failure(CUT, str(error) or type(error).__name__)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError) or (
            isinstance(cause, BaseExceptionGroup) and cause.subgroup(ConnectionRefusedError)
        ):
            return Failure(REFUSED, REFUSED)
        cause = cause.__cause__ or cause.__context__
    return Failure(NO_CONNECTION, str(error) or NO_CONNECTION)
