"""A server process: sockets, signals, an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from truedraw.errors import UsageError
from truedraw.server.connection import Connection
from truedraw.server.service import Service

_LAST_WORDS = 1.0
"""Seconds for the last events to be read, once the grace period is over."""


class Server(uvicorn.Server):
    """Stops in good order: what has not been begun is refused at once, what runs has `grace` seconds."""

    def __init__(
        self,
        app: FastAPI,
        *,
        grace: float,
        say: Callable[[str], None],
        on_ready: Callable[[], None] = lambda: None,
        access_log: bool = False,
        http: type[Connection] = Connection,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws="none",
                log_config=None,
                access_log=access_log,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(grace + 2 * _LAST_WORDS),
                backlog=1024,
            )
        )
        self._service: Service = app.state.service
        self._grace, self._say, self._on_ready = grace, say, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end, the next one ends the grace. Neither is raised again: this end is a good one."""
        if self.should_exit:
            self._grace_is_over()
            return
        self.should_exit = True
        running = self._service.worker.num_open
        self._say(f"stopping: {running} open, at most {self._grace:g} s for what runs" if running else "stopping")
        self._service.worker.drain()
        self._later(self._grace, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._service.worker.abort()
        self._later(_LAST_WORDS, self._cut)

    def _cut(self) -> None:
        """Those that have not read their last words."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # no loop: nothing runs yet
            asyncio.get_running_loop().call_later(seconds, call)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0: any that is free. Raises UsageError."""
    with contextlib.ExitStack() as undone:
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            made = undone.enter_context(socket.socket(info[0], info[1]))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(info[4])
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{host} port {port} cannot be listened on ({why}): take another --host or --port") from None
        undone.pop_all()
    return made


def serve(
    app: FastAPI,
    sock: socket.socket,
    *,
    grace: float,
    say: Callable[[str], None],
    on_ready: Callable[[], None] = lambda: None,
    access_log: bool = False,
) -> None:
    """Until SIGINT or SIGTERM. on_ready: called once requests are taken."""
    server = Server(app, grace=grace, say=say, on_ready=on_ready, access_log=access_log)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # for the moments before and after uvicorn's own
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[sock]))


def configure_log(level: str) -> None:
    """To standard error, a line for each thing; no prompt and no answer is ever logged."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=level.upper())
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # --access-log says whether there is one
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below are the mistakes of clients
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, logging.getLogger().level))
