"""The statements of docs/theory.md and docs/theory.zh.md, each by the test that the pages name.

p and q are random rows of fractions, zeros included, over 1 to 5 tokens. What is rational is compared with ==. Where
shipped code is the subject, `prove.exact` runs it through all of its noise, so that its law comes out in fractions too.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from truedraw import economics
from truedraw.drafters.random import RandomDrafter
from truedraw.engine import Engine
from truedraw.errors import RowError, RuleError
from truedraw.policy import FixedLength
from truedraw.prove.drafts import chain
from truedraw.prove.exact import (
    Context,
    Draft,
    Law,
    NoiseFactory,
    Parts,
    Problem,
    Row,
    certify,
    extended,
    law_of,
    table_problem,
    target_law,
    total_variation,
)
from truedraw.randomness import Key, Noise, Purpose
from truedraw.registry import Model
from truedraw.runners.toy import ByteTokenizer, ToyRunner, hashed
from truedraw.types import DenseRows, Proposal, SamplingParams
from truedraw.verify import Rule, block, coupled, lossy, token
from truedraw.verify.family import family, for_replacement, largest_acceptance, resample_from_target

F = Fraction
EXPLORED = settings(max_examples=30)
"""For tests that run shipped code through all of its noise at every example."""


# ---------------------------------------------------------------- rows, problems and what is computed from them


def fractions(text: str) -> Row:
    """A row from text: "1/2 1/3 1/6"."""
    return tuple(F(mass) for mass in text.split())


def normalised(weights: list[int] | Row) -> Row:
    return tuple(F(weight) / sum(weights) for weight in weights)


def laws(vocab: int, top: int = 6) -> st.SearchStrategy[Row]:
    return st.lists(st.integers(0, top), min_size=vocab, max_size=vocab).filter(any).map(normalised)


units = st.integers(0, 6).flatmap(lambda n: st.just(F(n, 6)))
"""Fractions in [0, 1]."""


def unit_rows(vocab: int) -> st.SearchStrategy[Row]:
    return st.tuples(*[units] * vocab)


@st.composite
def pairs(draw: st.DrawFn, max_vocab: int = 5) -> tuple[Row, Row]:
    """(p, q): unrelated, equal, or q a multiple of p where p > 0, with what is left elsewhere."""
    vocab = draw(st.integers(1, max_vocab))
    p = draw(laws(vocab))
    kind = draw(st.sampled_from(("unrelated", "unrelated", "unrelated", "equal", "multiple")))
    if kind == "unrelated":
        return p, draw(laws(vocab))
    outside = [0 if mass else 1 for mass in p]
    if kind == "equal" or not any(outside):
        return p, p
    share = draw(units)
    return p, tuple(share * mass + (1 - share) * other for mass, other in zip(p, normalised(outside), strict=True))


@st.composite
def tables(draw: st.DrawFn, vocab: int = 2, top: int = 4, point: bool = False) -> Problem:
    """Rows that depend on the last token and on the position."""
    p, q = (draw(st.lists(laws(vocab, top), min_size=vocab, max_size=vocab)) for _ in "pq")
    return table_problem("random", p, q, point=point)


TOY = table_problem("swapped thirds", [fractions("1/3 2/3")], [fractions("2/3 1/3")])


def constant(p: Row, q: Row) -> Problem:
    return table_problem("the same rows everywhere", [p], [q])


def floats(row: Row) -> np.ndarray:
    return np.array([float(mass) for mass in row])


def distance(left: Row, right: Row) -> Fraction:
    return sum((abs(a - b) for a, b in zip(left, right, strict=True)), F(0)) / 2


def least(p: Row, q: Row) -> Row:
    return tuple(map(min, p, q))


def positive(p: Row, q: Row) -> Row:
    """max(p - q, 0)."""
    return tuple(max(a - b, F(0)) for a, b in zip(p, q, strict=True))


def ratios(p: Row, q: Row) -> Row:
    """min(1, p/q), and 1 where q = 0: no draft comes from there."""
    return tuple(min(F(1), a / b) if b else F(1) for a, b in zip(p, q, strict=True))


def accepted_mass(q: Row, r: Row) -> Fraction:
    """A = sum q r."""
    return sum((a * b for a, b in zip(q, r, strict=True)), F(0))


def one_trial(q: Row, r: Row, a: Row) -> Row:
    """q r + (1 - A) a: draw from q, keep with probability r, else draw from a."""
    rejected = 1 - accepted_mass(q, r)
    return tuple(x * keep + rejected * other for x, keep, other in zip(q, r, a, strict=True))


def overlap(p: Row, q: Row) -> Fraction:
    """alpha = sum min(p, q)."""
    return sum(least(p, q))


def smallest_ratio(p: Row, q: Row) -> Fraction:
    """A* = min over p > 0 of q/p."""
    return min(b / a for a, b in zip(p, q, strict=True) if a)


def worths(p: Row, q: Row) -> Row:
    """w = min(1, q/p) where p > 0; 0 elsewhere, where it is never weighed."""
    return tuple(min(F(1), b / a) if a else F(0) for a, b in zip(p, q, strict=True))


def mean(p: Row, values: Row) -> Fraction:
    return sum((a * b for a, b in zip(p, values, strict=True)), F(0))


# ---------------------------------------------------------------- the shipped code, through all of its noise


def emitted(
    problem: Problem, rule: Rule, *lengths: int | tuple[int, ...], draft: Draft = chain, noise: NoiseFactory = Noise
) -> Law:
    """The law of what steps of these draft lengths emit, one after the other."""
    law: Law = {}
    for (text, _), mass in law_of(problem, Parts(rule, draft, noise), lengths).masses.items():
        if mass:
            law[text] = law.get(text, F(0)) + mass
    return law


def first_token(problem: Problem, law: Law) -> Row:
    cut = extended(problem, law, 1)
    return tuple(cut.get((y,), F(0)) for y in range(problem.vocab))


def one_position(p: Row, q: Row, rule: Rule) -> tuple[Row, Fraction]:
    """The law of the token that a step of one draft decides, and how often it is the accepted draft."""
    law = emitted(constant(p, q), rule, 1)
    return first_token(constant(p, q), law), sum((mass for text, mass in law.items() if len(text) == 2), F(0))


def mean_accepted(law: Law) -> Fraction:
    """Of one step: its text is the accepted drafts and one token more."""
    return sum(((len(text) - 1) * mass for text, mass in law.items()), F(0))


def rekeyed(change: Callable[[Key], Key]) -> NoiseFactory:
    return lambda seed, choice, source: Noise(seed, choice, lambda key, first, count: source(change(key), first, count))


class Coins:
    """Step noise whose every uniform is `u`."""

    start = 0

    def __init__(self, u: float) -> None:
        self.u = u

    def uniform(self, purpose: Purpose, index: int) -> float:
        return self.u

    def race(self, position: int):
        return Noise(0).at(0).race(position)


# ---------------------------------------------------------------- sums over draft paths, by hand


def paths(problem: Problem, k: int) -> list[Context]:
    return [*product(range(problem.vocab), repeat=k)]


def along(rows: Callable[[Context], Row], path: Context) -> Fraction:
    """The probability of a text under a chain of rows."""
    mass = F(1)
    for i, x in enumerate(path):
        mass *= rows(path[:i])[x]
    return mass


def survivals(problem: Problem, k: int) -> list[Fraction]:
    """S_1 .. S_k of the token rule: sums over paths of the product of min(p, q)."""
    return [
        sum((along(lambda c: least(problem.p(c), problem.q(c)), path) for path in paths(problem, i)), F(0))
        for i in range(1, k + 1)
    ]


def block_worth(problem: Problem, path: Context) -> Fraction:
    """P_i of block verification behind a path on which q > 0."""
    worth = F(1)
    for i, x in enumerate(path):
        worth = min(F(1), worth * problem.p(path[:i])[x] / problem.q(path[:i])[x])
    return worth


def block_excess(problem: Problem, path: Context) -> Row:
    """max(P_i p - q, 0) behind a path."""
    worth = block_worth(problem, path)
    return positive(tuple(worth * mass for mass in problem.p(path)), problem.q(path))


def block_lengths(problem: Problem, path: Context) -> list[Fraction]:
    """P(tau = i) for i = 0 .. k, given that `path` was drafted: coins h_k, h_{k-1}, .. from the end."""
    left, chances = F(1), []
    for i in range(len(path), -1, -1):
        worth, excess = block_worth(problem, path[:i]), sum(block_excess(problem, path[:i]))
        coin = worth if i == len(path) else F(1) if i == 0 or not excess + 1 - worth else excess / (excess + 1 - worth)
        chances.append(left * coin)
        left *= 1 - coin
    return chances[::-1]


# ---------------------------------------------------------------- 1: a step and its price


@EXPLORED
@given(tables(), st.integers(1, 2), st.sampled_from((token.verify, block.verify)))
def test_a_step_emits_one_token_more_than_it_accepts(problem, k, rule):
    law = emitted(problem, rule, k)
    assert {len(text) for text in law} <= set(range(1, k + 2))
    alike = replace(problem, q=problem.p, _floats={})  # all is accepted, and the last row gives one token more
    assert emitted(alike, rule, k) == target_law(problem, k + 1)
    first = int(np.argmax(problem.q(())))
    row = problem.float_row("p", ())
    with pytest.raises(RowError, match="2 are needed"):  # a row for each draft is one too few
        rule(Proposal((first,), DenseRows((problem.float_row("q", ()),))), [row], Coins(0.5))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("k", [1, 4])
def test_speculation_never_takes_more_target_passes(k, rule):
    vocab = 257

    def passes(drafter: RandomDrafter | None, seed: int) -> tuple[int, int]:
        runner = ToyRunner(hashed(vocab, sharpness=9.0), vocab)
        policy = FixedLength(k if drafter else 0)
        with Engine(Model("toy", runner, ByteTokenizer()), drafter, policy, rule=rule) as engine:
            result = engine.generate([[3, 1, 4]], SamplingParams(max_tokens=20, ignore_eos=True, seed=seed))[0]
        assert len(result.tokens) == 20
        return result.stats.steps, runner.num_passes

    for seed in range(2):
        steps, plain_passes = passes(None, seed)
        assert steps == 20
        for sampled in (False, True):  # rubbish, almost always rejected
            steps, speculative_passes = passes(RandomDrafter(vocab, sampled=sampled), seed)
            assert steps <= 20 and speculative_passes <= plain_passes


@EXPLORED
@given(tables(), st.integers(1, 2), pairs(max_vocab=3))
def test_expected_tokens_add_up_survivals(problem, k, pair):
    law, by_hand = emitted(problem, token.verify, k), survivals(problem, k)
    for i in range(1, k + 1):
        assert sum((mass for text, mass in law.items() if len(text) > i), F(0)) == by_hand[i - 1]
    assert mean_accepted(law) + 1 == 1 + sum(by_hand)
    assert math.isclose(economics.expected_tokens(tuple(map(float, by_hand)), k), 1 + sum(by_hand), rel_tol=1e-12)
    alpha = overlap(*pair)
    assert survivals(constant(*pair), 3) == [alpha, alpha**2, alpha**3]
    assert math.isclose(economics.constant_tokens(float(alpha), 3), 1 + alpha + alpha**2 + alpha**3, rel_tol=1e-12)


@given(st.floats(0, 2), st.floats(0, 0.5), st.integers(1, 16))
def test_more_than_two_accepted_tokens_is_neither_needed_nor_enough(each, draft, k):
    near, far = economics.Costs(economics.TokenCost(0.25), draft=0.05), economics.Costs(economics.TokenCost(0.9))
    assert math.isclose(economics.Outcome(1, 1, near.of(1)).speedup, 2 / 1.3) and 2 / 1.3 > 1.5
    assert math.isclose(economics.Outcome(4, 3, far.of(4)).speedup, 4 / 4.6) and 4 / 4.6 < 0.9
    assert economics.claim(near, 4).wins and economics.claim(far, 4).losses
    measured = economics.Costs(economics.MeasuredCost((1, 2, 4, 8, 16, 32), (8, 16, 23, 29, 44, 76)))
    assert measured.of(15) == 5.5 and economics.needed(measured, 15) == 5
    # a policy that loses, though its steps of three accepted drafts win
    steady = economics.Costs(economics.TokenCost(0.2))
    assert economics.Outcome(4, 3, steady.of(4)).speedup > 2 > 1.8 > economics.constant_tokens(0.3, 4)
    # in general: a step wins if and only if accepted + 1 exceeds what it costs
    costs = economics.Costs(economics.TokenCost(each), draft)
    winning = [n for n in range(k + 1) if economics.Outcome(k, n, costs.of(k)).tokens > costs.of(k)]
    assert economics.needed(costs, k) == (winning[0] if winning else None)


# ---------------------------------------------------------------- 2: the rule


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 12), pairs())
def test_the_comparison_is_strict(n, over, under, pair):
    r = min(F(1), F(over, under))
    from_0, to_1 = [F(i, n) for i in range(n)], [F(i, n) for i in range(1, n + 1)]
    strict_from_0, loose_to_1 = F(sum(u < r for u in from_0), n), F(sum(u <= r for u in to_1), n)
    loose_from_0, strict_to_1 = F(sum(u <= r for u in from_0), n), F(sum(u < r for u in to_1), n)
    assert abs(strict_from_0 - r) < F(1, n) and abs(loose_to_1 - r) < F(1, n)
    if (r * n).denominator == 1:
        assert strict_from_0 == loose_to_1 == r
    assert (strict_from_0 > 0) == (r > 0) and (loose_to_1 < 1) == (r < 1)
    if r == 0:
        assert loose_from_0 == F(1, n)  # a forbidden token comes through
    if r == 1:
        assert strict_to_1 == 1 - F(1, n)  # a certain one does not
    p, q = pair
    for x in (x for x in range(len(p)) if q[x]):
        for u in from_0:
            assert (u * q[x] < p[x]) == (u < min(F(1), p[x] / q[x]))
        rows, proposal = [floats(p)] * 2, Proposal((x,), DenseRows((floats(q),)))
        for rule in (token.verify, block.verify):
            assert rule(proposal, rows, Coins(0.0)).num_accepted == (1 if p[x] else 0)
            if p[x] >= q[x]:
                assert rule(proposal, rows, Coins(1 - 2**-53)).num_accepted == 1


# ---------------------------------------------------------------- 3: why the law is right, one token


@given(pairs())
def test_acceptance_is_one_minus_total_variation(pair):
    p, q = pair
    assert accepted_mass(q, ratios(p, q)) == overlap(p, q) == 1 - distance(p, q)


@given(pairs())
def test_the_residual_weighs_what_is_rejected(pair):
    p, q = pair
    assert sum(positive(p, q)) == 1 - accepted_mass(q, ratios(p, q)) == distance(p, q)
    assert any(positive(p, q)) == (p != q)
    assert all(not (mass and q[y] >= p[y]) for y, mass in enumerate(positive(p, q)))


@EXPLORED
@given(pairs())
def test_one_position_has_the_law_p(pair):
    p, q = pair
    assert tuple(map(sum, zip(least(p, q), positive(p, q), strict=True))) == p
    assert one_position(p, q, token.verify) == (p, overlap(p, q))


@EXPLORED
@given(pairs(max_vocab=4))
@example((fractions("1/2 1/2"), fractions("9/10 1/10")))
def test_the_law_given_the_verdict_is_another(pair):
    p, q = pair
    law = emitted(constant(p, q), token.verify, 1)
    kept = [sum((mass for text, mass in law.items() if len(text) == 2 and text[0] == y), F(0)) for y in range(len(p))]
    replaced = [law.get((y,), F(0)) for y in range(len(p))]
    assert tuple(kept) == least(p, q) and tuple(replaced) == positive(p, q)
    multiple = all(x == overlap(p, q) * mass for mass, x in zip(p, q, strict=True) if mass)
    for given_verdict in (kept, replaced):
        if p != q and any(given_verdict):
            assert (normalised(tuple(given_verdict)) == p) == multiple
    if p == fractions("1/2 1/2"):
        assert normalised(tuple(kept)) == fractions("5/6 1/6")


# ---------------------------------------------------------------- 3: why the law is right, many tokens


@EXPLORED
@given(tables())
def test_drafts_have_the_law_q_and_the_output_has_the_law_p(problem):
    drafted = {path: mass for path in paths(problem, 2) if (mass := along(problem.q, path))}
    target = target_law(problem, 2)
    alike = problem.p(()) == problem.q(()) and all(problem.p(path[:1]) == problem.q(path[:1]) for path in target)
    assert (drafted == target) == alike
    assert extended(problem, emitted(problem, token.verify, 2), 2) == target


@EXPLORED
@given(tables(), st.sampled_from(((1, 1), (2, 1), (2, 2), (0, 2, 1), ((0, 2), 1))), st.sampled_from((token.verify, block.verify)))
def test_under_four_conditions_the_joint_law_is_the_targets(problem, lengths, rule):
    assert certify(problem, Parts(rule, chain), lengths).exact
    # behind a given prefix, at a given place in the block
    law = emitted(problem, rule, 2)
    for i in range(3):
        arrived = {text: mass for text, mass in law.items() if len(text) > i}
        for prefix in {text[:i] for text in arrived}:
            here = {text: mass for text, mass in arrived.items() if text[:i] == prefix}
            for y, share in enumerate(problem.p(prefix)):
                assert sum((m for text, m in here.items() if text[i] == y), F(0)) == share * sum(here.values())

    # and up to any stopping time: here, the first token 0
    def stopped(law: Law) -> Law:
        ended: Law = {}
        for text, mass in law.items():
            end = text.index(0) + 1 if 0 in text else len(text)
            ended[text[:end]] = ended.get(text[:end], F(0)) + mass
        return ended

    assert stopped(extended(problem, emitted(problem, rule, 1, 1), 3)) == stopped(target_law(problem, 3))


@given(pairs(), st.data())
def test_a_draft_from_another_row_than_the_recorded_is_biased(pair, data):
    p, q = pair
    weights = tuple(weight if x else 0 for weight, x in zip(data.draw(laws(len(p))), q, strict=True))
    assume(any(weights))
    drawn, r, excess = normalised(weights), ratios(p, q), positive(p, q)
    a = normalised(excess) if any(excess) else p
    shift = tuple((s - x) * keep for s, x, keep in zip(drawn, q, r, strict=True))
    expected = tuple(mass + moved - sum(shift) * other for mass, moved, other in zip(p, shift, a, strict=True))
    assert one_trial(drawn, r, a) == expected
    half = fractions("1/2 1/2")

    def likeliest_as_if_drawn(problem: Problem, context: Context, k: int, noise) -> Proposal:
        row = problem.float_row("q", context)
        return Proposal((int(row.argmax()),) * k, DenseRows((row,) * k))

    law = emitted(constant(half, half), token.verify, 1, draft=likeliest_as_if_drawn)
    assert first_token(constant(half, half), law) == fractions("1 0")


@given(st.integers(1, 5).flatmap(lambda vocab: st.tuples(laws(vocab), st.tuples(*[st.booleans()] * vocab))))
def test_a_draft_dropped_for_what_it_is_is_biased(case):
    p, kept = case
    mass_kept = sum((mass for mass, keep in zip(p, kept, strict=True) if keep), F(0))
    law = tuple(mass * keep + (1 - mass_kept) * mass for mass, keep in zip(p, kept, strict=True))  # p = q
    assert law == tuple(mass * (1 + keep - mass_kept) for mass, keep in zip(p, kept, strict=True))
    assert (law == p) == (mass_kept in (0, 1))

    def dropped_if_unlikely(problem: Problem, context: Context, k: int, noise) -> Proposal:
        proposal = chain(problem, context, k, noise)
        likely = all(proposal.q.prob(i, x) > 0.5 for i, x in enumerate(proposal.tokens))
        return proposal if likely else Proposal()

    def not_drawn_if_unsure(problem: Problem, context: Context, k: int, noise) -> Proposal:
        return chain(problem, context, k, noise, more=lambda seen, row: row.margin > 0.1)

    same, other = fractions("3/5 2/5"), fractions("9/10 1/10")
    for p, q, expected in ((same, same, fractions("21/25 4/25")), (fractions("1/2 1/2"), other, fractions("11/20 9/20"))):
        problem = constant(p, q)
        assert first_token(problem, emitted(problem, token.verify, 1, draft=dropped_if_unlikely)) == expected
        assert first_token(problem, emitted(problem, token.verify, 1, draft=not_drawn_if_unsure)) == p


def test_noise_shared_within_a_step_is_biased():
    def like_drafts(purpose: Purpose) -> NoiseFactory:
        return rekeyed(lambda key: replace(key, purpose=Purpose.DRAFT) if key.purpose == purpose else key)

    for p, q, purpose, biased in (
        ("1/4 3/4", "1/2 1/2", Purpose.ACCEPT, "1/2 1/2"),
        ("1/2 0 1/4 1/4", "1/2 1/2 0 0", Purpose.RESIDUAL, "1/2 0 0 1/2"),
    ):
        problem = constant(fractions(p), fractions(q))
        assert first_token(problem, emitted(problem, token.verify, 1)) == fractions(p)
        assert first_token(problem, emitted(problem, token.verify, 1, noise=like_drafts(purpose))) == fractions(biased)
        assert distance(fractions(p), fractions(biased)) == F(1, 4)


def test_noise_met_again_by_a_later_step_is_biased():
    by_position = rekeyed(lambda key: replace(key, position=key.position + key.index, index=0))

    def off(rule: Rule, *lengths: int, noise: NoiseFactory = Noise) -> Fraction:
        return total_variation(extended(TOY, emitted(TOY, rule, *lengths, noise=noise), 3), target_law(TOY, 3))

    assert off(block.verify, 2, 2, 2, noise=by_position) == F(7, 108)
    assert off(block.verify, 2, noise=by_position) == 0  # one step alone shows nothing
    assert off(token.verify, 2, 2, 2, noise=by_position) == 0  # its verdicts look at no later draft
    assert off(block.verify, 2, 2, 2) == 0


# ---------------------------------------------------------------- 4: solving for the rule


@EXPLORED
@given(pairs(max_vocab=4), st.data())
def test_the_family_of_exact_rules(pair, data):
    p, q = pair
    r = data.draw(st.one_of(unit_rows(len(p)), unit_rows(len(p)).map(lambda t: tuple(map(F.__mul__, t, ratios(p, q))))))
    accepted = accepted_mass(q, r)
    assume(accepted < 1)
    a = tuple((mass - x * keep) / (1 - accepted) for mass, x, keep in zip(p, q, r, strict=True))
    bounded = all(x * keep <= mass for mass, x, keep in zip(p, q, r, strict=True))
    assert sum(a) == 1 and one_trial(q, r, a) == p
    assert (min(a) >= 0) == bounded
    other = data.draw(laws(len(p)))
    assert (one_trial(q, r, other) == p) == (other == a)
    if bounded:
        assert one_position(p, q, family(floats(r))) == (p, accepted)
    else:
        with pytest.raises(RuleError, match="above min"):
            one_position(p, q, family(floats(r)))


@EXPLORED
@given(pairs(max_vocab=4), st.data())
def test_certain_acceptance_means_p_is_q_and_leaves_the_replacement_open(pair, data):
    p, q = pair
    r, a = data.draw(unit_rows(len(p))), data.draw(laws(len(p)))
    always = all(keep == 1 for keep, x in zip(r, q, strict=True) if x)
    assert (accepted_mass(q, r) == 1) == always
    ones = (F(1),) * len(p)
    assert one_trial(q, ones, a) == q
    assert (overlap(p, q) == 1) == (p == q)
    assert emitted(constant(p, p), token.verify, 2) == target_law(constant(p, p), 3)  # never rejected


@given(pairs(), st.data())
def test_no_rule_accepts_more_than_one_minus_total_variation(pair, data):
    p, q = pair
    shares = data.draw(unit_rows(len(p)))
    r = tuple(map(F.__mul__, shares, ratios(p, q)))
    largest = all(share == 1 for share, mass in zip(shares, least(p, q), strict=True) if mass)
    assert accepted_mass(q, r) <= overlap(p, q)
    assert (accepted_mass(q, r) == overlap(p, q)) == largest
    # whatever a rule does, draft and output have some joint law
    vocab = len(p)
    joint = normalised(data.draw(st.lists(st.integers(0, 4), min_size=vocab**2, max_size=vocab**2).filter(any)))
    table = [joint[x * vocab : (x + 1) * vocab] for x in range(vocab)]
    draft, output = tuple(map(sum, table)), tuple(map(sum, zip(*table, strict=True)))
    assert sum(table[x][x] for x in range(vocab)) <= overlap(output, draft) == 1 - distance(output, draft)


@EXPLORED
@given(pairs(max_vocab=4), st.data())
def test_any_replacement_law_has_a_largest_acceptance(pair, data):
    p, q = pair
    r = tuple(map(F.__mul__, data.draw(unit_rows(len(p))), ratios(p, q)))
    left = tuple(mass - x * keep for mass, x, keep in zip(p, q, r, strict=True))
    points = st.integers(0, len(p) - 1).map(lambda y: tuple(F(i == y) for i in range(len(p))))
    a = data.draw(st.one_of(laws(len(p)), points, st.just(normalised(left) if any(left) else p), st.just(p)))
    covered = all(other or mass <= x for mass, x, other in zip(p, q, a, strict=True))
    need = max(max(mass - x, F(0)) / other for mass, x, other in zip(p, q, a, strict=True) if other)
    room = min(mass / other for mass, other in zip(p, a, strict=True) if other)

    def rule_at(rejected: Fraction) -> Row | None:
        """The r with which a rejection probability gives the law p; None: there is none."""
        taken = [mass - rejected * other for mass, other in zip(p, a, strict=True)]
        fits = all(0 <= t <= x for t, x in zip(taken, q, strict=True))
        return tuple(t / x if x else F(0) for t, x in zip(taken, q, strict=True)) if fits else None

    for rejected in {need, room, *(F(i, 12) for i in range(13))}:
        solution = rule_at(rejected)
        assert (solution is not None) == (covered and need <= rejected <= room)
        if solution is not None:
            assert accepted_mass(q, solution) == 1 - rejected and one_trial(q, solution, a) == p
    if covered and need <= room:
        assert math.isclose(largest_acceptance(floats(p), floats(q), floats(a)), 1 - need, abs_tol=1e-12)
        assert one_position(p, q, for_replacement(floats(a))) == (p, 1 - need)
    else:
        with pytest.raises(RuleError, match="no rule has this replacement law"):
            largest_acceptance(floats(p), floats(q), floats(a))
    residual = positive(p, q)
    if any(residual):
        assert math.isclose(largest_acceptance(floats(p), floats(q), floats(normalised(residual))), overlap(p, q), abs_tol=1e-12)
    assert math.isclose(largest_acceptance(floats(p), floats(q), floats(p)), smallest_ratio(p, q), abs_tol=1e-12)


@EXPLORED
@given(pairs(max_vocab=4), units)
def test_resampling_from_p_has_a_closed_form(pair, share):
    p, q = pair
    best = smallest_ratio(p, q)
    assert 0 <= best <= 1 and (best == 0) == any(mass and not x for mass, x in zip(p, q, strict=True))
    accepted = share * best
    r = tuple(accepted * mass / x if x else F(0) for mass, x in zip(p, q, strict=True))
    assert max(r) <= 1 and accepted_mass(q, r) == accepted and one_trial(q, r, p) == p
    if best < 1:
        beyond = best + (1 - best) * max(share, F(1, 6))
        assert any(beyond * mass > x for mass, x in zip(p, q, strict=True))  # r > 1, or mass of p where q has none
    assert one_position(p, q, resample_from_target) == (p, best)


@given(pairs(), units)
def test_the_self_consistent_equation_is_solved_by_an_interval(pair, share):
    p, q = pair
    best, alpha = smallest_ratio(p, q), overlap(p, q)

    def implied(accepted: Fraction) -> Fraction:
        """f(A): what r = min(1, p A / q) accepts."""
        r = [min(F(1), accepted * mass / x) if x else F(0) for mass, x in zip(p, q, strict=True)]
        return accepted_mass(q, tuple(r))

    grid = sorted({F(i, 12) for i in range(13)} | {best, alpha, share * best, best + share * (1 - best)})
    for accepted in grid:
        assert implied(accepted) == sum(min(x, accepted * mass) for mass, x in zip(p, q, strict=True))
        assert implied(accepted) <= accepted
        assert (implied(accepted) == accepted) == (accepted <= best)
        if implied(accepted) == accepted:
            assert all(accepted * mass <= x for mass, x in zip(p, q, strict=True) if x)  # the minimum cuts nothing off
    for left, right in pairwise(grid):
        assert 2 * implied((left + right) / 2) >= implied(left) + implied(right)
    assert (implied(alpha) == alpha) == (alpha == best)


@given(pairs())
@example((fractions("99/100 1/100"), fractions("99999/100000 1/100000")))
def test_what_resampling_from_p_costs(pair):
    p, q = pair
    w = worths(p, q)
    inside = [value for value, mass in zip(w, p, strict=True) if mass]
    assert mean(p, w) == overlap(p, q) and min(inside) == smallest_ratio(p, q)
    loss = overlap(p, q) - smallest_ratio(p, q)
    assert loss == mean(p, tuple(value - min(inside) for value in w)) >= 0
    assert (loss == 0) == (len(set(inside)) == 1)
    if p[0] == F(99, 100):
        assert overlap(p, q) == F(99001, 100000) and smallest_ratio(p, q) == F(1, 1000)


@EXPLORED
@given(pairs(max_vocab=4))
@example((fractions("1/2 1/2"), fractions("1 0")))
def test_the_law_of_the_naive_rule(pair):
    p, q = pair
    alpha, w = overlap(p, q), worths(p, q)
    law = one_trial(q, ratios(p, q), p)
    assert law == tuple(mass * (1 + value - alpha) for mass, value in zip(p, w, strict=True))
    variance = mean(p, tuple((value - alpha) ** 2 for value in w))
    assert distance(law, p) == mean(p, tuple(abs(value - alpha) for value in w)) / 2
    assert sum((a - b) ** 2 / b for a, b in zip(law, p, strict=True) if b) == variance
    assert (2 * distance(law, p)) ** 2 <= variance <= alpha * (1 - alpha) <= F(1, 4)
    if q == fractions("1 0") and p == fractions("1/2 1/2"):
        assert distance(law, p) == F(1, 4)
    assert one_position(p, q, lossy.biased_resample)[0] == law


@given(pairs(), st.data())
@example((fractions("7/10 3/10 0 0"), fractions("7/20 3/20 3/10 1/5")), None)
def test_when_the_naive_rule_is_unbiased(pair, data):
    p, q = pair
    alpha = overlap(p, q)
    unbiased = one_trial(q, ratios(p, q), p) == p
    assert unbiased == all(x == alpha * mass for mass, x in zip(p, q, strict=True) if mass)
    if all(mass or not x for mass, x in zip(p, q, strict=True)):
        assert unbiased == (p == q)
    if data is None:
        assert unbiased and p != q and alpha == F(1, 2)
        assert one_position(p, q, lossy.biased_resample) == (p, alpha)
        return
    kept = data.draw(st.lists(st.booleans(), min_size=len(q), max_size=len(q)))
    truncated = [x if keep else F(0) for x, keep in zip(q, kept, strict=True)]
    greedy = tuple(F(i == q.index(max(q))) for i in range(len(q)))
    for target in (greedy, normalised(truncated) if any(truncated) else q):
        assert one_trial(q, ratios(target, q), target) == target


# ---------------------------------------------------------------- 5: what the text does not treat


@EXPLORED
@given(tables(), st.integers(1, 3))
def test_block_verification_has_the_targets_law(problem, k):
    reached = {path for path in paths(problem, k) if along(problem.q, path)}
    lengths = {path: block_lengths(problem, path) for path in reached}
    law: Law = {}
    for path in reached:
        for i, chance in enumerate(lengths[path]):
            weights = problem.p(path) if i == k else block_excess(problem, path[:i])
            for y, share in enumerate(normalised(weights)) if any(weights) else ():
                text, mass = (*path[:i], y), along(problem.q, path) * chance * share
                if mass:
                    law[text] = law.get(text, F(0)) + mass
    for i in range(k + 1):
        for prefix in {path[:i] for path in reached}:
            arrived = sum((along(problem.q, path) * sum(lengths[path][i:]) for path in reached if path[:i] == prefix), F(0))
            assert arrived == along(problem.q, prefix) * block_worth(problem, prefix)
    assert extended(problem, law, k + 1) == target_law(problem, k + 1)
    if k < 3:
        assert emitted(problem, block.verify, k) == law


@EXPLORED
@given(tables(), st.integers(1, 3))
@example(TOY, 2)
def test_the_token_rule_is_not_optimal_for_a_block(problem, k):
    by_token = sum(survivals(problem, k))
    by_block, bound = F(0), F(0)
    for i in range(1, k + 1):
        for path in paths(problem, i):
            drafted, wanted = along(problem.q, path), along(problem.p, path)
            by_block += drafted * block_worth(problem, path) if drafted else 0
            bound += min(drafted, wanted)
    assert by_token <= by_block <= bound
    if k < 3:
        assert mean_accepted(emitted(problem, token.verify, k)) == by_token
        assert mean_accepted(emitted(problem, block.verify, k)) == by_block
    if problem is TOY:
        assert (by_token, by_block, bound) == (F(10, 9), F(11, 9), F(12, 9))


@EXPLORED
@given(tables(vocab=3, point=True), st.integers(1, 2))
def test_point_masses_leave_nothing_to_gain(problem, k):
    proposal = chain(problem, (), k, Coins(0.5))
    prefixes = [proposal.tokens[:i] for i in range(1, k + 1)]
    most = sum(along(problem.p, prefix) for prefix in prefixes)
    for rule in (token.verify, block.verify):
        assert mean_accepted(emitted(problem, rule, k)) == most
    bound = sum(min(along(problem.p, path), F(path in prefixes)) for i in range(1, k + 1) for path in paths(problem, i))
    assert bound == most


@EXPLORED
@given(pairs(max_vocab=4), st.sampled_from((F(1), F(1, 2), F(1, 3), F(1, 4))), st.data())
def test_relaxed_rules_drift_by_no_less_than_they_gain(pair, leniency, data):
    p, q = pair
    vocab, alpha = len(p), overlap(p, q)
    r = data.draw(unit_rows(vocab))
    replacements = [data.draw(laws(vocab)) for _ in range(vocab)]  # each rejected token may have its own
    law = tuple(q[y] * r[y] + sum(q[x] * (1 - r[x]) * replacements[x][y] for x in range(vocab)) for y in range(vocab))
    assert sum(law) == 1 and distance(law, p) >= accepted_mass(q, r) - alpha

    keep = tuple(min(F(1), mass / (leniency * x)) if x else F(1) for mass, x in zip(p, q, strict=True))
    excess = positive(p, q)
    lenient = one_trial(q, keep, normalised(excess) if any(excess) else p)
    gain = accepted_mass(q, keep) - alpha
    assert distance(lenient, p) == gain
    rule = lossy.lenience(float(leniency))
    assert one_position(p, q, rule) == (lenient, accepted_mass(q, keep))
    x = int(np.argmax(q))
    verdict = rule(Proposal((x,), DenseRows((floats(q),))), [floats(p)] * 2, Noise(0).at(0))
    assert math.isclose(verdict.drift.total_variation, gain, abs_tol=1e-12)


@given(tables(vocab=3), st.data())
def test_drift_adds_up_along_a_text(problem, data):
    vocab = problem.vocab
    own = [data.draw(laws(vocab)) for _ in range(vocab + 1)]

    def pi(context: Context) -> Row:
        return own[1 + context[-1]] if context else own[0]

    def divergence(left: dict, right: dict) -> float:
        if any(mass and not right[y] for y, mass in left.items()):
            return math.inf
        return sum(float(mass) * math.log(mass / right[y]) for y, mass in left.items() if mass)

    def keyed(row: Row) -> dict[Context, Fraction]:
        return {(y,): mass for y, mass in enumerate(row)}

    pairs_of_tokens = paths(problem, 2)
    drifted = {path: along(pi, path) for path in pairs_of_tokens}
    target = {path: along(problem.p, path) for path in pairs_of_tokens}
    reached = [(y,) for y in range(vocab) if pi(())[y]]
    added = distance(pi(()), problem.p(())) + sum(pi(())[y[0]] * distance(pi(y), problem.p(y)) for y in reached)
    assert total_variation(drifted, target) <= added
    first = divergence(keyed(pi(())), keyed(problem.p(())))
    rest = [float(pi(())[y[0]]) * divergence(keyed(pi(y)), keyed(problem.p(y))) for y in reached]
    both = divergence(drifted, target)
    assert both == math.inf == first + sum(rest) or math.isclose(both, first + sum(rest), rel_tol=1e-12, abs_tol=1e-12)


@given(pairs())
def test_shared_races_agree_within_bounds(pair):
    p, q = pair
    both = [i for i in range(len(p)) if p[i] and q[i]]
    agree = sum((1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in both), F(0))
    apart = distance(p, q)
    assert (1 - apart) / (1 + apart) <= agree <= 1 - apart
    assert math.isclose(coupled.acceptance(floats(p), floats(q)), agree, abs_tol=1e-12)


# ---------------------------------------------------------------- the pages

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("theory.md", "theory.zh.md")


def statements(page: str) -> list[tuple[str, list[str], bool]]:
    """The number of each statement of a page, the tests that it names, and whether it corrects the article."""
    parts = re.split(r"^\*\*(S\d+)\b", (DOCS / page).read_text(), flags=re.MULTILINE)
    return [
        (number, re.findall(r"`(test_\w+)`", body), "**Corrected:**" in body or "**更正：**" in body)
        for number, body in zip(parts[1::2], parts[2::2], strict=True)
    ]


def test_pages_say_the_same_and_name_every_test_of_a_statement():
    english, chinese = statements(PAGES[0]), statements(PAGES[1])
    assert english == chinese
    assert [number for number, *_ in english] == [f"S{i}" for i in range(1, len(english) + 1)]
    assert all(len(names) == 1 for _, names, _ in english)
    named = [names[0] for _, names, _ in english]
    assert named == [name for name in globals() if name.startswith("test_") and not name.startswith("test_pages_")]


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short_and_lead_somewhere(page):
    lines = (DOCS / page).read_text().splitlines()
    assert len(lines) <= 250
    for line in lines:
        assert sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line) <= 130, line
        assert not re.match(r"[>+=] |- (?!\([a-d]\))|\d+[.)] ", line), f"Markdown takes this for no formula: {line}"
    assert not re.search(r"(^|[^A-Za-z0-9_.])/(work|root|tmp|home)/", "\n".join(lines))
    for target in re.findall(r"\]\(([^)#:]+)\)", "\n".join(lines)):
        assert (DOCS / target).exists(), target
