"""The exact output law of a rule, by running it through all of its randomness.

The rule, the drafting draw and the keying are the shipped code; only the source of uniforms is
exchanged. Whenever the code asks for a uniform for the first time, the interval [0, 1) is cut at
the edges where an INDEPENDENT reference in fractions says that the outcome may change, and each
cell is followed up with its exact probability; a uniform that is asked for again (a key that is
used twice) stays in its cell, and is cut further if the new use needs it. So the law comes out in
fractions, over several consecutive steps, whatever the code does with its keys.

A cell is evaluated in its middle and at both of its ends (u = 0 itself included): float code that
has an edge in another place than the reference fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, product
from typing import Literal, TypeAlias

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.randomness import Key, Noise, Purpose, Source, Uniforms
from truedraw.sampling import TargetRows, draw_draft
from truedraw.types import DenseRows, PointMass, Probs, Proposal, probabilities
from truedraw.verify import Rule

Row: TypeAlias = tuple[Fraction, ...]
Context: TypeAlias = tuple[int, ...]
Law: TypeAlias = dict[Context, Fraction]
Where: TypeAlias = Literal["low", "middle", "high"]
PLACES: tuple[Where, ...] = ("low", "middle", "high")

_END = Fraction(1, 10**9)
"""How near to the end of a cell `low` and `high` look, as a share of the cell."""


# ---------------------------------------------------------------- problems


@dataclass(frozen=True, slots=True)
class Problem:
    """A finite target and drafter, both in fractions and both functions of the context.

    point: the drafter proposes its most likely token as a point mass instead of drawing.
    """

    name: str
    vocab: int
    p: Callable[[Context], Row]
    q: Callable[[Context], Row]
    point: bool = False
    _floats: dict[tuple[str, Context], Probs] = field(default_factory=dict, compare=False, repr=False)
    _edges: dict[tuple[Context, Context, bool, Purpose, int], list[Fraction]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def float_row(self, which: Literal["p", "q"], context: Context) -> Probs:
        """The row as the shipped code sees it; kept, since every path asks for it again."""
        key = (which, context)
        if key not in self._floats:
            row = self.p(context) if which == "p" else self.q(context)
            self._floats[key] = probabilities([float(mass) for mass in row], f"{which} row")
        return self._floats[key]


def table_problem(name: str, p: Sequence[Sequence[Fraction]], q: Sequence[Sequence[Fraction]], *, point: bool = False) -> Problem:
    """Rows chosen by the last token (row 0 at the start), and turned by the position, so that equal
    prefixes of different length have different rows."""

    def lookup(rows: Sequence[Sequence[Fraction]]) -> Callable[[Context], Row]:
        def row(context: Context) -> Row:
            last = context[-1] if context else 0
            return tuple(rows[(last + len(context)) % len(rows)])

        return row

    return Problem(name, len(p[0]), lookup(p), lookup(q), point)


def target_law(problem: Problem, horizon: int) -> Law:
    """The law of the first `horizon` tokens under the target, by the chain rule."""
    law: Law = {}
    for text in product(range(problem.vocab), repeat=horizon):
        mass = Fraction(1)
        for i, token in enumerate(text):
            mass *= problem.p(text[:i])[token]
        if mass:
            law[text] = mass
    return law


def total_variation(left: Law, right: Law) -> Fraction:
    """Half the sum of absolute differences."""
    zero = Fraction(0)
    return sum((abs(left.get(text, zero) - right.get(text, zero)) for text in left.keys() | right.keys()), zero) / 2


# ---------------------------------------------------------------- the parts under test


@dataclass(slots=True)
class State:
    """Where the run stands, for the reference: what has been emitted and drafted."""

    problem: Problem
    context: Context = ()
    drafts: list[int] = field(default_factory=list)
    verifying: bool = False


Draft: TypeAlias = Callable[[State, int, StepNoise], Proposal]
NoiseFactory: TypeAlias = Callable[[int, int, Source], Noise]


def draft(state: State, k: int, noise: StepNoise) -> Proposal:
    """k draft tokens from q by the shipped draw, with the rows they were drawn from."""
    rows: list[Probs] = []
    for i in range(k):
        row = state.problem.float_row("q", state.context + tuple(state.drafts))
        token = int(row.argmax()) if state.problem.point else draw_draft(row, noise, i, coupled=False)
        state.drafts.append(token)
        rows.append(row)
    return Proposal(tuple(state.drafts), PointMass() if state.problem.point else DenseRows(tuple(rows)))


@dataclass(frozen=True, slots=True)
class Parts:
    """What is run: the shipped parts, or some of them exchanged by a mutant."""

    rule: Rule
    draft: Draft = draft
    noise: NoiseFactory = Noise


def run(state: State, parts: Parts, source: Source, draft_lengths: Sequence[int]) -> Context:
    """Decode one step for each draft length, and return what they emitted."""
    problem = state.problem
    noise = parts.noise(0, 0, source)
    for k in draft_lengths:
        step = noise.at(len(state.context))
        state.drafts, state.verifying = [], False
        proposal = parts.draft(state, k, step)
        state.verifying = True
        prefixes = [state.context + proposal.tokens[:i] for i in range(len(proposal) + 1)]
        rows = [problem.float_row("p", prefix) for prefix in prefixes]
        verdict = parts.rule(proposal, TargetRows(len(rows), rows.__getitem__), step)
        state.context = (*state.context, *(proposal.tokens[i] for i in verdict.path), verdict.next_token)
    return state.context


# ---------------------------------------------------------------- the reference: where outcomes may change


def cdf_edges(row: Row) -> list[Fraction]:
    """Where a draw by inverse CDF from `row` (not normalised) changes its token."""
    total = sum(row)
    return [edge / total for edge in accumulate(row)] if total else []


def reference_residual(p: Row, q: Row) -> Row:
    return tuple(max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True))


def edges(state: State, key: Key) -> list[Fraction]:
    """The edges of the token rule (and of drafting) for a uniform asked for in this state."""
    known = state.problem._edges
    place = (state.context, tuple(state.drafts), state.verifying, key.purpose, key.index)
    if place not in known:
        known[place] = _edges(state, key)
    return known[place]


def _edges(state: State, key: Key) -> list[Fraction]:
    problem, drafts = state.problem, tuple(state.drafts)
    index = min(key.index, len(drafts))
    if not state.verifying:
        return cdf_edges(problem.q(state.context + drafts))
    prefix = state.context + drafts[:index]
    p = problem.p(prefix)
    if key.purpose == Purpose.BONUS or index >= len(drafts):
        return cdf_edges(problem.p(state.context + drafts)) + (cdf_edges(p) if key.purpose != Purpose.BONUS else [])
    x = drafts[index]
    q = tuple(Fraction(int(token == x)) for token in range(problem.vocab)) if problem.point else problem.q(prefix)
    accept = [min(Fraction(1), p[x] / q[x])] if 0 <= x < problem.vocab and q[x] else []
    correction = cdf_edges(reference_residual(p, q))
    match key.purpose:
        case Purpose.ACCEPT:
            return accept
        case Purpose.RESIDUAL:
            return correction
    return accept + correction  # no shipped code asks for another purpose here: a mutant does


# ---------------------------------------------------------------- the enumeration


class _Branching:
    """A source of uniforms that follows one path of choices, and notes where the path forks."""

    def __init__(self, state: State, where: Where, path: list[int]) -> None:
        self._state, self._where, self._path = state, where, path
        self._cells: dict[Key, tuple[Fraction, Fraction]] = {}
        self._taken = 0
        self.mass = Fraction(1)
        self.forks: list[list[int]] = []

    def __call__(self, key: Key, first: int, count: int) -> Uniforms:
        return np.array([self._uniform(key)])

    def _uniform(self, key: Key) -> float:
        low, high = self._cells.get(key, (Fraction(0), Fraction(1)))
        cuts = sorted({low, high, *(edge for edge in edges(self._state, key) if low < edge < high)})
        if len(cuts) > 2:
            low, high = self._choose(cuts)
        self._cells[key] = (low, high)
        return _point_in(low, high, self._where)

    def _choose(self, cuts: list[Fraction]) -> tuple[Fraction, Fraction]:
        if self._taken == len(self._path):
            self.forks += [[*self._path, other] for other in range(1, len(cuts) - 1)]
            self._path.append(0)
        cell = self._path[self._taken]
        self._taken += 1
        self.mass *= (cuts[cell + 1] - cuts[cell]) / (cuts[-1] - cuts[0])
        return cuts[cell], cuts[cell + 1]


def _point_in(low: Fraction, high: Fraction, where: Where) -> float:
    match where:
        case "low":
            return float(low + (high - low) * _END) if low else 0.0
        case "high":
            return float(high - (high - low) * _END)
    return float((low + high) / 2)


def output_law(
    problem: Problem, parts: Parts, draft_lengths: Sequence[int], horizon: int, where: Where = "middle"
) -> tuple[Law, int]:
    """The exact law of the first `horizon` tokens: what the steps emit, followed by the target's law
    where that is less. Each cell is evaluated at one place. Also the number of paths."""
    law: Law = {}
    num_paths = 0
    for text, mass in _leaves(problem, parts, draft_lengths, where):
        law[text[:horizon]] = law.get(text[:horizon], Fraction(0)) + mass
        num_paths += 1
    for length in range(horizon):
        for text in [text for text in law if len(text) == length]:
            mass = law.pop(text)
            for token, share in enumerate(problem.p(text)):
                if share:
                    longer = (*text, token)
                    law[longer] = law.get(longer, Fraction(0)) + mass * share
    return law, num_paths


def _leaves(problem: Problem, parts: Parts, draft_lengths: Sequence[int], where: Where) -> Iterator[tuple[Context, Fraction]]:
    todo: list[list[int]] = [[]]
    while todo:
        state = State(problem)
        source = _Branching(state, where, todo.pop())
        yield run(state, parts, source, draft_lengths), source.mass
        todo += source.forks


# ---------------------------------------------------------------- certificates


@dataclass(frozen=True, slots=True)
class Certificate:
    """The exact total variation between a rule's law and the target's on one problem.

    worst is the largest over the places in the cells; num_paths counts the paths of one of them.
    """

    problem: str
    draft_lengths: tuple[int, ...]
    horizon: int
    num_paths: int
    worst: Fraction

    @property
    def exact(self) -> bool:
        return self.worst == 0


def certify(problem: Problem, parts: Parts, draft_lengths: Sequence[int], places: Sequence[Where] = PLACES) -> Certificate:
    """Run one step for each draft length, two at least, and compare one token more than the first can emit."""
    if len(draft_lengths) < 2:
        raise ValueError(f"draft_lengths is {draft_lengths}: two consecutive steps are needed to see faults that cross steps")
    horizon = max(draft_lengths) + 2
    expected = target_law(problem, horizon)
    worst, num_paths = Fraction(0), 0
    for where in places:
        law, num_paths = output_law(problem, parts, draft_lengths, horizon, where)
        worst = max(worst, total_variation(law, expected))
    return Certificate(problem.name, tuple(draft_lengths), horizon, num_paths, worst)
