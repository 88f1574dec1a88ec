"""The exact law of the engine itself: p/q rules through `Engine`, decode, cache and draft model.

Only the source of uniforms is exchanged. Whenever the engine asks for one, it is cut where the outcome
may change (drafting: at the edges of q in fractions; verification: at the edges that `explore` finds in
the rule itself), and every cell is followed with its exact probability, at one scattered point. So the
joint law of all requests of a batch comes out in fractions, over consecutive steps, with a policy that
looks at all that it may look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count

import numpy as np

from truedraw import randomness
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.policy import FixedLength
from truedraw.protocols import (
    Constraint,
    Drafter,
    DraftRequest,
    LengthPolicy,
    PointProposal,
    RowStatistics,
    SequenceState,
    StepTiming,
)
from truedraw.prove import exact
from truedraw.prove.exact import Context, Law, Problem, Row, table_problem, target_rows, verdicts
from truedraw.prove.problems import rows
from truedraw.randomness import Key, Purpose, Uniforms
from truedraw.registry import Model, find_rule
from truedraw.runners.toy import LetterTokenizer, Logits, ToyRunner
from truedraw.types import Proposal, SamplingParams


class Watchful(LengthPolicy):
    """Looks at the past, at q rows before they are drawn from, and shares one budget in the batch."""

    def __init__(self, length: int, budget: int) -> None:
        self._length, self._budget = length, budget
        self._left = 0

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        self._left = self._budget
        return [self._length - (state.accepted % 2 if state.proposed else 0) for state in batch]

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        if self._left == 0 or (row.top_probability > 0.74 and row.depth > 1):
            return False
        self._left -= 1
        return True

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        return [len(proposal.tokens) for proposal in batch]

    def observe(self, step: StepTiming) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Setting:
    """What is enumerated.

    copies  drafts are drawn from what followed the end of the text before, not from the problem's q
    constraint  what every request gets; the problem then is the masked one
    unmasked    what the models say before the mask; None: the problem itself
    """

    name: str
    problem: Problem
    rule: str
    num_requests: int
    num_steps: int
    policy: Callable[[], LengthPolicy]
    width: int = 1
    prompt: tuple[int, ...] = (0,)
    copies: bool = False
    constraint: Constraint | None = None
    unmasked: Problem | None = None


def settings() -> tuple[Setting, ...]:
    problem = table_problem("two rows", rows("1/3 2/3", "3/4 1/4"), rows("2/3 1/3", "1/4 3/4"))
    three = table_problem("three tokens", rows("1/2 1/3 1/6", "1/5 0 4/5"), rows("1/6 1/2 1/3", "2/5 2/5 1/5"))
    equal = table_problem("p = q", rows("9/10 1/10", "2/5 3/5"), rows("9/10 1/10", "2/5 3/5"))
    return (
        Setting("token, two steps", problem, "token", 1, 2, lambda: Watchful(2, 2)),
        Setting("token, p = q, two steps", equal, "token", 1, 2, lambda: Watchful(2, 2)),
        Setting("token, a batch of two with one budget", problem, "token", 2, 1, lambda: Watchful(2, 3)),
        Setting("block, a batch of two with one budget", problem, "block", 2, 1, lambda: Watchful(2, 3)),
        Setting("block, two steps", problem, "block", 1, 2, lambda: Watchful(2, 2)),
        Setting("token, three drafts, two steps", problem, "token", 1, 2, lambda: Watchful(3, 3)),
        Setting("block, three drafts, two steps", problem, "block", 1, 2, lambda: Watchful(3, 3)),
        Setting("multidraft, two steps", three, "multidraft", 1, 2, lambda: Watchful(2, 9), width=2),
        Setting("multidraft, trees of depth two", three, "multidraft", 1, 1, lambda: Watchful(4, 9), width=2),
        Setting("traversal, full trees", three, "traversal", 1, 1, lambda: Watchful(4, 9), width=2),
        Setting("token, drawn copies, two steps", problem, "token", 1, 2, lambda: FixedLength(2), prompt=COPIED, copies=True),
        Setting("block, drawn copies, two steps", problem, "block", 1, 2, lambda: FixedLength(2), prompt=COPIED, copies=True),
        Setting("block, drawn copies, three drafts", three, "block", 1, 1, lambda: FixedLength(3), prompt=COPIED, copies=True),
    )


COPIED = (1, 0, 1, 0, 1, 0, 0, 1, 1)
"""A prompt whose end was followed by several tokens, one of them more often."""


def total_variation(setting: Setting) -> Fraction:
    """Between the joint law of the requests' texts and the product of the target's, exactly.

    Texts are cut to the fewest tokens that all must have, plus one, and continued by the target's law.
    """
    horizon = setting.num_steps + 1
    joint: dict[tuple[Context, ...], Fraction] = {}
    for texts, mass in _runs(setting):
        laws = [exact.extended(setting.problem, {text: Fraction(1)}, horizon) for text in texts]
        for combined, share in _product(laws):
            joint[combined] = joint.get(combined, Fraction(0)) + mass * share
    expected = dict(_product([exact.target_law(setting.problem, horizon)] * setting.num_requests))
    zero = Fraction(0)
    return sum((abs(joint.get(t, zero) - expected.get(t, zero)) for t in joint.keys() | expected.keys()), zero) / 2


def _product(laws: Sequence[Law]) -> Iterator[tuple[tuple[Context, ...], Fraction]]:
    if not laws:
        yield (), Fraction(1)
        return
    for text, mass in laws[0].items():
        for others, share in _product(laws[1:]):
            yield (text, *others), mass * share


def _runs(setting: Setting) -> Iterator[tuple[tuple[Context, ...], Fraction]]:
    """Every path of noise: what each request has emitted, and the path's probability."""
    todo: list[list[int]] = [[]]
    while todo:
        source = _Source(setting, todo.pop())
        yield _run(setting, source), source.mass
        todo += source.forks


