"""Measures a runner: what passes of several sizes cost, interleaved, so that drift of the machine does
not look like a difference between them; and whether their rows are the same, bit for bit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from truedraw.profile import CostPoint, Profile
from truedraw.protocols import Chunk, ModelRunner, Tokenizer
from truedraw.sampling import shape
from truedraw.types import Probs, SamplingParams, TokenArray

QUICK_SIZES = (1, 2, 4, 8, 16, 32)
QUICK_SECONDS = 3.0


def quick(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> Profile:
    """Pass sizes 1 to 32 in one slot, behind a short and a longer text, within about three seconds.

    The slot is empty afterwards. Raises what the runner raises.
    """
    lengths = [length for length in (16, 512) if length + max(QUICK_SIZES) <= runner.max_length]
    budget = QUICK_SECONDS / max(len(lengths), 1)
    points: list[CostPoint] = []
    for length in lengths or [0]:
        points += measure(runner, QUICK_SIZES, length, 1, seconds=budget, clock=clock)
    return Profile(tuple(points), dict(runner.identity))


def measure(
    runner: ModelRunner,
    sizes: Sequence[int],
    cached: int,
    sequences: int,
    *,
    seconds: float,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CostPoint]:
    """The median seconds of passes of each size (over all sequences together) behind `cached` tokens.

    Sizes come one after the other in every round, up and down in turn; after three rounds it stops
    when the time is up. Sizes that do not fit are left out.
    """
    started = clock()
    slots = range(sequences)
    room = min(runner.max_length - cached, runner.max_pass_size, runner.max_rows)
    usable = [size for size in sizes if sequences <= size <= room]
    for slot in slots:
        runner.rollback(slot, 0)
    for start in range(0, cached, 256):
        for slot in slots:
            runner.forward([Chunk(slot, _tokens(min(256, cached - start), start, runner.vocab_size), 0)])
    taken: dict[int, list[float]] = {size: [] for size in usable}
    for size in usable:  # the first pass of a size allocates
        _pass(runner, slots, size, cached)
        for slot in slots:
            runner.rollback(slot, cached)
    for number in range(rounds):
        if number >= 3 and clock() - started > seconds:
            break
        for size in usable if number % 2 == 0 else reversed(usable):
            before = clock()
            _pass(runner, slots, size, cached)
            taken[size].append(clock() - before)
            for slot in slots:
                runner.rollback(slot, cached)
    for slot in slots:
        runner.rollback(slot, 0)
    return [CostPoint(size, cached, sequences, statistics.median(times)) for size, times in taken.items()]


def _pass(runner: ModelRunner, slots: range, size: int, cached: int) -> None:
    """One pass of `size` tokens, dealt out over the slots, with all rows kept and looked at."""
    share, more = divmod(size, len(slots))
    chunks = []
    for slot in slots:
        count = share + (slot < more)
        if count:
            chunks.append(Chunk(slot, _tokens(count, cached, runner.vocab_size), count))
    rows = runner.forward(chunks)
    float(rows[0].logits[0, 0])  # where passes are asynchronous this waits for the result


def _tokens(count: int, start: int, vocab: int) -> np.ndarray:
    """Tokens of no meaning: what a pass costs does not depend on them."""
    return ((np.arange(start, start + count) * 7919 + 101) % vocab).astype(np.int32)


# ---------------------------------------------------------------- size classes

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
class SizeClass:
    """Rows of passes of one size against those of single tokens, for the same contexts.

    name           equal for sizes whose rows are all bit-identical
    mean_tv, max_tv  of the laws at temperature 1, against pass size 1
    flips          the share of rows with another argmax
    """

    size: int
    cached: int
    name: str
    mean_tv: float
    max_tv: float
    flips: float


def size_classes(
    runner: ModelRunner, text: TokenArray, cached: int, sizes: Sequence[int], *, num_rows: int = 32, chunk: int = 256
) -> list[SizeClass]:
    """Compare the rows behind `num_rows` tokens of `text` that follow its first `cached` ones.

    The first size decodes the stretch behind a prompt fed in chunks of 256 tokens, all others behind one
    fed in chunks of `chunk`. Slot 0 is empty afterwards.
    """
    first, *others = sizes
    _feed(runner, text[:cached], 256)
    rows = {first: _rows(runner, text, cached, first, num_rows)}
    if chunk != 256:
        _feed(runner, text[:cached], chunk)
    rows |= {size: _rows(runner, text, cached, size, num_rows) for size in others}
    runner.rollback(0, 0)
    alone = rows[sizes[0]]
    laws = [_law(row) for row in alone]
    groups: list[np.ndarray] = []
    told = []
    for size in sizes:
        group = next((i for i, known in enumerate(groups) if np.array_equal(known, rows[size])), len(groups))
        if group == len(groups):
            groups.append(rows[size])
        off = [float(np.abs(_law(row) - law).sum() / 2) for row, law in zip(rows[size], laws, strict=True)]
        flips = float(np.mean(rows[size].argmax(axis=1) != alone.argmax(axis=1)))
        told.append(SizeClass(size, cached, chr(ord("a") + group), float(np.mean(off)), max(off), flips))
    return told


def _feed(runner: ModelRunner, prompt: TokenArray, chunk: int) -> None:
    runner.rollback(0, 0)
    for start in range(0, len(prompt), chunk):
        runner.forward([Chunk(0, prompt[start : start + chunk], 0)])


def _rows(runner: ModelRunner, text: TokenArray, cached: int, size: int, count: int) -> np.ndarray:
    runner.rollback(0, cached)
    kept = []
    for start in range(cached, cached + count, size):
        tokens = text[start : min(start + size, cached + count)]
        kept.append(np.array(runner.forward([Chunk(0, tokens, len(tokens))])[0].logits))
    return np.concatenate(kept)


def _law(logits: np.ndarray) -> Probs:
    return shape(logits, SamplingParams(), np.zeros(1, dtype=np.int32), 1)
