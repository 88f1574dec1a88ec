import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw.errors import RowError
from truedraw.randomness import Noise
from truedraw.sampling import TargetRows, inverse_cdf, race, residual, shape
from truedraw.types import SamplingParams

EMPTY = np.array([], dtype=np.int32)


def law(probs, context=EMPTY, prompt_length=0, dtype=np.float32, **options):
    """shape() on the logarithms of a row, as a runner would hand them out."""
    extra = {name: options.pop(name) for name in ("stop_ids", "allowed") if name in options}
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(probs)).astype(dtype)
    return shape(logits, SamplingParams(**options), np.array(context, dtype=np.int32), prompt_length, **extra)


# ---------------------------------------------------------------- temperature


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-8, 1e-3, 0.1])
def test_small_temperatures_are_finite_and_greedy(temperature):  # B24
    row = shape(np.array([50.0, 0, -50]), SamplingParams(temperature=temperature), EMPTY, 0)
    np.testing.assert_allclose(row, [1, 0, 0], atol=1e-12)


def test_temperature_is_the_power_of_the_row():
    np.testing.assert_allclose(law([0.5, 0.3, 0.2], temperature=0.5), np.array([25, 9, 4]) / 38, rtol=1e-6)


def test_greedy_ties_go_to_the_first_maximum():  # B26
    logits = np.zeros(8)
    logits[[2, 5]] = 3
    assert shape(logits, SamplingParams(temperature=0), EMPTY, 0).argmax() == 2


# ---------------------------------------------------------------- truncation


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, {0, 3}),
        ([0.3, 0.1, 0.1, 0.5], 1.0, {0, 1, 2, 3}),
        ([0.3, 0.1, 0.1, 0.5], 0.85, {0, 1, 3}),  # ties in token order
        ([0.3, 0.1, 0.1, 0.5], 0.0, {3}),
        ([0.3, 0.1, 0.1, 0.5], 1e-9, {3}),
        ([0.999, 0.001], 0.5, {0}),
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_top_p_keeps_the_smallest_set_that_reaches_it(probs, top_p, kept, dtype):  # B27, B28
    if dtype == np.float16 and top_p in (0.8, 0.5):
        top_p -= 2e-3  # the logits themselves are only good to three digits
    row = law(probs, top_p=top_p, dtype=dtype)
    assert set(np.flatnonzero(row)) == kept
    inside = np.array([p if i in kept else 0 for i, p in enumerate(probs)])
    np.testing.assert_allclose(row, inside / inside.sum(), rtol=5e-3)


def test_top_p_sums_in_double_precision():  # B29
    row = law(np.full(5000, 1 / 5000), top_p=0.9)
    assert abs(np.count_nonzero(row) - 4500) <= 1
    wide = shape(np.zeros(151_936, dtype=np.float32), SamplingParams(top_p=0.5), EMPTY, 0)
    assert abs(np.count_nonzero(wide) - 75_968) <= 1


def test_top_p_of_almost_equal_tokens_keeps_one():
    for vocab in (3, 7, 1000, 49_152):
        logits = np.zeros(vocab)
        logits[::3] -= 1e-16
        assert np.count_nonzero(shape(logits, SamplingParams(top_p=0.0), EMPTY, 0)) == 1


