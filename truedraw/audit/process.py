"""A program as a subject: JSON lines on its standard input and output, many requests under way at once.

    it says first   {"protocol": 1, "name": "my engine 2.3", "uniforms": true}
    it is asked     {"id": 7, "p": [[...], ...], "q": [[...], ...] or null, "drafts": [...], "uniforms": [...]}
    it answers      {"id": 7, "accepted": 1, "token": 5}   or   {"id": 7, "error": "row 0 of p is no law"}

`uniforms` in the first line: it uses those it is given, and no others. `float32`: it computes in 32 bits. Answers may
come in any order. What JSON has no number for comes as a string: "NaN", "Infinity".
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import IO, Any

import numpy as np

from truedraw.audit.convention import Answer, Draw, Lost, Outcome, Refused, Request, Subject, WrongAnswer, read_answer
from truedraw.errors import InvalidParameter, UsageError

PROTOCOL = 1
MAX_LINE = 1 << 20
SHOWN = 200


def encode(number: int, request: Request, uniforms: Sequence[float]) -> str:
    """A request as a line."""
    q = None if request.q is None else [_numbers(row) for row in request.q]
    told = {"id": number, "p": [_numbers(row) for row in request.p], "q": q, "drafts": list(request.drafts)}
    return json.dumps({**told, "uniforms": list(map(float, uniforms))}, allow_nan=False, separators=(",", ":"))


def _numbers(row: Any) -> list[float | str]:
    values: list[float | str] = row.tolist()
    if not np.isfinite(row).all():
        return [_word(float(value)) if not math.isfinite(float(value)) else value for value in values]
    return values


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode_row(row: Sequence[float | str]) -> list[float]:
    """A row as it was before it was encoded."""
    return [float(value) for value in row]


class Program:
    """A running program. Every failure of it becomes Lost, told to whoever waits for an answer."""

    def __init__(self, command: str, timeout: float) -> None:
        self._timeout = timeout
        self._pending: dict[int, tuple[Request, Future[Answer]]] = {}
        self._lock = threading.Lock()
        self._next_id = 0
        self._hello: Future[dict[str, Any]] = Future()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost: Lost | None = None
        self._closing = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the program
        try:
            words = shlex.split(command)
            if not words:
                raise InvalidParameter("command", command, "a program and its arguments")
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, encoding="utf-8", errors="replace"
            )
        except ValueError as error:
            self._errors.close()
            raise error if isinstance(error, UsageError) else UsageError(f"the command cannot be read: {error}") from None
        except OSError as error:
            self._errors.close()
            raise UsageError(f"{words[0]} cannot be started: {error.strerror or error}") from None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def hello(self) -> dict[str, Any]:
        """The first line. Raises Lost."""
        try:
            return self._hello.result(self._timeout)
        except FutureTimeout:
            raise self._fail(f"no first line within {self._timeout:g} s") from None

    def submit(self, request: Request, uniforms: Sequence[float]) -> Future[Answer]:
        """Asks without waiting. The future holds Refused, WrongAnswer or Lost where no answer came. Raises Lost."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            number = self._next_id
            self._next_id += 1
            self._pending[number] = (request, future)
        self._lines.put(encode(number, request, uniforms))
        return future

    def result(self, future: Future[Answer]) -> Answer:
        """Waits. Raises Refused, WrongAnswer, Lost."""
        try:
            return future.result(self._timeout)
        except FutureTimeout:
            raise self._fail(f"no answer within {self._timeout:g} s") from None

    def close(self) -> None:
        """End the program: by the end of its input, then by force."""
        self._closing = True
        self._lines.put(None)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5.0)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    # ------------------------------------------------------------ the two ends of the pipe

    def _write(self) -> None:
        stream: IO[str] | None = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended: the reader says how
            while (line := self._lines.get()) is not None:
                stream.write(line + "\n")
                if self._lines.empty():
                    stream.flush()
        with contextlib.suppress(OSError, ValueError):
            stream.close()

    def _read(self) -> None:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        while line := stream.readline(MAX_LINE):
            wrong = f"a line of more than {MAX_LINE >> 20} MiB came" if not line.endswith("\n") else self._take(line)
            if wrong is not None and (line.endswith("\n") or len(line) >= MAX_LINE):
                self._fail(wrong)
                return
        if not self._closing:
            self._fail(self._ended())

    def _take(self, line: str) -> str | None:
        """One line; what is wrong with it, or None."""
        try:
            told = json.loads(line)
        except ValueError:
            return f"a line is no JSON: {line.strip()[:SHOWN]!r}"
        if not isinstance(told, dict):
            return f"a line is no JSON object: {line.strip()[:SHOWN]!r}"
        if not self._hello.done():
            if told.get("protocol") != PROTOCOL:
                return f'the first line has to be {{"protocol": {PROTOCOL}, ...}}, and was {line.strip()[:SHOWN]!r}'
            self._hello.set_result(told)
            return None
        number = told.get("id")
        with self._lock:
            asked = self._pending.pop(number, None) if isinstance(number, int) and not isinstance(number, bool) else None
        if asked is None:
            return f"an answer to id {number!r}, which is not open: {line.strip()[:SHOWN]!r}"
        request, future = asked
        if "error" in told:
            future.set_exception(Refused(str(told["error"])[:SHOWN]))
            return None
        try:
            future.set_result(read_answer(told.get("accepted"), told.get("token"), request))
        except WrongAnswer as error:
            future.set_exception(error)
        return None

    def _ended(self) -> str:
        try:
            status = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return "the program closed its standard output"
        if status < 0:
            return f"the program was ended by {signal.Signals(-status).name}"
        return f"the program ended with status {status}"

    def _fail(self, told: str) -> Lost:
        """Nothing more comes from here: ends the program, and tells all who wait."""
        with self._lock:
            if self._lost is None:
                open_requests = f"; {len(self._pending)} requests unanswered" if self._pending else ""
                self._lost = Lost(f"{told}{open_requests}{self._last_words()}")
            waiting = [future for _request, future in self._pending.values()]
            self._pending.clear()
        self._process.kill()
        for future in waiting:
            future.set_exception(self._lost)
        if not self._hello.done():
            self._hello.set_exception(self._lost)
        return self._lost

    def _last_words(self) -> str:
        """The end of what it wrote to standard error."""
        with contextlib.suppress(OSError, ValueError):
            number = self._errors.fileno()  # read beside the program, whose place in the file is its own
            text = os.pread(number, 2000, max(0, os.fstat(number).st_size - 2000))
            lines = text.decode(errors="replace").strip().splitlines()
            if lines:
                return f"; last on its standard error: {lines[-1][:SHOWN]!r}"
        return ""


