"""HTTP/1.1 and server-sent events for a planted server, on the standard library."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from truedraw.audit.planted.asked import Refused, read
from truedraw.audit.planted.choices import Piece
from truedraw.audit.planted.replies import Reply
from truedraw.audit.planted.troubles import TroubleKind

if TYPE_CHECKING:
    from truedraw.audit.planted.server import PlantedServer

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
}
_BROKEN = b'data: {"id": "cmpl-0", "choices": [{"index": 0, "te'


class _Gone(Exception):
    """The connection is to end without another byte."""


class Http(ThreadingHTTPServer):
    """On a free port. Who closes it ends every connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, planted: PlantedServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.planted = planted
        self.released = threading.Event()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are none of its business."""

    def server_close(self) -> None:
        self.released.set()
        self.socket.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        """From a request's own thread."""
        threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a chunk waits for the acknowledgement of the one before, 40 ms
    server: Http

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._allowed():
            if self.path != "/v1/models":
                return self._refuse(Refused(404, f"{self.path} is not here", "not_found"))
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "truedraw"} for name in self.server.planted.names]
            self._send(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._allowed():
            return
        try:
            self._complete(data)
        except Refused as refused:
            self._refuse(refused)
        except _Gone:
            self.close_connection = True

    def _complete(self, data: bytes) -> None:
        planted = self.server.planted
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            raise Refused(404, f"{self.path} is not here", "not_found")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from None
        number = planted.next_number()
        troubled = planted.troubled(number)
        if "dies" in troubled:
            self.server.die()
            raise _Gone
        if "drops" in troubled:
            raise _Gone
        if "429" in troubled:
            raise Refused(429, "too many requests: come back later", "rate_limit_exceeded")
        if "500" in troubled:
            raise Refused(500, "something broke", "server_error")
        asked = read(body, chat=self.path.endswith("/chat/completions"), knows_speculation=planted.knows_speculation)
        if asked.model is not None and asked.model not in planted.names:
            raise Refused(404, f"model is {asked.model!r}: there is {', '.join(planted.names)}", "model_not_found")
        reply, choices = planted.answer(asked, number)
        if asked.stream:
            self._stream(reply, choices, troubled)
        else:
            self._whole(reply, choices, troubled)

    def _whole(self, reply: Reply, choices: list[Iterator[Piece]], troubled: frozenset[TroubleKind]) -> None:
        body = json.dumps(reply.whole([list(choice) for choice in choices])).encode()
        if "garbage" in troubled:
            body = b"{'choices': [" + body[:40]
        elif "half event" in troubled:
            body = body[: len(body) // 2]
        elif troubled & {"stalls", "closes"}:
            self.wfile.write(self._head(200, "application/json", f"Content-Length: {len(body)}") + body[: len(body) // 2])
            self._leave(troubled)
        self.wfile.write(self._head(200, "application/json", f"Content-Length: {len(body)}") + body)

    def _stream(self, reply: Reply, choices: list[Iterator[Piece]], troubled: frozenset[TroubleKind]) -> None:
        self.wfile.write(self._head(200, "text/event-stream", "Transfer-Encoding: chunked"))
        for number, event in enumerate(_events(reply, choices)):
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
            if number == 1:
                self._leave(troubled)
                if "garbage" in troubled:
                    self._chunk(_BROKEN + b"\n\n")
                if "half event" in troubled:
                    self._chunk(_BROKEN)
                    break
        else:
            self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _leave(self, troubled: frozenset[TroubleKind]) -> None:
        """In the middle of an answer."""
        if "stalls" in troubled:
            self.server.released.wait()
        while "drips" in troubled and not self.server.released.wait(0.05):
            self._chunk(b": still here\n\n")
        while "floods" in troubled and not self.server.released.is_set():
            self._chunk(b"x" * 65536)
        if troubled & {"stalls", "closes", "drips", "floods"}:
            raise _Gone

    def _allowed(self) -> bool:
        key = self.server.planted.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._refuse(Refused(401, "no such key: Authorization: Bearer KEY is needed", "invalid_api_key"))
        return False

    def _refuse(self, refused: Refused) -> None:
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
        more = (f"Retry-After: {self.server.planted.retry_after():g}",) if refused.status == 429 else ()
        self._send(refused.status, {"error": error}, *more)

    def _send(self, status: int, body: dict[str, Any], *headers: str) -> None:
        data = json.dumps(body).encode()
        self.wfile.write(self._head(status, "application/json", f"Content-Length: {len(data)}", *headers) + data)

    def _head(self, status: int, kind: str, *headers: str) -> bytes:
        lines = (f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Type: {kind}", *headers)
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _events(reply: Reply, choices: list[Iterator[Piece]]) -> Iterator[dict[str, Any]]:
    """One chunk per step, a choice after the other."""
    for index, choice in enumerate(choices):
        if reply.asked.chat:
            yield reply.opening(index)
        for number, piece in enumerate(choice):
            last = piece.finish is not None and index == len(choices) - 1
            yield reply.chunk(index, piece, first=number == 0 and index == 0, last=last)
    if reply.asked.include_usage:
        yield reply.last()