def test_top_p_drops_the_boundary_token_neither_too_early_nor_too_late():  # B31, flashinfer 2202
    row = law([0.5, 0.39999, 0.1, 1e-5], top_p=0.9)
    assert set(np.flatnonzero(row)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("probs", "top_k", "kept"),
    [
        ([0.25, 0.25, 0.25, 0.25], 2, [0, 1]),
        ([0.9] + [0.001] * 100, 5, [0, 1, 2, 3, 4]),
        ([0.1, 0.2, 0.3, 0.4], 1, [3]),
        ([0.1, 0.2, 0.3, 0.4], 9, [0, 1, 2, 3]),
    ],
)
def test_top_k_keeps_exactly_k_ties_by_token_id(probs, top_k, kept):  # B31
    assert list(np.flatnonzero(law(probs, top_k=top_k))) == kept


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.integers(1, 60), st.booleans())
def test_top_k_against_a_sort(vocab, seed, k, ties):
    logits = np.random.default_rng(seed).normal(size=vocab)
    if ties:
        logits = logits.round(1)
    expected = sorted(sorted(range(vocab), key=lambda i: (-logits[i], i))[:k])
    row = shape(logits, SamplingParams(top_k=k), EMPTY, 0)
    assert list(np.flatnonzero(row)) == expected


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.floats(0, 0.999))
def test_top_p_against_a_sort(vocab, seed, top_p):
    logits = np.random.default_rng(seed).normal(size=vocab) * 3
    full = shape(logits, SamplingParams(), EMPTY, 0)
    order = sorted(range(vocab), key=lambda i: (-full[i], i))
    size, total = 0, 0.0
    while size == 0 or total < top_p * (1 - 2e-6):
        total += full[order[size]]
        size += 1
    kept = np.flatnonzero(shape(logits, SamplingParams(top_p=top_p), EMPTY, 0))
    assert list(kept) in (sorted(order[:size]), sorted(order[: size + 1]))


def test_min_p_keeps_its_boundary():  # B32
    np.testing.assert_allclose(law([0.6, 0.3, 0.1], min_p=0.5), [2 / 3, 1 / 3, 0], rtol=1e-6)


