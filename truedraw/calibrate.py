"""Measures a runner: what passes of several sizes cost, and with how many threads they are fastest; interleaved,
so that drift of the machine does not look like a difference between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from truedraw.errors import RunnerError
from truedraw.profile import CostPoint, Profile, ThreadChoice, ThreadTime
from truedraw.protocols import Chunk, ModelRunner, Threaded
from truedraw.types import TokenArray

QUICK_SIZES = (1, 2, 4, 8, 16, 32)
QUICK_SECONDS = 3.0
LARGE_SIZES = (8, 32)
"""Passes of more than one token that the number of threads is chosen on."""
LEAST_GAIN = 0.03
"""Fewer threads than all cores must be faster by this share to be chosen: noise should not flip the choice."""
STEADY = 1.5
"""A choice lasts: none is made where the middle round took so many times the best one."""


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
    for slot in range(sequences):
        runner.rollback(slot, 0)
        fill(runner, slot, _tokens(cached, 0, runner.vocab_size))
    points = time_passes(runner, sizes, cached, sequences, seconds=seconds, rounds=rounds, clock=clock)
    for slot in range(sequences):
        runner.rollback(slot, 0)
    return points


def fill(runner: ModelRunner, slot: int, tokens: TokenArray, chunk: int = 256) -> None:
    """Append `tokens` to a slot in passes of `chunk`."""
    for start in range(0, len(tokens), chunk):
        runner.forward([Chunk(slot, tokens[start : start + chunk], 0)])


def time_passes(
    runner: ModelRunner,
    sizes: Sequence[int],
    cached: int,
    sequences: int,
    *,
    seconds: float,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CostPoint]:
    """As `measure`, with slots that hold `cached` tokens each already, and do again afterwards."""
    started = clock()
    slots = range(sequences)
    room = min(runner.max_length - cached, runner.max_pass_size, runner.max_rows)
    usable = [size for size in sizes if sequences <= size <= room]
    taken: dict[int, list[float]] = {size: [] for size in usable}
    for size in usable:  # the first pass of a size allocates
        _timed(runner, slots, size, cached, clock)
    for number in range(rounds):
        if number >= 3 and clock() - started > seconds:
            break
        for size in usable if number % 2 == 0 else reversed(usable):
            taken[size].append(_timed(runner, slots, size, cached, clock))
    return [CostPoint(size, cached, sequences, statistics.median(times)) for size, times in taken.items()]


def threads(
    runner: ModelRunner,
    *,
    seconds: float = 6.0,
    cached: int = 256,
    rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> ThreadChoice | None:
    """Measure passes of one, 8 and 32 tokens behind `cached` ones with each of the runner's `thread_counts`, and
    leave it with the fastest for small and for large passes; None where the runner is not Threaded.

    All cores stay chosen unless fewer are faster by LEAST_GAIN, for large passes in the mean over their sizes; and
    where the same pass took STEADY times its best in the middle round, since then another program ran.
    Numbers of threads come one after the other in every round, up and down in turn; after three rounds it stops
    when the time is up. The best round counts: what other programs take says nothing about the threads, and a
    choice lasts. Slot 0 is empty afterwards. Raises RunnerError where not even one token fits.
    """
    if not isinstance(runner, Threaded):
        return None
    started = clock()
    counts = runner.thread_counts
    room = min(runner.max_pass_size, runner.max_rows, runner.max_length)
    sizes = [size for size in (1, *LARGE_SIZES) if size <= room]
    if not sizes:
        raise RunnerError("no pass fits into this context")
    cached = min(cached, runner.max_length - sizes[-1])
    runner.rollback(0, 0)
    fill(runner, 0, _tokens(cached, 0, runner.vocab_size))
    taken: dict[tuple[int, int], list[float]] = {(count, size): [] for count in counts for size in sizes}
    for number in range(rounds):
        if number >= 3 and clock() - started > seconds:
            break
        for count in counts if number % 2 == 0 else reversed(counts):
            runner.set_threads(count, count)
            _timed(runner, range(1), sizes[-1], cached, clock)  # the first pass starts the threads
            for size in sizes:
                taken[count, size].append(_timed(runner, range(1), size, cached, clock))
    runner.rollback(0, 0)
    times = {kind: min(each) for kind, each in taken.items()}
    steady = all(statistics.median(each) <= STEADY * times[kind] for kind, each in taken.items())
    small = _fastest(counts, {count: [times[count, 1]] for count in counts})
    large = _fastest(counts, {count: [times[count, size] for size in sizes if size > 1] for count in counts})
    if not steady:
        small = large = counts[-1]
    runner.set_threads(small, large)
    return ThreadChoice(small, large, tuple(ThreadTime(*kind, took) for kind, took in times.items()), steady)


def _fastest(counts: Sequence[int], times: Mapping[int, Sequence[float]]) -> int:
    """The number of threads with the least mean ratio to all cores, which come last."""
    everything = counts[-1]
    ratios = {
        count: statistics.fmean([took / base for took, base in zip(times[count], times[everything], strict=True)] or [1.0])
        for count in counts
    }
    best = min(counts, key=lambda count: ratios[count])
    return best if ratios[best] < 1 - LEAST_GAIN else everything


def _timed(runner: ModelRunner, slots: range, size: int, cached: int, clock: Callable[[], float]) -> float:
    """Seconds of one pass; the slots are as before."""
    before = clock()
    _pass(runner, slots, size, cached)
    taken = clock() - before
    for slot in slots:
        runner.rollback(slot, cached)
    return taken


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


def _tokens(count: int, start: int, vocab: int) -> TokenArray:
    """Tokens of no meaning: what a pass costs does not depend on them."""
    return ((np.arange(start, start + count) * 7919 + 101) % vocab).astype(np.int32)
