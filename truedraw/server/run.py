"""A server process: sockets, signals, an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from truedraw.errors import UsageError
from truedraw.server.service import Service

HEADER_SECONDS = 20.0
"""A connection that has not sent a whole head by then is closed."""

_AFTER_GRACE = 2.0


class Protocol(HttpToolsProtocol):
    """uvicorn's, and it does not wait for ever for a head that does not come."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._patience = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # from here on uvicorn's own keep-alive time counts

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """Stops in good order: what has not been begun is refused at once, what runs has `grace` seconds."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service, self._grace, self._say = service, grace, say
        self._told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._told:
            self._told = True
            running = self._service.worker.num_open
            self._say(f"stopping: {running} open, at most {self._grace:g} s for what runs" if running else "stopping")
            self._service.worker.drain()
            with contextlib.suppress(RuntimeError):  # no loop: nothing runs yet
                asyncio.get_running_loop().call_later(self._grace, self._service.worker.abort)
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0: any that is free. Raises UsageError."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(info[0], info[1])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(info[4])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{host} port {port} cannot be listened on ({why}): take another --host or --port") from None
    return made


def serve(app: FastAPI, sock: socket.socket, *, grace: float, say: Callable[[str], None], access_log: bool = False) -> None:
    """Until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(grace + _AFTER_GRACE),
        backlog=1024,
    )
    server = Server(config, app.state.service, grace, say)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[sock]))


def configure_log(level: str) -> None:
    """To standard error, a line for each thing; no prompt and no answer is ever logged."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=level.upper())
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
