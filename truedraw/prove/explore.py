"""Every outcome of a call that draws noise, with the exact region of noise that leads to it.

The call is a black box. Whenever it asks for a uniform for the first time, its behaviour is probed
over all 2**53 values that the production source can give: at both ends and at points scattered over
the unit interval, and where two of them differ, by bisection down to the two neighbouring values
between which the behaviour changes. So a threshold is located to the last bit, wherever the code has
it. Whatever the call asks for later is answered in three ways meanwhile (scattered, near 0, near 1),
so that a choice shows whose effect some later coin would hide. What stays unseen is a band between
two scattered points in which the behaviour changes and changes back.

A threshold that lies within 1e-14 of a fraction with a denominator of at most 10**6 counts as that
fraction, so that laws come out in fractions wherever the rule is rational; any other is kept as it
was located. What happens only within 1e-14 of the ends of the unit interval, u = 0 itself for
instance, so gets mass 0, and stays an outcome: a text that the target forbids may not even be one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from truedraw.protocols import RaceNoise
from truedraw.randomness import Purpose
from truedraw.types import Probs

T = TypeVar("T", bound=Hashable)

Ask: TypeAlias = tuple[Purpose, int]
"""A uniform as a rule asks for it: purpose and index in the block. A race: RACE_TOKEN and the
position counted from the step's first token."""

Interval: TypeAlias = tuple[Fraction, Fraction]

NUM_VALUES = 2**53
SNAP = Fraction(1, 10**14)
MAX_DENOMINATOR = 10**6


@dataclass(frozen=True, slots=True)
class Leaf(Generic[T]):
    """The call returns `outcome` where every uniform that it asks for lies in its interval.

    Of a race the interval is the winner's place in the cumulated law. `rational`: every end is a
    fraction that was recognised.
    """

    intervals: tuple[tuple[Ask, Interval], ...]
    outcome: T
    rational: bool = True

    @property
    def mass(self) -> Fraction:
        mass = Fraction(1)
        for _, (low, high) in self.intervals:
            mass *= high - low
        return mass


