"""The law of somebody's verifier, in fractions, by going through all of its randomness.

Drafts are drawn here, honestly; the verifier's uniforms are probed and bisected (prove/explore.py), and consecutive
steps composed (prove/exact.py). Nothing is assumed about the rule, only that what it emits, followed by p, has p's law.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TypeAlias

import numpy as np

from truedraw.audit.causes import CAUSES, UNKNOWN, Cause, Verify, likely_causes
from truedraw.audit.convention import (
    Answer,
    Draw,
    Refused,
    Request,
    Subject,
    WrongAnswer,
    given,
    impossible,
    one_by_one,
    read_answer,
)
from truedraw.audit.findings import Example, Fired, ModeReport
from truedraw.protocols import StepNoise
from truedraw.prove.drafts import chain
from truedraw.prove.exact import (
    Context,
    Law,
    Parts,
    Problem,
    extended,
    law_of,
    target_law,
    target_rows,
    total_variation,
    verdicts,
)
from truedraw.prove.explore import explore
from truedraw.prove.problems import cases
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows
from truedraw.types import PointMass, Proposal, Verdict
from truedraw.verify import Rule

Steps: TypeAlias = tuple[int, ...]
"""The draft length of each of some consecutive steps."""

TOLERANCE = 1e-6
"""A TV below this is what 32-bit arithmetic does to a law, and no evidence of a fault."""


@dataclass(frozen=True, slots=True)
class Measured:
    """How far the emitted law is from the target's on one problem, over the first step and over all steps.

    law  of the first step, followed by p up to one token more than it can emit
    """

    problem: Problem
    steps: Steps
    one: Fraction
    all: Fraction
    law: Law
    rational: bool


class Impossible(Exception):
    """An answer that the target cannot give, or none at all, met while the randomness was gone through."""

    def __init__(self, told: str, request: Request, uniforms: Sequence[float]) -> None:
        super().__init__(told)
        self.request, self.uniforms = request, tuple(uniforms)


def problems(*, min_drafts: int = 0) -> list[tuple[Problem, Steps]]:
    """Those of prove/problems.py with draft lengths that a slow callable bears: at most two drafts a step where they are
    drawn, and four in all."""
    picked: dict[tuple[Problem, Steps], None] = {}
    for problem, lengths in cases():
        steps = [min(k) if isinstance(k, tuple) else k for k in lengths]
        if not problem.point:
            steps = [min(k, 2) for k in steps]
            while sum(steps) > 4:
                steps.pop()
        if min(steps) >= min_drafts and max(steps) > 0:
            picked[problem, tuple(steps)] = None
    return list(picked)


# ---------------------------------------------------------------- the verifier as a rule


MAX_DRAWS = 64


class TooManyDraws(Exception):
    """A step asked for more than MAX_DRAWS uniforms: its law is not made of few regions."""


class AsRule:
    """A subject with the signature of a rule.

    impossible  the first answer that the target cannot give; such answers are part of the law, even with mass 0
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.num_calls = 0
        self.impossible: Impossible | None = None

    def __call__(self, proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
        """Raises Impossible where no answer comes at all, TooManyDraws, Lost."""
        request = request_for(proposal, target_rows)
        drawn: dict[int, float] = {}

        def uniform(i: int) -> float:
            if i >= MAX_DRAWS:
                raise TooManyDraws(
                    f"more than {MAX_DRAWS} uniforms were asked for in one step: its law is not made of few regions"
                )
            drawn[i] = noise.uniform(Purpose.ACCEPT, i)
            return drawn[i]

        self.num_calls += 1
        uniforms = self._subject.draw_from(lambda i: drawn.get(i, 0.5))
        try:
            answer = self._subject.ask(request, self._subject.draw_from(uniform))
        except (Refused, WrongAnswer) as error:
            told = f"sound rows were answered by an error: {error}" if isinstance(error, Refused) else str(error)
            raise Impossible(told, request, [uniforms(i) for i in range(request.num_uniforms)]) from None
        if self.impossible is None:
            wrong = impossible(request, answer)
            if wrong is not None:
                self.impossible = Impossible(wrong, request, [uniforms(i) for i in range(request.num_uniforms)])
        return Verdict(tuple(range(answer.accepted)), answer.token, "residual")


def request_for(proposal: Proposal, rows: TargetRows) -> Request:
    k = len(proposal)
    p = np.stack([rows[i] for i in range(k + 1)])
    if isinstance(proposal.q, PointMass) and k:
        return Request(p, None, proposal.tokens)
    q = [proposal.q.row(i, x, p.shape[1]) for i, x in enumerate(proposal.tokens)]
    return Request(p, np.array(q).reshape(k, p.shape[1]), proposal.tokens)


def as_subject(verify: Verify, name: str = "planted") -> Subject:
    """A verifier of causes.py as a subject."""

    def ask(request: Request, draw: Draw) -> Answer:
        uniforms = [draw(i) for i in range(request.num_uniforms)]
        try:
            return read_answer(*verify(request.p, request.q, request.drafts, uniforms), request)
        except (IndexError, ValueError) as error:
            raise Refused(str(error)) from None

    return Subject(name, ask, one_by_one(ask), injected=True, reproduce=lambda request, uniforms: "")


# ---------------------------------------------------------------- its law


def measure(problem: Problem, steps: Steps, rule: Rule, lanes: int = 1) -> Measured:
    """Raises Impossible, and Lost where the verifier is a program that is no longer there."""
    parts = Parts(rule, chain)
    if lanes > 1:
        _look_ahead(problem, steps, rule, lanes)
    off: list[Fraction] = []
    laws: list[Law] = []
    rational = True
    for lengths in (steps[:1], steps):
        run = law_of(problem, parts, lengths)
        emitted: Law = {}
        for (text, _), mass in run.masses.items():
            emitted[text] = emitted.get(text, Fraction(0)) + mass
        horizon = max(lengths) + 2
        laws.append(extended(problem, emitted, horizon))
        off.append(total_variation(laws[-1], target_law(problem, horizon)))
        rational &= run.rational
    return Measured(problem, steps, off[0], off[1], laws[0], rational)


def _look_ahead(problem: Problem, steps: Steps, rule: Rule, lanes: int) -> None:
    """Explores what `law_of` will ask for, several at a time; it finds them remembered."""
    contexts: list[Context] = [()]
    contexts += [text for length in range(1, max(steps) + 2) for text in target_law(problem, length)]
    seen: set[object] = set()
    todo: list[tuple[list[object], Proposal, int]] = []
    for context, k in ((context, k) for context in contexts for k in dict.fromkeys(steps)):
        if (problem.phase(context), k) not in seen:
            seen.add((problem.phase(context), k))
            for proposal in _proposals(problem, context, k):
                todo.append((list(target_rows(problem, context, proposal)), proposal, len(context)))
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(lambda item: verdicts(item[0], item[1], rule, item[2]), todo))


