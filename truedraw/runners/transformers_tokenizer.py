"""Tokenizers of transformers, with the exact bytes of each token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from truedraw.errors import ModelFileError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space."""


class TransformersTokenizer:
    """The vocabulary of a fast tokenizer: byte-level BPE, or SentencePiece with or without tokens for bytes.

    model       the tokenizer, as transformers loaded it
    vocab_size  of the model, which may have more rows than there are tokens
    eos_ids     what ends a text besides the tokenizer's own end
    Raises ModelFileError for any other kind: what its tokens stand for depends on their neighbours.
    """

    def __init__(self, model: Any, vocab_size: int, eos_ids: frozenset[int] = frozenset()) -> None:
        self._model = model
        self.vocab_size = vocab_size
        backend = getattr(model, "backend_tokenizer", None)
        if backend is None:
            raise ModelFileError(f"{type(model).__name__} runs in Python only: a tokenizer.json is needed")
        self._byte_level = _is_byte_level(json.loads(backend.to_str()).get("decoder"), type(model).__name__)
        self._added = {token: added for token, added in model.added_tokens_decoder.items() if token < vocab_size}
        own = model.eos_token_id
        self.eos_ids = frozenset(token for token in {*eos_ids, own} if token is not None and token < vocab_size)
        template = model.chat_template
        self.chat_template: str | None = template.get("default") if isinstance(template, dict) else template
        self.bos_text: str = model.bos_token or ""
        self.eos_text: str = model.eos_token or ""
        if b"a" not in b"".join(map(self.token_bytes, self.encode("a", add_special=False))):  # made up where files are missing
            raise ModelFileError(f"{type(model).__name__} has {len(model)} tokens, and none for 'a': a file of it is missing")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        text.encode()  # a lone surrogate is refused here, by the name that callers know
        return list(self._model.encode(text, add_special_tokens=add_special))

    def token_bytes(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else str(added.content).encode()
        piece = self._piece(token)
        if self._byte_level:
            return b"".join(_UNIT_BYTES.get(unit) or unit.encode() for unit in piece)
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()

    def token_text(self, token: int) -> bytes:
        return self._piece(token).encode()

    def _piece(self, token: int) -> str:
        """The spelling of a token; empty where the model has a row and the tokenizer no token."""
        return (self._model.convert_ids_to_tokens(token) or "") if 0 <= token < self.vocab_size else ""


def _is_byte_level(decoder: Any, name: str) -> bool:
    """Byte-level BPE, or else SentencePiece. Raises ModelFileError."""
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ModelFileError(
        f"{name} decodes by {', '.join(sorted(kinds)) or 'nothing'}: byte-level BPE or SentencePiece is needed, where each "
        "token stands for bytes of its own"
    )


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for part in decoder.get("decoders", ()):
                yield from _kinds(part)
        else:
            yield str(decoder.get("type"))


def _units() -> dict[str, bytes]:
    """The characters by which byte-level BPE writes bytes: printable ones of Latin-1 stand for themselves, the others
    for U+0100 onwards in their order (Radford et al. 2019, GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(hidden)}


_UNIT_BYTES = _units()
