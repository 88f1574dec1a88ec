"""Text to tokens and back: words, an end, a character in two halves, and any other byte."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_WORDS = (
    "red green blue white black grey brown pink stone river cloud house tree bird fish horse "
    "sings runs falls waits turns and or with"
)
_CHARACTER = "é".encode()

PIECES: tuple[bytes, ...] = (b"", *(b" " + word.encode() for word in _WORDS.split()), _CHARACTER[:1], _CHARACTER[1:])
"""The bytes of each token that the model can emit."""
END, FIRST_HALF, SECOND_HALF = 0, len(PIECES) - 2, len(PIECES) - 1
VOCAB = len(PIECES)
"""How many tokens have a probability; the ids from here on are single bytes, which only prompts hold."""
NUM_IDS = VOCAB + 256

_END_TEXT = "<|end|>"
_IDS = {piece: token for token, piece in enumerate(PIECES) if piece}
_SPLIT = re.compile(b"|".join(re.escape(piece) for piece in PIECES if len(piece) > 1) + b"|.", re.DOTALL)


def encode(text: str) -> list[int]:
    """Words where there are words, bytes elsewhere: every text has exactly one encoding."""
    return [_IDS[piece] if piece in _IDS else VOCAB + piece[0] for piece in _SPLIT.findall(text.encode("utf-8", "replace"))]


def token_bytes(token: int) -> bytes:
    return PIECES[token] if token < VOCAB else bytes([token - VOCAB])


def decode(tokens: Iterable[int]) -> bytes:
    return b"".join(map(token_bytes, tokens))


def shown(token: int) -> str:
    """As log-probabilities name it: its text, or its bytes as OpenAI writes those that are no text."""
    data = token_bytes(token)
    if not data:
        return _END_TEXT
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_prompt(messages: Sequence[tuple[str, str]]) -> str:
    """The prompt of (role, content) pairs. It ends with the last content, so that different questions have different laws."""
    return "\n".join(f"{role}:{content}" for role, content in messages)
