"""Certificates of the rules on tensors (`verify/torch.py`), by what is certified of the reference.

Tensors cannot hold fractions, so the noise is gone through with the reference: `explore` finds its cells of
noise, each with its exact mass. Then both are asked the same questions, packed in batches in which drafts of
all lengths are neighbours: in the middle of each cell, at scattered places in it, and on both sides of each of
its edges to the last bit. Equal verdicts everywhere, and the middles with the masses of their cells give the
law of a step, whose total variation to the target's is a fraction.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from truedraw.protocols import RaceNoise
from truedraw.prove.coupling import coupled_chain
from truedraw.prove.drafts import chain
from truedraw.prove.exact import Context, Law, Problem, extended, target_rows, total_variation, verdicts
from truedraw.prove.explore import NUM_VALUES, Ask, ScriptedNoise, explore
from truedraw.prove.problems import cases
from truedraw.randomness import Noise, Purpose
from truedraw.registry import RULES as REFERENCES
from truedraw.sampling import TargetRows
from truedraw.types import DenseRows, PointMass, Probs, Proposal

if TYPE_CHECKING:
    from truedraw.verify.torch import Verdicts

RULES = ("token", "block", "coupled")


def available() -> bool:
    """torch is installed."""
    return importlib.util.find_spec("torch") is not None


# ---------------------------------------------------------------- the questions


@dataclass(frozen=True, slots=True)
class GivenNoise:
    """Step noise with given uniforms, as multiples of 2**-53; all others scattered, races as production draws them."""

    values: tuple[tuple[Ask, int], ...]
    seed: int = 0
    start: int = 0

    def uniform(self, purpose: Purpose, index: int) -> float:
        scattered = int((int(purpose) * 0.7548776662 + index * 0.5698402910 + self.seed * 0.6180339887) % 1 * NUM_VALUES)
        return dict(self.values).get((purpose, index), scattered) / NUM_VALUES

    def race(self, position: int) -> RaceNoise:
        return Noise(self.seed).at(self.start).race(position)


Told: TypeAlias = tuple[int, int, str]
"""Accepted drafts, next token, origin."""

Step: TypeAlias = tuple[Problem, int]
"""One step of a problem from its start: so many drafts."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A proposal with its rows and noise, and what the reference answers.

    cell  if it stands for a cell of noise: the step it belongs to, and the mass of draft and cell
    """

    where: str
    proposal: Proposal
    rows: list[Probs]
    noise: GivenNoise
    told: Told
    cell: tuple[Step, Fraction] | None = None


def _answer(rule: str, proposal: Proposal, rows: list[Probs], noise: GivenNoise) -> Told:
    verdict = REFERENCES[rule](proposal, TargetRows(len(rows), rows.__getitem__), noise)
    return verdict.num_accepted, verdict.next_token, verdict.origin


@cache
def questions(rule: str) -> tuple[Question, ...]:
    """Of a rule, in an order that makes drafts of all lengths neighbours."""
    asked = [*_wide(rule), *_of_seeds(rule), *(_of_cells(rule) if rule != "coupled" else ())]
    random.Random(5).shuffle(asked)
    return tuple(asked)


def _steps() -> list[Step]:
    """Each problem with all draft lengths from 1 up to the longest of its certificates."""
    longest: dict[Problem, int] = {}
    for problem, lengths in cases():
        longest[problem] = max(longest.get(problem, 0), *(max(k) if isinstance(k, tuple) else k for k in lengths))
    return [(problem, k) for problem, most in longest.items() for k in range(1, most + 1)]


def _of_cells(rule: str) -> Iterator[Question]:
    for problem, k in _steps():
        for mass, proposal in _drafted(problem, k):
            rows = target_rows(problem, (), proposal)
            for leaf in verdicts(rows, proposal, REFERENCES[rule], 0):
                ends = {ask: (low * NUM_VALUES, high * NUM_VALUES) for ask, (low, high) in leaf.intervals}
                middle = {ask: min(int(low + high) // 2, NUM_VALUES - 1) for ask, (low, high) in ends.items()}
                for values, told in _probes(rule, proposal, rows, middle, ends):
                    cell = ((problem, k), mass * leaf.mass) if values == tuple(middle.items()) and leaf.mass else None
                    yield Question(problem.name, proposal, rows, GivenNoise(values), told, cell)


@cache
def _drafted(problem: Problem, k: int) -> list[tuple[Fraction, Proposal]]:
    """Every proposal of k drafts, with its probability."""
    found: dict[Context, Proposal] = {}

    def drafted(noise: ScriptedNoise) -> Context:
        proposal = chain(problem, (), k, noise)
        found[proposal.tokens] = proposal
        return proposal.tokens

    return [(leaf.mass, found[leaf.outcome]) for leaf in explore(drafted, 0)]


NEAR = 100
"""An edge lies at most so many values from the simple fraction that it counts as (explore.SNAP)."""


Values: TypeAlias = tuple[tuple[Ask, int], ...]


def _probes(
    rule: str, proposal: Proposal, rows: list[Probs], middle: dict[Ask, int], ends: dict[Ask, tuple[Fraction, Fraction]]
) -> Iterator[tuple[Values, Told]]:
    """The middle of a cell, and for each uniform, the others in the middle: scattered values of the cell, and all
    that a bisection meets on its way to the two neighbours between which the reference changes its answer."""
    seen: dict[Values, Told] = {}

    def told(ask: Ask, value: int) -> Told:
        values = tuple({**middle, ask: min(value, NUM_VALUES - 1)}.items())
        if values not in seen:
            seen[values] = _answer(rule, proposal, rows, GivenNoise(values))
        return seen[values]

    for ask, (low, high) in ends.items():
        for value in (middle[ask], *(int(low + (high - low) * place / 8) for place in (1, 3, 6))):
            told(ask, value)
        for end in (low, high):
            left, right = max(0, int(end) - NEAR), min(NUM_VALUES - 1, int(end) + NEAR)
            while right - left > 1 and told(ask, left) != told(ask, right):
                between = (left + right) // 2
                left, right = (between, right) if told(ask, between) == told(ask, left) else (left, between)
    yield from seen.items()


def _of_seeds(rule: str) -> Iterator[Question]:
    """Every problem with 0 to 3 drafts, drawn by the seed."""
    draft = coupled_chain if rule == "coupled" else chain
    for problem in _problems():
        for k, seed in itertools.product(range(4), range(8)):
            noise = GivenNoise((), seed)
            proposal = draft(problem, (), k, Noise(seed).at(0))
            rows = target_rows(problem, (), proposal)
            yield Question(problem.name, proposal, rows, noise, _answer(rule, proposal, rows, noise))


def _problems() -> list[Problem]:
    return list(dict.fromkeys(problem for problem, _ in cases()))


WIDE = (64, 65, 200, 64 * 64 + 70)
"""Vocabularies of one block, of two and four, and of more blocks than one block holds: sums of two and of three levels."""


def _wide(rule: str) -> Iterator[Question]:
    """Random rows with zeros over vocabularies of several blocks; drafts from the very rows, from rows like
    them, or point masses; uniforms at both ends too."""
    generator = np.random.default_rng(11)

    def row(vocab: int) -> Probs:
        weights = generator.exponential(size=vocab) ** 3
        weights[generator.random(vocab) < 0.3] = 0.0
        weights[generator.integers(vocab)] += 0.1
        return np.asarray(weights / weights.sum())

    for vocab in WIDE:
        for trial in range(20):
            k, start = trial % 5, trial * 3
            rows = [row(vocab) for _ in range(k + 1)]
            laws = [0.3 * row(vocab) + 0.7 * p if trial % 4 else p for p in rows[:k]]
            tokens = [int(generator.choice(vocab, p=p / p.sum())) for p in laws]
            proposal = Proposal(tuple(tokens), DenseRows(tuple(law / law.sum() for law in laws)) if trial % 3 else PointMass())
            ends = [(Purpose.ACCEPT, k - 1), (Purpose.RESIDUAL, trial % 2), (Purpose.BONUS, k)] if trial % 5 == 4 else []
            noise = GivenNoise(tuple((ask, (NUM_VALUES - 1) * (trial % 2)) for ask in ends), trial, start)
            yield Question(f"{vocab} tokens", proposal, rows, noise, _answer(rule, proposal, rows, noise))


# ---------------------------------------------------------------- the answers


Verify: TypeAlias = Callable[[str, Sequence[Question]], "Verdicts"]
"""(rule, questions of one vocabulary) -> their verdicts, as one batch."""


def on_tensors(rule: str, asked: Sequence[Question]) -> Verdicts:
    """The shipped rule on one packed batch."""
    from truedraw.verify import torch as tensors

    proposals, noises = [question.proposal for question in asked], [question.noise for question in asked]
    batch, vocab = tensors.pack(proposals, [question.rows for question in asked]), len(asked[0].rows[0])
    if rule == "coupled":
        races = tensors.races_of(noises, [len(proposal) + 1 for proposal in proposals], vocab)
        return tensors.verify_coupled(batch, races)
    verify = tensors.verify_token if rule == "token" else tensors.verify_block
    noise = tensors.uniforms_of(noises, batch)
    return verify(batch, noise, tensors.races_of(noises, [1] * len(noises), vocab))


def batches(asked: Sequence[Question]) -> Iterator[list[Question]]:
    """Of one vocabulary each, with drawn drafts or point masses: of 1, 2, 3 and 7 sequences, then large ones."""
    kinds: dict[tuple[int, bool], list[Question]] = {}
    for question in asked:
        kinds.setdefault((len(question.rows[0]), question.proposal.q.sampled), []).append(question)
    for same in kinds.values():
        sizes = itertools.chain((1, 2, 3, 7), itertools.repeat(1000))
        start = 0
        while start < len(same):
            size = next(sizes)
            yield same[start : start + size]
            start += size


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A rule on tensors over all its questions.

    different  how many it answers otherwise than the reference; `worst`: the first of them, or where the law is off
    max_tv     of the law of a step from the target's, in the middles of the reference's cells: the total variation
               where nothing differs. None: coupled, whose law is that of the reference it equals
    """

    name: str
    problems: int
    questions: int
    different: int
    max_tv: Fraction | None
    worst: str

    @property
    def exact(self) -> bool:
        return not self.different and not self.max_tv


