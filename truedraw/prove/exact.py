"""The exact law of what a rule emits, over several consecutive steps.

Rule, drafting draw and keying are the shipped code. `explore` finds every outcome of drafting and of
the rule, each with the region of noise that leads to it; here the regions of consecutive calls are
intersected, key by key, as the production keys say. A key that is met for the first time brings its
region's full probability; one that is met again brings what is left of it, so that noise which is
used twice shows in the law, in whatever step.

The race of an empty draft enters by its law (certified by `coupling.race_law`), after a check that
its key was not met before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np

from truedraw.protocols import RaceNoise, StepNoise
from truedraw.prove.explore import Ask, Interval, Leaf, ScriptedNoise, explore
from truedraw.randomness import Key, Noise, Purpose, Source, Uniforms
from truedraw.sampling import TargetRows
from truedraw.types import Probs, Proposal, probabilities
from truedraw.verify import Rule

Row: TypeAlias = tuple[Fraction, ...]
Context: TypeAlias = tuple[int, ...]
Law: TypeAlias = dict[Context, Fraction]


# ---------------------------------------------------------------- problems


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A finite target and drafter, both in fractions and both functions of the context.

    phase  equal for two contexts only if all rows behind them are equal
    point  the drafter proposes its most likely token as a point mass instead of drawing
    """

    name: str
    vocab: int
    p: Callable[[Context], Row]
    q: Callable[[Context], Row]
    phase: Callable[[Context], Hashable]
    point: bool = False
    _floats: dict[tuple[str, Context], Probs] = field(default_factory=dict, compare=False, repr=False)

    def float_row(self, which: Literal["p", "q"], context: Context) -> Probs:
        """The row as the shipped code sees it; kept, since every run asks for it again."""
        key = (which, context)
        if key not in self._floats:
            row = self.p(context) if which == "p" else self.q(context)
            self._floats[key] = probabilities([float(mass) for mass in row], f"{which} row")
        return self._floats[key]


def table_problem(name: str, p: Sequence[Sequence[Fraction]], q: Sequence[Sequence[Fraction]], *, point: bool = False) -> Problem:
    """Rows chosen by the last token (row 0 at the start), and turned by the position, so that equal
    prefixes of different length have different rows."""

    def place(context: Context, rows: Sequence[Sequence[Fraction]]) -> int:
        last = context[-1] if context else 0
        return (last + len(context)) % len(rows)

    def phase(context: Context) -> Hashable:
        return (place(context, p), place(context, q), len(context) % len(p), len(context) % len(q))

    return Problem(name, len(p[0]), lambda c: tuple(p[place(c, p)]), lambda c: tuple(q[place(c, q)]), phase, point)


def target_law(problem: Problem, horizon: int) -> Law:
    """The law of the first `horizon` tokens under the target, by the chain rule."""
    return extended(problem, {(): Fraction(1)}, horizon)


def extended(problem: Problem, law: Law, horizon: int) -> Law:
    """`law` cut to `horizon` tokens, and where a text is shorter, followed by the target's law."""
    full: Law = {}
    for text, mass in law.items():
        full[text[:horizon]] = full.get(text[:horizon], Fraction(0)) + mass
    for length in range(horizon):
        for text in [text for text in full if len(text) == length]:
            mass = full.pop(text)
            for token, share in enumerate(problem.p(text)):
                if share:
                    longer = (*text, token)
                    full[longer] = full.get(longer, Fraction(0)) + mass * share
    return full


def total_variation(left: Law, right: Law) -> Fraction:
    """Half the sum of absolute differences."""
    zero = Fraction(0)
    return sum((abs(left.get(text, zero) - right.get(text, zero)) for text in left.keys() | right.keys()), zero) / 2


# ---------------------------------------------------------------- the parts under test


Draft: TypeAlias = Callable[[Problem, Context, int, StepNoise], Proposal]
"""(problem, context, draft length, noise) -> what is proposed there."""

NoiseFactory: TypeAlias = Callable[[int, int, Source], Noise]
Lengths: TypeAlias = tuple[int | tuple[int, ...], ...]
"""A draft length for each step; a tuple: one of them, each as likely, whatever was drawn."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What is run: the shipped parts, or some of them exchanged by a mutant."""

    rule: Rule
    draft: Draft
    noise: NoiseFactory = Noise


