"""Who may ask, from where, and how much at a time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from truedraw.errors import InvalidParameter
from truedraw.server.errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take.

    body_bytes, body_seconds  of the whole body; seconds: of the whole request, None: no bound
    bodies         of one owner that are being read or checked at a time
    prompt_tokens  None: as many as the context holds
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    bodies: int = 64
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

    host: empty where none was sent, as no browser does; allowed: host names, without ports; empty: any
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if host and allowed and name.lower() not in allowed:
        raise ApiError(
            421, f"this server does not answer for the host {host[:100]!r}: --allowed-host adds one", code="wrong_host"
        )
