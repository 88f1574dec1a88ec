"""The rules beyond token and coupled: worked examples, acceptance, refusals. Their laws are certified
in test_prove.py."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw.errors import InvalidParameter, ProposalError, RowError, RuleError
from truedraw.randomness import Noise, Purpose
from truedraw.registry import LOSSY_RULES, RULES, find_rule
from truedraw.sampling import TargetRows, draw_draft, race
from truedraw.types import DenseRows, Drift, Proposal
from truedraw.verify import block, coupled, lossy, multidraft, token, traversal
from truedraw.verify.family import family, for_replacement, largest_acceptance, resample_from_target

P = np.array([0.5, 0.3, 0.2])  # R1 of FAULTS.md
Q = np.array([0.2, 0.3, 0.5])
RESIDUAL = np.array([1.0, 0.0, 0.0])
TV = 0.3


class Script:
    """Noise with given uniforms; everything not given is 0.5."""

    start = 0

    def __init__(self, uniforms=None):
        self.uniforms, self.asked = uniforms or {}, []

    def uniform(self, purpose, index):
        self.asked.append((purpose, index))
        return self.uniforms.get((purpose, index), 0.5)

    def race(self, position):
        return Noise(5).at(0).race(position)


def sampled(*tokens, row=Q, parents=None):
    return Proposal(tokens, DenseRows((row,) * len(tokens)), parents)


def rows(count, row=P):
    return TargetRows.of([row] * count)


def laws(size):
    numbers = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    return numbers.map(lambda counts: np.array(counts) / sum(counts))


pairs = st.integers(2, 5).flatmap(lambda size: st.tuples(laws(size), laws(size)))


# ---------------------------------------------------------------- block


def test_block_tries_the_longest_prefix_first_and_shapes_only_what_it_needs():
    looked = []

    def compute(i):
        looked.append(i)
        return P

    script = Script({(Purpose.ACCEPT, 2): 0.39})
    verdict = block.verify(sampled(0, 1, 2), TargetRows(4, compute), script)
    assert verdict.path == (0, 1, 2) and verdict.origin == "bonus"
    assert script.asked == [(Purpose.ACCEPT, 2), (Purpose.BONUS, 3)]  # P_3 = .4, and nothing else was asked
    script = Script({(Purpose.ACCEPT, 2): 0.41})
    assert block.verify(sampled(0, 1, 2), rows(4), script).path == (0, 1)  # P_2 = 1, S_2 = .3: h_2 = 1
    assert script.asked == [(Purpose.ACCEPT, 2), (Purpose.ACCEPT, 1), (Purpose.RESIDUAL, 2)]


def test_block_stops_looking_behind_a_draft_that_the_target_forbids():
    looked = []

    def compute(i):
        looked.append(i)
        return np.array([1.0, 0.0])

    verdict = block.verify(sampled(1, 0, 0, row=np.array([0.5, 0.5])), TargetRows(4, compute), Script({(Purpose.ACCEPT, 0): 0.0}))
    assert verdict.path == () and verdict.next_token == 0 and set(looked) == {0}


def test_block_on_the_worked_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), drafts (0, 0): P = 1/2, 1/4; S_1 = max(1/6 - 2/3, 0) + max(1/3 - 1/3, 0) = 0."""
    p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
    proposal = sampled(0, 0, row=q)
    assert block.prefix_worths(proposal, rows(3, p)) == [1.0, 0.5, 0.25]
    assert block.verify(proposal, rows(3, p), Script({(Purpose.ACCEPT, 1): 0.24})).path == (0, 1)
    rejected = block.verify(proposal, rows(3, p), Script({(Purpose.ACCEPT, 1): 0.26, (Purpose.ACCEPT, 0): 0.0}))
    assert rejected.path == () and rejected.next_token == 1


@given(st.integers(2, 4).flatmap(lambda size: st.tuples(*[laws(size)] * 4)))
def test_block_accepts_at_least_as_much_as_token_in_expectation(given_rows):
    """Exact sums over two drafts: sum over prefixes of q P_i against the products of min(p, q)."""
    p1, p2, q1, q2 = given_rows
    by_token = by_block = 0.0
    for x in range(len(p1)):
        if q1[x]:
            worth = min(1.0, p1[x] / q1[x])
            by_token += q1[x] * worth * (1 + np.minimum(p2, q2).sum())
            by_block += q1[x] * worth + np.minimum(q1[x] * q2, q1[x] * worth * p2).sum()
    assert by_block >= by_token - 1e-12


