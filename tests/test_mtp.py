"""The MTP drafter: its arithmetic, its caches, its law, whose text it remembers, and what it refuses."""

from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from tiny_target import WIDTH, TinyTarget, tiny_model

from truedraw import kernels
from truedraw.acceptance import Confidence
from truedraw.drafters import mtp_modules
from truedraw.drafters.mtp import MOST_UNREAD, MtpDrafter
from truedraw.drafters.mtp_modules import EntryCache, MtpModule, MtpShape, MtpWeights, fingerprint
from truedraw.engine import Engine
from truedraw.errors import IncompatibleModels, InvalidParameter, ModelFileError, ModelNotFound, RunError
from truedraw.policy import FixedLength
from truedraw.protocols import DraftRequest, Outcome, Worth
from truedraw.randomness import Noise
from truedraw.registry import Made, make_drafter
from truedraw.sampling import race, shape
from truedraw.types import PointMass, Proposal, SamplingParams, Verdict

VOCAB = 24
SHAPE = MtpShape(WIDTH, VOCAB, heads=4, kv_heads=2, inner=24, window=16, target="tiny")


def weights(*, seed=0, ids=tuple(range(0, VOCAB, 2)), shape=SHAPE, embedding=None):
    generator = np.random.default_rng(seed)
    arrays = {
        name: (generator.normal(size=size) * 0.5 if len(size) > 1 else np.ones(size)).astype(np.float32)
        for name, size in shape.shapes().items()
    }
    known = TinyTarget(VOCAB).embedding if embedding is None else embedding
    return MtpWeights(shape, arrays, np.array(ids), fingerprint(known))


def module(*, vocab=VOCAB, **options):
    if vocab != VOCAB:
        options |= {"shape": replace(SHAPE, vocab_size=vocab), "ids": range(0, vocab, 2)}
    return MtpModule(weights(**options), TinyTarget(vocab).token_matrices())


class Hearing(MtpDrafter):
    """Hears each text anew before it is asked about it, as if its tokens had just come, one pass for all."""

    def forecast(self, requests):
        self._hear(requests)
        return super().forecast(requests)

    def propose(self, requests):
        self._hear(requests)
        return super().propose(requests)

    def _hear(self, requests):
        for asked in requests:
            self._texts.pop(asked.slot, None)
            if len(asked.context) > 1:
                self.observe([told(asked.context[1:].tolist(), sequence=asked.sequence, slot=asked.slot)])


def request(context, max_draft=4, *, sequence=1, slot=0, coupled=False, seed=0, params=None, owner="", constraint=None):
    tokens = np.array(context, dtype=np.int32)
    return DraftRequest(
        sequence, slot, tokens, 1, max_draft, params or SamplingParams(), frozenset({VOCAB - 1}), constraint,
        Noise(seed).at(len(tokens)), coupled, lambda row: True,
        lambda forecast: Worth(len(forecast.survival), sum(forecast.survival)), 100, owner=owner,
    )  # fmt: skip


def told(tokens, *, sequence=1, slot=0, states=None, finished=False, proposal=None):
    generator = np.random.default_rng(len(tokens))
    states = generator.normal(size=(len(tokens), WIDTH)).astype(np.float32) if states is None else states
    return Outcome(
        sequence, slot, tuple(tokens), proposal or Proposal(), Verdict((), tokens[-1], "plain"), {"final": states}, finished
    )


TEXT = [3, 5, 8, 2, 9, 14, 6]


# ---------------------------------------------------------------- arithmetic


def test_integer_products_are_the_same_with_and_without_numba():
    generator = np.random.default_rng(0)
    for n, m, b in ((1, 1, 1), (300, 37, 2), (129, 576, 3)):
        integers = generator.integers(-127, 128, (n, m), dtype=np.int8)
        vectors = generator.integers(-4095, 4096, (b, m), dtype=np.int16)
        exact = vectors.astype(np.int64) @ integers.T.astype(np.int64)
        assert (kernels.products(integers, vectors) == exact).all()
        if kernels.warm():
            assert (kernels.products(integers, vectors) == exact).all()
        kernels.cool()