def _run(setting: Setting, source: _Source) -> tuple[Context, ...]:
    def logits(which: str) -> Callable[[tuple[int, ...]], Logits]:
        def next_logits(context: tuple[int, ...]) -> Logits:
            problem = setting.problem if setting.unmasked is None else setting.unmasked
            row = problem.float_row("p" if which == "p" else "q", context[len(setting.prompt) :])
            with np.errstate(divide="ignore"):
                return np.asarray(np.log(row))

        return next_logits

    vocab, slots = setting.problem.vocab, setting.num_requests
    model = Model("toy", ToyRunner(logits("p"), vocab, num_slots=slots), LetterTokenizer(vocab))
    model_drafter = ModelDrafter(ToyRunner(logits("q"), vocab, num_slots=slots), vocab, width=setting.width)
    drafter = _Noted(SuffixDrafter() if setting.copies else model_drafter, source)
    seeds = count()
    with Engine(model, drafter, setting.policy(), rule=setting.rule, entropy=lambda: next(seeds), source=source) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        requests = [engine.submit(setting.prompt, params, constraint=setting.constraint) for _ in range(slots)]
        texts: dict[int, Context] = {request.id: () for request in requests}
        source.texts = texts
        for _ in range(setting.num_steps):
            for step in engine.step():
                texts[step.request] += step.tokens
        return tuple(texts[request.id] for request in requests)


class _Noted(Drafter):
    """A drafter whose proposals the source of uniforms gets to know."""

    samples = True

    def __init__(self, drafter: Drafter, source: _Source) -> None:
        self._drafter, self._source = drafter, source
        self.trees = drafter.trees

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = self._drafter.propose(requests)
        for request, proposal in zip(requests, proposals, strict=True):
            assert isinstance(request.noise, randomness.StepNoise)
            self._source.proposals[request.noise.seed, request.noise.start] = proposal
        return proposals


