"""Each kernel's loop against its NumPy twin, bit for bit, and both against what they stand for."""

import math
import os
import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw import Engine, SamplingParams, kernels, sampling
from truedraw.errors import RowError
from truedraw.randomness import RACE_BLOCK, Noise

numba = pytest.importorskip("numba", reason="the twins need numba")

VOCABS = (1, 2, 7, 63, 64, 65, 129, 1000, 4095, 4096, 4097, 49_152, 151_936)
EMPTY = np.array([], dtype=np.int32)


@pytest.fixture(scope="module")
def loops():
    kernels.cool()
    assert kernels.warm()
    made = kernels._loops
    kernels.cool()
    return made


@pytest.fixture
def both(loops, monkeypatch):
    """both(f): what f() answers, or the message it raises, with NumPy and with the loops."""

    def run(f):
        answers = []
        for use in (None, loops):
            monkeypatch.setattr(kernels, "_loops", use)
            try:
                answers.append(f())
            except RowError as error:
                answers.append(str(error))
        monkeypatch.setattr(kernels, "_loops", None)
        return answers

    return run


def same(both, f):
    numpy, loop = both(f)
    flat = (numpy, loop) if isinstance(numpy, tuple) else ((numpy,), (loop,))
    for a, b in zip(*flat, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return numpy


def logits_of(vocab, seed, dtype=np.float32, *, holes=False, ties=False):
    generator = np.random.default_rng(seed)
    row = generator.normal(size=vocab).astype(dtype) * 4
    if ties:
        row = row.round()
    if holes:
        row[generator.random(vocab) < 0.3] = -np.inf
        row[generator.integers(vocab)] = 1.0
    return row


# ---------------------------------------------------------------- exp


def test_exp_keeps_its_error_bound(both):
    x = np.concatenate([-np.geomspace(1e-17, 707.9, 4000), np.linspace(-708, 0, 1777)])
    with localcontext() as exact:
        exact.prec = 40
        for value, got in zip(x, same(both, lambda: kernels.soften(x, 0.0, 1.0)), strict=True):
            error = abs(Decimal(float(got)) / Decimal(float(value)).exp() - 1)
            assert error < Decimal((abs(float(value)) + 2) * 2.0**-52)


def test_exp_at_its_ends(both):
    x = np.array([0.0, -0.0, -708.0, np.nextafter(-708, -709), -1e308, -np.inf])
    got = same(both, lambda: kernels.soften(x, 0.0, 1.0))
    assert list(got[:2]) == [1, 1] and 0 < got[2] < 1e-307 and list(got[3:]) == [0, 0, 0]


def test_exp_is_monotone(both):
    x = -np.sort(np.random.default_rng(0).random(100_000) * 3)
    assert (np.diff(same(both, lambda: kernels.soften(x, 0.0, 1.0))) <= 4e-16).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0, 1e-3, 1e-300, 5e-324, 1e300])
def test_soften_is_the_same(both, dtype, temperature):
    for vocab in (1, 1000, 20_000):
        row = logits_of(vocab, vocab, dtype, holes=True)
        got = same(both, lambda row=row: kernels.soften(row, float(row.max()), temperature))
        assert got[row.argmax()] == 1
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, np.exp((row.astype(np.float64) - float(row.max())) / temperature), 1e-12, 1e-300)


# ---------------------------------------------------------------- sums


def in_lanes(block):
    """Eight lanes over 64 numbers, written out."""
    lanes = [0.0] * 8
    for i, value in enumerate(block):
        lanes[i % 8] += float(value)
    a, b, c, d, e, f, g, h = lanes
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@pytest.mark.parametrize("vocab", VOCABS)
def test_block_sums_run_in_eight_lanes(both, vocab):
    """What NumPy does inside is no promise of its documentation: where it changes, this fails."""
    row = np.random.default_rng(vocab).random(vocab) ** 9
    got = same(both, lambda: kernels.block_sums(row))
    wanted = [in_lanes(row[i : i + 64]) for i in range(0, vocab, 64)]
    assert list(got) == wanted
    total = same(both, lambda: kernels.total(got))
    assert total == pytest.approx(math.fsum(row), rel=1e-14)


def test_the_race_draws_between_the_same_blocks():
    assert kernels.BLOCK == RACE_BLOCK


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_few_tokens_are_summed_like_a_whole_row(both, vocab, share):
    generator = np.random.default_rng(vocab)
    row = generator.random(vocab) * (generator.random(vocab) < share)
    row[generator.integers(vocab)] = 1.0
    ids = np.flatnonzero(row)

    whole = same(both, lambda: kernels.block_sums(row))
    few = same(both, lambda: kernels.block_sums_of_few(ids, row[ids], vocab))
    np.testing.assert_array_equal(whole, few)


@pytest.mark.parametrize("vocab", VOCABS)
def test_excess_is_the_same(both, vocab):
    generator = np.random.default_rng(vocab)
    p, q = generator.random(vocab), generator.random(vocab)
    for worth in (1.0, 0.3, 0.0):
        left, masses = same(both, lambda worth=worth: kernels.excess(p, q, worth))
        np.testing.assert_array_equal(left, np.maximum(worth * p - q, 0))
        np.testing.assert_array_equal(masses, kernels.block_sums(left))