def test_the_largest_products_do_not_overflow():
    row = np.full((1, 4096), 127, dtype=np.int8)
    matrix = mtp_modules.Matrix(row.astype(np.float32))
    assert matrix(np.ones((1, 4096), np.float32))[0, 0] == pytest.approx(127 * 4096, rel=1e-5)


def test_a_matrix_of_8_bits_is_close_to_its_floats():
    generator = np.random.default_rng(1)
    floats = generator.normal(size=(50, 200)).astype(np.float32)
    floats[7] = 0.0
    vectors = generator.normal(size=(3, 200)).astype(np.float32)
    vectors[2] = 0.0
    product = mtp_modules.Matrix(floats)(vectors)
    assert np.abs(product - vectors @ floats.T).max() < 0.02 * np.abs(vectors @ floats.T).max()
    assert not product[:, 7].any() and not product[2].any()


def test_entries_that_are_read_at_once_give_the_same_drafts_as_one_by_one():
    made, generator = module(), np.random.default_rng(2)
    states, tokens = generator.normal(size=(9, WIDTH)).astype(np.float32), generator.integers(0, VOCAB, 9)
    together, single = EntryCache(SHAPE), EntryCache(SHAPE)
    made.remember(states[:8], tokens[:8], together)
    for i in range(8):
        made.step(states[i : i + 1], tokens[i : i + 1], [single])
    last = [made.step(states[8:], tokens[8:], [cache]) for cache in (together, single)]
    np.testing.assert_array_equal(*last)
    alone = made.step(np.repeat(states[8:], 2, 0), np.repeat(tokens[8:], 2), [EntryCache(SHAPE), EntryCache(SHAPE)])
    assert np.abs(alone[0] - last[0]).max() > 0.01, "what was read before matters"


def test_a_cache_forgets_by_position_and_keeps_a_window():
    def entry(i):
        return np.full((1, 2, 4), i, np.float32)

    cache = EntryCache(SHAPE)
    for i in range(100):
        cache.append(entry(i), entry(-i))
        keys, values = cache.newest()
        expected = np.arange(max(0, i - 15), i + 1)
        assert cache.position == i + 1
        np.testing.assert_array_equal(keys[0, :, 0], expected)
        np.testing.assert_array_equal(values[1, :, 3], -expected)
    cache.truncate(97)
    cache.append(entry(7), entry(7))
    assert cache.position == 98 and cache.newest()[0][0, -2:, 0].tolist() == [96, 7]


def test_positions_are_relative():
    """Attention looks at distances: the same entries further on in a text give the same state."""
    made, generator = module(), np.random.default_rng(3)
    states, tokens = generator.normal(size=(40, WIDTH)).astype(np.float32), generator.integers(0, VOCAB, 40)
    outputs = []
    for first in (24, 0):  # a window of 16 ends both: what lies before it is not seen
        cache = EntryCache(SHAPE)
        for i in range(first, 39):
            made.remember(states[i : i + 1], tokens[i : i + 1], cache)
        outputs.append(made.step(states[39:], tokens[39:], [cache]))
    np.testing.assert_allclose(*outputs, atol=2e-3)


# ---------------------------------------------------------------- drafts


def test_nothing_is_drafted_before_a_state_is_known():
    drafter = MtpDrafter(module())
    assert len(drafter.propose([request([1, *TEXT])])[0]) == 0
    assert drafter.forecast([request([1, *TEXT])])[0].survival == ()
    drafter.observe([replace(told(TEXT), hidden={})])  # a pass that read much of a prompt
    assert len(drafter.propose([request([1, *TEXT])])[0]) == 0
    drafter.observe([told([7])])
    assert len(drafter.propose([request([1, *TEXT, 7])])[0]) > 0