class AnnouncedRows(TargetRows):
    """Target rows that tell the noise which law a race is over."""

    def race(self, index: int, noise: RaceNoise) -> int:
        owner = getattr(noise, "_noise", None)
        if isinstance(owner, ScriptedNoise):
            owner.announce(self[index])
        return TargetRows.race(self, index, noise)


def target_rows(problem: Problem, context: Context, proposal: Proposal) -> list[Probs]:
    """The target's rows at the root and behind each draft."""
    prefixes = [context, *((*context, *(proposal.tokens[j] for j in proposal.path(i))) for i in range(len(proposal)))]
    return [problem.float_row("p", prefix) for prefix in prefixes]


def verdict_on(rows: Sequence[Probs], proposal: Proposal, rule: Rule, noise: StepNoise) -> Context:
    """What a step emits: the accepted path and the rule's own token."""
    verdict = rule(proposal, AnnouncedRows(len(rows), rows.__getitem__), noise)
    return (*(proposal.tokens[i] for i in verdict.path), verdict.next_token)


class _Steps:
    """The outcomes of one step from any context, found once for each phase of the problem."""

    def __init__(self, problem: Problem, parts: Parts) -> None:
        self._problem, self._parts = problem, parts
        self._known: dict[Hashable, list[Leaf[Context]]] = {}

    def leaves(self, context: Context, k: int) -> list[Leaf[Context]]:
        key = (self._problem.phase(context), k)
        if key not in self._known:
            self._known[key] = list(self._explore(context, k))
        return self._known[key]

    def _explore(self, context: Context, k: int) -> Iterator[Leaf[Context]]:
        problem, parts, start = self._problem, self._parts, len(context)
        proposals: dict[Hashable, Proposal] = {}

        def drafted(noise: ScriptedNoise) -> Hashable:
            proposal = parts.draft(problem, context, k, noise)
            name = (proposal.tokens, proposal.parents, type(proposal.q), tuple(_recorded(proposal, problem.vocab)))
            proposals[name] = proposal
            return name

        for draft in explore(drafted, start):
            proposal = proposals[draft.outcome]

            for verdict in verdicts(target_rows(problem, context, proposal), proposal, parts.rule, start):
                yield Leaf((*draft.intervals, *verdict.intervals), verdict.outcome, draft.rational and verdict.rational)


_memo: dict[Hashable, list[Leaf[Context]]] = {}


def verdicts(rows: Sequence[Probs], proposal: Proposal, rule: Rule, start: int) -> list[Leaf[Context]]:
    """Explored once for each rule, rows and proposal, whoever proposed it: a rule is pure."""
    recorded = tuple(_recorded(proposal, len(rows[0])))
    key = (rule, proposal.tokens, proposal.parents, type(proposal.q), recorded, tuple(row.tobytes() for row in rows))
    if key not in _memo:
        _memo[key] = explore(lambda noise: verdict_on(rows, proposal, rule, noise), start)
    return _memo[key]


def _recorded(proposal: Proposal, vocab: int) -> Iterator[bytes]:
    return (proposal.q.row(i, token, vocab).tobytes() for i, token in enumerate(proposal.tokens))


# ---------------------------------------------------------------- from regions to laws


def key_of(noise: StepNoise, seen: list[Key], ask: Ask) -> Key:
    """The production key behind an ask; `seen` is where the noise's source notes it."""
    purpose, index = ask
    seen.clear()
    if purpose == Purpose.RACE_TOKEN:
        noise.race(noise.start + index).tokens(0, 1)
    else:
        noise.uniform(purpose, index)
    return seen[0]


Region: TypeAlias = frozenset[tuple[Key, Interval]]


@dataclass(slots=True)
class _Run:
    """The law after some steps: for each text and region of noise that may be met again, its mass."""

    masses: dict[tuple[Context, Region], Fraction]
    met_twice: bool = False
    rational: bool = True


