"""Counter-based noise: every number is a function of a key, never of what was drawn before it.

Two keyings, and no purpose shares noise with another (DESIGN.md section 4):

* race noise by the ABSOLUTE position of the token that it decides: the same in whatever step,
  batch or draft length the position comes up;
* draft, acceptance, residual and bonus uniforms by the position of the STEP'S FIRST token and the
  index in the block: no step ever meets noise that an earlier verdict or policy has seen.

The generator is Philox 4x64-10 (Salmon et al. 2011) as NumPy ships it: key = seed, counter =
(stream offset, position, purpose, index in the block and choice).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Uniforms: TypeAlias = npt.NDArray[np.float64]
RACE_BLOCK = 64
"""Token ids in one block of the two-level race."""

_WORDS_PER_COUNTER = 4


class Purpose(IntEnum):
    """What a stream of noise is for."""

    RACE_TOKEN = 1
    RACE_BLOCK = 2
    DRAFT = 3
    ACCEPT = 4
    RESIDUAL = 5
    BONUS = 6
    FILLER = 7


@dataclass(frozen=True, slots=True)
class Key:
    """Names one stream of uniforms. `position` is absolute; `index` counts inside a block."""

    seed: int
    choice: int
    purpose: Purpose
    position: int
    index: int = 0


Source: TypeAlias = Callable[[Key, int, int], Uniforms]
"""(key, first, count) -> uniforms `first` .. `first + count` of the key's stream, in [0, 1)."""


def philox(key: Key, first: int, count: int) -> Uniforms:
    """The production source. Seeds may use 128 bits; choice and index 32 bits each."""
    skip, offset = divmod(first, _WORDS_PER_COUNTER)
    counter = (skip, key.position, int(key.purpose), key.index | key.choice << 32)
    generator = _generator_at(counter, (key.seed & _LOW_WORD, key.seed >> 64))
    return generator.random(offset + count)[offset:]  # 53 high bits of each word


_LOW_WORD = 2**64 - 1
_scratch = threading.local()


def _generator_at(counter: tuple[int, ...], key: tuple[int, ...]) -> np.random.Generator:
    """A Philox generator that starts there. One for each thread is wound instead of building another:
    that took three times as long, twice for every token."""
    if not hasattr(_scratch, "generator"):
        _scratch.philox = np.random.Philox(0)
        _scratch.generator = np.random.Generator(_scratch.philox)
        _scratch.state = _scratch.philox.state
    state = _scratch.state
    state["state"]["counter"][:] = counter
    state["state"]["key"][:] = key
    state["buffer_pos"] = _WORDS_PER_COUNTER  # nothing buffered
    _scratch.philox.state = state
    generator: np.random.Generator = _scratch.generator
    return generator


@dataclass(frozen=True, slots=True)
class RaceNoise:
    """The Exp(1) noise of the race for one position."""

    key: Key
    source: Source

    def tokens(self, first: int, count: int) -> Uniforms:
        """E of token ids first .. first + count, shape (count,)."""
        return _exponentials(self.source(self.key, first, count))

    def blocks(self, count: int) -> Uniforms:
        """E of the first `count` blocks, shape (count,)."""
        key = Key(self.key.seed, self.key.choice, Purpose.RACE_BLOCK, self.key.position)
        return _exponentials(self.source(key, 0, count))


def _exponentials(uniforms: Uniforms) -> Uniforms:
    """-log(1 - u), with u moved inside its cell of 2**-53: never 0 nor infinite, and the small end,
    which wins races, is the finely resolved one."""
    inside = uniforms + 2.0**-54
    np.minimum(inside, 1 - 2.0**-53, out=inside)
    np.negative(inside, out=inside)
    np.log1p(inside, out=inside)
    return np.negative(inside, out=inside)


@dataclass(frozen=True, slots=True)
class StepNoise:
    """The noise of one step of one choice. `start` is the position of the step's first token."""

    seed: int
    choice: int
    start: int
    source: Source = philox

    def uniform(self, purpose: Purpose, index: int) -> float:
        """In [0, 1), keyed by (seed, choice, start, purpose, index in the block)."""
        return float(self.source(Key(self.seed, self.choice, purpose, self.start, index), 0, 1)[0])

    def race(self, position: int) -> RaceNoise:
        """Keyed by (seed, choice, absolute position) alone, whatever step asks."""
        return RaceNoise(Key(self.seed, self.choice, Purpose.RACE_TOKEN, position), self.source)


@dataclass(frozen=True, slots=True)
class Noise:
    """All the noise of one choice of a request: the seed (given or drawn) and the choice's index."""

    seed: int
    choice: int = 0
    source: Source = philox

    def at(self, start: int) -> StepNoise:
        """The noise of the step whose first token goes to position `start`."""
        return StepNoise(self.seed, self.choice, start, self.source)
