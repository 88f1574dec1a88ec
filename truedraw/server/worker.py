"""The one thread that owns the engine, and how requests get to it and steps back.

Everything that touches the engine runs here, between two steps. Answers go to the event loop as they are made, into
a queue for each request: who reads slowly holds up nobody, and what waits for him is bounded by his max_tokens.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from truedraw.engine import Engine, Request
from truedraw.protocols import Constraint
from truedraw.server.errors import Busy, ShuttingDown
from truedraw.server.metrics import Metrics
from truedraw.types import Result, SamplingParams, Step

logger = logging.getLogger("truedraw.server")

_SAVE_EVERY = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt that is to be answered, checked as far as it can be without the engine."""

    tokens: Sequence[int]
    params: SamplingParams
    rule: str | None
    constraint: Constraint | None
    options: dict[str, Any]

    @property
    def owner(self) -> str:
        return str(self.options.get("owner", ""))


@dataclass(frozen=True, slots=True)
class Ended:
    """All choices of a prompt have ended."""

    results: tuple[Result, ...]


Event: TypeAlias = Step | Ended | BaseException


@dataclass(slots=True, eq=False)
class Ticket:
    """A running job and what came out of it so far."""

    job: Job
    loop: asyncio.AbstractEventLoop
    request: Request | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    submitted: float = 0.0
    first: float | None = None  # when the first token came
    closed: bool = False

    @property
    def num_choices(self) -> int:
        return self.job.params.n

    async def steps(self) -> AsyncIterator[Step | Ended]:
        """Until all choices have ended. Raises what ended the whole request."""
        while True:
            event = await self.events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Ended):
                return


class Worker:
    """Runs the engine.

    max_queue  choices that may wait for a slot, shared evenly by num_owners
    """

    def __init__(self, engine: Engine, metrics: Metrics, *, max_queue: int, num_owners: int = 1) -> None:
        self.engine = engine
        self._metrics = metrics
        self._max_queue = max(1, max_queue // max(num_owners, 1))
        self._num_slots = engine.model.runner.num_slots
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._open: dict[str, int] = {}  # choices that have not ended, by owner; of the event loop
        self._draining = False
        self._stopped = False
        self._seconds_each = 1.0  # of a request, lately
        self._saved_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="truedraw-engine", daemon=True)

    # ------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        self._thread.start()

    @property
    def num_open(self) -> int:
        return sum(self._open.values())

    @property
    def largest(self) -> int:
        """Choices that one owner can have open at all."""
        return self._num_slots + self._max_queue

    async def submit(self, jobs: Sequence[Job]) -> list[Ticket]:
        """Raises Busy, ShuttingDown, and what Engine.submit raises; then none of the jobs was begun."""
        if self._draining:
            raise ShuttingDown
        owner, choices = jobs[0].owner, sum(job.params.n for job in jobs)
        if self._open.get(owner, 0) + choices > self.largest:
            self._metrics.refused.inc()
            raise Busy(min(60, max(1, round(self._seconds_each * self.num_open / self._num_slots))))
        self._open[owner] = self._open.get(owner, 0) + choices
        loop = asyncio.get_running_loop()
        tickets = [Ticket(job, loop) for job in jobs]
        accepted: Future[None] = Future()
        self._inbox.put(lambda: self._accept(tickets, accepted))
        try:
            await asyncio.wrap_future(accepted)
        except BaseException:
            self.close(tickets)
            raise
        return tickets

    def close(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more: what is unfinished of them ends before the next step. Idempotent."""
        for ticket in tickets:
            if not ticket.closed:
                ticket.closed = True
                self._open[ticket.job.owner] -= ticket.num_choices
                self._inbox.put(lambda ticket=ticket: self._cancel(ticket))  # type: ignore[misc]  # its own ticket

    def drain(self) -> None:
        """Take no more, and refuse what has not been begun."""
        self._draining = True
        self._inbox.put(self._refuse_waiting)

    def abort(self) -> None:
        """End what is still running."""
        self._inbox.put(lambda: self._fail_all(ShuttingDown()))

    def stop(self) -> None:
        """End the thread, and free the engine. Called once nothing runs any more."""
        self._stopped = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------ the engine's side

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._take_in()
                if not self.engine.idle:
                    self._step()
                self._save()
        finally:
            try:
                self.engine.close()
            except Exception as error:
                logger.error("%s", error)

    def _take_in(self) -> None:
        """Run what was asked for since the last step; wait where there is nothing else to do."""
        try:
            if self.engine.idle:
                self._inbox.get(timeout=_SAVE_EVERY)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _accept(self, tickets: Sequence[Ticket], accepted: Future[None]) -> None:
        if not accepted.set_running_or_notify_cancel():
            return  # who asked has gone already
        made: list[Request] = []
        try:
            for ticket in tickets:
                job = ticket.job
                made.append(self.engine.submit(job.tokens, job.params, rule=job.rule, constraint=job.constraint, **job.options))
        except Exception as error:
            for request in made:
                self.engine.cancel(request)
            accepted.set_exception(error)
            return
        for ticket, request in zip(tickets, made, strict=True):
            ticket.request, ticket.submitted = request, time.monotonic()
            self._tickets[request.id] = ticket
        accepted.set_result(None)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.request is not None and self._tickets.pop(ticket.request.id, None) is not None:
            self._metrics.ended(ticket.request, "cancelled")
            self.engine.cancel(ticket.request)

    def _refuse_waiting(self) -> None:
        for ticket in list(self._tickets.values()):
            assert ticket.request is not None
            if not self.engine.has_begun(ticket.request):
                self._fail(ticket, ShuttingDown())

    def _fail_all(self, error: BaseException) -> None:
        for ticket in list(self._tickets.values()):
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        assert ticket.request is not None
        del self._tickets[ticket.request.id]
        self._metrics.ended(ticket.request, "error")
        self.engine.cancel(ticket.request)
        self._send([(ticket, error)])

    def _step(self) -> None:
        started = time.monotonic()
        try:
            steps = self.engine.step()
        except Exception as error:  # of the runner or the drafter: it concerns everybody
            logger.exception("a step failed")
            self._metrics.errors.labels(type(error).__name__).inc()
            self._fail_all(error)
            return
        events: list[tuple[Ticket, Event]] = []
        for step in steps:
            ticket = self._tickets[step.request]
            if ticket.first is None and step.num_emitted:
                ticket.first = time.monotonic()
                self._metrics.first_token.observe(ticket.first - ticket.submitted)
            events.append((ticket, step))
        for ticket in {id(ticket): ticket for ticket, _ in events}.values():
            request = ticket.request
            assert request is not None
            request.steps.clear()
            if request.finished:
                del self._tickets[request.id]
                seconds = time.monotonic() - ticket.submitted
                self._seconds_each = 0.9 * self._seconds_each + 0.1 * seconds
                self._metrics.finished(request, seconds)
                events.append((ticket, Ended(tuple(result for result in request.results if result is not None))))
        self._metrics.stepped(steps, self.engine, time.monotonic() - started)
        self._send(events)

    def _send(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        if events:
            events[0][0].loop.call_soon_threadsafe(_deliver, events)

    def _save(self) -> None:
        """What drafters have learned is written once a minute: a server that is killed loses no more."""
        if time.monotonic() - self._saved_at > _SAVE_EVERY:
            self._saved_at = time.monotonic()
            try:
                self.engine.drafter.save()
            except Exception as error:
                logger.error("%s", error)


def _deliver(events: Sequence[tuple[Ticket, Event]]) -> None:
    for ticket, event in events:
        ticket.events.put_nowait(event)