class _Asked(Exception):
    """The script ends here, and the call wants more."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask


Default: TypeAlias = Callable[[Ask], int]
"""Answers what a script does not hold."""

DEFAULTS: tuple[Default, ...] = (
    lambda ask: _scattered(ask, 1)[0],
    lambda ask: NUM_VALUES // 1000 + ask[1],
    lambda ask: NUM_VALUES - NUM_VALUES // 1000 - ask[1],
)


class ScriptedNoise:
    """Step noise that answers from a script. What is not in it stops the call, or is answered by the
    default, and noted."""

    def __init__(self, script: dict[Ask, int], start: int, default: Default | None = None) -> None:
        self._script, self._default = script, default
        self._start = start
        self.asks: list[Ask] = []
        self.law: Probs | None = None

    @property
    def start(self) -> int:
        return self._start

    def value(self, ask: Ask) -> int:
        if ask in self._script:
            return self._script[ask]
        if self._default is None:
            raise _Asked(ask)
        self.asks.append(ask)
        return self._default(ask)

    def uniform(self, purpose: Purpose, index: int) -> float:
        return self.value((Purpose(purpose), index)) / NUM_VALUES

    def announce(self, law: Probs) -> None:
        """The row that the next race is over: a race enters by its law."""
        self.law = law

    def race(self, position: int) -> RaceNoise:
        return _ScriptedRace(self, position - self._start)


class _ScriptedRace:
    """Exponentials that let one token win: which, is decided by a uniform and the announced law."""

    def __init__(self, noise: ScriptedNoise, place: int) -> None:
        self._noise, self._ask = noise, (Purpose.RACE_TOKEN, place)

    def blocks(self, count: int) -> Probs:
        assert count == 1, "vocabularies of one block only"
        return np.ones(1)

    def tokens(self, first: int, count: int) -> Probs:
        law = self._noise.law
        assert law is not None, "a race whose law nobody announced"
        cumulative = np.cumsum(law)
        noise = np.ones(count)
        winner = np.searchsorted(cumulative, self._noise.value(self._ask) / NUM_VALUES * cumulative[-1], side="right")
        noise[int(winner)] = 1e-300
        return noise


def explore(call: Callable[[ScriptedNoise], T], start: int, num_points: int = 4) -> list[Leaf[T]]:
    """All outcomes of `call`, with the noise that leads to each.

    start       position of the step's first token
    num_points  how many scattered values each uniform is probed at, besides both ends
    """
    leaves: list[Leaf[T]] = []
    todo: list[tuple[dict[Ask, int], tuple[tuple[Ask, Interval], ...], bool]] = [({}, (), True)]
    while todo:
        script, intervals, rational = todo.pop()
        try:
            leaves.append(Leaf(intervals, call(ScriptedNoise(script, start)), rational))
        except _Asked as asked:
            ask = asked.ask

            def behaviour(value: int, default: Default, script: dict[Ask, int] = script, ask: Ask = ask) -> Hashable:
                noise = ScriptedNoise({**script, ask: value}, start, default)
                outcome = call(noise)
                return (tuple(noise.asks), outcome)

            points = _scattered(ask, num_points)
            edges: list[int] = []
            for default in DEFAULTS:
                edges = _edges(partial(behaviour, default=default), points, edges)
            ends = [Fraction(0), *map(as_fraction, edges), Fraction(1)]
            for i, (first, behind) in enumerate(zip([0, *edges], [*edges, NUM_VALUES], strict=True)):
                inside = first + (behind - first) * (points[i % num_points] >> 20) // (NUM_VALUES >> 20)
                known = all(end.denominator <= MAX_DENOMINATOR for end in ends[i : i + 2])
                todo.append(({**script, ask: inside}, (*intervals, (ask, (ends[i], ends[i + 1]))), rational and known))
    return leaves


def _scattered(ask: Ask, count: int) -> list[int]:
    """Values of an additive recurrence, each ask with an offset of its own."""
    offset = (int(ask[0]) * 0.7548776662 + ask[1] * 0.5698402910) % 1
    return [int((offset + (i + 1) * 0.6180339887498949) % 1 * NUM_VALUES) for i in range(count)]


def _edges(behaviour: Callable[[int], Hashable], points: Iterable[int], known_edges: list[int]) -> list[int]:
    """The values at which the behaviour is another than just before, and those known before."""
    seen: dict[int, Hashable] = {}

    def at(value: int) -> Hashable:
        if value not in seen:
            seen[value] = behaviour(value)
        return seen[value]

    edges = set(known_edges)
    left = 0
    for right in sorted({*points, *known_edges, NUM_VALUES - 1}):
        behind = right - 1 if right in edges else right  # up to a known edge nothing should change
        while left < behind and at(behind) != at(left):
            left = _first_change(at, left, behind)
            edges.add(left)
        left = right
    return sorted(edges)


def _first_change(at: Callable[[int], Hashable], low: int, high: int) -> int:
    """By bisection the smallest value in (low, high] with another behaviour than `low`. Once it is
    known to about 1e-6, simple fractions are tried first: that halves the number of calls."""
    before = at(low)
    guessed = False
    while high - low > 1:
        if not guessed and high - low < NUM_VALUES >> 21:
            guessed = True
            fraction = Fraction(low + high, 2 * NUM_VALUES).limit_denominator(1000)
            guess = -(-fraction.numerator * NUM_VALUES // fraction.denominator)
            for value in (guess + 3, guess - 3):
                if low < value < high:
                    low, high = (value, high) if at(value) == before else (low, value)
            continue
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) == before else (low, middle)
    return high


def as_fraction(value: int) -> Fraction:
    """The simple fraction at this edge, 0 and 1 included, if there is one, else the edge itself."""
    edge = Fraction(value, NUM_VALUES)
    for largest in (1000, MAX_DENOMINATOR):
        simple = edge.limit_denominator(largest)
        if abs(simple - edge) <= SNAP:
            return simple
    return edge
