"""A connection: how long and how much a client may keep it busy without asking for anything."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from truedraw.server.errors import ApiError


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds on heads that do not come to an end and on clients that do not read.

    head_seconds   in which a whole head must come; then the connection is closed
    idle_seconds   between an answer and the first byte after it
    head_bytes     of a head, of what stands between the chunks of a body, or of what follows it
    stall_seconds  after which a client that reads nothing of what waits for it is cut off
    """

    head_seconds = 20.0
    idle_seconds = 15.0
    head_bytes = 64 * 2**10
    stall_seconds = 60.0

    _patience: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refused = False
    _num_unasked = 0  # bytes since the last that belonged to a body or ended something

    # ------------------------------------------------------------ what comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.timeout_keep_alive = self.idle_seconds  # type: ignore[assignment]  # a timer takes fractions
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._num_unasked += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._num_unasked > self.head_bytes:
            self._refuse(ApiError(431, f"the head is larger than {self.head_bytes} bytes: send fewer or shorter headers"))
        elif self._idle and self.timeout_keep_alive_task is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        _cancel(self._patience)
        self._patience = None
        self._num_unasked = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unasked = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unasked = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP/1.1 request"))

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.head_seconds, self.timeout_keep_alive_handler)

    def _refuse(self, failure: ApiError) -> None:
        """Says so, unless an answer is under way, which ends; what else comes is not looked at.

        The connection is open for a while yet: closed at once it would be reset, and the client might never see why.
        """
        told = self._idle or not self.cycle.response_started
        if not self._idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if told:
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(failure.data)
            self.transport.write(STATUS_LINE[failure.status] + head + failure.data)
        self._refused = True
        self.pipeline.clear()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._expect_reading()
        self._wait_for_head()

    # ------------------------------------------------------------ what goes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stalled)
        self._stalled = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()

    def _expect_reading(self) -> None:
        """What waits to be sent must have gone by then."""
        if self._stalled is None and self.transport.get_write_buffer_size():
            self._stalled = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._patience)
        _cancel(self._stalled)
        super().connection_lost(exc)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