@pytest.mark.parametrize("coupled", [False, True])
def test_drafts_come_from_the_trimmed_vocabulary_and_the_same_question_has_the_same_answer(coupled):
    drafter = MtpDrafter(module())
    drafter.observe([told(TEXT), told(TEXT, sequence=2, slot=1)])
    for seed in range(30):
        asked = [request([1, *TEXT], coupled=coupled, seed=seed, sequence=slot + 1, slot=slot) for slot in (0, 1)]
        first, second = drafter.propose(asked)
        assert first.tokens == second.tokens == drafter.propose(asked[1:])[0].tokens
        for i, token in enumerate(first.tokens):
            row = first.q.row(i, token, VOCAB)
            assert token % 2 == 0 and row[token] > 0 and not row[1::2].any() and row.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(top_p=0.8, min_p=0.05),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
        SamplingParams(logit_bias={4: 2.0, 5: 50.0, 6: -np.inf}, min_tokens=50),
        SamplingParams(temperature=0),
    ],
    ids=["temperature, top-k", "top-p, min-p", "penalties", "bias, min_tokens", "greedy"],
)
def test_q_is_what_shaping_the_whole_row_gives(params):
    """The row as recorded against sampling.shape of the logits with -inf outside the trimmed vocabulary, and the coupled draw
    against the race over that whole row."""
    made = module(ids=(*range(0, VOCAB, 2), VOCAB - 1))
    drafter, states = MtpDrafter(made), np.random.default_rng(5).normal(size=(len(TEXT), WIDTH)).astype(np.float32)
    drafter.observe([told(TEXT, states=states)])
    cache = EntryCache(SHAPE)
    made.remember(states[:-1], np.array(TEXT[:-1]), cache)
    logits = np.full(VOCAB, -np.inf)
    logits[made.draft_ids] = made.logits(made.step(states[-1:], np.array(TEXT[-1:]), [cache]))[0]
    for seed in range(20):
        asked = request([1, *TEXT], 1, params=params, coupled=True, seed=seed)
        proposal = drafter.propose([asked])[0]
        expected = shape(logits, params, asked.context, 1, stop_ids=asked.stop_ids)
        np.testing.assert_allclose(proposal.q.row(0, proposal.tokens[0], VOCAB), expected, atol=1e-12)
        assert proposal.tokens[0] == race(expected, asked.noise.race(len(asked.context)))


@pytest.mark.parametrize("coupled", [False, True])
def test_drafts_have_the_law_that_they_record(coupled):
    """Null: first draft tokens ~ recorded q. n = 3,000; chi2 of at most 11 degrees of freedom above 45 has probability
    below 1e-5; a draw from another temperature (TV > 0.05) is found with power > 0.99."""
    drafter, n = MtpDrafter(module()), 3000
    drafter.observe([told(TEXT)])
    proposals = [drafter.propose([request([1, *TEXT], 1, coupled=coupled, seed=seed)])[0] for seed in range(n)]
    q = proposals[0].q.row(0, 0, VOCAB)
    counts = np.bincount([proposal.tokens[0] for proposal in proposals], minlength=VOCAB)
    assert counts[q == 0].sum() == 0
    seen = q > 1e-3
    assert ((counts - n * q)[seen] ** 2 / (n * q[seen])).sum() < 45


def test_drafts_may_have_parameters_of_their_own_but_greedy_ones_stay_greedy():
    sharp = MtpDrafter(module(), draft_params=SamplingParams(temperature=0.05))
    flat = MtpDrafter(module())
    for drafter in (sharp, flat):
        drafter.observe([told(TEXT)])
    q = [drafter.propose([request([1, *TEXT], 1)])[0].q.probs[0].max() for drafter in (sharp, flat)]
    assert q[0] > 0.9 > q[1]
    greedy = [drafter.propose([request([1, *TEXT], 1, params=SamplingParams(temperature=0))])[0] for drafter in (sharp, flat)]
    assert greedy[0].tokens == greedy[1].tokens and greedy[0].q.probs[0].tolist() == [1.0]


def test_states_of_rejected_drafts_are_replaced_by_the_targets_own():
    """After a rejection the next drafts are those of a drafter that heard the emitted tokens alone."""
    heard, other = MtpDrafter(module()), MtpDrafter(module())
    states = np.random.default_rng(6).normal(size=(12, WIDTH)).astype(np.float32)
    for drafter in (heard, other):
        drafter.observe([told(TEXT, states=states[: len(TEXT)])])
    proposal = heard.propose([request([1, *TEXT])])[0]
    assert len(proposal) > 1
    emitted = [11, 4]  # a pass of five tokens: one draft accepted, and the target's own
    heard.observe([told(emitted, states=states[7:12], proposal=proposal)])
    other.observe([told(emitted, states=states[7:9])])
    again = [drafter.propose([request([1, *TEXT, *emitted])])[0] for drafter in (heard, other)]
    assert again[0].tokens == again[1].tokens
    np.testing.assert_array_equal(again[0].q.probs[0], again[1].q.probs[0])


