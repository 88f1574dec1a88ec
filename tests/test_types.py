import math

import numpy as np
import pytest

from truedraw.errors import InvalidParameter, ProposalError, RowError
from truedraw.types import DenseRows, PointMass, Proposal, SamplingParams, SparseRows, Stats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("seed", -1),
        ("seed", 2**64),
        ("temperature", 10**400),
        ("logit_bias", {1: 10**400}),
        ("n", 0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", [1]),
    ],
)
def test_parameters_out_of_range_name_the_field_and_what_is_allowed(field, value):
    with pytest.raises(InvalidParameter, match=field) as error:
        SamplingParams(**{field: value})
    assert "allowed is" in str(error.value) and "\n" not in str(error.value)


def test_parameters_at_the_edges_are_accepted():
    assert type(SamplingParams(seed=np.int64(7)).seed) is int
    SamplingParams(temperature=0, top_p=0, top_k=0, min_p=1, max_tokens=0, seed=2**64 - 1, logit_bias={5: -math.inf})
    assert SamplingParams(stop="end").stop == ("end",)
    with pytest.raises(InvalidParameter, match="min_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3)


# ---------------------------------------------------------------- proposals


def test_a_token_with_q_0_cannot_have_been_drawn():  # B04
    row = np.array([0.5, 0.5, 0.0])
    with pytest.raises(ProposalError, match="q = 0"):
        Proposal((2,), DenseRows((row,)))
    with pytest.raises(ProposalError, match="q = 0"):
        Proposal((-1,), DenseRows((row,)))


@pytest.mark.parametrize("row", [[2.0, 1.0, -1.0], [0.5, 0.4, 0.0], [math.nan, 0.5, 0.5], [[0.5, 0.5]], []])
def test_logits_in_the_place_of_probabilities_are_refused(row):  # B08
    with pytest.raises(RowError, match=r"sum to 1|one number for each token"):
        DenseRows((np.array(row),))


def test_recorded_rows_cannot_be_changed():  # B12
    row = np.array([0.5, 0.5])
    q = DenseRows((row,))
    with pytest.raises(ValueError, match="read-only"):
        q.rows[0][0] = 1.0


def test_sparse_rows_equal_the_dense_rows_they_stand_for():
    sparse = SparseRows((np.array([3, 1]),), (np.array([0.25, 0.75]),))
    dense = np.array([0, 0.75, 0, 0.25, 0])
    assert [sparse.prob(0, token) for token in range(5)] == list(dense)
    np.testing.assert_array_equal(sparse.row(0, 3, 5), dense)
    np.testing.assert_array_equal(sparse.row(0, 3, 3), dense[:3])  # a target with fewer tokens
    assert Proposal((3,), sparse).cut(0).q.sampled
    with pytest.raises(ProposalError, match="distinct"):
        SparseRows((np.array([1, 1]),), (np.array([0.5, 0.5]),))


def test_each_sampled_token_needs_its_own_row():
    with pytest.raises(ProposalError, match="2 draft tokens and 1 draft rows"):
        Proposal((0, 0), DenseRows((np.array([1.0]),)))


def test_trees_and_chains():
    chain = Proposal((4, 5, 6), parents=(-1, 0, 1))
    assert chain.is_chain and chain.parents is None and chain.path(2) == (0, 1, 2)
    tree = Proposal((4, 5, 6, 7), parents=(-1, -1, 0, 2))
    assert not tree.is_chain and tree.path(3) == (0, 2, 3) and tree.path(-1) == ()
    assert tree.cut(2).parents == (-1, -1)
    for parents in ((0, 0), (-1, 1), (-2, 0)):
        with pytest.raises(ProposalError, match="before their children"):
            Proposal((1, 2), parents=parents)


def test_an_empty_proposal_is_an_ordinary_value():
    empty = Proposal()
    assert len(empty) == 0 and empty.is_chain and empty.q == PointMass() and empty.cut(3) is empty


# ---------------------------------------------------------------- statistics


def test_pooling_is_a_ratio_of_sums_and_nothing_proposed_is_no_ratio():  # B80
    pooled = Stats(proposed=10, accepted=1) + Stats(proposed=4000, accepted=3600) + Stats()
    assert pooled.acceptance_rate == 3601 / 4010
    assert Stats().acceptance_rate is None and Stats().tokens_per_step is None and Stats().tokens_per_second is None
