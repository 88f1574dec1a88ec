"""Who may ask, from where, and how much at a time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from truedraw.errors import InvalidParameter
from truedraw.server.errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take.

    body_bytes, body_seconds  of the whole body; seconds: of the whole request, None: no bound
    prompt_tokens  None: as many as the context holds
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    prompt_tokens: int | None = None
    prompts: int = 64
    choices: int = 16
    stops: int = 16
    stop_length: int = 256
    seconds: float | None = 600.0


class Keys:
    """API keys, held as digests. Without any everybody is let in, as one owner."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidParameter("api_key", f"{key[:2]}...", "at least 8 printable ASCII characters, no space")
        self._digests = tuple(dict.fromkeys(map(_digest, keys)))

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(digest.hex()[:16] for digest in self._digests) or ("",)

    def owner(self, authorization: str | None) -> str:
        """Whose request it is. Every key is compared, in constant time, whichever fits. Raises ApiError."""
        if not self._digests:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            wrong = "wrong" if given else "missing"
            message = f"the API key is {wrong}: send one of the server's as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return self.owners[found.index(True)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_host(host: str, allowed: Sequence[str]) -> None:
    """A page of another site that got its name to point here sends that name (DNS rebinding). Raises ApiError.

    allowed: host names, without ports; empty: any
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if allowed and name.lower() not in allowed:
        raise ApiError(
            421, f"this server does not answer for the host {host[:100]!r}: --allowed-host adds one", code="wrong_host"
        )


async def read_json(request: Request, limits: Limits) -> Any:
    """The body. Raises ApiError for one that is too large, too slow, no UTF-8 or no JSON."""
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
        raise ApiError(408, message, headers={"Connection": "close", "x-should-retry": "false"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the connection was closed before the body had come") from None
    try:
        return json.loads(bytes(body).decode(), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    except ValueError as error:
        raise ApiError(400, f"the body holds a number that is none: {error}") from None


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes: send less", headers={"Connection": "close"})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number that JSON has")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is larger than any number")
    return value