def test_block_equals_token_for_point_masses_in_acceptance():
    for x, y in ((0, 0), (1, 2), (2, 1)):
        proposal = Proposal((x, y))
        counts = [
            sum(rule(proposal, rows(3), Noise(seed).at(0)).num_accepted for seed in range(4000))
            for rule in (token.verify, block.verify)
        ]
        expected = P[x] * (1 + P[y])  # 4.5 standard errors of 4,000 draws, each at most 2
        assert all(abs(count / 4000 - expected) < 4.5 / math.sqrt(4000) for count in counts)


# ---------------------------------------------------------------- family


def test_the_largest_r_is_the_token_rule():
    largest = family(lambda p, q: np.minimum(1.0, p / q))
    for x in range(3):
        for seed in range(50):
            noise = Noise(seed).at(0)
            assert largest(sampled(x), rows(2), noise) == token.verify(sampled(x), rows(2), noise)


def test_an_array_may_be_the_rule():
    never = family(np.zeros(3))
    verdict = never(sampled(0), rows(2), Script({(Purpose.ACCEPT, 0): 0.0, (Purpose.RESIDUAL, 0): 0.79}))
    assert verdict.path == () and verdict.next_token == 1  # a = p


def test_a_rule_that_breaks_its_bound_is_refused_with_the_token_and_the_excess():
    with pytest.raises(RuleError, match=r"keeps token 2 with probability 0.5, 0.1 above min\(1, p/q\) = 0.4"):
        family(np.array([1.0, 1.0, 0.5]))(sampled(2), rows(2), Script())
    with pytest.raises(RuleError, match=r"keeps token 0 with probability 1.5, 0.5 above"):
        family(np.array([1.5, 1.0, 0.4]))(sampled(2), rows(2), Script())
    with pytest.raises(RuleError, match=r"keeps token 1 with probability -0\.1"):
        family(np.array([1.0, -0.1, 0.4]))(sampled(2), rows(2), Script())
    with pytest.raises(RuleError, match="keeps token 1 with probability nan"):
        family(np.array([1.0, np.nan, 0.4]))(sampled(2), rows(2), Script())
    with pytest.raises(RuleError, match="one number for each of the 3 tokens"):
        family(np.ones(2))(sampled(2), rows(2), Script())


@given(pairs)
def test_replacement_laws(pair):
    """a = residual gives alpha = 1 - TV; a = p gives A* = min over p > 0 of q/p; any a between them exists."""
    p, q = pair
    excess = np.maximum(p - q, 0)
    tv = excess.sum()
    assert math.isclose(largest_acceptance(p, q, p), min(1.0, min(q[i] / p[i] for i in range(len(p)) if p[i] > 0)), abs_tol=1e-12)
    if tv > 0:
        residual = excess / tv
        assert math.isclose(largest_acceptance(p, q, residual), 1 - tv, abs_tol=1e-12)
        between = largest_acceptance(p, q, (residual + p) / 2)
        assert largest_acceptance(p, q, p) - 1e-12 <= between <= 1 - tv + 1e-12


def test_why_there_is_no_rule_with_this_replacement():
    with pytest.raises(RuleError, match=r"token 0 has p = 0.5 above q = 0.2, and a gives it nothing"):
        for_replacement([0.0, 0.5, 0.5])(sampled(2), rows(2), Script())
    with pytest.raises(
        RuleError, match=r"token 0 asks for rejections with probability 0.6 at least, and token 2 bears 0.4 at most"
    ):
        for_replacement([0.5, 0.0, 0.5])(sampled(2), rows(2), Script())
    with pytest.raises(RowError, match=r"replacement law a sums to 0\.9"):
        for_replacement([0.5, 0.2, 0.2])(sampled(2), rows(2), Script())


def test_resample_from_target_accepts_a_star():
    """A* = min q/p = .4: r = A* p/q = (1, .4, .16)."""
    for x, r in enumerate((1.0, 0.4, 0.16)):
        assert resample_from_target(sampled(x), rows(2), Script({(Purpose.ACCEPT, 0): r - 1e-9})).path == (0,)
        if r < 1:
            assert resample_from_target(sampled(x), rows(2), Script({(Purpose.ACCEPT, 0): r + 1e-9})).path == ()


