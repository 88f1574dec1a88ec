"""The economics of speculation as a renewal rate: the expected tokens of a step over its cost.

Costs are in units of one plain pass of the target, so a plain step costs 1 and speed-up is tokens over cost (Leviathan et
al. 2023, theorem 3.8, with a measured pass cost in place of a free one). A survival is a tuple: entry k - 1 is S_k, the
probability that the first k draft tokens of a proposal are all accepted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from truedraw.errors import InvalidParameter

Survival: TypeAlias = tuple[float, ...]

MAX_LENGTH = 4096
MAX_COST = 1e9  # bounds that keep every ratio finite
MIN_SECONDS = 1e-12
_BISECTIONS = 60


def _number(name: str, value: object, *, low: float = 0, high: float) -> None:
    known = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not known or not low <= value <= high:  # type: ignore[operator]  # known says so; NaN is in no range
        raise InvalidParameter(name, value, f"a number in [{low:g}, {high:g}]")


# ---------------------------------------------------------------- what is accepted


def constant_survival(acceptance: float, length: int) -> Survival:
    """S_k = acceptance**k for k = 1..length."""
    _number("acceptance", acceptance, high=1)
    return tuple(float(acceptance) ** depth for depth in range(1, length + 1))


def depth_survival(rates: Sequence[float]) -> Survival:
    """rates[k - 1] is the acceptance at depth k of those proposals whose first k - 1 tokens were accepted."""
    for depth, rate in enumerate(rates, start=1):
        _number(f"acceptance at depth {depth}", rate, high=1)
    return tuple(float(chance) for chance in np.cumprod(np.array(rates, dtype=np.float64)))


def trace_survival(accepted: Sequence[int], proposed: Sequence[int] | None = None, max_length: int = MAX_LENGTH) -> Survival:
    """The survival that a trace shows, up to the deepest depth that a proposal reached.

    accepted[i] of proposed[i] draft tokens were accepted in step i; None: every step proposed as many as the best step
    accepted (at least one). The acceptance at depth k is a ratio of sums over steps: accepted >= k over those that
    proposed >= k and accepted >= k - 1 (Kaplan and Meier 1958: a draft that ended is no draft that was rejected).
    Where no step accepted k - 1, S_k is 0.
    """
    for name, counts in (("accepted", accepted), ("proposed", proposed or ())):
        for step, count in enumerate(counts):
            if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= MAX_LENGTH:
                raise InvalidParameter(f"{name} of step {step}", count, f"an integer in [0, {MAX_LENGTH}]")
    if proposed is None:
        proposed = [max([1, *accepted])] * len(accepted)
    if len(proposed) != len(accepted):
        raise InvalidParameter("proposed", len(proposed), f"one count for each of the {len(accepted)} accepted ones")
    for step, (hits, length) in enumerate(zip(accepted, proposed, strict=True)):
        if hits > length:
            raise InvalidParameter(f"accepted of step {step}", hits, f"at most {length}, the tokens proposed there")
    hits_by_step, length_by_step = np.array(accepted, dtype=np.int64), np.array(proposed, dtype=np.int64)
    survival: list[float] = []
    survived = 1.0
    for depth in range(1, min(max_length, int(length_by_step.max(initial=0))) + 1):
        at_risk = int(((length_by_step >= depth) & (hits_by_step >= depth - 1)).sum())
        if not at_risk and survived > 0:
            break  # all that got this far ended here: what a longer draft would do, no step shows
        survived *= int((hits_by_step >= depth).sum()) / at_risk if at_risk else 0.0
        survival.append(survived)
    return tuple(survival)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server counted over all of its steps that drafted, at least one.

    by_depth[k - 1] counts the steps whose draft token at depth k was accepted. Over drafts of one length, over `drafts`,
    that is the survival; over drafts of several lengths it is less, as a draft that ended counts like a rejected one.
    """

    drafts: int
    proposed: int
    accepted: int
    by_depth: tuple[int, ...]

    @property
    def survival(self) -> Survival:
        return tuple(count / self.drafts for count in self.by_depth)

    @property
    def mean_length(self) -> float:
        return self.proposed / self.drafts

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.accepted / self.drafts