def test_a_text_that_went_on_unheard_is_forgotten():
    drafter = MtpDrafter(module())
    drafter.observe([told(TEXT)])
    assert len(drafter.propose([request([1, *TEXT, 5])])[0]) == 0, "the states do not reach the end of the text"
    assert len(drafter.propose([request([1, *TEXT], sequence=2)])[0]) == 0, "another text in the slot"
    tree = Proposal((1, 2), PointMass(), (-1, -1))
    drafter.observe([told([7], proposal=tree)])
    assert len(drafter.propose([request([1, *TEXT, 7])])[0]) == 0, "rows of a tree are not in a row"
    drafter.observe([told([9])])
    assert len(drafter.propose([request([1, *TEXT, 7, 9])])[0]) > 0, "behind the gap it goes on"
    drafter.observe([replace(told([2]), hidden={})])
    assert len(drafter.propose([request([1, *TEXT, 7, 9, 2])])[0]) == 0, "a pass without states"


def test_nothing_outlives_its_text():
    """Privacy: a text that ended, or was cancelled, leaves nothing to the next one in its slot, whoever's that is."""
    for end in (told([7], finished=True), replace(told([7], finished=True), tokens=(), verdict=None)):
        drafter, fresh = MtpDrafter(module()), MtpDrafter(module())
        drafter.observe([told(TEXT)])
        drafter.observe([end])
        assert not drafter._texts
        for each in (drafter, fresh):
            each.observe([told([4, 4], sequence=2)])
        asked = request([1, 4, 4], sequence=2, owner="another")
        left, right = drafter.propose([asked])[0], fresh.propose([asked])[0]
        assert left.tokens == right.tokens and (left.q.probs[0] == right.q.probs[0]).all()


def test_memory_is_bounded_where_drafts_never_pay():
    drafter = MtpDrafter(module())
    for i in range(300):
        drafter.observe([told([i % VOCAB])])
    (text,) = drafter._texts.values()
    assert len(text.states) == len(text.tokens) == MOST_UNREAD
    drafter.propose([request([i % VOCAB for i in range(300)])])
    assert text.cache.position == MOST_UNREAD - 1


def test_the_number_of_drafts_is_asked_before_any_is_drawn():
    drafter = MtpDrafter(module())
    drafter.observe([told(TEXT)])
    asked = replace(request([1, *TEXT], 6), worth=lambda forecast: Worth(2, 1.0))
    assert len(drafter.propose([asked])[0]) <= 2
    none = replace(asked, worth=lambda forecast: Worth(0, 0.0))
    assert len(drafter.propose([none])[0]) == 0
    rows = []
    stopped = replace(request([1, *TEXT], 6), more=lambda row: rows.append(row) or row.depth < 2)
    assert len(drafter.propose([stopped])[0]) <= 1 and [row.depth for row in rows] == list(range(1, len(rows) + 1))


def test_whether_to_draft_on_is_asked_behind_each_draft_by_what_the_module_thinks_of_it():
    """The forecast holds the drafts that are drawn; one that the module thinks little of lowers it for all behind it."""
    drafter = MtpDrafter(module())
    drafter.observe([told(TEXT)])
    asked = []

    def worth(forecast):
        asked.append(forecast)
        return Worth(len(forecast.survival) if forecast.drawn < 3 else forecast.drawn, 1.0)

    (proposal,) = drafter.propose([replace(request([1, *TEXT], 6), worth=worth)])
    assert len(proposal) == 3 and [forecast.drawn for forecast in asked] == [0, 1, 2, 3]
    (draft,) = drafter._asked.values()
    confidence = drafter._confidence[False]
    for forecast in asked[1:]:
        alive = np.cumprod([confidence.acceptance(probability) for probability in draft.confidence[: forecast.drawn]])
        np.testing.assert_allclose(forecast.survival[: forecast.drawn], alive)
        assert all(a >= b for a, b in pairwise(forecast.survival)) and len(forecast.survival) > forecast.drawn
    (text,), made = drafter._texts.values(), drafter._module
    logits = made.logits(made.step(np.stack(text.states[-1:]), np.array(text.tokens[-1:]), [text.cache]))[0]
    place = made.draft_ids.tolist().index(proposal.tokens[0])
    assert draft.confidence[0] == pytest.approx(float(np.exp(logits[place]) / np.exp(logits).sum()))