# ---------------------------------------------------------------- several candidates


def test_candidates_are_tried_in_order_and_each_against_what_is_left():
    rest = np.array([0.2, 0.3, 0.0]) / 0.5
    proposal = Proposal((2, 1), DenseRows((Q, rest)), (-1, -1))
    first = multidraft.verify(proposal, rows(3), Script({(Purpose.ACCEPT, 0): 0.39}))
    assert first.path == (0,) and first.origin == "bonus"
    second = multidraft.verify(proposal, rows(3), Script({(Purpose.ACCEPT, 0): 0.41, (Purpose.ACCEPT, 1): 0.0}))
    assert second.path == () and second.next_token == 0 and second.origin == "residual"  # (1, 0, 0) is left


def test_a_residual_that_is_another_child_is_accepted_and_the_walk_goes_on():
    greedy, laws_of = multidraft.greedy_draft(np.array([0.1, 0.5, 0.4]), 2, 0.9)
    assert greedy == [2, 1] and laws_of[1].tolist() == [0, 1, 0]
    proposal = Proposal((2, 1, 0), DenseRows((*laws_of, P)), (-1, -1, 1))
    p = np.array([0.0, 1.0, 0.0])
    verdict = multidraft.verify(proposal, rows(4, p), Script({(Purpose.ACCEPT, 1): 0.5}))
    assert verdict.path == (1,) and verdict.origin == "residual" and verdict.next_token == 1


@given(pairs, st.integers(1, 3))
def test_acceptance_of_candidates_stays_within_the_transport_bound(pair, n):
    p, q = pair
    drawn = drawn_sets(q, n)
    bound = multidraft.optimal_acceptance_of(p, drawn)
    assert acceptance_without_replacement(p, q, n) <= bound + 1e-12
    independent = independent_sets(q, n)
    assert math.isclose(multidraft.optimal_acceptance_of(p, independent), multidraft.optimal_acceptance(p, q, n), abs_tol=1e-12)
    best = np.argsort(-q, kind="stable")[: n - 1]
    fixed = frozenset(int(i) for i in best if q[i] > 0)
    rest = {i: q[i] for i in range(len(q)) if i not in fixed and q[i] > 0}
    greedy = {fixed | {i}: mass / sum(rest.values()) for i, mass in rest.items()} or {fixed: 1.0}
    assert math.isclose(multidraft.greedy_draft_acceptance(p, q, n), multidraft.optimal_acceptance_of(p, greedy), abs_tol=1e-12)
    assert multidraft.optimal_acceptance(p, q, 1) == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


def sequences(q, n):
    """Successive sampling: each order of distinct tokens and its probability."""
    support = [i for i in range(len(q)) if q[i] > 0]
    for order in permutations(support, min(n, len(support))):
        mass, left = 1.0, 1.0
        for i in order:
            mass *= q[i] / left
            left = max(left - q[i], 1e-300)
        yield order, mass


def drawn_sets(q, n):
    sets = {}
    for order, mass in sequences(q, n):
        sets[frozenset(order)] = sets.get(frozenset(order), 0.0) + mass
    return sets


def independent_sets(q, n):
    sets = {frozenset(): 1.0}
    for _ in range(n):
        grown = {}
        for drawn, mass in sets.items():
            for i in range(len(q)):
                if q[i] > 0:
                    grown[drawn | {i}] = grown.get(drawn | {i}, 0.0) + mass * q[i]
        sets = grown
    return sets


def acceptance_without_replacement(p, q, n):
    """P(some candidate is kept), by the recursion of the rule over all orders."""
    total = 0.0
    for order, mass in sequences(q, n):
        left, row, rejected = p.copy(), q.copy(), 1.0
        for x in order:
            keep = min(1.0, left[x] / row[x])
            total += mass * rejected * keep
            rejected *= 1 - keep
            if rejected <= 0:
                break
            left = np.maximum(left - row, 0)
            left /= left.sum()
            row = row.copy()
            row[x] = 0
            row = row / row.sum() if row.any() else row
    return total


