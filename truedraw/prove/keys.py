"""Certificate of the noise itself: exponentials are exponential, and every stream has a key of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from truedraw import randomness
from truedraw.randomness import Key, Noise, Purpose, StepNoise, philox

_CELL = 2.0**-53
_ROUNDING = 1e-15


def first_fault() -> str | None:
    """What is wrong with the production noise, or None.

    Exponentials against -log(1 - u) over the cell of 2**-53 of the smallest, largest and scattered uniforms; streams by their
    first values over a grid of keys, where two equal ones would be a shared stream (64 bits: a chance
    collision has probability below 1e-12); and what may depend on what: race noise on seed, choice,
    absolute position and token alone, uniforms on seed, choice, start, purpose and index.
    """
    return next(_faults(), None)


def _faults() -> Iterator[str]:
    uniforms = np.concatenate([[0.0, _CELL, 2 * _CELL, 1 - _CELL, 0.5], np.arange(1, 400) * 0.6180339887498949 % 1])
    drawn = randomness._exponentials(uniforms)
    for u, e in zip(uniforms, drawn, strict=True):
        low, high = -math.log1p(-u), -math.log1p(-(u + _CELL)) if u + _CELL < 1 else 40.0
        if not (0 < e < math.inf) or not low * (1 - _ROUNDING) <= e <= high * (1 + _ROUNDING):
            yield f"the exponential of u = {u!r} is {e!r}: between {low!r} and {high!r} is -log(1 - u) for this cell"
    streams: dict[tuple[float, ...], object] = {}
    for name, values in _streams():
        if values in streams:
            yield f"{name} and {streams[values]} share their noise"
        streams[values] = name
    for start, position in product(range(4), range(4, 8)):
        here, there = (StepNoise(3, 1, s).race(position) for s in (0, start))
        if not np.array_equal(here.tokens(0, 4), there.tokens(0, 4)) or not np.array_equal(here.blocks(4), there.blocks(4)):
            yield f"race noise of position {position} depends on the step's start {start}"
    row = StepNoise(3, 1, 0).race(5).tokens(0, 150)
    for first, count in ((0, 7), (1, 3), (63, 2), (64, 64), (129, 21)):
        if not np.array_equal(StepNoise(3, 1, 0).race(5).tokens(first, count), row[first : first + count]):
            yield f"race noise of tokens {first} to {first + count} depends on how it is asked for"


def _streams() -> Iterator[tuple[object, tuple[float, ...]]]:
    for seed, choice, start in product((0, 1, 2**64 - 1, 2**64, 2**100), (0, 1, 7), (0, 1, 2, 9)):
        step = Noise(seed, choice).at(start)
        for purpose, index in product((Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL, Purpose.BONUS, Purpose.FILLER), range(4)):
            yield ("uniform", seed, choice, start, purpose.name, index), (step.uniform(purpose, index),)
        race = step.race(start + 100)  # positions apart from the starts above
        yield ("race of tokens", seed, choice, start + 100), tuple(race.tokens(0, 4))
        yield ("race of blocks", seed, choice, start + 100), tuple(race.blocks(4))
    for position in range(64):
        yield ("token race at", position), tuple(Noise(5).at(0).race(position).tokens(0, 4))
        yield ("block race at", position), tuple(Noise(5).at(0).race(position).blocks(4))
    for purpose in Purpose:
        for position, index in product((200, 201), range(3)):
            yield ("stream", purpose.name, position, index), tuple(philox(Key(9, 0, purpose, position, index), 0, 4))