def test_greedy_drafts_have_the_modules_own_probability_as_confidence():
    drafter = MtpDrafter(module())
    drafter.observe([told(TEXT)])
    drafter.propose([request([1, *TEXT], 3, params=SamplingParams(temperature=0.0))])
    (draft,) = drafter._asked.values()
    assert draft.greedy and len(draft.confidence) == 3 and all(0 < probability < 1 for probability in draft.confidence)


def test_what_the_module_thinks_of_its_drafts_is_learned_to_be_read():
    """A module that is sure of everything and right half of the time is taken to be right half of the time."""
    confidence = Confidence()
    assert confidence.acceptance(0.99) > 0.9 and confidence.acceptance(0.01) < 0.1
    for i in range(400):
        confidence.observe([0.99, 0.5], ((1.0, float(i % 2)), (float(i % 2), 0.0)))
    assert confidence.acceptance(0.985) == pytest.approx(0.5, abs=0.05)
    assert confidence.acceptance(0.55) < 0.05 and confidence.acceptance(0.01) < 0.1


def test_a_constraint_is_followed_along_the_drafts():
    class Rising:
        """Only larger ids than the last."""

        def __init__(self, least=0):
            self.least = least

        def mask(self):
            return np.arange(VOCAB) >= self.least

        def fork(self):
            return Rising(self.least)

        def advance(self, token):
            self.least = token + 1

    drafter = MtpDrafter(module())
    drafter.observe([told(TEXT)])
    constraint = Rising(3)
    for seed in range(20):
        tokens = drafter.propose([request([1, *TEXT], 8, seed=seed, constraint=constraint)])[0].tokens
        assert tokens and tokens[0] >= 3 and all(a < b for a, b in pairwise(tokens))
    assert constraint.least == 3


# ---------------------------------------------------------------- in the engine


def engine(drafter, length=3, slots=2, seed=0):
    return Engine(tiny_model(VOCAB, num_slots=slots), drafter, FixedLength(length), entropy=iter(range(seed, 1 << 30)).__next__)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("params", [SamplingParams(seed=5), SamplingParams(temperature=0)], ids=["seed", "greedy"])
def test_the_text_of_a_seed_is_that_of_plain_decoding(length, params):
    params = replace(params, max_tokens=60, ignore_eos=True)
    prompts = [[1, 2, 3], [7], [4, 4, 4, 4, 4]]
    drafted = engine(MtpDrafter(module()), length).generate(prompts, params)
    plain = engine(None, 0).generate(prompts, params)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert sum(result.stats.proposed for result in drafted) > 60
    assert len(plain[0].tokens) == 60


@pytest.mark.long
def test_the_law_of_the_engine_is_the_targets():
    """Null: each token is drawn from the target's row behind the tokens before it, drafts of a trimmed vocabulary or not.

    Score test over 20,000 tokens: Z = sum of (f(x) - E_p f) / sqrt(sum of Var_p f), with f(x) = x in the trimmed vocabulary,
    standard normal under the null: |Z| > 4.9 has probability 1e-6. A shift of E f by 0.02 a token moves Z by about 5.7 or more;
    the fault below by more than 10.
    """
    assert abs(_score(MtpDrafter(flat_module()))) < 4.9