# ---------------------------------------------------------------- what it costs


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Every further token of a pass costs the same: v(n) = 1 + each (n - 1); 0 is a pass bound by memory alone."""

    each: float = 0.0

    def __post_init__(self) -> None:
        _number("pass_cost", self.each, high=MAX_COST)

    @property
    def max_size(self) -> int | None:
        return None

    def of(self, size: float) -> float:
        return 1 + self.each * (size - 1)


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of a pass by its size, linear between measured sizes, never beyond the largest."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds):
            raise InvalidParameter("sizes", len(self.sizes), f"one for each of the {len(self.seconds)} seconds")
        for size, seconds in zip(self.sizes, self.seconds, strict=True):
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise InvalidParameter("size", size, "an integer >= 1")
            _number(f"seconds of size {size}", seconds, low=MIN_SECONDS, high=MAX_COST)
        points = sorted(zip(self.sizes, self.seconds, strict=True))
        object.__setattr__(self, "sizes", tuple(int(size) for size, _ in points))
        object.__setattr__(self, "seconds", tuple(float(seconds) for _, seconds in points))
        if len(set(self.sizes)) < len(self.sizes):
            raise InvalidParameter("sizes", self.sizes, "every size once")
        if len(self.sizes) < 2 or self.sizes[0] != 1:
            raise InvalidParameter("sizes", self.sizes, "size 1, the plain pass, and at least one larger: measure these")
        for index in range(1, len(self.sizes)):
            if self.seconds[index] < self.seconds[index - 1]:
                allowed = f"at least the {self.seconds[index - 1]:g} of size {self.sizes[index - 1]}: measure again"
                raise InvalidParameter(f"seconds of size {self.sizes[index]}", self.seconds[index], allowed)

    @property
    def max_size(self) -> int | None:
        return self.sizes[-1]

    def of(self, size: float) -> float:
        """v(size). Raises InvalidParameter beyond the largest measured size."""
        if not 1 <= size <= self.sizes[-1]:
            raise InvalidParameter("pass size", size, f"at most {self.sizes[-1]}, the largest measured: measure larger ones")
        right = min(bisect_right(self.sizes, size), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return ((1 - share) * self.seconds[right - 1] + share * self.seconds[right]) / self.seconds[0]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step with drafts costs, in plain passes.

    passes    v(n) of a pass of n tokens
    draft     one draft token
    overhead  the rest of a step that drafts: sampling, launches, bookkeeping
    """

    passes: TokenCost | MeasuredCost = TokenCost()
    draft: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        _number("draft_cost", self.draft, high=MAX_COST)
        _number("overhead", self.overhead, high=MAX_COST)

    @property
    def max_length(self) -> int | None:
        """The longest draft that can be priced; None: any."""
        return None if self.passes.max_size is None else self.passes.max_size - 1

    def of(self, length: float) -> float:
        """A step that drafts `length` tokens (a mean may be broken); at length 0 a plain step, which is 1."""
        return 1.0 if length == 0 else self.passes.of(1 + length) + length * self.draft + self.overhead


# ---------------------------------------------------------------- whether it pays


@dataclass(frozen=True, slots=True)
class Point:
    """One draft length. break_even is the acceptance, the same at every depth, at which this length is as fast as plain
    decoding; None where even 1 is too little, and at length 0, which is plain decoding."""

    length: int
    tokens_per_step: float
    cost: float
    break_even: float | None

    @property
    def speedup(self) -> float:
        return self.tokens_per_step / self.cost


def expected_tokens(survival: Survival, length: int) -> float:
    """E[N] = 1 + S_1 + ... + S_length: the accepted tokens and the one that the target gives."""
    return 1 + math.fsum(survival[:length])


def constant_tokens(acceptance: float, length: int) -> float:
    """expected_tokens of a constant acceptance in closed form: (1 - a**(length + 1)) / (1 - a)."""
    if acceptance in (0, 1):
        return 1 + length * acceptance
    return -math.expm1((length + 1) * math.log(acceptance)) / (1 - acceptance)


def break_even(costs: Costs, length: int) -> float | None:
    """The smallest constant acceptance at which drafting `length` tokens does not lose; None if 1 is too little."""
    cost = costs.of(length)
    if cost > 1 + length:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if constant_tokens(middle, length) >= cost else (middle, high)
    return high if cost > 1 else 0.0


def curve(survival: Survival, costs: Costs, max_length: int) -> tuple[Point, ...]:
    """Every draft length from 0 to max_length, which must be known to `survival` and priced by `costs`."""
    limit = min(len(survival), MAX_LENGTH if costs.max_length is None else costs.max_length)
    if not 0 <= max_length <= limit:
        raise InvalidParameter("max_length", max_length, f"at most {limit}, the longest with a known acceptance and pass cost")
    return tuple(
        Point(
            length,
            expected_tokens(survival, length),
            costs.of(length),
            break_even(costs, length) if length else None,
        )
        for length in range(max_length + 1)
    )


def best(points: Sequence[Point]) -> Point:
    """The fastest, the shorter of equals. All are compared: a cost curve that is concave at its start loses first and wins
    later, so the first loss says nothing."""
    return max(points, key=lambda point: point.speedup)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step: what it emits if `accepted` of `length` draft tokens are accepted, against what it costs."""

    length: int
    accepted: int
    cost: float

    @property
    def tokens(self) -> int:
        return self.accepted + 1

    @property
    def speedup(self) -> float:
        return self.tokens / self.cost


@dataclass(frozen=True, slots=True)
class Claim:
    """'A step with more than two accepted tokens cannot lose', held against costs, by ascending draft length.

    wins    steps that win with one accepted token: more than two are not needed
    losses  steps that lose with three: more than two are not enough
    """

    max_length: int
    wins: tuple[Outcome, ...]
    losses: tuple[Outcome, ...]


def claim(costs: Costs, max_length: int) -> Claim:
    steps = [(length, costs.of(length)) for length in range(1, max_length + 1)]
    return Claim(
        max_length,
        wins=tuple(Outcome(length, 1, cost) for length, cost in steps if cost < 2),
        losses=tuple(Outcome(length, 3, cost) for length, cost in steps if length >= 3 and cost > 4),
    )


def needed(costs: Costs, length: int) -> int | None:
    """The fewest accepted tokens with which a step of this draft length wins; None: even all of them lose."""
    fewest = math.floor(costs.of(length))  # accepted + 1 tokens must exceed the cost
    return fewest if fewest <= length else None