def test_top_p_works_on_what_top_k_left():
    np.testing.assert_allclose(law([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55), [1, 0, 0, 0], atol=1e-6)


# ---------------------------------------------------------------- history and masks


def test_penalties_see_the_context_they_are_given():
    logits = np.array([2.0, -2.0, 1.0, 0.0])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # prompt 0 1, output 2 2: repetition over all of it, presence and frequency over the output
    row = shape(logits, params, np.array([0, 1, 2, 2], dtype=np.int32), 2)
    expected = np.exp([1.0, -4.0, 0.5 - 0.5 - 2 * 0.25, 0.0])
    np.testing.assert_allclose(row, expected / expected.sum(), rtol=1e-12)


def test_logit_bias_adds_and_bans():
    np.testing.assert_allclose(law([0.5, 0.5], logit_bias={0: math.log(3)}), [0.75, 0.25], rtol=1e-6)
    assert law([0.9, 0.1], logit_bias={0: -math.inf})[0] == 0
    assert law([0.9, 0.1], logit_bias={0: -100})[0] < 1e-40


def test_stop_tokens_wait_for_min_tokens():  # B36
    options = {"min_tokens": 3, "stop_ids": (0,), "temperature": 0}
    assert law([0.9, 0.1], context=[1, 1], prompt_length=1, **options).argmax() == 1  # one token out
    assert law([0.9, 0.1], context=[1, 1, 1], prompt_length=1, **options).argmax() == 1  # two out
    assert law([0.9, 0.1], context=[1, 1, 1, 1], prompt_length=1, **options).argmax() == 0  # three out


def test_a_mask_removes_mass():
    np.testing.assert_allclose(law([0.5, 0.25, 0.25], allowed=np.array([False, True, True])), [0, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("bad", [[math.nan] * 3, [0, math.nan, 0], [0, math.inf, 0], [-math.inf] * 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_that_are_no_law_are_errors(bad, temperature):  # B67
    with pytest.raises(RowError, match="position 2"):
        shape(np.array(bad), SamplingParams(temperature=temperature), np.array([1, 2], dtype=np.int32), 1)


@pytest.mark.parametrize("extreme", [{"repetition_penalty": 1e-320}, {"frequency_penalty": -1e308, "logit_bias": {1: 1e308}}])
def test_penalties_that_overflow_are_told(extreme):
    with pytest.raises(RowError, match="after penalties and bias"):
        shape(np.ones(3), SamplingParams(temperature=0, **extreme), np.array([0, 1], dtype=np.int32), 1)


def test_some_minus_infinities_are_legal():
    np.testing.assert_allclose(shape(np.array([-math.inf, 0, 0]), SamplingParams(), EMPTY, 0), [0, 0.5, 0.5])


def test_shaping_leaves_the_logits_alone():  # B13, B49
    logits = np.array([1.0, 2.0, 3.0])
    shape(logits, SamplingParams(top_k=1, logit_bias={0: 5.0}, temperature=0.5), EMPTY, 0)
    np.testing.assert_array_equal(logits, [1, 2, 3])


# ---------------------------------------------------------------- drawing


def test_inverse_cdf_steps_at_the_edges_and_never_leaves_the_support():
    row = np.array([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    drawn = [inverse_cdf(row, u) for u in (0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53)]
    assert drawn == [1, 1, 3, 3, 4, 4]


@given(st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True), st.floats(1e-300, 1e300))
def test_inverse_cdf_of_any_scale_lands_on_mass(seed, u, scale):  # B66: id < vocab always
    generator = np.random.default_rng(seed)
    row = generator.random(33) * (generator.random(33) < 0.5) * scale
    if row.sum() > 0:
        assert row[inverse_cdf(row, u)] > 0
        assert row[inverse_cdf(row, 1 - 2**-53)] > 0


@pytest.mark.parametrize("vocab", [8193, 10_000, 151_936])
def test_draws_stay_inside_wide_vocabularies(vocab):  # B66: mass in the first block only
    row = np.zeros(vocab)
    row[:5] = 0.2
    assert inverse_cdf(row, 1 - 2**-53) == 4
    assert all(race(row, Noise(seed).at(0).race(0)) < 5 for seed in range(50))


def test_a_row_without_mass_is_an_error():
    with pytest.raises(RowError, match="without mass"):
        inverse_cdf(np.zeros(3), 0.5)
    with pytest.raises(RowError, match="without mass"):
        race(np.zeros(130), Noise(0).at(0).race(0))


def test_residual_of_r1_and_of_equal_rows(caplog):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    np.testing.assert_allclose(residual(p, q), [0.3, 0, 0])
    np.testing.assert_array_equal(residual(p, p), p)
    assert "p = q" in caplog.text  # the rounding event is logged


def test_residual_has_exact_zeros_in_a_wide_vocabulary():  # B05
    p, q = np.full(100_000, 1e-5), np.full(100_000, 1e-5)
    p[7] += 0.1
    assert list(np.flatnonzero(residual(p, q))) == [7]


def test_the_race_has_the_law_of_the_row():
    """Null: P(i) = p_i in two levels. n = 40,000, 6 cells over 3 blocks; the chi-square bound is
    exceeded with probability 1e-5 under the null; a shift of TV 0.02 is found with power > 0.999."""
    row = np.zeros(150)
    row[[3, 40, 70, 71, 128, 149]] = [0.3, 0.05, 0.25, 0.1, 0.2, 0.1]
    n = 40_000
    counts = np.bincount([race(row, Noise(seed).at(0).race(seed % 7)) for seed in range(n)], minlength=150)
    support = row > 0
    assert counts[~support].sum() == 0
    assert ((counts[support] - n * row[support]) ** 2 / (n * row[support])).sum() < 30.9  # chi2(5), 1e-5


def test_the_race_hardly_moves_when_the_row_does():
    """DESIGN 4: with a perturbation of TV t about t..2t of the draws change."""
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.full(1000, 0.1))
    moved = p * np.exp(generator.normal(size=1000) * 0.01)
    moved /= moved.sum()
    tv = np.abs(p - moved).sum() / 2
    changed = np.mean([race(p, Noise(s).at(0).race(0)) != race(moved, Noise(s).at(0).race(0)) for s in range(4000)])
    assert changed <= 2 * tv + 0.004  # four standard errors at TV 0.4 %


def test_target_rows_are_shaped_when_looked_at_and_once():
    asked = []

    def compute(i):
        asked.append(i)
        return np.array([1.0])

    rows = TargetRows(3, compute)
    assert asked == [] and len(rows) == 3
    rows[1], rows[1], rows[0]
    assert asked == [1, 0]
    with pytest.raises(RowError, match="sum"):
        TargetRows.of([[2.0, 1.0, -1.0]])
