"""A target of a few hundred weights with hidden states and matrices, for tests of MTP: a recurrent net over the text.

Its state after a token is a function of the state before and the token, so that what follows can be learned from states.
"""

from __future__ import annotations

import numpy as np

from truedraw.protocols import Rows, TokenMatrices
from truedraw.registry import Model
from truedraw.runners.toy import ByteTokenizer, ToyRunner

WIDTH = 16


class TinyTarget(ToyRunner):
    """logits = state @ output.T, with "final" the states."""

    def __init__(self, vocab_size: int = 24, *, seed: int = 0, width: int = WIDTH, **options) -> None:
        super().__init__(self._logits, vocab_size, **options)
        generator = np.random.default_rng(seed)
        self.embedding = generator.normal(size=(vocab_size, width)).astype(np.float32)
        self.output = (1.2 * generator.normal(size=(vocab_size, width))).astype(np.float32)
        self._turn = np.linalg.qr(generator.normal(size=(width, width)))[0]
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def state(self, text: tuple[int, ...]) -> np.ndarray:
        if not text:
            return np.zeros(len(self._turn))
        if text not in self._known:
            self._known[text] = np.tanh(self._turn @ self.state(text[:-1]) + self.embedding[text[-1]])
        return self._known[text]

    def _logits(self, text: tuple[int, ...]) -> np.ndarray:
        return self.output @ self.state(text)

    def _append(self, chunk) -> Rows:
        rows = super()._append(chunk)
        if not chunk.hidden or not chunk.rows_to_keep:
            return Rows(rows.logits)
        kept = self._cells[chunk.slot][-chunk.rows_to_keep :]
        return Rows(rows.logits, {"final": np.stack([self.state(text) for text in kept]).astype(np.float32)})

    def token_matrices(self) -> TokenMatrices:
        return TokenMatrices(self.embedding, self.output)


class TinyTokenizer(ByteTokenizer):
    """Bytes, folded into a few ids; the last of them ends a text."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.eos_ids = frozenset({vocab_size - 1})

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [byte % (self.vocab_size - 1) for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token % 26])


def tiny_model(vocab_size: int = 24, **options) -> Model:
    return Model("tiny", TinyTarget(vocab_size, **options), TinyTokenizer(vocab_size))