def test_mean_acceptance_of_two_candidates():
    """ALGORITHMS 3.5: two draws beat one, without replacement beats with, the greedy draft beats both."""
    generator = np.random.default_rng(0)
    means = np.zeros(4)
    for _ in range(200):
        p, noise = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
        q = (p + noise) / 2
        means += [
            np.minimum(p, q).sum(),
            acceptance_without_replacement(p, q, 2),
            multidraft.greedy_draft_acceptance(p, q, 2),
            multidraft.optimal_acceptance(p, q, 2),
        ]
    single, without, greedy, bound = means / 200
    assert single < 0.8 < without < greedy and 0.85 < without < 0.93 and 0.9 < bound < 0.97


def test_traversal_of_a_chain_is_block_verification():
    for seed in range(300):
        noise = Noise(seed).at(0)
        drafts = tuple(draw_draft(Q, noise, i, coupled=False) for i in range(3))
        ours, blocks = (rule(sampled(*drafts), rows(4), noise) for rule in (traversal.verify, block.verify))
        assert ours.path == blocks.path and ours.next_token == blocks.next_token


def test_chain_rules_refuse_trees():
    tree = sampled(0, 1, parents=(-1, -1))
    for name in set(RULES) - {"coupled", "multidraft", "traversal"}:
        with pytest.raises(ProposalError, match="verifies chains"):
            RULES[name](tree, rows(3), Script())
    for rule in (lossy.biased_resample, lossy.lenience(0.5)):
        with pytest.raises(ProposalError, match="verifies chains"):
            rule(tree, rows(3), Script())


# ---------------------------------------------------------------- coupled


@given(pairs)
def test_coupled_acceptance_lies_between_its_bounds_and_has_its_closed_form(pair):
    p, q = pair
    tv = np.abs(p - q).sum() / 2
    wanted = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in range(len(p)) if p[i] > 0 and q[i] > 0)
    assert coupled.acceptance(p, q) == pytest.approx(wanted, abs=1e-12)
    assert (1 - tv) / (1 + tv) - 1e-12 <= wanted <= 1 - tv + 1e-12


def test_what_the_two_levels_of_the_race_give_up():
    """The closed form of the two-level race against 4,000 seeds: 4.5 standard errors, passed by chance
    with probability 7e-6. Over 200 tokens it gives up a few hundredths of the flat race's acceptance."""
    generator = np.random.default_rng(1)
    p = generator.dirichlet(np.full(200, 0.2))
    q = 0.7 * p + 0.3 * generator.dirichlet(np.full(200, 0.2))
    matches = np.mean([race(p, Noise(s).at(0).race(0)) == race(q, Noise(s).at(0).race(0)) for s in range(4000)])
    flat, blocks = coupled.acceptance(p, q), coupled.race_acceptance(p, q)
    assert abs(matches - blocks) < 4.5 * math.sqrt(blocks * (1 - blocks) / 4000)
    assert coupled.race_acceptance(p, q, block=200) == pytest.approx(flat, abs=1e-12)
    assert -0.03 < flat - blocks < 0.06


# ---------------------------------------------------------------- lossy


def test_the_naive_rule_reports_its_bias():
    """R1: min(p, q) + .3 p = (.35, .39, .26): TV .15."""
    verdict = lossy.biased_resample(sampled(2), rows(2), Script({(Purpose.ACCEPT, 0): 0.9}))
    assert verdict.drift.total_variation == pytest.approx(0.15)
    law = np.array([0.35, 0.39, 0.26])
    assert verdict.drift.kl_divergence == pytest.approx((law * np.log(law / P)).sum())
    assert lossy.biased_resample(sampled(0, 0), rows(3), Script()).drift.total_variation == pytest.approx(0.30)


def test_the_naive_rule_is_exact_where_q_is_a_multiple_of_p():  # ALGORITHMS 1.5
    p, q = np.array([0.7, 0.3, 0, 0]), np.array([0.35, 0.15, 0.3, 0.2])
    drift = lossy.biased_resample(sampled(2, row=q), rows(2, p), Script()).drift
    assert drift.total_variation < 1e-15 and drift.kl_divergence < 1e-15