def report(rule: str) -> TensorReport:
    """Ask the shipped rule everything."""
    laws: dict[Step, Law] = {}
    differences: list[str] = []
    for question, told in answers(rule, on_tensors):
        if told != (*question.told, 0):
            differences.append(difference(question, told))
        if question.cell is not None:
            (step, mass), (accepted, token, *_) = question.cell, told
            text = (*question.proposal.tokens[:accepted], token)
            law = laws.setdefault(step, {})
            law[text] = law.get(text, Fraction(0)) + mass
    num_different, off = len(differences), {step: _off(step, law) for step, law in laws.items()}
    worst = max(off, key=lambda step: off[step], default=None)
    if worst is not None and off[worst]:
        differences.append(f"the law is off on {worst[0].name}, {worst[1]} drafts")
    return TensorReport(
        rule,
        len(_problems()),
        len(questions(rule)),
        num_different,
        None if worst is None else off[worst],
        differences[0] if differences else "",
    )


def first_difference(rule: str, verify: Verify) -> str | None:
    """What a faulty rule answers otherwise than the reference; None: nothing."""
    wrong = ((question, told) for question, told in answers(rule, verify) if told != (*question.told, 0))
    return next((difference(question, told) for question, told in wrong), None)


def answers(rule: str, verify: Verify) -> Iterator[tuple[Question, tuple[int, int, str, int]]]:
    """Every question with accepted drafts, next token, origin and status, batch by batch."""
    from truedraw.verify.torch import ORIGINS

    for asked in batches(questions(rule)):
        told = verify(rule, asked)
        columns = [column.tolist() for column in (told.num_accepted, told.next_token, told.origin, told.status)]
        for question, (accepted, token, origin, status) in zip(asked, zip(*columns, strict=True), strict=True):
            yield question, (accepted, token, ORIGINS[origin], status)


def difference(question: Question, told: tuple[int, int, str, int]) -> str:
    """In words."""
    return f"{told} instead of {(*question.told, 0)} on {question.where}, {len(question.proposal)} drafts"


def _off(step: Step, law: Law) -> Fraction:
    problem, k = step
    lawful = {text: mass for text, mass in law.items() if text[-1] >= 0}
    return total_variation(extended(problem, lawful, k + 1), extended(problem, {(): Fraction(1)}, k + 1))