@pytest.mark.long
def test_the_score_sees_a_drafter_that_hides_its_trimmed_vocabulary():
    """The fault that trimming invites: q as drawn from, but told as if the whole vocabulary could have come."""

    class Hiding(MtpDrafter):
        def propose(self, requests):
            told = []
            for proposal in super().propose(requests):
                flat = [0.5 * proposal.q.row(i, t, VOCAB) + 0.5 / VOCAB for i, t in enumerate(proposal.tokens)]
                told.append(replace(proposal, q=type(proposal.q)(tuple(np.arange(VOCAB) for _ in flat), tuple(flat))))
            return told

    assert _score(Hiding(flat_module())) > 10


def flat_module():
    """Its rows are flat, so that what is wrong about q shows."""
    made = weights()
    made.arrays["norm_out"] *= 0.2
    return MtpModule(made, TinyTarget(VOCAB).token_matrices())


def _score(drafter):
    model = tiny_model(VOCAB, num_slots=8)
    made = Engine(model, drafter, FixedLength(3), entropy=iter(range(1 << 30)).__next__)
    results = made.generate([[i % VOCAB, 3] for i in range(100)], SamplingParams(max_tokens=200, ignore_eos=True))
    assert results[0].rule == "block" and sum(len(result.tokens) for result in results) == 20_000
    inside = np.zeros(VOCAB)
    inside[drafter._module.draft_ids] = 1.0
    difference = variance = 0.0
    for prompt, result in zip([[i % VOCAB, 3] for i in range(100)], results, strict=True):
        text = (*prompt, *result.tokens)
        for i, token in enumerate(result.tokens, len(prompt)):
            logits = model.runner.output @ model.runner.state(text[:i])
            p = np.exp(logits - logits.max())
            mean = inside @ p / p.sum()
            difference += inside[token] - mean
            variance += mean * (1 - mean)
    return difference / np.sqrt(variance)


def test_a_chain_with_suffix_works():
    from truedraw.drafters.chain import ChainDrafter
    from truedraw.drafters.suffix import SuffixDrafter

    chained = engine(ChainDrafter([SuffixDrafter(), MtpDrafter(module())]))
    results = chained.generate([[1, 2, 3]], SamplingParams(max_tokens=80, seed=1, ignore_eos=True))
    plain = engine(None, 0).generate([[1, 2, 3]], SamplingParams(max_tokens=80, seed=1, ignore_eos=True))
    assert results[0].tokens == plain[0].tokens and results[0].stats.proposed > 0


# ---------------------------------------------------------------- files and refusals


def test_a_file_holds_what_was_saved(tmp_path):
    kept = weights()
    mtp_modules.save(tmp_path / "m.safetensors", kept, {"facts": "{}"})
    read = mtp_modules.load(tmp_path / "m.safetensors")
    assert read.shape == kept.shape and (read.draft_ids == kept.draft_ids).all()
    for name, array in kept.arrays.items():
        np.testing.assert_allclose(read.arrays[name], array, rtol=1e-3)
    mtp_modules.check_fits(read, TinyTarget(VOCAB).token_matrices(), "tiny")


def test_modules_that_cannot_be_written_are_told_in_one_line(tmp_path):
    with pytest.raises(RunError, match="make room") as caught:
        mtp_modules.save(tmp_path / "no" / "folder.safetensors", weights(), {})
    assert "\n" not in str(caught.value)


def test_modules_of_another_target_are_refused_in_one_line():
    matrices = TinyTarget(VOCAB).token_matrices()
    for wrong, words in (
        (weights(shape=replace(SHAPE, width=8, heads=2)), "16 wide"),
        (weights(embedding=TinyTarget(VOCAB, seed=1).embedding), "likeness"),
    ):
        with pytest.raises(IncompatibleModels, match=words) as caught:
            mtp_modules.check_fits(wrong, matrices, "tiny")
        assert "\n" not in str(caught.value) and "truedraw train mtp" in str(caught.value)
    noisy = matrices.embedding + np.random.default_rng(0).normal(size=matrices.embedding.shape) * 0.05
    mtp_modules.check_fits(weights(), replace(matrices, embedding=noisy.astype(np.float32)), "tiny")