def law_of(problem: Problem, parts: Parts, draft_lengths: Lengths) -> _Run:
    """Run one step for each draft length, through all outcomes."""
    choices = [(k,) if isinstance(k, int) else k for k in draft_lengths]
    seen: list[Key] = []

    def source(key: Key, first: int, count: int) -> Uniforms:
        seen.append(key)
        return np.full(count, 0.5)

    noise = parts.noise(0, 0, source)
    steps = _Steps(problem, parts)
    asks, starts = _asked(steps, choices)
    keys = {start: {ask: key_of(noise.at(start), seen, ask) for ask in asks} for start in sorted(starts)}
    last = max(keys)
    later = {start: {key for s in range(start + 1, last + 1) for key in keys.get(s, {}).values()} for start in keys}

    run = _Run({((), frozenset()): Fraction(1)})
    for alternatives in choices:
        masses: dict[tuple[Context, Region], Fraction] = {}
        for (context, region), mass in run.masses.items():
            start = len(context)
            for k in alternatives:
                for leaf in steps.leaves(context, k):
                    run.rational &= leaf.rational
                    told = _intersect(run, dict(region), leaf.intervals, keys[start])
                    if told is None:
                        continue
                    share, met = told
                    kept = frozenset(item for item in met.items() if item[0] in later[start])
                    place = ((*context, *leaf.outcome), kept)
                    masses[place] = masses.get(place, Fraction(0)) + mass * share / len(alternatives)
        run.masses = masses
    return run


def _asked(steps: _Steps, choices: Sequence[Sequence[int]]) -> tuple[set[Ask], set[int]]:
    """Everything that is asked anywhere, and where steps start."""
    asks: set[Ask] = set()
    starts: set[int] = set()
    contexts: set[Context] = {()}
    for alternatives in choices:
        starts |= {len(context) for context in contexts}
        leaves = [(context, leaf) for context in contexts for k in alternatives for leaf in steps.leaves(context, k)]
        asks |= {ask for _, leaf in leaves for ask, _ in leaf.intervals}
        contexts = {(*context, *leaf.outcome) for context, leaf in leaves}
    return asks, starts


def _intersect(
    run: _Run, met: dict[Key, Interval], intervals: Sequence[tuple[Ask, Interval]], keys: dict[Ask, Key]
) -> tuple[Fraction, dict[Key, Interval]] | None:
    """The share of the region `met` in which also these intervals hold, and the region that is left."""
    share = Fraction(1)
    for ask, (low, high) in intervals:
        key = keys[ask]
        if key not in met:
            share *= high - low
        else:
            known_low, known_high = met[key]
            if ask[0] == Purpose.RACE_TOKEN or key.purpose == Purpose.RACE_TOKEN:
                run.met_twice = True
            low, high = max(low, known_low), min(high, known_high)
            if low >= high:
                return None
            share *= (high - low) / (known_high - known_low)
        met[key] = (low, high)
    return share, met


# ---------------------------------------------------------------- certificates

IRRATIONAL_TOLERANCE = Fraction(1, 10**12)


@dataclass(frozen=True, slots=True)
class Certificate:
    """How far a rule's law is from the target's on one problem, exactly.

    total_variation  a fraction; `rational` says whether all its thresholds were recognised as fractions
    forbidden        a text that comes out, with whatever mass, and that the target cannot give
    met_twice        race noise was met again: no law by regions then, and no exactness
    """

    problem: str
    draft_lengths: Lengths
    horizon: int
    num_texts: int
    total_variation: Fraction
    rational: bool
    forbidden: Context | None
    met_twice: bool

    @property
    def exact(self) -> bool:
        allowed = Fraction(0) if self.rational else IRRATIONAL_TOLERANCE
        return self.total_variation <= allowed and self.forbidden is None and not self.met_twice


def certify(problem: Problem, parts: Parts, draft_lengths: Lengths) -> Certificate:
    """Run one step for each draft length, two at least, and compare one token more than the first can emit."""
    if len(draft_lengths) < 2:
        raise ValueError(f"draft_lengths is {draft_lengths}: two consecutive steps are needed to see faults that cross steps")
    horizon = max(max(k) if isinstance(k, tuple) else k for k in draft_lengths) + 2
    run = law_of(problem, parts, draft_lengths)
    emitted: Law = {}
    for (text, _), mass in run.masses.items():
        emitted[text] = emitted.get(text, Fraction(0)) + mass
    law, expected = extended(problem, emitted, horizon), target_law(problem, horizon)
    forbidden = next((text for text in law if text not in expected), None)
    return Certificate(
        problem.name,
        draft_lengths,
        horizon,
        len(emitted),
        total_variation(law, expected),
        run.rational,
        forbidden,
        run.met_twice,
    )
