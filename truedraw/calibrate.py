"""Measures a profile from a runner: passes of several sizes, interleaved, so that drift of the machine
does not look like a difference between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from truedraw.profile import CostPoint, Profile
from truedraw.protocols import Chunk, ModelRunner

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
    for slot in slots:
        runner.rollback(slot, cached)


def _tokens(count: int, start: int, vocab: int) -> np.ndarray:
    """Tokens of no meaning: what a pass costs does not depend on them."""
    return ((np.arange(start, start + count) * 7919 + 101) % vocab).astype(np.int32)
