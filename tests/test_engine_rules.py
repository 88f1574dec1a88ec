"""Rules through the engine: which one a request gets, trees of a draft model, drift, rows that fail."""

from dataclasses import replace

import numpy as np
import pytest

from truedraw.drafters.chain import ChainDrafter
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.engine import Engine
from truedraw.errors import IncompatibleModels, InvalidParameter, RowError
from truedraw.policy import FixedLength
from truedraw.registry import RULES, Model
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed
from truedraw.types import SamplingParams

VOCAB = 9
TARGET = hashed(VOCAB, seed=1, order=2)
DRAFT = hashed(VOCAB, seed=1, order=2, blend=0.7)
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


def engine(width=1, length=4, slots=1, drawing="without-replacement", draft=DRAFT, target=TARGET, draft_vocab=VOCAB, **options):
    model = Model("toy", ToyRunner(target, VOCAB, num_slots=slots), LetterTokenizer(VOCAB))
    runner = ToyRunner(draft, draft_vocab, num_slots=slots)
    return Engine(model, ModelDrafter(runner, VOCAB, width=width, drawing=drawing), FixedLength(length), **options)


def only(under_test, prompt, params, **options):
    return under_test.generate([prompt], params, **options)[0]


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8])
def test_a_seeded_text_is_plain_decodings_with_trees_too(width, length):
    for seed in range(6):
        params = replace(PARAMS, seed=seed, frequency_penalty=0.5 * (seed % 2), logit_bias={0: 1.0}, ignore_eos=seed % 3 > 0)
        plain = only(engine(), [3, 4], params, max_draft=0)
        drafted = only(engine(width, length), [3, 4], params)
        assert drafted.tokens == plain.tokens and drafted.text == plain.text and drafted.rule == "coupled"


def test_trees_of_a_batch_are_those_of_each_alone():
    prompts = [[1], [2, 2, 7], [5, 3, 5, 3, 5]]
    params = [replace(PARAMS, seed=seed) for seed in range(3)]
    batch = engine(2, 6, slots=3).generate(prompts, params)
    assert [result.tokens for result in batch] == [
        only(engine(), p, s, max_draft=0).tokens for p, s in zip(prompts, params, strict=True)
    ]
    assert sum(result.stats.accepted for result in batch) > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_trees_with_the_target_itself_accepts_to_the_end(temperature):
    for drawing, rule in (("without-replacement", "multidraft"), ("without-replacement", "traversal"), ("greedy", "multidraft")):
        result = only(engine(2, 4, drawing=drawing, draft=TARGET), [3], replace(PARAMS, temperature=temperature), rule=rule)
        levels = 4 if temperature == 0 else 2  # a point mass has one candidate, and the tree is a chain
        if temperature == 0 or drawing == "without-replacement":
            assert result.stats.tokens_per_step == pytest.approx(levels + 1, abs=0.35)
        assert set(result.origins) <= {"draft", "bonus", "residual", "plain"}


def test_two_candidates_accept_more_than_one():
    """Means over 150 requests of 30 tokens: the difference, about 0.1 in tokens of the first position per
    step, is some ten standard errors."""
    first = {}
    for width in (1, 2):
        under_test = engine(width, width)
        for _ in range(150):
            only(under_test, [3], PARAMS)
        first[width] = under_test.stats.tokens_per_step
    assert first[2] > first[1] + 0.05


def test_stop_tokens_and_unknown_ids_stay_candidates_of_drawn_trees():
    """A draft vocabulary with more ids than the target's: what lies outside is cut before the draw."""
    wide = hashed(VOCAB + 3, seed=4, order=1, sharpness=0.5)
    for rule in ("multidraft", "traversal"):
        under_test = engine(3, 9, draft=wide, draft_vocab=VOCAB + 3)
        ends = [only(under_test, [3], replace(PARAMS, ignore_eos=False, logit_bias={0: 2.0}), rule=rule) for _ in range(40)]
        assert all(result.error is None for result in ends)
        assert any(result.finish_reason == "stop" and result.origins[-1] == "draft" for result in ends)
        assert all(0 not in result.tokens[:-1] for result in ends)


def test_the_law_of_the_first_token_under_trees_with_a_stop_token():
    """Null: the first token of multidraft with stop token 0 has the target's law (B84 on trees). n = 4,000
    requests, G-test at 1e-4; dropping drawn stop tokens would move it by a TV of about 0.1 (power 1)."""
    from truedraw.prove.goodness import g_test
    from truedraw.sampling import shape

    under_test = engine(2, 4)
    params = SamplingParams(max_tokens=3, logit_bias={0: 1.5})
    counts = np.zeros(VOCAB)
    for _ in range(4000):
        counts[only(under_test, [3], params).tokens[0]] += 1
    row = shape(TARGET((3,)), params, np.array([3], dtype=np.int32), 1)
    assert row[0] > 0.1 and g_test(counts, row).p_value > 1e-4