def test_rows_that_are_views_or_read_only_are_taken(both):
    wide = np.random.default_rng(0).random((300, 2))
    wide.flags.writeable = False
    np.testing.assert_array_equal(same(both, lambda: kernels.block_sums(wide[:, 0])), kernels.block_sums(wide[:, 0].copy()))
    same(both, lambda: kernels.soften(wide[:, 0], 1.0, 0.5))
    same(both, lambda: kernels.excess(wide[:, 0], wide[:, 1]))


# ---------------------------------------------------------------- laws


OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1e-300},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 50, "temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "top_k": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_laws_and_draws_are_the_same(both, vocab, options):
    """Over the whole vocabulary and over few tokens: the same bits, the same tokens for the same noise."""
    for seed, (dtype, holes, ties) in enumerate([(np.float32, True, False), (np.float64, False, True)]):
        row = logits_of(vocab, seed, dtype, holes=holes, ties=ties)
        context = np.arange(7, dtype=np.int32) % vocab
        params = SamplingParams(**options)

        def told(row=row, params=params, context=context):
            law = sampling.law(row, params, context, 3)
            full, noise = law.row(), Noise(5).at(3).race(4)
            rows = sampling.TargetRows(1, lambda index: law)
            assert law.race(noise) == rows.race(0, noise) == sampling.race(full, noise)
            assert [law.prob(t) for t in (-1, 0, vocab - 1, vocab)] == [0, full[0], full[vocab - 1], 0]
            assert rows.prob(0, vocab - 1) == full[vocab - 1]
            return full, law.race(noise), *(sampling.inverse_cdf(full, u) for u in (0.0, 0.3, 0.999))

        full = same(both, told)[0]
        assert full.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("bad", [[math.nan] * 3, [0, math.nan, 0], [0, math.inf, 0], [-math.inf] * 3])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_rows_that_are_no_law_have_the_same_message(both, bad, options):
    row = np.array(bad, dtype=np.float32)
    numpy, loop = both(lambda: sampling.law(row, SamplingParams(**options), EMPTY, 0))
    assert isinstance(numpy, str) and numpy == loop


@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.integers(1, 90), st.booleans())
def test_top_k_against_a_sort(vocab, seed, k, ties):
    row = logits_of(vocab, seed, holes=True, ties=ties)
    expected = sorted(sorted(range(vocab), key=lambda i: (-row[i], i))[:k])
    if k < vocab:
        assert list(kernels.top_k(row, k)) == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("vocab", [130, 1000, 4097, 49_152])
def test_top_k_is_the_same_with_ties_and_up_to_the_last_id(both, vocab, dtype):
    row = np.zeros(vocab, dtype=dtype)
    row[[5, vocab - 2, vocab - 1]] = [1, 2, 3]
    for k in (1, 2, 3, 40, vocab - 1):
        expected = sorted(sorted(range(vocab), key=lambda i: (-row[i], i))[:k])
        assert list(same(both, lambda k=k: kernels.top_k(row, k))) == expected


def test_top_p_of_a_flat_row_needs_more_than_its_first_look():
    weights = np.random.default_rng(0).random(20_000) ** 3
    weights[0] = 1.0
    order = np.argsort(-weights, kind="stable")
    for top_p in (0.0, 0.01, 0.5, 0.9, 0.999):
        size = np.searchsorted(np.cumsum(weights[order]), weights.sum() * top_p * (1 - sampling.BOUNDARY_SLACK)) + 1
        assert list(sampling._top_p(weights, top_p)) == sorted(order[:size])


def test_inverse_cdf_in_two_levels_is_the_cumulative_sum():
    row = np.random.default_rng(0).random(1000) ** 5
    row[100:200] = 0.0
    edges = np.cumsum(row) / row.sum()
    for u in (*np.random.default_rng(1).random(2000), 0.0, 1 - 2.0**-53):
        drawn = sampling.inverse_cdf(row, float(u))
        assert row[drawn] > 0
        assert (edges[drawn - 1] if drawn else 0) - 1e-12 <= u <= edges[drawn] + 1e-12


# ---------------------------------------------------------------- with an engine


def test_a_seeded_text_is_the_same(loops, monkeypatch):
    texts = []
    for use in (None, loops):
        monkeypatch.setattr(kernels, "_loops", use)
        with Engine.load("toy", drafter="ngram", draft_length=5) as engine:
            for options in ({}, {"top_k": 20}, {"top_p": 0.9, "temperature": 1.4}):
                params = SamplingParams(seed=11, max_tokens=120, ignore_eos=True, **options)
                texts.append(engine.generate(["what is the toy"], params)[0].tokens)
    assert texts[:3] == texts[3:] and len(set(texts)) == 3


def test_a_toy_does_not_import_numba_and_a_wide_vocabulary_does():
    code = (
        "import sys, truedraw\n"
        "from truedraw import kernels\n"
        "truedraw.Engine.load('toy').close()\n"
        "print('numba' in sys.modules, kernels.warm(), 'numba' in sys.modules)"
    )
    assert _run(code) == "False True True"


def test_without_numba_or_a_place_for_its_code_numpy_stays(tmp_path):
    assert _run("import sys; sys.modules['numba'] = None\nfrom truedraw import kernels\nprint(kernels.warm())") == "False"
    code = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from truedraw import kernels\n"
        "print(kernels.warm(), kernels._loops)"
    )
    assert _run(code) == "False None"


def test_compiling_is_told_once(tmp_path):
    code = "from truedraw import kernels\nsaid = []\nprint(kernels.warm(said.append), said)"
    assert _run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "True ['compiling kernels, once']"
    assert _run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "True []"


def _run(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
