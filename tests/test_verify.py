"""Worked examples, one per branch. The laws themselves are certified in test_prove.py."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from truedraw.errors import ProposalError, RowError
from truedraw.randomness import Noise, Purpose
from truedraw.registry import RULES
from truedraw.sampling import TargetRows, race
from truedraw.types import DenseRows, PointMass, Proposal, SparseRows, Verdict
from truedraw.verify import coupled, probability, token

P = np.array([0.5, 0.3, 0.2])  # R1 of FAULTS.md
Q = np.array([0.2, 0.3, 0.5])


@dataclass
class Script:
    """Noise with given uniforms; everything not given is 0.5."""

    start: int = 0
    uniforms: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)

    def uniform(self, purpose, index):
        self.asked.append((purpose, index))
        return self.uniforms.get((purpose, index), 0.5)

    def race(self, position):
        return Noise(5).at(0).race(position)


def sampled(*tokens, row=Q):
    return Proposal(tokens, DenseRows((row,) * len(tokens)))


def rows(count, row=P):
    return TargetRows.of([row] * count)


# ---------------------------------------------------------------- token rule


@pytest.mark.parametrize(("x", "accept"), [(0, 1.0), (1, 1.0), (2, 0.4)])
def test_r1_accepts_with_probability_min_1_p_over_q(x, accept):
    just_below = Script(uniforms={(Purpose.ACCEPT, 0): min(accept, 1) - 1e-12})
    assert token.verify(sampled(x), rows(2), just_below).num_accepted == 1
    if accept < 1:
        at = Script(uniforms={(Purpose.ACCEPT, 0): accept + 1e-12})
        verdict = token.verify(sampled(x), rows(2), at)
        assert verdict.path == () and verdict.origin == "residual"


@pytest.mark.parametrize("r", [0.0, 0.5, 1 - 2**-53])
def test_r1_residual_can_only_give_token_0(r):  # B01
    script = Script(uniforms={(Purpose.ACCEPT, 0): 0.9, (Purpose.RESIDUAL, 0): r})
    assert token.verify(sampled(2), rows(2), script).next_token == 0


def test_all_accepted_gives_the_bonus_from_the_last_row():  # B86, B18
    one_hot = np.eye(5)
    verdict = token.verify(Proposal((1, 2, 3)), TargetRows.of(one_hot[1:5]), Script())
    assert verdict.path == (0, 1, 2) and verdict.next_token == 4 and verdict.origin == "bonus"


@pytest.mark.parametrize("name", sorted(RULES))
def test_an_empty_proposal_is_one_race_under_every_rule(name):
    for start in range(20):
        script = Script(start=start)
        verdict = RULES[name](Proposal(), rows(1), script)
        assert verdict == Verdict((), race(P, script.race(start)), "plain") and script.asked == []


def test_nothing_behind_the_first_rejection_is_looked_at():  # B19, B20
    looked = []

    def compute(i):
        looked.append(i)
        return P

    script = Script(uniforms={(Purpose.ACCEPT, 1): 0.99})
    verdict = token.verify(sampled(0, 2, 0, 0), TargetRows(5, compute), script)
    assert verdict.path == (0,) and looked == [0, 1]
    assert script.asked == [(Purpose.ACCEPT, 0), (Purpose.ACCEPT, 1), (Purpose.RESIDUAL, 1)]


def test_u_0_does_not_accept_what_the_target_forbids():  # ALGORITHMS finding 8
    p, q = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    verdict = token.verify(sampled(1, row=q), TargetRows.of([p, p]), Script(uniforms={(Purpose.ACCEPT, 0): 0.0}))
    assert verdict.path == () and verdict.next_token == 0


def test_p_0_and_q_0():  # B04 (b): never accepted, no NaN; (a): refused where the proposal is built
    p = np.array([1.0, 0.0])
    for u in (0.0, 0.5):
        verdict = token.verify(Proposal((1,)), TargetRows.of([p, p]), Script(uniforms={(Purpose.ACCEPT, 0): u}))
        assert verdict.path == () and verdict.next_token == 0


@pytest.mark.parametrize("bad", [-1, 3, 49_250])
@pytest.mark.parametrize("name", sorted(RULES))
def test_tokens_outside_the_vocabulary_are_rejected_and_never_indexed(bad, name):  # B64, B69
    last_is_likely = TargetRows.of([[0.0, 0.0, 1.0]] * 3)  # -1 would read it
    verdict = RULES[name](Proposal((2, bad)), last_is_likely, Script())
    assert verdict.path == (0,) and verdict.next_token == 2 and verdict.origin == "residual"


def test_a_draft_vocabulary_padded_beyond_the_targets():  # B68: mass outside is an ordinary rejection
    q = np.array([0.2, 0.1, 0.1, 0.6])
    p = np.array([0.5, 0.3, 0.2])
    outside = token.verify(sampled(3, row=q), TargetRows.of([p, p]), Script(uniforms={(Purpose.RESIDUAL, 0): 0.99}))
    assert outside.path == () and outside.next_token == 2  # the residual is (.3, .2, .1)
    shorter = np.array([0.4, 0.6])
    script = Script(uniforms={(Purpose.ACCEPT, 0): 0.7, (Purpose.RESIDUAL, 0): 0.99})
    assert token.verify(sampled(1, row=shorter), TargetRows.of([p, p]), script).next_token == 2  # (.1, 0, .2)


def test_sparse_and_dense_rows_give_the_same_verdicts():
    sparse = Proposal((2, 0), SparseRows((np.arange(3), np.arange(3)), (Q, Q)))
    for seed in range(200):
        noise = Noise(seed).at(0)
        assert token.verify(sparse, rows(3), noise) == token.verify(sampled(2, 0), rows(3), noise)


def test_point_masses_are_accepted_with_probability_p():
    assert token.verify(Proposal((1,)), rows(2), Script(uniforms={(Purpose.ACCEPT, 0): 0.3 - 1e-12})).path == (0,)
    rejected = token.verify(Proposal((1,)), rows(2), Script(uniforms={(Purpose.ACCEPT, 0): 0.3, (Purpose.RESIDUAL, 0): 0.72}))
    assert rejected.next_token == 2  # residual (.5, 0, .2)


def test_verification_changes_neither_p_nor_q():  # B12, B13
    p = np.tile(P, (3, 1))
    proposal = Proposal((0, 1), PointMass())
    first = [token.verify(proposal, p, Noise(seed).at(0)) for seed in range(50)]
    np.testing.assert_array_equal(p, np.tile(P, (3, 1)))
    assert first == [token.verify(proposal, p, Noise(seed).at(0)) for seed in range(50)]


@pytest.mark.parametrize("name", sorted(RULES))
def test_logits_handed_over_as_rows_are_refused(name):  # B08
    with pytest.raises(RowError, match="sum to 1"):
        RULES[name](Proposal((0,)), [[2.0, 1.0, -1.0]] * 2, Script())


def test_the_token_rule_refuses_trees():
    with pytest.raises(ProposalError, match="tree"):
        token.verify(Proposal((0, 1), parents=(-1, -1)), rows(3), Script())


def test_greedy_rows_accept_the_argmax_only():  # B15: p gives a=.3 b=.5, q gives a=.2
    one_hot = np.array([0.0, 1.0, 0.0])
    for u in (0.0, 0.5, 1 - 2**-53):
        script = Script(uniforms={(Purpose.ACCEPT, 0): u})
        assert token.verify(sampled(0, row=Q), TargetRows.of([one_hot] * 2), script).next_token == 1


# ---------------------------------------------------------------- coupled rule


@pytest.mark.parametrize("seed", range(30))
def test_coupled_emits_what_plain_decoding_draws(seed):
    noise = Noise(seed).at(4)
    plain = coupled.verify(Proposal(), rows(1), noise).next_token
    for x in range(3):
        verdict = coupled.verify(Proposal((x,)), rows(2), noise)
        emitted = [*[x][: verdict.num_accepted], verdict.next_token]
        assert emitted[0] == plain
        assert verdict.origin == ("bonus" if x == plain else "residual")


def test_coupled_walks_a_tree_from_the_root():
    tree = Proposal((0, 1, 2, 0, 1, 2, 0, 1, 2), parents=(-1, -1, -1, 0, 0, 0, 1, 1, 1))
    one_hot = np.eye(3)
    verdict = coupled.verify(tree, TargetRows.of([one_hot[1], *[one_hot[2]] * 9]), Noise(0).at(0))
    assert verdict.path == (1, 8) and verdict.next_token == 2 and verdict.origin == "bonus"
    childless = coupled.verify(tree, TargetRows.of([one_hot[2], *[one_hot[0]] * 9]), Noise(0).at(0))
    assert childless.path == (2,) and childless.next_token == 0 and childless.origin == "bonus"


def test_acceptance_of_shared_noise_has_its_closed_form():
    """P(match) = sum_i 1 / sum_j max(p_j/p_i, q_j/q_i) (ALGORITHMS 4). n = 20,000: the bound of 4.5
    standard errors is passed with probability 7e-6; n-sized shifts of 0.016 would be seen."""
    from truedraw.sampling import draw_draft

    ratio = sum(1 / max_sum for max_sum in (np.maximum(P / P[i], Q / Q[i]).sum() for i in range(3)))
    n, matches = 20_000, 0
    for seed in range(n):
        noise = Noise(seed).at(0)
        matches += coupled.verify(Proposal((draw_draft(Q, noise, 0, coupled=True),)), rows(2), noise).num_accepted
    assert abs(matches / n - ratio) < 4.5 * np.sqrt(ratio * (1 - ratio) / n)


def test_probability_of_ids_outside_is_0():
    assert [probability(P, x) for x in (-1, 0, 2, 3)] == [0, 0.5, 0.2, 0]