# ---------------------------------------------------------------- which rule


def test_drawn_drafts_without_a_seed_are_verified_as_blocks_or_candidates():
    assert only(engine(), [1], PARAMS).rule == "block"
    assert only(engine(2), [1], PARAMS).rule == "multidraft"
    both = Engine(
        Model("toy", ToyRunner(TARGET, VOCAB), LetterTokenizer(VOCAB)),
        ChainDrafter([NGramDrafter(), ModelDrafter(ToyRunner(DRAFT, VOCAB), VOCAB, width=2)]),
        FixedLength(4),
    )
    assert only(both, [1, 2, 1, 2, 1], PARAMS).rule == "multidraft"


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_runs_by_name_and_fills_the_budget(name):
    width = 2 if name in ("multidraft", "traversal", "coupled") else 1
    result = only(engine(width, 4), [3, 4], replace(PARAMS, temperature=0.9, top_p=0.9, repetition_penalty=1.2), rule=name)
    assert len(result.tokens) == 30 and result.error is None and result.stats.drift is None


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InvalidParameter, match="coupled, multidraft, traversal with a drafter that proposes trees"):
        engine(2).submit([1], PARAMS, rule="token")
    with pytest.raises(InvalidParameter, match="allow-lossy"):
        engine().submit([1], PARAMS, rule="lenience:0.5")
    with pytest.raises(InvalidParameter, match="allow-lossy"):
        engine(rule="biased_resample")
    with pytest.raises(InvalidParameter, match="width is 0"):
        engine(0)

    class Chains(ToyRunner):
        can_score_trees = False

    with pytest.raises(IncompatibleModels, match="scores chains only"):
        Engine(Model("toy", Chains(TARGET, VOCAB), LetterTokenizer(VOCAB)), ModelDrafter(ToyRunner(DRAFT, VOCAB), VOCAB, width=2))
    with pytest.raises(IncompatibleModels, match="scores chains only"):
        ModelDrafter(Chains(DRAFT, VOCAB), VOCAB, width=2)


@pytest.mark.parametrize("length", [1.5, "2", None, True])
def test_a_policy_that_answers_no_integer_is_refused(length):
    class Odd(FixedLength):
        def limits(self, batch):
            return [length] * len(batch)

    under_test = engine()
    under_test.policy = Odd(1)
    with pytest.raises(InvalidParameter, match="policy's draft length"):
        only(under_test, [1], PARAMS)


# ---------------------------------------------------------------- drift


@pytest.mark.parametrize("rule", ["biased_resample", "lenience:0.5", "thresholds:0.5,0.5", "typical"])
def test_lossy_rules_add_up_their_drift(rule):
    under_test = engine(allow_lossy=True)
    result = only(under_test, [3], PARAMS, rule=rule)
    assert result.stats.drift is not None and result.stats.drift.total_variation > 0.1
    assert 0 < result.stats.drift.bound <= 1
    assert under_test.stats.drift == result.stats.drift
    exact = only(under_test, [3], PARAMS)
    assert exact.stats.drift is None and under_test.stats.drift == result.stats.drift


# ---------------------------------------------------------------- rows that fail


def broken_at(length):
    def logits(context):
        return np.full(VOCAB, np.nan) if len(context) >= length else TARGET(context)

    return logits


@pytest.mark.parametrize("rule", ["token", "block", "multidraft", "coupled", "resample_from_target"])
def test_a_broken_row_behind_a_draft_keeps_what_was_accepted_before_it(rule):
    """Self-drafting accepts everything: the text reaches the broken row whatever the draft length."""
    for length in (1, 2, 3, 5, 8):
        result = only(engine(length=length, draft=TARGET, target=broken_at(9)), [3, 4], PARAMS, rule=rule)
        assert isinstance(result.error, RowError) and "target's row at position 9 holds nan at token 0" in str(result.error)
        assert len(result.tokens) == 7


def test_a_broken_row_does_not_pass_unverified_drafts():
    """Block verification looks at later rows first. Null: the tokens before the broken row have the
    target's law; without verification they would have the draft's. n = 4,000, G-test at 1e-4, TV 0.2."""
    from truedraw.prove.goodness import g_test
    from truedraw.sampling import shape

    under_test = engine(length=4, target=broken_at(3), draft=hashed(VOCAB, seed=9, order=2))
    counts = np.zeros(VOCAB)
    for _ in range(4000):
        counts[only(under_test, [3], PARAMS).tokens[0]] += 1
    assert g_test(counts, shape(TARGET((3,)), PARAMS, np.array([3], dtype=np.int32), 1)).p_value > 1e-4
