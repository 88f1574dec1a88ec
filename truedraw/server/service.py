"""What the endpoints do: from a request that came to the answer that goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from truedraw.engine import Engine
from truedraw.protocols import Constraint
from truedraw.registry import LOSSY_RULES, RULES
from truedraw.server.access import Keys, Limits
from truedraw.server.asked import Asked
from truedraw.server.body import decode_json, read_body
from truedraw.server.errors import ApiError, TookTooLong, as_api_error, log_failure
from truedraw.server.metrics import Metrics
from truedraw.server.replies import TokenTexts
from truedraw.server.schema import ChatRequest, CompletionRequest, ResponseFormat, parse
from truedraw.server.stream import DONE, EventStream, SteadyPace, event
from truedraw.server.worker import Ended, Job, Ticket, Worker
from truedraw.types import SamplingParams, Step

logger = logging.getLogger("truedraw.server")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server behaves, apart from its engine.

    name           what clients call the model
    hosts          names that it answers for; empty: any
    shared         caches and corpus serve all keys alike
    allow_lossy    requests may name rules that change the law
    steady         streams are of one pace and size
    """

    name: str
    keys: Keys = field(default_factory=lambda: Keys(()))
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_queue: int = 64
    allow_lossy: bool = False
    strict: bool = False
    shared: bool = False
    steady: SteadyPace | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was found sound: what the engine is asked, and how it is told."""

    jobs: Sequence[Job]
    asked: Asked
    stream: bool


class Service:
    """What the endpoints do."""

    def __init__(self, engine: Engine, settings: Settings, grammars: Callable[[ResponseFormat], Constraint | None]) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.metrics.watch(engine)
        owners = 1 if settings.shared else len(settings.keys.owners)
        self.worker = Worker(engine, self.metrics, max_queue=settings.max_queue, num_owners=owners)
        self._engine, self._grammars = engine, grammars
        self._texts = TokenTexts(engine.model.tokenizer)
        self._started = int(time.time())
        self._num_read: Counter[str] = Counter()

    # ------------------------------------------------------------ what is asked

    async def completion(self, request: Request, owner: str, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        with self._reading(owner):
            body = await read_body(request, self.settings.limits)
            prepared = await asyncio.to_thread(self._prepare, kind, body, owner)
        tickets = await self.worker.submit(prepared.jobs)
        if not prepared.stream:
            return await self._whole(request, prepared, tickets)
        return EventStream(self._streamed(prepared, tickets), lambda: self.worker.close(tickets))

    @contextlib.contextmanager
    def _reading(self, owner: str) -> Iterator[None]:
        """Raises Busy where the answer would have to wait for too long, or too much is being read already."""
        self.worker.check_room(owner, 1)
        if self._num_read[owner] >= self.settings.limits.bodies:
            raise self.worker.busy()
        self._num_read[owner] += 1
        try:
            yield
        finally:
            self._num_read[owner] -= 1

    def _prepare(self, kind: type[ChatRequest] | type[CompletionRequest], body: bytes, owner: str) -> Prepared:
        """Everything that needs no engine: in a thread of its own, since prompts can be long."""
        asked = parse(kind, decode_json(body))
        settings, chat = self.settings, isinstance(asked, ChatRequest)
        if asked.model is not None and asked.model != settings.name:
            raise ApiError(
                404,
                f"there is no model {asked.model[:100]!r}: this server has {settings.name!r}",
                param="model",
                code="model_not_found",
            )
        params = asked.sampling(asked.limit)
        prompts = [asked.messages and self._messages(asked)] if isinstance(asked, ChatRequest) else asked.prompts
        self._check(len(prompts), params.n, params.stop)
        tokens = [self._encode(prompt, chat) for prompt in prompts]
        speculation = asked.speculation
        trace = speculation.alternatives if speculation is not None and speculation.trace else None
        echo = not isinstance(asked, ChatRequest) and bool(asked.echo)
        echoes = None
        if echo:
            echoes = [prompt if isinstance(prompt, str) else self._texts.text(prompt) for prompt in prompts]  # type: ignore[arg-type]
        steady = settings.steady is not None and bool(asked.stream)
        if steady and (trace is not None or asked.num_logprobs is not None or asked.return_token_ids):
            raise ApiError(
                400, "this server streams at an even size (--steady-stream): ask for token details without stream: true"
            )
        options: dict[str, Any] = {
            "owner": "" if settings.shared else owner,
            "top_records": trace,
            "top_logprobs": asked.num_logprobs,
            "prompt_logprobs": echo and asked.num_logprobs is not None,
        }
        rule, drafter = None, self._engine.drafter.default or type(self._engine.drafter).__name__
        if speculation is not None:
            rule = speculation.rule if speculation.rule != "auto" else None
            drafter = "none" if speculation.off else speculation.drafter or drafter
            options["max_draft"] = 0 if speculation.off or drafter == "none" else speculation.max_draft
            options["drafter"] = speculation.drafter if speculation.drafter != "none" else None
        constraint = None if asked.response_format is None else self._grammar(asked.response_format, params)
        return Prepared(
            [Job(prompt, params, rule, constraint, options) for prompt in tokens],
            Asked(
                chat, settings.name, self._texts, tokens, params.n, drafter, asked.num_logprobs, trace,
                bool(asked.return_token_ids), bool(asked.stream_options and asked.stream_options.include_usage), echoes,
            ),
            bool(asked.stream),
        )  # fmt: skip

    def _messages(self, asked: ChatRequest) -> list[dict[str, str]]:
        if self._engine.model.tokenizer.chat_template is None:
            raise ApiError(400, f"{self.settings.name} has no chat template: use /v1/completions", code="no_chat_template")
        return [message.plain(place) for place, message in enumerate(asked.messages)]

    def _encode(self, prompt: Any, chat: bool) -> list[int]:
        tokens = self._engine.encode(prompt)
        limit = self.settings.limits.prompt_tokens
        if limit is not None and len(tokens) > limit:
            message = f"the prompt has {len(tokens)} tokens: this server takes {limit}"
            raise ApiError(400, message, param="messages" if chat else "prompt", code="context_length_exceeded")
        return tokens

    def _check(self, num_prompts: int, num_choices: int, stops: Sequence[str]) -> None:
        limits, most = self.settings.limits, self.worker.largest
        for name, value, limit in (
            ("prompt", num_prompts, limits.prompts),
            ("n", num_choices, limits.choices),
            ("stop", len(stops), limits.stops),
            ("stop", max(map(len, stops), default=0), limits.stop_length),
            ("n", num_prompts * num_choices, most),
        ):
            if value > limit:
                raise ApiError(400, f"{name} has or makes {value}: this server takes {limit} at most", param=name)

    def _grammar(self, format: ResponseFormat, params: SamplingParams) -> Constraint | None:
        for name in ("ignore_eos", "min_tokens") if format.type != "text" else ():
            if getattr(params, name):
                raise ApiError(400, f"{name} does not go with response_format: the text ends where its JSON does", param=name)
        return self._grammars(format)

    # ------------------------------------------------------------ what is told

    async def _whole(self, request: Request, prepared: Prepared, tickets: Sequence[Ticket]) -> Response:
        """One answer. A client that goes away ends its request."""
        reading = asyncio.create_task(self._collect(prepared, tickets))
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return Response(status_code=499)
            return JSONResponse(prepared.asked.answer(reading.result()))
        finally:
            for task in (reading, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            self.worker.close(tickets)

    async def _collect(self, prepared: Prepared, tickets: Sequence[Ticket]) -> list[tuple[int, Step]]:
        steps: list[tuple[int, Step]] = []
        async for place, item in self._events(prepared, tickets):
            if isinstance(item, Step) and prepared.asked.trace is not None:
                steps.append((place, item))
        return steps

    async def _events(self, prepared: Prepared, tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Step | Ended]]:
        """Of all prompts, as they come. Raises what ended any of them, and TookTooLong."""
        merged: asyncio.Queue[tuple[int, Step | Ended | BaseException]] = asyncio.Queue()
        open_ = len(tickets)

        async def forward(place: int, ticket: Ticket) -> None:
            try:
                async for item in ticket.steps():
                    merged.put_nowait((place, item))
            except Exception as error:
                merged.put_nowait((place, error))

        seconds = self.settings.limits.seconds
        tasks = [asyncio.create_task(forward(place, ticket)) for place, ticket in enumerate(tickets)]
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            while open_:
                try:
                    async with asyncio.timeout_at(deadline):
                        place, item = await merged.get()
                except TimeoutError:
                    raise TookTooLong(f"{seconds:g}") from None
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Ended):
                    open_ -= 1
                    prepared.asked.results[place] = item.results
                    failed = next((result.error for result in item.results if result.error is not None), None)
                    if failed is not None:
                        raise failed
                yield place, item
        finally:
            for task in tasks:
                task.cancel()

    async def _streamed(self, prepared: Prepared, tickets: Sequence[Ticket]) -> AsyncIterator[bytes]:
        steady = self.settings.steady
        chunks = self._chunks(prepared, tickets)
        try:
            if steady is not None:
                async for data in steady.even(chunks):
                    yield data
            else:
                async for chunk in chunks:
                    yield event(chunk)
            yield DONE
        except Exception as error:
            failure = self.told(error)
            yield b"data: " + failure.data + b"\n\n"

    async def _chunks(self, prepared: Prepared, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        asked = prepared.asked
        for chunk in asked.opening():
            yield chunk
        held: dict[str, Any] | None = None  # with a choice's end: the last of them comes with the statistics
        async for place, item in self._events(prepared, tickets):
            if isinstance(item, Step) and (made := asked.chunk(place, item)) is not None:
                if held is not None:
                    yield held
                    held = None
                if item.finish_reason is None:
                    yield made
                else:
                    held = made
        if held is not None:
            for chunk in asked.closing(held):
                yield chunk

    def told(self, error: BaseException) -> ApiError:
        """And logged, where it is the server's fault."""
        failure = as_api_error(error)
        if failure.status == 500:
            log_failure(logger, error)
        return failure

    def models(self) -> dict[str, Any]:
        engine, settings = self._engine, self.settings
        runner, drafter = engine.model.runner, engine.drafter
        known = [*(getattr(drafter, "drafters", {}) if drafter.default else ()), "none"]
        about = {
            "chat": engine.model.tokenizer.chat_template is not None,
            "context": runner.max_length,
            "slots": runner.num_slots,
            "drafters": known,
            "drafter": drafter.default or None,
            "rules": ["auto", *sorted(RULES)],
            "lossy_rules": sorted(LOSSY_RULES) if settings.allow_lossy else [],
            "strict": settings.strict,
            "steady_stream": settings.steady is not None,
            "vocab_size": runner.vocab_size,
        }
        model = {"id": settings.name, "object": "model", "created": self._started, "owned_by": "truedraw", "truedraw": about}
        return {"object": "list", "data": [model]}


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