def _proposals(problem: Problem, context: Context, k: int) -> Iterator[Proposal]:
    found: dict[tuple[int, ...], Proposal] = {}

    def drafted(noise: StepNoise) -> tuple[int, ...]:
        proposal = chain(problem, context, k, noise)
        found[proposal.tokens] = proposal
        return proposal.tokens

    explore(drafted, len(context))
    yield from found.values()


# ---------------------------------------------------------------- the report


def exact_mode(
    subject: Subject, *, tolerance: float = TOLERANCE, picked: Sequence[tuple[Problem, Steps]] | None = None
) -> ModeReport:
    """Every problem, or those picked, and what usually causes what was found. Raises Lost."""
    rule = AsRule(subject)
    done: list[Measured] = []
    notes: list[str] = []
    broken: Impossible | None = None
    for problem, steps in picked or problems(min_drafts=subject.min_drafts):
        try:
            done.append(measure(problem, steps, rule, subject.lanes))
        except Impossible as error:
            broken = error
            notes.append(f"{problem.name}, {_lengths(steps)}: stopped, since {error}")
            break
    largest = max((max(m.one, m.all) for m in done), default=Fraction(0))
    notes = [
        *(_told(m) for m in done),
        *notes,
        f"{rule.num_calls:,} calls; thresholds located to the last bit of a 53-bit uniform",
    ]
    fired: list[Fired] = []
    example: Example | None = None
    if largest > tolerance:
        worst = max(done, key=lambda m: max(m.one, m.all))
        fired += diagnose(done)
        example = Example(f"{_told(worst)}: {_differences(worst)}")
    wrong = broken or rule.impossible
    if wrong is not None:
        if not fired:
            fired.append(usual_cause_of(subject, wrong))
        told = f"{wrong}; uniforms {list(wrong.uniforms)}"
        told = told if example is None else f"{told}. {example.text}"
        example = Example(told, subject.reproduce(wrong.request, wrong.uniforms))
    return ModeReport(
        mode="exact law",
        verdict="fault found" if fired else "no evidence",
        asked="the law of what a step emits, followed by p: is it p's, over one step and over all steps of each problem?",
        samples=len(done),
        unit="problems",
        floor=tolerance if largest else 0.0,
        fired=tuple(fired),
        example=example,
        notes=tuple(notes),
    )