@given(pairs, st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_lenience_drifts_by_exactly_what_it_accepts_too_much(pair, leniency):
    p, q = pair
    x = int(q.argmax())
    drift = lossy.lenience(leniency)(sampled(x, row=q), rows(2, p), Script()).drift
    gain = np.minimum(q, p / leniency).sum() - np.minimum(p, q).sum()
    assert drift.total_variation == pytest.approx(gain, abs=1e-12)
    assert leniency < 1 or drift.total_variation < 1e-12


def test_thresholds_at_one_are_exact_and_lower_ones_say_so():
    exact = lossy.thresholds()(Proposal((1,)), rows(2), Script())
    assert exact.drift == Drift(0.0, 0.0) or exact.drift.total_variation < 1e-15
    lax = lossy.thresholds(0.6, 1.0)(Proposal((1,)), rows(2), Script())
    assert lax.drift.total_variation == pytest.approx(0.3 / 0.6 - 0.3)
    assert lossy.thresholds(1.0, 0.3)(Proposal((1,)), rows(2), Script()).drift.total_variation == pytest.approx(0.7)


def test_typical_acceptance_of_a_point_mass():
    kept = lossy.typical(0.3, 0.9)(Proposal((1,)), rows(2), Script())  # H(p) = 1.03: threshold min(.3, .32) = .3
    assert (kept.path == () and kept.next_token != 1) or kept.drift.total_variation == 0  # p = .3 is not above .3
    kept = lossy.typical(0.29, 0.9)(Proposal((1,)), rows(2), Script({(Purpose.ACCEPT, 0): 0.999}))
    assert kept.path == (0,) and kept.drift.total_variation == pytest.approx(0.7)


def test_drifts_add_up_and_bound_the_text():
    total = Drift(0.1, 0.02) + Drift(0.3, 0.06)
    assert total == Drift(0.4, 0.08) and total.bound == pytest.approx(0.2)  # sqrt(.08 / 2)
    assert Drift(5.0, math.inf).bound == 1.0


@pytest.mark.parametrize("bad", [0, -0.5, 1.5, math.nan, True, "x"])
def test_lossy_parameters_out_of_range(bad):
    for factory in (lossy.lenience, lossy.typical, lossy.thresholds):
        with pytest.raises(InvalidParameter, match=r"a number in \(0, 1\]"):
            factory(bad)


# ---------------------------------------------------------------- names


def test_rules_are_found_by_name():
    assert all(find_rule(name) is RULES[name] for name in RULES)
    for name in LOSSY_RULES:
        with pytest.raises(InvalidParameter, match="allow-lossy"):
            find_rule(name)
        assert callable(find_rule(name if name != "lenience" else "lenience:0.5", allow_lossy=True))
    with pytest.raises(InvalidParameter, match=r"block, coupled, multidraft, .*lossy"):
        find_rule("best")
    for name in ("token:1", "lenience:0.5x", "lenience:0.5,0.5", "biased_resample:1", "lenience"):
        with pytest.raises(InvalidParameter, match="rule is"):
            find_rule(name, allow_lossy=True)
    with pytest.raises(InvalidParameter, match="l is 2"):
        find_rule("lenience:2", allow_lossy=True)


# ---------------------------------------------------------------- bad rows


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[0.5, 0.3, 0.2], [0.5, -0.1, 0.6]], "target row at index 1 holds -0.1 at token 1"),
        ([[0.5, 0.3, 0.2], [0.5, 0.3, 0.3]], "target row at index 1 sums to 1.1"),
        ([[0.5, math.nan, 0.2], [0.5, 0.3, 0.2]], "target row at index 0 holds nan at token 1"),
        ([[0.5, math.inf, 0.2], [0.5, 0.3, 0.2]], "target row at index 0 holds inf at token 1"),
        ([[0.5, 0.3, 0.2], [0.5, 0.5]], "target row at index 1 has 2 tokens and row 0 has 3"),
        ([[0.5, 0.3, 0.2]], "1 target rows for 1 draft tokens: 2 are needed"),
    ],
)
def test_bad_target_rows_are_named(name, bad, message):
    with pytest.raises(RowError, match=message):
        RULES[name](sampled(0), bad, Script())


def test_bad_draft_rows_are_named():
    with pytest.raises(RowError, match="draft row at index 1 holds nan at token 2"):
        DenseRows((Q, np.array([0.5, 0.5, np.nan])))
    with pytest.raises(ProposalError, match="draft token 1 at index 0 has q = 0"):
        Proposal((1,), DenseRows((np.array([1.0, 0.0]),)))
