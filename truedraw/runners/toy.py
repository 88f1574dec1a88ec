"""Toy models: a table of logits, a cache interface that fails loudly, a byte tokenizer.

Part of the public interface: users test their drafters, rules and engines with the same tool as
the authors do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from truedraw.errors import RollbackUnsupported, RunnerError
from truedraw.protocols import Chunk, Rows, TokenMatrices

Logits = npt.NDArray[np.float64]
NextLogits = Callable[[tuple[int, ...]], npt.ArrayLike]
"""The whole context, as a tuple of token ids -> (vocab,) logits of the next token."""


class ToyRunner:
    """A language model given by a function of the context.

    Each slot really stores the tokens that were fed to it, so that a missing or wrong rollback
    changes the rows, and one that reaches beyond the cache raises.
    """

    can_score_trees = True
    hidden_layers: tuple[str, ...] = ("final",)
    identity: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        next_logits: NextLogits,
        vocab_size: int,
        *,
        num_slots: int = 1,
        max_length: int = 4096,
        max_pass_size: int = 512,
        can_rollback: bool = True,
    ) -> None:
        self._next_logits = next_logits
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_pass_size = max_pass_size
        self.max_rows = max_pass_size
        self.can_rollback = self.can_copy = can_rollback
        self.num_passes = 0
        self.num_fed = 0
        self._cells: list[list[tuple[int, ...]]] = [[] for _ in range(num_slots)]  # each cell: the text up to it

    def forward(self, chunks: Sequence[Chunk]) -> list[Rows]:
        size = sum(len(chunk.tokens) for chunk in chunks)
        if size > self.max_pass_size:
            raise RunnerError(f"a pass of {size} tokens: at most {self.max_pass_size} fit")
        if len({chunk.slot for chunk in chunks}) != len(chunks):
            raise RunnerError("two chunks for one slot in a pass")
        self.num_passes += 1
        self.num_fed += size
        return [self._append(chunk) for chunk in chunks]

    def _append(self, chunk: Chunk) -> Rows:
        cells = self._cells[chunk.slot]
        if not len(chunk.tokens) or not 0 <= chunk.rows_to_keep <= len(chunk.tokens):
            raise RunnerError(f"a chunk of {len(chunk.tokens)} tokens that keeps {chunk.rows_to_keep} rows")
        if len(cells) + len(chunk.tokens) > self.max_length:
            raise RunnerError(f"slot {chunk.slot} would hold {len(cells) + len(chunk.tokens)} tokens: {self.max_length} fit")
        num_linear = len(chunk.tokens) - len(chunk.parents or ())
        base = len(cells) + num_linear
        for i, token in enumerate(map(int, chunk.tokens)):
            if not 0 <= token < self.vocab_size:
                raise RunnerError(f"token {token} was fed: the vocabulary has {self.vocab_size}")
            if chunk.parents is None or i < num_linear:
                before = cells[-1] if cells else ()
            else:
                parent = chunk.parents[i - num_linear]
                before = cells[base + parent] if base + parent >= 0 else ()
            cells.append((*before, token))
        kept = cells[len(cells) - chunk.rows_to_keep :]
        logits = np.array([self._next_logits(text) for text in kept], dtype=np.float64).reshape(len(kept), self.vocab_size)
        hidden = {layer: np.array([[len(text), text[-1]] for text in kept], dtype=np.float32) for layer in chunk.hidden}
        return Rows(logits, hidden)

    def rollback(self, slot: int, length: int) -> None:
        cells = self._cells[slot]
        if length > len(cells) or length < 0:
            raise RunnerError(f"rollback of slot {slot} to {length} tokens: it holds {len(cells)}")
        if length and length < len(cells) and not self.can_rollback:
            raise RollbackUnsupported(f"slot {slot} cannot forget its last {len(cells) - length} tokens")
        del cells[length:]
        if cells and len(cells[-1]) != length:
            raise RunnerError(f"rollback of slot {slot} to {length} tokens ends inside a tree")

    def copy(self, source: int, target: int, length: int) -> None:
        cells = self._cells[source]
        if not self.can_copy:
            raise RollbackUnsupported(f"slot {target} cannot take over what slot {source} holds")
        if length > len(cells) or length < 0:
            raise RunnerError(f"a copy of {length} tokens of slot {source}: it holds {len(cells)}")
        self._cells[target] = cells[:length]

    def token_matrices(self) -> TokenMatrices:
        raise RunnerError("a toy model is a function of the context: it has no embeddings and no output matrix")

    def close(self) -> None:
        self._cells = [[] for _ in range(self.num_slots)]


def markov(rows: npt.ArrayLike, order: int = 1) -> NextLogits:
    """Next-token logits from probabilities that depend on the last `order` tokens.

    rows: (vocab,) * order + (vocab,), or (vocab,) for order 0. A context that is too short is
    padded with token 0 in front. Zero probabilities become -inf.
    """
    table = np.asarray(rows, dtype=np.float64)
    with np.errstate(divide="ignore"):
        logs = np.log(table)

    def next_logits(context: tuple[int, ...]) -> Logits:
        padded = (0,) * order + context
        row: Logits = logs[padded[len(padded) - order :]] if order else logs
        return row

    return next_logits


def hashed(vocab_size: int, *, seed: int = 0, order: int = 3, sharpness: float = 2.0, blend: float = 0.0) -> NextLogits:
    """Logits that look arbitrary and depend on the last `order` tokens and on the position.

    blend > 0 mixes in logits of another seed: two models of one seed with different blends are a
    target and a draft model that resembles it.
    """

    def gaussian(key: tuple[int, ...]) -> Logits:
        return np.random.default_rng(np.abs(np.array(key, dtype=np.int64))).normal(size=vocab_size)

    def next_logits(context: tuple[int, ...]) -> Logits:
        tail = (len(context), *context[-order:])
        return sharpness * (gaussian((seed, *tail)) + blend * gaussian((seed + 7919, *tail)))

    return next_logits


class ByteTokenizer:
    """Token ids 0 .. 255 are the bytes themselves; 256 ends the text."""

    vocab_size = 257
    eos_ids = frozenset({256})
    chat_template: str | None = None
    bos_text = ""
    eos_text = ""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else b""

    def token_text(self, token: int) -> bytes:
        return self.token_bytes(token) or b"<end>"


class LetterTokenizer:
    """Token 0 ends the text; token i is the i-th letter. For models with few tokens, 27 at most."""

    chat_template: str | None = None
    bos_text = ""
    eos_text = ""

    def __init__(self, vocab_size: int) -> None:
        assert 1 <= vocab_size <= 27
        self.vocab_size = vocab_size
        self.eos_ids = frozenset({0})

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        tokens = [ord(letter) - ord("a") + 1 for letter in text]
        assert all(1 <= token < self.vocab_size for token in tokens), f"{text!r} has letters outside the vocabulary"
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return bytes([ord("a") + token - 1]) if 1 <= token < self.vocab_size else b""

    def token_text(self, token: int) -> bytes:
        return self.token_bytes(token) or b"<end>"


_TOY_TEXT = (
    "the cat sat on the mat and the dog sat on the log. the cat saw the dog and the dog saw the cat. "
    "a cat and a dog sat on a mat. the mat was on the log and the log was on the mat. "
)


def toy_language(order: int = 4) -> NextLogits:
    """A byte model that counts what followed the last `order` bytes in a few sentences: seen
    continuations are likely, everything else possible."""
    counts: dict[bytes, Logits] = {}
    text = _TOY_TEXT.encode()
    for n in range(order + 1):
        for i in range(n, len(text)):
            row = counts.setdefault(text[i - n : i], np.zeros(257))
            row[text[i]] += 1

    def next_logits(context: tuple[int, ...]) -> Logits:
        tail = bytes(token for token in context[-order:] if token < 256)
        while tail not in counts:
            tail = tail[1:]
        row = counts[tail] + 1e-4
        row[256] = 0.01 * row.sum()
        return np.log(row)

    return next_logits