@contextlib.contextmanager
def program(command: str, *, timeout: float = 10.0, lanes: int = 16) -> Iterator[Subject]:
    """A program as a subject, for as long as the context lasts. Raises UsageError, Lost.

    timeout  seconds that it may take for one answer
    lanes    requests under way at once
    """
    running = Program(command, timeout)
    try:
        hello = running.hello()

        def ask(request: Request, draw: Draw) -> Answer:
            uniforms = [draw(i) for i in range(request.num_uniforms)]
            return running.result(running.submit(request, uniforms))

        def ask_many(requests: Sequence[tuple[Request, Draw]]) -> list[Outcome]:
            outcomes: list[Outcome] = []
            for start in range(0, len(requests), 8 * lanes):
                part = requests[start : start + 8 * lanes]
                futures = [running.submit(request, [draw(i) for i in range(request.num_uniforms)]) for request, draw in part]
                for future in futures:
                    try:
                        outcomes.append(running.result(future))
                    except (Refused, WrongAnswer) as error:
                        outcomes.append(error)
            return outcomes

        yield Subject(
            name=str(hello.get("name", command))[:SHOWN],
            ask=ask,
            ask_many=ask_many,
            injected=hello.get("uniforms") is True,
            reproduce=lambda request, uniforms: f"printf '%s\\n' '{encode(0, request, uniforms)}' | {command}",
            float32=hello.get("float32") is True,
            lanes=lanes,
        )
    finally:
        running.close()
