"""Many users of one engine: owners, slots, shared prefixes, fairness, drafters by name, log-probabilities."""

from itertools import count

import numpy as np
import pytest

from truedraw.cache import CachedModel
from truedraw.drafters.choice import ChoiceDrafter
from truedraw.drafters.corpus import Corpus
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.errors import InvalidParameter, RowError
from truedraw.policy import Controller, FixedLength
from truedraw.profile import CostPoint, Profile
from truedraw.registry import Made, Model, make_drafter
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed
from truedraw.sampling import logprob
from truedraw.types import SamplingParams

VOCAB = 9
TARGET = hashed(VOCAB, seed=1, order=2)
LONG = [1, 2, 3, 4, 5, 6, 7, 8] * 40  # 320 tokens: more than a chunk


def engine(slots=2, drafter=None, policy=None, next_logits=TARGET, **options):
    runner = ToyRunner(next_logits, VOCAB, num_slots=slots, **options)
    return Engine(Model("toy", runner, LetterTokenizer(VOCAB)), drafter, policy)


def params(count=8, seed=3, **options):
    return SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **options)


def finish(made, *requests):
    while not all(request.finished for request in requests):
        made.step()
    return [request.results[0] for request in requests]


# ---------------------------------------------------------------- prefixes


def test_choices_of_one_prompt_read_it_once():
    made = engine(slots=4)
    request = made.submit(LONG, params(n=4))
    finish(made, request)
    assert made.model.runner.num_fed <= len(LONG) + 4 * 10
    assert [result.stats.copied for result in request.results] == [0, *[len(LONG) - 1] * 3]
    alone = engine(slots=1)
    for choice, result in enumerate(request.results):
        again = alone.submit(LONG, params(n=4))
        finish(alone, again)
        assert again.results[choice].tokens == result.tokens


def test_a_prompt_that_is_being_read_is_waited_for_as_far_as_it_is_shared():
    made = engine(slots=3)
    requests = [made.submit([*LONG, tail], params(seed=tail)) for tail in (1, 2, 3)]
    results = finish(made, *requests)
    assert made.model.runner.num_fed <= len(LONG) + 3 * 12
    assert results[1].stats.copied >= len(LONG) - 1
    for tail, result in zip((1, 2, 3), results, strict=True):
        assert finish(single := engine(slots=1), single.submit([*LONG, tail], params(seed=tail)))[0].tokens == result.tokens


def test_a_reader_that_is_cancelled_lets_the_waiting_go_on():
    made = engine(slots=2)
    first, second = made.submit([*LONG, 1], params()), made.submit([*LONG, 2], params())
    made.step()
    made.cancel(first)
    assert finish(made, second)[0].finish_reason == "length"


def test_a_running_text_lends_its_prefix():
    made = engine(slots=2)
    first = made.submit(LONG, params(count=60))
    while not first.steps:
        made.step()
    fed = made.model.runner.num_fed
    second = made.submit([*LONG, 5], params(count=2))
    finish(made, second)
    assert second.results[0].stats.copied >= len(LONG) - 1
    assert made.model.runner.num_fed - fed < 40


def test_a_conversation_keeps_its_cache_while_others_come_and_go():
    """The slot that holds a long text is not taken for one that shares a token with it."""
    made = engine(slots=2)
    finish(made, made.submit(LONG, params(count=2)))
    for seed in range(4):
        finish(made, made.submit([1, 7, 7], params(seed=seed)))
    (again,) = finish(made, made.submit([*LONG, 3], params(count=2)))
    assert again.stats.cached + again.stats.copied >= len(LONG)


def test_copies_share_nothing_that_changes():
    """Both go on in their own way behind the shared prefix, and back again."""
    runner = ToyRunner(TARGET, VOCAB, num_slots=2)
    cache = CachedModel(runner)
    text = np.array(LONG[:30], np.int32)
    cache.logits([(0, text)], [1])
    assert cache.adopt(1, np.array([*LONG[:20], 8, 8], np.int32)) == 20
    for slot, tail in ((0, [3, 3]), (1, [4, 4]), (0, [5])):
        context = np.array([*LONG[:20], *tail], np.int32)
        got = cache.logits([(slot, context)], [1])[0].logits[0]
        np.testing.assert_array_equal(got, TARGET(tuple(context.tolist())))


