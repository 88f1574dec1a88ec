"""OpenAI-style completions over HTTP for an engine that answers one request at a time: what an audit asks for and no more.

Standard library only, since it runs in the engines' own environments. What an engine has no counterpart for is refused by name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

PLAIN = ("model", "stream", "return_token_ids", "speculation", "prompt", "max_tokens")
"""Fields that every engine has."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion. `off`: without speculation; `seed` None: fresh randomness; `logprobs`: so many alternatives."""

    prompt: str
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    off: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """A drawn token, the one that ended the answer included; `text` tells it from all others. Natural logarithms."""

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """finish: "stop" or "length"."""

    text: str
    tokens: Sequence[Token]
    finish: str


class Refused(Exception):
    """The request asks for what the engine does not have."""


class Engine(Protocol):
    """known: the fields of Request that it has a counterpart for."""

    name: str
    known: frozenset[str]

    def answer(self, request: Request) -> list[Answer]:
        """`request.n` of them. Raises Refused."""


def serve(engine: Engine, port: int) -> None:
    """Answers on 127.0.0.1, one request at a time, until the process ends."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            self._json(
                200 if known else 404, {"object": "list", "data": [{"id": engine.name}]} if known else _error("no such path")
            )

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path != "/v1/completions":
                return self._json(404, _error("no such path"))
            try:
                told = json.loads(body)
                request = _request(told, engine.known)
                with lock:
                    answers = engine.answer(request)
            except (Refused, ValueError) as error:
                return self._json(400, _error(str(error)))
            except Exception as error:
                return self._json(500, _error(f"{type(error).__name__}: {error}"))
            choices = [_choice(i, answer, request, told.get("return_token_ids", False)) for i, answer in enumerate(answers)]
            whole = {"object": "text_completion", "model": engine.name, "choices": choices, "speculation": {}}
            if told.get("stream"):
                self._events(whole)
            else:
                self._json(200, whole)

        def _events(self, event: dict[str, Any]) -> None:
            sent = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
            self._send(200, "text/event-stream", sent)

        def _json(self, status: int, body: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(body).encode())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _request(body: Any, known: frozenset[str]) -> Request:
    """Raises Refused or ValueError."""
    if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
        raise Refused("prompt: a string is needed")
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(set(given) - known - set(PLAIN))
    if unknown:
        raise Refused(f"{', '.join(unknown)}: this engine has no counterpart")
    speculation = given.pop("speculation", {})
    if not isinstance(speculation, dict) or set(speculation) - {"off"}:
        raise Refused(f"speculation: {speculation!r} is not {{'off': true}}")
    wanted: dict[str, Any] = {name: given[name] for name in (each.name for each in fields(Request)) if name in given}
    stop = wanted.get("stop", ())
    wanted["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    wanted["logit_bias"] = {int(token): float(bias) for token, bias in wanted.get("logit_bias", {}).items()}
    return Request(**{**wanted, "off": bool(speculation.get("off", False))})


def _choice(index: int, answer: Answer, request: Request, ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": answer.text, "finish_reason": answer.finish, "logprobs": None}
    if request.logprobs is not None:
        choice["logprobs"] = {
            "tokens": [token.text for token in answer.tokens],
            "token_logprobs": [token.logprob for token in answer.tokens],
            "top_logprobs": [dict(token.top) for token in answer.tokens],
        }
    if ids:
        choice["token_ids"] = [token.id for token in answer.tokens]
    return choice
