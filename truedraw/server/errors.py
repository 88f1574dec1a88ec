"""Failures as OpenAI's clients know them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from typing import Any

from truedraw.errors import ConstraintError, InvalidParameter, NoTokenLeft, PromptError, TemplateError, TruedrawError, UsageError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
}

_LONGEST = 500


class ApiError(Exception):
    """An answer that is an error. param: the field it is about; code: for programs to tell it by."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _one_line(message), code
        self.param = None if param is None else _one_line(param)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def data(self) -> bytes:
        """ASCII, since a message may quote what is no Unicode."""
        return json.dumps(self.body).encode()


def _one_line(text: str) -> str:
    """What a client sent may be quoted in it: neither its length nor its control characters are passed on."""
    shown = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(shown.split()))


class Busy(Exception):
    """The queue is full. seconds: when it is worth to try again."""

    def __init__(self, seconds: int) -> None:
        super().__init__("the queue is full")
        self.seconds = seconds


class ShuttingDown(Exception):
    """The server is going down: the request was not begun, or not finished within the grace period."""


class TookTooLong(Exception):
    """The time that a request may take is over."""


_NO_RETRY = {"x-should-retry": "false"}  # clients of OpenAI's heed it: the same request would fail again


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of a failure."""
    match error:
        case ApiError():
            return error
        case InvalidParameter():
            return ApiError(400, str(error), param=error.name.split()[0])
        case PromptError():
            too_long = "at most" in str(error) and "context" in str(error)
            return ApiError(400, str(error), param="prompt", code="context_length_exceeded" if too_long else None)
        case UsageError() | TemplateError():
            return ApiError(400, str(error))
        case RecursionError():
            return ApiError(400, "the request is nested too deeply")
        case ConstraintError():  # constraints are made from what the request holds
            return ApiError(400, f"response_format: {error}", param="response_format")
        case NoTokenLeft():
            return ApiError(400, str(error), code="no_token_left")
        case Busy():
            message = (
                f"the queue is full: try again in {error.seconds} s; the server's --slots and --max-queue say how much it takes"
            )
            return ApiError(429, message, code="queue_full", headers={"Retry-After": str(error.seconds)})
        case ShuttingDown():
            return ApiError(503, "the server is shutting down: send the request to another one, or later", code="shutting_down")
        case TookTooLong():
            message = f"the request took longer than the {error} s that it may take: ask for fewer max_tokens"
            return ApiError(504, message, code="request_timeout", headers=_NO_RETRY)
    text = str(error) if isinstance(error, TruedrawError) else "an error inside the server"  # may quote others
    return ApiError(500, f"the request failed: {text}", code=type(error).__name__, headers=_NO_RETRY)


def log_failure(logger: logging.Logger, error: BaseException) -> None:
    """What it was and where; what an unforeseen one says is left out, since it may quote a prompt."""
    if isinstance(error, TruedrawError):
        logger.error("%s: %s", type(error).__name__, error)
    else:
        logger.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)).rstrip())
