"""What truedraw load is given on the command line, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from truedraw.bench import load_prompts
from truedraw.bench.load_prompts import Messages
from truedraw.cli.files import read_text
from truedraw.errors import InvalidParameter

MAX_CONCURRENCY = 1024


def address(url: str) -> str:
    """What stands before /v1, whether or not that was typed. Raises InvalidParameter."""
    import httpx

    wanted = "an address as http://localhost:8000"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise InvalidParameter("url", url, f"{wanted} ({error})") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidParameter("url", url, wanted)
    if parsed.query or parsed.fragment or parsed.userinfo:
        raise InvalidParameter("url", str(parsed), f"{wanted}, without user, query or fragment; keys go into --api-key")
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def concurrency(text: str, requests: int) -> list[int]:
    """Numbers parted by commas, in the order given. Raises InvalidParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part[:9]) <= MAX_CONCURRENCY for part in parts):
        raise InvalidParameter("concurrency", text, f"numbers from 1 to {MAX_CONCURRENCY}, as 1,4,16")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise InvalidParameter("concurrency", text, "each number once")
    if requests < max(numbers):
        raise InvalidParameter("requests", requests, f"an integer >= {max(numbers)}, the largest concurrency")
    return numbers


def check_numbers(max_tokens: int, seconds: float, timeout: float, abandon: float, temperature: float) -> None:
    """Raises InvalidParameter."""
    if max_tokens < 1:
        raise InvalidParameter("max_tokens", max_tokens, "an integer >= 1")
    for name, value in (("seconds", seconds), ("timeout", timeout)):
        if not 0 < value < math.inf:
            raise InvalidParameter(name, value, "a number > 0")
    if not 0 <= abandon <= 1:
        raise InvalidParameter("abandon", abandon, "a share in [0, 1]")
    if not 0 <= temperature < math.inf:
        raise InvalidParameter("temperature", temperature, "a number >= 0")


def headers(api_key: str | None, given: Sequence[str]) -> dict[str, str]:
    """Of every request. Raises InvalidParameter; a key is not repeated there."""
    found = {}
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidParameter("api_key", "...", "printable ASCII")
        found["Authorization"] = f"Bearer {api_key}"
    for each in given:
        name, colon, value = (part.strip() for part in each.partition(":"))
        if not (
            colon
            and name.isascii()
            and name.replace("-", "").replace("_", "").isalnum()
            and value.isascii()
            and value.isprintable()
        ):
            raise InvalidParameter("header", each, "'Name: value' in ASCII")
        found[name] = value
    return found


def prompts(path: str | None, *, raw: bool) -> list[str | Messages]:
    """Raises PromptError, naming the line, and UsageError for a file that cannot be read."""
    if path is None:
        found = load_prompts.shipped()
    else:
        found = load_prompts.parse(read_text("prompts", path, "a text or .jsonl file"), path)
    return [load_prompts.as_text(prompt) for prompt in found] if raw else found
