"""The body of a request: bytes in bounded number and time, and the JSON that they hold."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from truedraw.server.access import Limits
from truedraw.server.errors import ApiError

_CLOSE = {"Connection": "close"}


async def read_body(request: Request, limits: Limits) -> bytes:
    """Raises ApiError for a body of another kind, or one that is too large or too slow.

    What is refused unread keeps its connection: closed at once it would be reset, and the client might never see why.
    """
    if "upgrade" in request.headers:  # the parser takes what follows for the new protocol
        raise ApiError(400, "the connection cannot be upgraded: speak HTTP/1.1 and leave the header Upgrade out", headers=_CLOSE)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind[:100]!r}: application/json is needed")
    if int(request.headers.get("content-length") or 0) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError:
        message = f"the body did not come within {limits.body_seconds:g} s"
        raise ApiError(408, message, headers={**_CLOSE, "x-should-retry": "false"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the connection was closed before the body had come") from None
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """Raises ApiError for what is no UTF-8, no JSON, or JSON that readers take differently."""
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
        )
        if isinstance(value, dict) and "\\ud" in text.lower():
            _check_unicode(value)
        return value
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes: send less")


def _check_unicode(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise ApiError(400, f"{name[:100]} holds a lone surrogate, {lone!r}: text is needed", param=name[:100]) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]  # adds
        raise ApiError(400, f"the body has the key {twice[:100]!r} twice in one object: give it once", param=twice[:100])
    return made


def _refuse_constant(name: str) -> None:
    raise ApiError(400, f"the body holds {name}, which is no number that JSON has")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ApiError(400, f"the body holds {text[:40]}, which is larger than any number")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise ApiError(400, f"the body holds an integer of {len(text)} digits, {text[:20]}...: 40 are taken")
    return int(text)