class _Source:
    """A source of uniforms that follows one path of choices, and notes where the path forks."""

    def __init__(self, setting: Setting, path: list[int]) -> None:
        self._setting, self._path = setting, path
        self._rule = find_rule(setting.rule)
        self._cells: dict[Key, tuple[Fraction, Fraction]] = {}
        self._drafts: dict[tuple[int, int], list[int]] = {}
        self._taken = 0
        self.mass = Fraction(1)
        self.forks: list[list[int]] = []
        self.texts: dict[int, Context] = {}
        self.proposals: dict[tuple[int, int], Proposal] = {}

    def __call__(self, key: Key, first: int, count: int) -> Uniforms:
        context = self.texts[key.seed]
        problem = self._setting.problem
        if key.purpose in (Purpose.RACE_BLOCK, Purpose.RACE_TOKEN):
            if key.purpose == Purpose.RACE_BLOCK:
                return np.full(count, 0.5)
            low, high = self._cell(key, cdf(problem.p(context)))
            uniforms = np.full(count, 0.5)
            uniforms[place_of((low + high) / 2, problem.p(context))] = 0.0  # the small end wins
            return uniforms
        if key.purpose == Purpose.DRAFT:
            drafts = self._drafts.setdefault((key.seed, key.position), [])
            row = self._draft_row(context, drafts, key.index)
            low, high = self._cell(key, cdf(row))
            drafts[key.index :] = [place_of((low + high) / 2, row)]
        else:
            low, high = self._cell(key, self._rule_edges(context, key))
        share = Fraction((key.position * 7 + key.index * 5 + int(key.purpose) * 3) % 11 * 9 + 1, 100)
        return np.array([float(low + (high - low) * share)])

    def _draft_row(self, context: Context, drafts: Sequence[int], node: int) -> Row:
        """The row that draft `node` is drawn from: at the root without the candidates before it."""
        problem, width = self._setting.problem, self._setting.width
        if self._setting.copies:
            return _followers((*self._setting.prompt, *context), drafts[:node], problem.vocab)
        if node < width:
            if width == 1:
                return problem.q(context)
            return tuple(mass if token not in drafts[:node] else Fraction(0) for token, mass in enumerate(problem.q(context)))
        path = [node]
        while path[0] >= width:
            path.insert(0, path[0] - width)
        return problem.q((*context, *(drafts[i] for i in path[:-1])))

    def _rule_edges(self, context: Context, key: Key) -> list[Fraction]:
        """Where the rule's verdict on what was proposed changes with this uniform, whatever the others are."""
        proposal = self.proposals[key.seed, key.position]
        edges: set[Fraction] = set()
        for length in range(1, len(proposal) + 1) if proposal.is_chain else (len(proposal),):
            shorter = proposal.cut(length)  # decode may cut a chain
            for leaf in verdicts(target_rows(self._setting.problem, context, shorter), shorter, self._rule, key.position):
                edges |= {edge for ask, ends in leaf.intervals if ask == (key.purpose, key.index) for edge in ends}
        return sorted(edges)

    def _cell(self, key: Key, edges: Sequence[Fraction]) -> tuple[Fraction, Fraction]:
        """The cell of this path; a key that comes up again stays in its cell, and is cut further if need be."""
        low, high = self._cells.get(key, (Fraction(0), Fraction(1)))
        cuts = sorted({low, high, *(edge for edge in edges if low < edge < high)})
        if len(cuts) > 2:
            if self._taken == len(self._path):
                self.forks += [[*self._path, other] for other in range(1, len(cuts) - 1)]
                self._path.append(0)
            cell = self._path[self._taken]
            self._taken += 1
            self.mass *= (cuts[cell + 1] - cuts[cell]) / (cuts[-1] - cuts[0])
            low, high = cuts[cell], cuts[cell + 1]
        self._cells[key] = (low, high)
        return low, high


def _followers(text: Context, drafts: Sequence[int], vocab: int) -> Row:
    """How often each token followed the longest suffix of text and drafts that something followed in the
    text, counted by hand; the suffix of the text itself is the longest that came up before."""
    length = next(n for n in range(len(text) - 1, 0, -1) if _occurrences(text, text[len(text) - n :]) > 1)
    string = (*text[len(text) - length :], *drafts)
    while True:
        counts = [_occurrences(text, (*string, token)) for token in range(vocab)]
        if any(counts):
            return tuple(Fraction(count, sum(counts)) for count in counts)
        string = string[1:]


def _occurrences(text: Context, string: Context) -> int:
    return sum(text[i : i + len(string)] == string for i in range(len(text) - len(string) + 1))


# ---------------------------------------------------------------- draws by inverse CDF, in fractions


def cdf(row: Sequence[Fraction]) -> list[Fraction]:
    """Where a draw by inverse CDF from `row` (not normalised) changes its token."""
    total = sum(row)
    return [edge / total for edge in accumulate(row)] if total else []


def place_of(u: Fraction, row: Sequence[Fraction]) -> int:
    """The token that inverse CDF draws at u."""
    return next(token for token, edge in enumerate(cdf(row)) if u < edge)