FINGERPRINT = ("swapped halves", "zeros in p and q", "point-mass drafts")


def diagnose(done: Sequence[Measured]) -> list[Fired]:
    """Whatever has the law that was measured: compared over the first step of some problems that tell faults apart."""
    some = [m for m in done if m.problem.name in FINGERPRINT and m.steps[0] >= 2]
    if not any(m.one for m in some):
        some = sorted(done, key=lambda m: -m.one)[:1]
    targets = [target_law(m.problem, m.steps[0] + 2) for m in some]
    causes, same = likely_causes(
        [m.law for m in some], targets, lambda cause: [_law_of_cause(cause, m.problem, m.steps[0]) for m in some]
    )
    named = [Fired(cause.name if same else f"resembles: {cause.name}", math.inf, cause.usually) for cause in causes]
    return named or [Fired("the law is off", math.inf, UNKNOWN)]


@cache
def _law_of_cause(cause: Cause, problem: Problem, k: int) -> Law:
    return measure(problem, (k,), AsRule(as_subject(cause.verify))).law


def usual_cause_of(subject: Subject, wrong: Impossible) -> Fired:
    """Of an impossible answer without a law that is off: a fault that answers this very request in the same way."""
    try:
        answer = subject.ask(wrong.request, given(wrong.uniforms))
    except (Refused, WrongAnswer):
        return Fired("no answer to sound rows", math.inf, "an error, or a token outside the vocabulary, where an answer is due")
    same = (cause for cause in CAUSES if _answer(cause, wrong) == (answer.accepted, answer.token))
    cause = next(same, None)
    return Fired("an impossible token" if cause is None else cause.name, math.inf, UNKNOWN if cause is None else cause.usually)


def _answer(cause: Cause, wrong: Impossible) -> tuple[int, int]:
    request = wrong.request
    return cause.verify(request.p, request.q, request.drafts, wrong.uniforms)


def _told(m: Measured) -> str:
    return f"{m.problem.name}, {_lengths(m.steps)}: TV {_fraction(m.one)} after one step, {_fraction(m.all)} after {len(m.steps)}"


def _lengths(steps: Steps) -> str:
    return "drafts " + " then ".join(map(str, steps))


def _fraction(value: Fraction) -> str:
    """As a fraction where that is short."""
    if value == 0 or (value.denominator < 10**6):
        return str(value) + (f" = {float(value):.4g}" if value else "")
    return f"{float(value):.3g}"


def _differences(m: Measured) -> str:
    target = target_law(m.problem, m.steps[0] + 2)
    zero = Fraction(0)
    gaps = {text: m.law.get(text, zero) - target.get(text, zero) for text in m.law.keys() | target.keys()}
    most, least = max(gaps, key=lambda text: gaps[text]), min(gaps, key=lambda text: gaps[text])
    told = [
        f"{list(text)} comes with probability {float(m.law.get(text, zero)):.4g} instead of {float(target.get(text, zero)):.4g}"
        for text in (most, least)
    ]
    return "the text " + ", ".join(told)