def test_files_that_are_no_modules_are_refused(tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    with pytest.raises(ModelNotFound):
        mtp_modules.load(tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ModelFileError):
        mtp_modules.load(tmp_path / "text")
    save_file({"x": np.zeros(3, np.float32)}, str(tmp_path / "other"))
    with pytest.raises(ModelFileError, match="no MTP modules"):
        mtp_modules.load(tmp_path / "other")
    for change, words in (
        ({"draft_ids": np.array([4, 2])}, "ascending"),
        ({"draft_ids": np.array([4, 4000])}, "ascending"),
        ({"arrays": {**weights().arrays, "join": np.zeros((2, 2), np.float32)}}, "join of shape"),
        ({"arrays": {**weights().arrays, "join": np.full((WIDTH, 2 * WIDTH), np.nan, np.float32)}}, "finite"),
    ):
        mtp_modules.save(tmp_path / "bad", replace(weights(), **change), {})
        with pytest.raises(ModelFileError, match=words):
            mtp_modules.load(tmp_path / "bad")
    for change in ({"heads": 0}, {"width": "8"}, {"window": 0}, {"heads": 5}, {"kv_heads": 3}):
        monkeypatch.setattr(mtp_modules, "asdict", lambda shape, change=change: asdict(shape) | change)
        mtp_modules.save(tmp_path / "bad", weights(), {})
        with pytest.raises(ModelFileError, match=r"cannot be read as MTP modules \(.*(its shape is|has no) "):
            mtp_modules.load(tmp_path / "bad")


def test_the_registry_makes_it_and_says_what_a_target_lacks(tmp_path):
    path = tmp_path / "m.safetensors"
    mtp_modules.save(path, weights(), {})
    assert isinstance(make_drafter("mtp", Made(tiny_model(VOCAB), mtp_modules=path)), MtpDrafter)
    chained = make_drafter("suffix+mtp", Made(tiny_model(VOCAB), mtp_modules=path))
    assert chained.hidden == ("final",) and chained.samples and chained.forecasts
    with pytest.raises(InvalidParameter, match="mtp"):
        Engine.load("toy", drafter="suffix", mtp_modules=path)
    with pytest.raises(IncompatibleModels, match="toy"):
        Engine.load("toy", drafter="mtp", mtp_modules=path)


# ---------------------------------------------------------------- the modules that are shipped


def test_the_shipped_modules_are_small_and_say_where_they_come_from():
    card = mtp_modules.SHIPPED.with_suffix(".md").read_text()
    assert mtp_modules.SHIPPED.stat().st_size <= 12_000_000
    shipped = mtp_modules.load(mtp_modules.SHIPPED)
    assert shipped.shape.width == 576 and len(shipped.draft_ids) == 8192
    assert "truedraw train mtp --model smollm2" in card and "--seed" in card


@pytest.mark.model
def test_the_shipped_modules_foresee_an_answer():
    """Greedy, as drafting at temperature 0 does: at a fixed length of two, a third of the first drafts at least."""
    with Engine.load("smollm2", drafter="mtp", draft_length=2, context=512) as made:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        drafted = made.generate([[{"role": "user", "content": "Why do birds sing in the morning?"}]], params)[0]
        plain = made.generate([[{"role": "user", "content": "Why do birds sing in the morning?"}]], params, max_draft=0)[0]
    assert drafted.tokens == plain.tokens
    proposed, accepted = drafted.stats.proposed_by_depth[0], drafted.stats.accepted_by_depth[0]
    assert accepted >= proposed / 3 and proposed >= 25


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_seed_on_transformers_in_float32(temperature):
    """12 prompts of 80 tokens, where rows of different passes agree to 1e-6 or so: with and without drafts the same texts."""
    pytest.importorskip("torch")
    prompts = [
        [{"role": "user", "content": f"Tell me about {thing}."}] for thing in ["rain", "salt", "owls", "maps", "tea", "ice"]
    ]
    with Engine.load("hf:smollm2@f32", drafter="mtp", draft_length=3, context=512) as made:
        for seed in (1, 2):
            params = SamplingParams(temperature=temperature, max_tokens=80, seed=seed)
            drafted, plain = (made.generate(prompts, params, max_draft=most) for most in (None, 0))
            assert [result.tokens for result in drafted] == [result.tokens for result in plain]
            assert sum(result.stats.accepted for result in drafted) > 40