def test_ctrl_c_while_a_slot_is_forgotten_leaves_no_row_of_the_old_text(monkeypatch):
    cache = CachedModel(ToyRunner(TARGET, VOCAB, num_slots=1))
    cache.logits([(0, np.array(LONG[:20], np.int32))], [0])
    with monkeypatch.context() as patched:
        patched.setattr(cache.runner, "rollback", lambda slot, length: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.forget(0)
    rows = cache.logits([(0, np.array([5, 4], np.int32))], [1])[0].logits[0]
    np.testing.assert_array_equal(rows, TARGET((5, 4)))


def test_nothing_is_adopted_by_a_slot_that_has_as_much():
    cache = CachedModel(ToyRunner(TARGET, VOCAB, num_slots=2))
    for slot in (0, 1):
        cache.logits([(slot, np.array(LONG[:20], np.int32))], [0])
    assert cache.adopt(1, np.array(LONG[:25], np.int32)) == 0
    assert cache.adopt(1, np.array(LONG[:25], np.int32), at_least=0) == 0


# ---------------------------------------------------------------- owners


def test_nobody_gains_from_what_another_owner_left():
    made = engine(slots=2)
    finish(made, made.submit(LONG, params(), owner="a"))
    fed = made.model.runner.num_fed
    (other,) = finish(made, made.submit(LONG, params(), owner="b"))
    assert other.stats.cached == other.stats.copied == 0
    assert made.model.runner.num_fed - fed >= len(LONG)
    (again,) = finish(made, made.submit(LONG, params(), owner="a"))
    assert again.stats.cached == len(LONG) - 1
    both = made.submit(LONG, params(), owner="a"), made.submit(LONG, params(), owner="b")
    assert all(result.stats.copied == 0 for result in finish(made, *both))


def test_a_slot_that_changes_hands_is_empty():
    made = engine(slots=1)
    finish(made, made.submit(LONG, params(), owner="a"))
    fed = made.model.runner.num_fed
    (other,) = finish(made, made.submit(LONG, params(), owner="b"))
    assert other.stats.cached == 0 and made.model.runner.num_fed - fed >= len(LONG)


def test_a_draft_model_keeps_owners_apart_too():
    drafts = ToyRunner(TARGET, VOCAB, num_slots=1)
    made = engine(slots=1, drafter=ModelDrafter(drafts, VOCAB), policy=FixedLength(2))
    finish(made, made.submit(LONG, params(), owner="a"))
    fed = drafts.num_fed
    finish(made, made.submit(LONG, params(), owner="a"))
    assert drafts.num_fed - fed < 40
    fed = drafts.num_fed
    finish(made, made.submit(LONG, params(), owner="b"))
    assert drafts.num_fed - fed >= len(LONG)


def test_kept_answers_serve_their_owner_alone():
    kept = {owner: Corpus(learning=True) for owner in ("a", "b")}
    made = engine(slots=1, drafter=SuffixDrafter(kept=kept), policy=FixedLength(4))
    finish(made, made.submit([1, 2], params(count=30), owner="a"))
    assert [len(kept[owner].added()) for owner in ("a", "b")] == [1, 0]
    finish(made, made.submit([1, 2], params(count=30), owner="nobody"))
    assert [len(kept[owner].added()) for owner in ("a", "b")] == [1, 0]


# ---------------------------------------------------------------- fairness


def order(made, *requests):
    """In which order choices got their slots."""
    started = []
    while not all(request.finished for request in requests):
        made.step()
        for sequence in made._running.values():
            if (sequence.request, sequence.choice) not in started:
                started.append((sequence.request, sequence.choice))
    return started


def test_one_owner_cannot_hold_up_another():
    made = engine(slots=1)
    flood = [made.submit([1], params(count=3), owner="a") for _ in range(5)]
    late = made.submit([2], params(count=3), owner="b")
    made.submit([2], params(count=3), owner="b")
    started = order(made, *flood, late)
    assert started.index((late.id, 0)) == 1


def test_of_one_owner_no_request_takes_all_slots_before_another_has_one():
    made = engine(slots=2)
    many, one = made.submit([1], params(count=6, n=6)), made.submit([2], params(count=6))
    started = order(made, many, one)
    assert started.index((one.id, 0)) <= 1
    assert [choice for request, choice in started if request == many.id] == list(range(6))


# ---------------------------------------------------------------- drafters by name


def choices():
    made = Made(Model("toy", ToyRunner(TARGET, VOCAB), LetterTokenizer(VOCAB)))
    return ChoiceDrafter({name: make_drafter(name, made) for name in ("suffix", "ngram", "random", "ngram+random")}, "suffix")


def test_requests_name_their_drafters_and_share_a_batch():
    made = engine(slots=4, drafter=choices(), policy=FixedLength(3))
    requests = [
        made.submit([1, 2, 1, 2, 1], params(count=30), drafter=name) for name in (None, "ngram", "random", "ngram+random")
    ]
    results = finish(made, *requests)
    assert len({result.tokens for result in results}) == 1, "a seeded text does not depend on who drafts"
    proposed = [result.stats.proposed for result in results]
    assert proposed[2] > proposed[1] and len(set(proposed)) > 2
    with pytest.raises(InvalidParameter, match="drafter is 'model': allowed is one of suffix, ngram"):
        made.submit([1], drafter="model")
    with pytest.raises(InvalidParameter, match="one drafter only"):
        engine().submit([1], drafter="ngram")


def test_names_share_their_parts():
    made = Made(Model("toy", ToyRunner(TARGET, VOCAB), LetterTokenizer(VOCAB)))
    chain = make_drafter("suffix+ngram", made)
    assert chain.drafters[0] is make_drafter("suffix", made)


def test_the_rule_follows_the_drafter_that_was_chosen():
    made = engine(drafter=ChoiceDrafter({"ngram": NGramDrafter(), "drawn": RandomDrafter(VOCAB, sampled=True)}, "ngram"))
    unseeded = SamplingParams(max_tokens=2)
    assert made.submit([1], unseeded).rule_name == "coupled"
    assert made.submit([1], unseeded, drafter="drawn").rule_name == "block"


def test_a_drafter_without_forecasts_does_not_blind_the_controller_to_others():
    profile = Profile(tuple(CostPoint(size, 0, 1, 0.008 + 0.0002 * size) for size in (1, 2, 4, 8, 16, 32)), {})
    policy = Controller(profile)

    def counting(context):
        return 9.0 * (np.arange(VOCAB) == (context[-1] + 1) % VOCAB)

    made = engine(slots=2, drafter=choices(), policy=policy, next_logits=counting)
    ticks = count()
    made._clock = lambda: 0.008 * next(ticks)  # every pass takes the same
    blind = made.submit([1, 2] * 10, params(count=40, temperature=0), drafter="ngram")
    finish(made, blind)
    (sighted,) = finish(made, made.submit([1, 2] * 10, params(count=40, temperature=0)))
    assert set(policy._blind) == {"ngram"}
    assert sighted.stats.proposed > 0


# ---------------------------------------------------------------- log-probabilities and estimates


def reference(context, token):
    row = TARGET(tuple(context))
    return float(row[token] - np.log(np.exp(row).sum()))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_the_targets_own_whatever_the_parameters_and_the_origin(temperature):
    drafter = ModelDrafter(ToyRunner(hashed(VOCAB, seed=1, order=2, blend=0.3), VOCAB), VOCAB)
    options = {"temperature": temperature, "presence_penalty": 1.0, "logit_bias": {3: 2.0}}
    made = engine(slots=1, drafter=drafter, policy=FixedLength(3))
    (drafted,) = finish(made, made.submit([1, 2], params(40, **options), top_logprobs=2))
    plain = engine(slots=1)
    (plainly,) = finish(plain, plain.submit([1, 2], params(40, **options), top_logprobs=2))
    assert {record.origin for record in drafted.records} >= {"draft", "residual"}
    assert drafted.tokens == plainly.tokens
    assert [record.logprob for record in drafted.records] == [record.logprob for record in plainly.records]
    for i, record in enumerate(drafted.records):
        context = [1, 2, *drafted.tokens[:i]]
        assert record.logprob.logprob == pytest.approx(reference(context, record.token), abs=1e-12)
        best = np.argsort(-TARGET(tuple(context)), kind="stable")[:2]
        assert [token for token, _ in record.logprob.top] == best.tolist()


def test_a_prompt_is_judged_whatever_caches_hold():
    made = engine(slots=2)
    finish(made, made.submit(LONG, params()))
    (result,) = finish(made, made.submit(LONG, params(count=3), prompt_logprobs=True, top_logprobs=1))
    assert [each.token for each in result.prompt_logprobs] == LONG[1:]
    for i in (1, 17, 255, 256, 257, 319):
        assert result.prompt_logprobs[i - 1].logprob == pytest.approx(reference(LONG[:i], LONG[i]), abs=1e-12)


def test_a_prompt_alone_can_be_judged():
    made = engine(slots=1)
    request = made.submit(LONG, params(count=0), prompt_logprobs=True)
    steps = list(made.run(request))
    assert len(request.results[0].prompt_logprobs) == len(LONG) - 1 == len(steps[-1].prompt_logprobs)
    assert request.results[0].finish_reason == "length" and request.results[0].tokens == ()
    short = made.submit([1], params(count=0), prompt_logprobs=True)
    finish(made, short)
    assert short.results[0].prompt_logprobs == ()


def test_judged_prompts_beside_running_texts_and_each_other():
    made = engine(slots=3)
    running = made.submit([1], params(count=40))
    made.step()
    judged = [made.submit(LONG, params(count=4), prompt_logprobs=True) for _ in range(2)]
    results = finish(made, running, *judged)
    assert results[1].prompt_logprobs == results[2].prompt_logprobs
    assert results[0].tokens == finish(alone := engine(slots=1), alone.submit([1], params(count=40)))[0].tokens


def test_a_prompt_row_that_is_no_law_ends_its_own_request_alone():
    def broken(context):
        return np.full(VOCAB, np.nan) if context[-1] == 8 else TARGET(context)

    made = engine(slots=2, next_logits=broken)
    good = made.submit([1, 2], params(temperature=0))
    bad = made.submit([1, 8, 3, 4], params(), prompt_logprobs=True)
    while not bad.finished:
        made.step()
    assert bad.results[0].finish_reason == "error" and isinstance(bad.results[0].error, RowError)
    assert good.results[0] is None or good.results[0].finish_reason != "error" or 8 in good.results[0].tokens


def test_logprob_of_a_token_that_cannot_be():
    assert logprob(np.array([0.0, -np.inf]), 1).logprob == -np.inf
    assert logprob(np.array([0.0, 0.0, 1.0]), 2, 3).top[1][0] == 0, "ties by token id"
    with pytest.raises(RowError):
        logprob(np.array([0.0, np.inf]), 0)


def test_plain_time_is_estimated_from_the_curve():
    profile = Profile(tuple(CostPoint(size, 0, 1, 0.5 + 0.01 * size) for size in (1, 2, 4, 8, 16, 32)), {})
    made = engine(slots=2, drafter=NGramDrafter(), policy=Controller(profile))
    (result,) = finish(made, made.submit([1, 2] * 4, params(count=20, temperature=0)))
    # passes of the toy take next to nothing, so the curve is corrected downwards, step by step
    assert 0 < result.stats.plain_seconds < 20 * 0.6
    assert made.stats.plain_seconds == pytest.approx(result.stats.plain_seconds)
    fixed = engine(drafter=NGramDrafter(), policy=FixedLength(2))
    assert finish(fixed, fixed.submit([1, 2] * 4, params()))[0].stats.plain_seconds is None
