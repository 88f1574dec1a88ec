"""Do the rows of a runner depend on how a text was fed: bit for bit, and if so, how far are they apart?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from truedraw.calibrate import fill
from truedraw.protocols import Chunk, ModelRunner, Tokenizer
from truedraw.sampling import shape
from truedraw.types import Probs, SamplingParams, TokenArray

NUM_ROWS = 32
"""Rows that are compared: after so many consecutive tokens of a text."""

MARGIN = 64
"""Tokens of text, and of room in the slots, that a comparison needs beyond the cached ones: passes keep their size to
the end, and of slots that share one unequally some are ahead."""

TEXT = (
    "The lighthouse stood where the river met the sea. In the morning the keeper wrote down the wind, the rain and the names of "
    "the ships; in the evening he read the list aloud, and his daughter counted them. def add(a, b):\n    return a + b\n"
)
"""Words and code, repeated with a number until it is long enough: rows are compared on it."""


def real_text(tokenizer: Tokenizer, length: int) -> TokenArray:
    """So many tokens of text to compare rows on."""
    tokens: list[int] = []
    number = 0
    while len(tokens) < length:
        number += 1
        tokens += tokenizer.encode(f"{number}. {TEXT}", add_special=not tokens)
    return np.asarray(tokens[:length], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Some rows against the plain ones: those of passes of a single token, for the same contexts.

    name           equal where rows are the same, bit for bit; a: as the plain ones
    mean_tv, max_tv  of the laws at temperature 1, against the plain ones
    mean_tv_f32, max_tv_f32  against those of the same weights as f32 numbers; None: not compared
    """

    name: str
    mean_tv: float
    max_tv: float
    mean_tv_f32: float | None = None
    max_tv_f32: float | None = None

    @property
    def identical(self) -> bool:
        return self.name == "a"


class Comparison:
    """Sorts rows behind one text into classes that are bit-identical.

    plain      (num_rows, vocab) logits of passes of a single token
    reference  (num_rows, vocab) laws of the f32 weights
    """

    def __init__(self, plain: np.ndarray, reference: Probs | None = None) -> None:
        self._plain_laws = laws(plain)
        self._reference = reference
        self._classes: list[tuple[np.ndarray, Agreement]] = []
        self.plain = self.add(plain[np.newaxis])

    def add(self, rows: np.ndarray) -> Agreement:
        """Of (sequences, num_rows, vocab) logits, each sequence at the same text: the class that has all of these rows,
        a new one where none has."""
        same = all(np.array_equal(row, rows[0]) for row in rows)
        kept = rows[:1] if same else rows
        for known, agreement in self._classes:
            if np.array_equal(kept, known):
                return agreement
        off = _distances(kept, self._plain_laws)
        exact = _distances(kept, self._reference) if self._reference is not None else None
        agreement = Agreement(
            chr(ord("a") + len(self._classes)),
            float(np.mean(off)),
            max(off),
            None if exact is None else float(np.mean(exact)),
            None if exact is None else max(exact),
        )
        self._classes.append((kept.copy(), agreement))
        return agreement


def size_classes(
    runner: ModelRunner, text: TokenArray, cached: int, sizes: Sequence[int], *, sequences: int = 1, known: Comparison
) -> list[Agreement]:
    """The classes of passes of `sizes` tokens, dealt out over `sequences` slots that hold text[:cached] each, and do
    again afterwards. Passes of several slots decode the same stretch of text in each.

    Raises what the runner raises.
    """
    return [known.add(decode(runner, text, cached, size, sequences)) for size in sizes if size >= sequences]


def decode(runner: ModelRunner, text: TokenArray, cached: int, size: int = 1, sequences: int = 1) -> np.ndarray:
    """Logits of the stretch behind text[:cached], which `sequences` slots hold, in passes of exactly `size` tokens:
    shape (sequences, NUM_ROWS, vocab). The slots are as before."""
    share, more = divmod(size, sequences)
    at = [cached] * sequences
    kept: list[list[np.ndarray]] = [[] for _ in at]
    while min(at) < cached + NUM_ROWS:
        chunks = []
        for slot in range(sequences):
            end = at[slot] + share + (slot < more)
            chunks.append(Chunk(slot, text[at[slot] : end], end - at[slot]))
            at[slot] = end
        for rows, answer in zip(kept, runner.forward(chunks), strict=True):
            rows.append(np.array(answer.logits))
    for slot in range(sequences):
        runner.rollback(slot, cached)
    return np.stack([np.concatenate(rows)[:NUM_ROWS] for rows in kept])


@dataclass(frozen=True, slots=True)
class History:
    """Rows behind a prompt of `cached` tokens fed in passes of `chunk`, decoded in passes of `size`."""

    chunk: int
    size: int
    cached: int
    agreement: Agreement


def histories(runner: ModelRunner, text: TokenArray, cached: int, chunks: Sequence[int]) -> Iterator[History]:
    """Feed a prompt in passes of each of `chunks`, and compare single tokens behind it with single tokens behind the
    first kind of prompt, whose own line is about passes of 8 tokens.

    Slot 0 is empty afterwards. Raises what the runner raises.
    """
    known: Comparison | None = None
    for chunk in chunks:
        runner.rollback(0, 0)
        fill(runner, 0, text[:cached], chunk)
        rows, size = decode(runner, text, cached), 1
        if known is None:
            known = Comparison(rows[0])
            rows, size = decode(runner, text, cached, 8), 8
        yield History(chunk, size, cached, known.add(rows))
    runner.rollback(0, 0)


def laws(logits: np.ndarray) -> Probs:
    """Of (n, vocab) logits, at temperature 1: shape (n, vocab)."""
    return np.stack([shape(row, SamplingParams(), np.zeros(1, dtype=np.int32), 1) for row in logits])


def _distances(rows: np.ndarray, wanted: Probs) -> list[float]:
    """The TV of every row to its law in `wanted`."""
    return [float(np.abs(got - law).sum() / 2) for each in rows for got, law in zip(laws(each), wanted, strict=True)]
