"""The engine on toy models: batches, stops, budgets, errors, cancellation, records, seeds."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.engine import Engine
from truedraw.errors import IncompatibleModels, InvalidParameter, PromptError, ProposalError, RowError, RunnerError
from truedraw.policy import FixedLength
from truedraw.protocols import Drafter
from truedraw.prove.engine_check import Brackets
from truedraw.registry import Model
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed, markov
from truedraw.types import DenseRows, PointMass, Proposal, SamplingParams

VOCAB = 9
TARGET = hashed(VOCAB, seed=1, order=2)
PARAMS = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)


def model(next_logits=TARGET, vocab=VOCAB, slots=1, **options):
    return Model("toy", ToyRunner(next_logits, vocab, num_slots=slots, **options), LetterTokenizer(vocab))


def self_drafter(next_logits=TARGET, vocab=VOCAB, slots=1):
    return ModelDrafter(ToyRunner(next_logits, vocab, num_slots=slots), vocab)


class Script(Drafter):
    """Proposes what a function of the request says."""

    def __init__(self, propose, samples=False):
        self._propose, self.samples, self.outcomes = propose, samples, []

    def propose(self, requests):
        return [self._propose(request) for request in requests]

    def observe(self, outcomes):
        self.outcomes += outcomes


def always(*tokens):
    return Script(lambda request: Proposal(tokens, PointMass()))


def one_hot_chain(vocab):
    """0 -> 1 -> 2 -> ... : the next token is the last plus one."""
    return lambda context: np.where(np.arange(vocab) == (context[-1] + 1) % vocab, 0.0, -np.inf)


def only(engine, prompt, params=PARAMS, **options):
    request = engine.submit(prompt, params, **options)
    for _step in engine.run(request):
        pass
    return request.results[0]


# ---------------------------------------------------------------- same text, same law


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("length", range(1, 9))
def test_the_same_seed_gives_the_text_of_plain_decoding(length, slots):
    prompts = [[3, 5, 3, 5], [1], [2, 2, 7], [6, 6, 6, 6, 6]]
    params = [replace(PARAMS, seed=i, temperature=t, top_k=k) for i, (t, k) in enumerate(((1, 0), (0, 0), (0.7, 5), (1.3, 0)))]
    plain = [only(Engine(model()), prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    blurred = hashed(VOCAB, seed=1, order=2, blend=0.8)
    for drafter in (
        NGramDrafter(min_match=1), RandomDrafter(VOCAB), RandomDrafter(VOCAB, sampled=True),
        self_drafter(blurred, slots=slots), always(1, 2, 3, 4, 5, 6, 7, 8),
    ):  # fmt: skip
        results = Engine(model(slots=slots), drafter, FixedLength(length)).generate(prompts, params)
        assert [result.tokens for result in results] == [result.tokens for result in plain]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_drafting_with_the_target_itself_accepts_everything(rule, length, temperature):  # B82, B86
    engine = Engine(model(), self_drafter(), FixedLength(length))
    result = only(engine, [1, 2], replace(PARAMS, max_tokens=200, temperature=temperature), rule=rule)
    assert result.stats.acceptance_rate == 1 and len(result.tokens) == 200
    assert result.stats.steps == -(-200 // (length + 1))


def test_a_gap_without_drafts_starves_no_cache():  # B82
    class Gaps(FixedLength):
        def __init__(self):
            super().__init__(3)
            self.step = 0

        def limits(self, batch):
            self.step += 1
            return [3 if self.step % 4 in (1, 0) else 0] * len(batch)

    result = only(Engine(model(), self_drafter(), Gaps()), [1, 2], replace(PARAMS, max_tokens=60))
    assert result.stats.acceptance_rate == 1


def test_two_identical_calls_have_identical_traces():  # B82
    engine = Engine(model(), NGramDrafter(min_match=1), FixedLength(3))

    def trace():
        return [(s.tokens, s.origins, s.num_proposed, s.num_accepted) for s in engine.stream([1, 2, 1, 2], PARAMS)]

    assert trace() == trace()


def test_every_position_of_a_block_has_the_law_of_the_target():
    """B16. Null: each emitted token ~ p = (.5, .3, .2), whatever its place in the block; drafts are
    always 0. n = 4,000 per place: chi2(2) above 23 has probability 1e-5; an engine that decides
    drafts by argmax (TV .5) or any shift of TV .05 is found with power > 0.999."""
    engine = Engine(
        model(markov([0.5, 0.3, 0.2], order=0), 3), always(0, 0, 0), FixedLength(3), entropy=iter(range(10**6)).__next__
    )
    for rule in ("coupled", "token"):
        counts = np.zeros((4, 3))
        for _ in range(1000):
            tokens = only(engine, [1], SamplingParams(max_tokens=16, ignore_eos=True), rule=rule).tokens
            for place in range(4):
                counts[place] += np.bincount(tokens[place::4], minlength=3)
        expected = 4000 * np.array([0.5, 0.3, 0.2])
        assert (((counts - expected) ** 2 / expected).sum(axis=1) < 23).all()


# ---------------------------------------------------------------- seeds and neighbours


def test_a_seeded_request_does_not_see_its_neighbours_nor_the_past():  # B50, B52
    for drafter in (NGramDrafter(min_match=1), RandomDrafter(VOCAB)):
        alone = only(Engine(model(), drafter, FixedLength(3)), [4, 4], PARAMS).tokens
        engine = Engine(model(slots=4), drafter, FixedLength(3))
        for seed in (None, 1, 2):
            only(engine, [1, seed or 3], replace(PARAMS, seed=seed))
        others = [
            replace(PARAMS, seed=None),
            PARAMS,
            replace(PARAMS, seed=2, temperature=0.1),
            replace(PARAMS, frequency_penalty=2.0),
        ]
        assert engine.generate([[1], [4, 4], [4, 4, 2], [4, 4]], others)[1].tokens == alone


def test_different_seeds_and_choices_differ_and_unseeded_requests_do_too():  # B51
    engine = Engine(model(hashed(26, sharpness=0.1), 26))
    texts = {only(engine, [1], replace(PARAMS, seed=seed)).tokens for seed in range(20)}
    unseeded = {only(engine, [1], replace(PARAMS, seed=None)).tokens for _ in range(20)}
    choices = {result.tokens for result in engine.generate([[1]], replace(PARAMS, n=20))}
    assert len(texts) == len(unseeded) == len(choices) == 20


def test_choice_i_is_keyed_by_seed_and_i_alone():
    engine = Engine(model(slots=3), NGramDrafter(min_match=1), FixedLength(4))
    three = engine.generate([[1, 2]], replace(PARAMS, n=3))
    assert three[0].tokens == only(engine, [1, 2]).tokens
    assert [r.tokens for r in engine.generate([[1, 2]], replace(PARAMS, n=2))] == [r.tokens for r in three[:2]]


def test_the_rule_follows_the_request():
    sampled, points = self_drafter(), NGramDrafter()
    rules = {
        (drafter.samples, seed, temperature):
            Engine(model(), drafter).submit([1], SamplingParams(seed=seed, temperature=temperature)).rule_name
        for drafter in (sampled, points) for seed in (None, 1) for temperature in (0, 1)
    }  # fmt: skip
    assert {key for key, rule in rules.items() if rule == "block"} == {(True, None, 1)}
    assert Engine(model(), points, rule="token").submit([1], SamplingParams(seed=1)).rule_name == "token"


# ---------------------------------------------------------------- verification in its place


def test_the_first_draft_is_checked():  # B17
    target = markov(np.eye(4)[[1, 2, 3, 1]])  # 1 -> 2
    result = only(Engine(model(target, 4), always(1)), [1, 1, 1], replace(PARAMS, max_tokens=1))
    assert result.tokens == (2,)


def test_each_draft_is_judged_by_its_own_row():  # B18
    result = only(Engine(model(one_hot_chain(9)), always(3, 4, 5), FixedLength(3)), [2], replace(PARAMS, max_tokens=4))
    assert result.tokens == (3, 4, 5, 6) and result.origins == ("draft",) * 3 + ("bonus",)


def test_nothing_conditioned_on_a_rejected_draft_survives():  # B19, B54
    chain = one_hot_chain(9)
    runner = ToyRunner(chain, 9)
    engine = Engine(
        Model("toy", runner, LetterTokenizer(9)), Script(lambda r: Proposal((int(r.context[-1]) + 1, 8, 8))), FixedLength(3)
    )
    result = only(engine, [1] * 128, replace(PARAMS, max_tokens=5))  # the pass that reads so long a prompt drafts nothing
    assert result.tokens == (2, 3, 4, 5, 6) and result.origins == ("plain", "draft", "residual", "draft", "bonus")
    only(engine, [1] * 128 + [2, 3], replace(PARAMS, max_tokens=1))
    assert len(engine._target.held(0)) == 130  # rejected drafts are gone, pending tokens are in no cache


def test_batches_with_different_acceptance_keep_their_own_positions():  # B35, B37, B60, B65
    def propose(request):
        good = [(int(request.context[-1]) + 1 + i) % 9 for i in range(3)]
        return Proposal({1: tuple(good), 2: (), 3: (good[0], 8, 8)}[int(request.context[0])], PointMass())

    engine = Engine(model(one_hot_chain(9), slots=3), Script(propose), FixedLength(3))
    results = engine.generate([[1, 2, 3], [2] * 7, [3] * 12], replace(PARAMS, max_tokens=9))
    for result, last in zip(results, (3, 2, 3), strict=True):
        assert result.tokens == tuple((last + 1 + i) % 9 for i in range(9))
    assert [result.stats.steps for result in results] == [3, 9, 5]


def test_padding_and_foreign_ids_are_never_emitted_nor_fed():  # B64, B69
    for bad in (-1, 9, 49_250):
        result = only(Engine(model(one_hot_chain(9)), always(4, bad, bad), FixedLength(3)), [3], replace(PARAMS, max_tokens=6))
        assert result.tokens == (4, 5, 6, 7, 8, 0)


def test_an_adversarial_drafter_never_matters():  # B78
    engine = Engine(model(), always(5, 5, 5, 5), FixedLength(4))
    plain = Engine(model())
    for seed in range(20):
        assert (
            only(engine, [seed % 8 + 1], replace(PARAMS, seed=seed)).tokens
            == only(plain, [seed % 8 + 1], replace(PARAMS, seed=seed)).tokens
        )


def test_counts_of_three_rounds():  # B79
    answers = iter([(4, 5, 6, 7), (0, 1, 8, 8), (8, 8, 8, 8)])
    engine = Engine(model(one_hot_chain(9)), Script(lambda r: Proposal(next(answers))), FixedLength(4))
    request = engine.submit([3], PARAMS)
    for _ in range(3):
        engine.step()
    engine.cancel(request)
    stats = request.results[0].stats
    assert (stats.proposed, stats.accepted, stats.emitted, stats.steps) == (12, 6, 9, 3)
    assert stats.acceptance_rate == 0.5 and stats.tokens_per_step == 3.0
    assert stats.acceptance_by_depth == (2 / 3, 2 / 3, 1 / 3, 1 / 3)


# ---------------------------------------------------------------- stops and budgets


def fixed_text(*tokens):
    """A target that says exactly these tokens after a prompt of one token."""
    return lambda context: np.where(np.arange(VOCAB) == tokens[min(len(context) - 1, len(tokens) - 1)], 0.0, -np.inf)


@pytest.mark.parametrize("stop_ids", [(), (3,)])
def test_a_stop_token_in_an_accepted_run_ends_the_text(stop_ids):  # B41, B47
    end = stop_ids[0] if stop_ids else 0
    engine = Engine(model(fixed_text(5, end, 6, 7)), always(5, end, 6, 7), FixedLength(4))
    result = only(engine, [1], SamplingParams(stop_token_ids=stop_ids, temperature=0))
    assert result.tokens == (5, end) and result.origins == ("draft", "draft")
    assert result.text == "e" and result.finish_reason == "stop"
    assert result.stats.emitted == 2 and result.stats.accepted == 2 and result.stats.proposed == 2


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 5])
def test_budgets_hold_to_the_token(max_tokens):  # B45
    engine = Engine(
        model(one_hot_chain(9)),
        Script(lambda r: Proposal(tuple((int(r.context[-1]) + 1 + i) % 9 for i in range(8)))),
        FixedLength(8),
    )
    result = only(engine, [2], replace(PARAMS, max_tokens=max_tokens))
    assert result.tokens == (3, 4, 5, 6, 7)[:max_tokens] and result.finish_reason == "length"


def test_stop_beats_length():
    engine = Engine(model(fixed_text(5, 0)), always(5, 0), FixedLength(2))
    assert only(engine, [1], SamplingParams(max_tokens=2)).finish_reason == "stop"
    assert only(Engine(model(fixed_text(5, 6, 7))), [1], SamplingParams(max_tokens=2, stop="f")).finish_reason == "stop"


def test_the_context_is_never_overrun():  # B46
    engine = Engine(model(one_hot_chain(9), max_length=16), always(*range(8)), FixedLength(8))
    result = only(engine, [2] * 13, SamplingParams(ignore_eos=True))
    assert result.tokens == (3, 4, 5) and result.finish_reason == "length"
    with pytest.raises(PromptError, match="16 tokens and the context 16"):
        engine.submit([2] * 16)


def test_min_tokens_masks_exactly_the_first_rows():  # B36
    def eager(context):
        return np.log([0.9] + [0.0125] * 8)

    for drafter in (always(0, 0, 0), always(1, 1, 1, 0), self_drafter(eager)):
        result = only(
            Engine(model(eager), drafter, FixedLength(4)), [1], SamplingParams(min_tokens=3, temperature=0, max_tokens=9)
        )
        assert len(result.tokens) == 4 and result.tokens[-1] == 0 and 0 not in result.tokens[:3]


def test_stop_strings_over_steps_and_inside_blocks():  # B43, B44
    target = fixed_text(1, 2, 3, 4, 5, 6)  # abcdef
    for drafter in (always(1, 2, 3, 4, 5), always(2, 3), RandomDrafter(VOCAB)):
        for stop, text in (("b", "a"), ("cd", "ab"), ("a", ""), ("def", "abc"), ("x", "abcdef")):
            engine = Engine(model(target), drafter, FixedLength(5))
            request = engine.submit([7], SamplingParams(max_tokens=6, temperature=0, stop=stop), top_records=1)
            steps = list(engine.run(request))
            result = request.results[0]
            assert result.text == text and result.tokens == tuple(range(1, len(text) + 1))
            assert "".join(step.text for step in steps) == text
            assert sum((step.tokens for step in steps), ()) == result.tokens
            assert sum((step.origins for step in steps), ()) == result.origins
            assert [record.token for record in result.records] == list(result.tokens)
            assert result.stats.emitted == len(result.tokens) >= result.stats.accepted
            assert sum(result.stats.accepted_by_depth) == result.stats.accepted == result.origins.count("draft")


def test_logit_bias_and_min_p_hold_on_every_position():  # B32
    biased = only(Engine(model(markov([0.9, 0.1], 0), 2), always(0, 0)), [1], replace(PARAMS, logit_bias={0: -100.0}))
    assert set(biased.tokens) == {1}
    params = replace(PARAMS, min_p=0.5, max_tokens=200)
    assert set(only(Engine(model(markov([0.6, 0.3, 0.1], 0), 3), always(2, 2, 2)), [1], params).tokens) == {0, 1}


# ---------------------------------------------------------------- constraints


def test_constraints_follow_the_drafts_and_commit_what_is_emitted():  # B38, B39, B40
    params = SamplingParams(max_tokens=50, seed=3, logit_bias={1: 2.0, 2: 2.0})
    plain = only(Engine(model()), [3], params, constraint=Brackets())
    for drafter in (always(2, 2, 2), always(1, 2, 0, 2), self_drafter(), RandomDrafter(VOCAB)):
        assert only(Engine(model(), drafter, FixedLength(4)), [3], params, constraint=Brackets()).tokens == plain.tokens


class Word:
    """The text "a" and nothing else; asked anything after its end it breaks."""

    def __init__(self, at=0):
        self.at = at

    def mask(self):
        assert self.at < 2, "asked after the end"
        return np.arange(VOCAB) == (1, 0)[self.at]

    def fork(self):
        return Word(self.at)

    def advance(self, token):
        assert self.mask()[token]
        self.at += 1


def test_a_finished_grammar_is_not_asked_again():  # B38
    for drafter in (always(1, 0, 1), always(4, 4), self_drafter()):
        result = only(Engine(model(), drafter, FixedLength(3)), [3], SamplingParams(seed=1), constraint=Word())
        assert result.tokens == (1, 0) and result.text == "a"


class Breaks(Brackets):
    """A grammar that fails once it is inside a bracket."""

    def mask(self):
        if self.depth:
            raise KeyError("no such state")
        return super().mask()

    def fork(self):
        return Breaks(self.depth)

    def advance(self, token):
        self.depth += token == 1


# ---------------------------------------------------------------- errors and cancellation


@pytest.mark.parametrize("drafter", [None, "good"])
def test_a_grammar_that_fails_ends_its_own_request_alone(drafter):
    good = Script(lambda r: Proposal(tuple((int(r.context[-1]) + 1 + i) % 9 for i in range(3))))
    engine = Engine(model(one_hot_chain(9), slots=2), good if drafter else None, FixedLength(3))
    broken = engine.submit([6], replace(PARAMS, max_tokens=12), constraint=Breaks())
    fine = engine.submit([6], replace(PARAMS, max_tokens=12))
    while not engine.idle:
        engine.step()
    result = broken.results[0]
    assert result.finish_reason == "error" and isinstance(result.error, KeyError)
    assert result.tokens == (7, 8, 0, 1) and len(result.origins) == result.stats.emitted == 4
    assert fine.results[0].tokens == tuple((7 + i) % 9 for i in range(12))


def test_a_drafter_that_fails_when_it_looks_back_loses_nothing():
    class Forgetful(NGramDrafter):
        def observe(self, outcomes):
            if any(outcome.finished for outcome in outcomes):
                raise RuntimeError("where was I?")

    engine = Engine(model(), Forgetful(min_match=1), FixedLength(3))
    request = engine.submit([1, 2, 1, 2], PARAMS)
    with pytest.raises(RuntimeError, match="where"):
        while True:
            engine.step()
    assert engine.idle and request.results[0].tokens == only(Engine(model()), [1, 2, 1, 2]).tokens


def breaks_at(length, bad=np.nan):
    def next_logits(context):
        row = np.array(one_hot_chain(9)(context))
        if len(context) == length and context[0] == 1:
            row[4] = bad
        return row

    return next_logits


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("drafter", [None, "good"])
def test_a_row_that_is_no_law_ends_its_own_request_alone(bad, drafter):  # B67
    good = Script(lambda r: Proposal(tuple((int(r.context[-1]) + 1 + i) % 9 for i in range(3))))
    engine = Engine(model(breaks_at(6, bad), slots=2), good if drafter else None, FixedLength(3))
    broken, fine = engine.generate([[1, 2, 3], [5, 2, 3]], replace(PARAMS, max_tokens=12))
    assert broken.finish_reason == "error" and isinstance(broken.error, RowError)
    assert broken.tokens == (4, 5, 6) and len(broken.origins) == 3  # what was decided before stays, drafts or not
    assert fine.tokens == tuple((4 + i) % 9 for i in range(12)) and fine.error is None
    with pytest.raises(RowError, match="position 6"):
        list(engine.stream([1, 2, 3], PARAMS))


def test_a_runner_that_fails_once_loses_nothing():
    class Flaky(ToyRunner):
        calls = 0

        def forward(self, chunks):
            rows = super().forward(chunks)
            Flaky.calls += 1
            if Flaky.calls == 4:
                raise RunnerError("out of luck")
            return rows

    engine = Engine(Model("toy", Flaky(TARGET, VOCAB), LetterTokenizer(VOCAB)), NGramDrafter(min_match=1), FixedLength(3))
    request = engine.submit([1, 2, 1, 2], PARAMS)
    with pytest.raises(RunnerError, match="out of luck"):
        while True:
            engine.step()
    while not request.finished:
        engine.step()
    assert request.results[0].tokens == only(Engine(model()), [1, 2, 1, 2]).tokens


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (lambda: Proposal((1,), DenseRows(())), "needs its own"),
        (lambda: Proposal((2,), DenseRows((np.array([0.5, 0.5]),))), "q = 0"),
    ],
)
def test_a_dishonest_drafter_is_told_so(proposal, message):  # B04
    engine = Engine(model(), Script(lambda request: proposal(), samples=True))
    with pytest.raises(ProposalError, match=message):
        only(engine, [1])
    engine.drafter = NGramDrafter()
    assert len(only(engine, [1]).tokens) == 30  # the engine is well


def test_closing_a_stream_frees_its_slot_and_leaves_the_others_alone():  # B61, B62
    engine = Engine(model(slots=3), self_drafter(slots=3), FixedLength(3))
    first, second, third = (engine.submit([i, 2], replace(PARAMS, seed=i)) for i in (1, 2, 3))
    stream = engine.run(second)
    next(stream)
    stream.close()
    assert second.results[0].finish_reason == "cancelled" and len(second.results[0].tokens) > 0
    while not engine.idle:
        engine.step()
    for request, i in ((first, 1), (third, 3)):
        assert request.results[0].tokens == only(Engine(model()), [i, 2], replace(PARAMS, seed=i)).tokens
    again = only(engine, [2, 2], replace(PARAMS, seed=2))  # warm cache, same text as cold
    assert again.tokens == only(Engine(model()), [2, 2], replace(PARAMS, seed=2)).tokens
    assert again.stats.acceptance_rate == 1


def test_a_waiting_request_can_be_cancelled_too():
    engine = Engine(model())
    running, waiting = engine.submit([1], PARAMS), engine.submit([2], PARAMS)
    engine.step()
    engine.cancel(waiting)
    engine.cancel(waiting)
    assert waiting.results[0].finish_reason == "cancelled" and waiting.results[0].tokens == ()
    while not engine.idle:
        engine.step()
    assert running.finished and engine.step() == []


def test_more_requests_than_slots_wait_their_turn_and_reuse_prefixes():
    runner = ToyRunner(TARGET, VOCAB, num_slots=2)
    engine = Engine(Model("toy", runner, LetterTokenizer(VOCAB)))
    prompts = [[1] * 50 + [i] for i in range(1, 6)]
    results = engine.generate(prompts, replace(PARAMS, max_tokens=4))
    assert [r.tokens for r in results] == [
        only(Engine(model()), prompt, replace(PARAMS, max_tokens=4)).tokens for prompt in prompts
    ]
    assert runner.num_fed < 2 * 54 + 3 * 10  # two prompts in full, three continued


def test_long_prompts_go_in_chunks_while_others_go_on():
    engine = Engine(model(slots=2, max_pass_size=512))
    short = engine.submit([1], replace(PARAMS, max_tokens=20))
    engine.step()
    long = engine.submit([2] * 1000, replace(PARAMS, max_tokens=2))
    emitted = [sum(step.num_emitted for step in engine.step() if step.request == short.id) for _ in range(4)]
    assert emitted == [1, 1, 1, 1] and long.results == [None]
    while not engine.idle:
        engine.step()
    assert long.results[0].tokens == only(Engine(model()), [2] * 1000, replace(PARAMS, max_tokens=2)).tokens


@pytest.mark.parametrize("spare", [tuple(range(9)), (-1, 1, 2, 3, 49_250, 5, 6, 7, 8)])
@pytest.mark.parametrize("params", [replace(PARAMS, min_tokens=12), replace(PARAMS, ignore_eos=False, logit_bias={0: 1.0})])
def test_trees_with_stop_tokens_and_unknown_ids_give_the_text_of_plain_decoding(spare, params):
    two_levels = Proposal((*spare, *spare), parents=(*[-1] * 9, *[4] * 9))
    for tree in (Proposal(spare, parents=(-1,) * 9), two_levels):
        drafted = only(Engine(model(), Script(lambda request, tree=tree: tree), FixedLength(18)), [3, 4], params)
        assert drafted.tokens == only(Engine(model()), [3, 4], params).tokens
    refused = only(Engine(model(), Script(lambda request: two_levels), FixedLength(18), rule="coupled"), [3, 4], params)
    assert refused.stats.accepted > 0
    alone = only(Engine(model(), Script(lambda request: two_levels), FixedLength(18), rule="token"), [3, 4], params)
    assert isinstance(alone.error, ProposalError) and "verifies chains" in str(alone.error)


def test_a_request_that_cannot_start_fails_alone():
    class Unforkable(Brackets):
        def fork(self):
            raise KeyError("no copies")

    engine = Engine(model())
    good, bad = engine.submit([1], PARAMS), engine.submit([1], PARAMS, constraint=Unforkable())
    assert len(list(engine.run(good))) == 30
    list(engine.run(bad))
    assert bad.results[0].finish_reason == "error" and isinstance(bad.results[0].error, KeyError)
    assert engine.idle and not engine._requests
    with pytest.raises(InvalidParameter, match="lone surrogate"):
        SamplingParams(stop="\udcff")


def test_a_constraint_that_fails_inside_the_draft_model_leaves_the_neighbours_alone():
    engine = Engine(model(slots=2), self_drafter(slots=2), FixedLength(4))
    bad = engine.submit([6], replace(PARAMS, logit_bias={1: 9.0}), constraint=Breaks())
    good = engine.submit([6], PARAMS)
    while not engine.idle:
        engine.step()
    assert good.results[0].tokens == only(Engine(model()), [6]).tokens
    plain = engine.submit([6], replace(PARAMS, logit_bias={1: 9.0}), constraint=Breaks(), max_draft=0)
    list(engine.run(plain))
    assert bad.results[0].tokens == plain.results[0].tokens and isinstance(bad.results[0].error, KeyError)


def test_a_mask_of_numbers_is_refused():
    class Numbers(Brackets):
        def mask(self):
            return super().mask().astype(int)

        def fork(self):
            return Numbers(self.depth)

    result = only(Engine(model()), [3], PARAMS, constraint=Numbers())
    assert result.finish_reason == "error" and "a bool array of shape (9,)" in str(result.error)


@pytest.mark.parametrize("where", ["forward", "extend", "rollback", "truncate"])
def test_ctrl_c_at_any_instant_of_a_pass_leaves_the_cache_right(monkeypatch, where):
    """The interrupt comes right after the operation has worked, n times in all."""
    from truedraw.cache import TokenBuffer

    expected = only(Engine(model()), [1, 2, 1, 2]).tokens
    owner = TokenBuffer if where in ("extend", "truncate") else ToyRunner
    original = getattr(owner, where)
    for n in range(1, 25, 2):
        engine = Engine(model(), NGramDrafter(min_match=1), FixedLength(4))
        left = [n]

        def interrupted(self, *arguments, left=left):
            answer = original(self, *arguments)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return answer

        request = engine.submit([1, 2, 1, 2], PARAMS)
        monkeypatch.setattr(owner, where, interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            list(engine.run(request))
        monkeypatch.setattr(owner, where, original)
        assert only(engine, [1, 2, 1, 2]).tokens == expected


def test_prompt_chunks_do_not_depend_on_neighbours():
    def chunks(neighbours):
        runner = ToyRunner(TARGET, VOCAB, num_slots=4)
        engine = Engine(Model("toy", runner, LetterTokenizer(VOCAB)))
        for i in range(neighbours):
            engine.submit([i + 1], replace(PARAMS, max_tokens=20))
        engine.step()
        passes = runner.num_passes
        engine.submit([2] * 600, replace(PARAMS, max_tokens=1))
        fed = []
        for _ in range(3):
            before = runner.num_fed
            engine.step()
            fed.append(runner.num_fed - before - neighbours)
        return fed, runner.num_passes - passes

    assert chunks(0) == chunks(3) == ([256, 256, 88], 3)  # the last with the first token's own


def test_cancelled_requests_say_nothing_more_and_nothing_is_kept_of_finished_ones():  # B62
    engine = Engine(model())
    request = engine.submit([1], PARAMS)
    engine.step()
    engine.cancel(request)
    assert list(engine.run(request)) == []
    for _ in range(3):
        only(engine, [1], replace(PARAMS, max_tokens=0))
    assert not engine._requests


def test_a_reused_draft_buffer_does_not_change_what_is_recorded():  # B12
    buffer = np.array([0.5, 0.5])
    q = DenseRows((buffer,))
    buffer[:] = [1.0, 0.0]
    assert list(q.rows[0]) == [0.5, 0.5]


# ---------------------------------------------------------------- records and refusals


def test_records_tell_p_q_and_origin():
    engine = Engine(model(), self_drafter(hashed(VOCAB, seed=1, order=2, blend=0.5)), FixedLength(3))
    result = only(engine, [1, 2], replace(PARAMS, temperature=0.8), top_records=3)
    assert [record.token for record in result.records] == list(result.tokens)
    assert [record.origin for record in result.records] == list(result.origins)
    for record in result.records:
        assert 0 < record.p <= 1 and len(record.top) == 3 and record.top[0][1] >= record.top[2][1]
        assert (record.q is None) == (record.origin != "draft")
    assert result.records == only(engine, [1, 2], replace(PARAMS, temperature=0.8), top_records=3).records


def test_records_do_not_depend_on_speculation():  # B49
    fast = only(Engine(model(), NGramDrafter(min_match=1), FixedLength(4)), [1, 2, 1, 2], replace(PARAMS, top_k=1), top_records=3)
    plain = only(Engine(model()), [1, 2, 1, 2], replace(PARAMS, top_k=1), top_records=3)
    assert [(r.token, r.p, r.top) for r in fast.records] == [(r.token, r.p, r.top) for r in plain.records]


def test_recurrent_targets_run_plainly_and_are_refused_with_drafts():
    recurrent = model(can_rollback=False)
    with pytest.raises(IncompatibleModels, match="recurrent or hybrid"):
        Engine(recurrent, NGramDrafter())
    assert only(Engine(recurrent), [1, 2]).tokens == only(Engine(model()), [1, 2]).tokens
    with pytest.raises(IncompatibleModels, match="recurrent"):
        ModelDrafter(recurrent.runner, VOCAB)


def test_greedy_records_know_the_penalties_of_their_own_position():
    params = replace(PARAMS, temperature=0, frequency_penalty=0.7, logit_bias={3: 1.0})
    fast = only(Engine(model(), self_drafter(), FixedLength(4)), [1, 2], params, top_records=2)
    plain = only(Engine(model()), [1, 2], params, top_records=2)
    assert [(r.token, r.p, r.top) for r in fast.records] == [(r.token, r.p, r.top) for r in plain.records]
    assert all(record.p == 1 for record in fast.records)


def test_hidden_layers_that_do_not_exist_are_refused_and_others_arrive():
    spy = always(1)
    spy.hidden = ("third",)
    with pytest.raises(IncompatibleModels, match="third"):
        Engine(model(), spy)
    spy.hidden = ("final",)
    only(Engine(model(), spy), [1, 2, 3], replace(PARAMS, max_tokens=2))
    assert spy.outcomes[0].hidden["final"].shape == (2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.submit([]), "prompt is empty"),
        (lambda e: e.submit(""), "prompt is empty"),
        (lambda e: e.submit([9]), r"outside the vocabulary: ids in \[0, 8\]"),
        (lambda e: e.submit(["text"]), "holds 'text'"),
        (lambda e: SamplingParams(stop=None), "a list"),
        (lambda e: e.submit([1], SamplingParams(logit_bias={9: 1.0})), r"token id in \[0, 8\]"),
        (lambda e: e.submit([1], SamplingParams(stop_token_ids=(9,))), r"token id in \[0, 8\]"),
        (lambda e: e.submit([1], rule="best"), "block, coupled, multidraft"),
        (lambda e: e.submit([1], rule=""), "block, coupled, multidraft"),
        (lambda e: e.submit([1], max_draft="x"), "max_draft is 'x'"),
        (lambda e: e.submit([1], top_records=-1), "top_records is -1"),
        (lambda e: e.submit([1] * 4090, SamplingParams(min_tokens=100)), "at most the 6"),
        (lambda e: e.generate([1, 2]), "a list of token ids"),
        (lambda e: Engine.load("toy", kv_type="q8_0"), "f16 only, for the toy model"),
        (lambda e: Engine.load("toy", drafter="none", draft_length=5), "auto or 0"),
        (lambda e: Engine.load("toy", drafter=NGramDrafter(), draft_model="toy"), "None together"),
        (lambda e: e.generate("text"), "a list of prompts"),
        (lambda e: e.generate([[1]], [PARAMS, PARAMS]), "one for each"),
        (lambda e: FixedLength(-1), "an integer >= 0"),
        (lambda e: Engine.load("toy", draft_length=1.5), "an integer >= 0"),
        (lambda e: Engine.load("toy", drafter="magic"), "auto, none, suffix, ngram"),
        (lambda e: Engine.load("toy", slots=0), "an integer >= 1"),
        (lambda e: Engine.load("toy", drafter="ngram", draft_model="toy"), "auto, model or tree"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(call, message):
    with pytest.raises((PromptError, InvalidParameter), match=message):
        call(Engine(model()))


def test_prompts_may_be_arrays_and_a_draft_model_needs_a_slot_for_each():
    assert only(Engine(model()), np.array([1, 2])).tokens == only(Engine(model()), [1, 2]).tokens
    engine = Engine(model(slots=2), self_drafter(slots=1))
    with pytest.raises(IncompatibleModels, match="1 slots, fewer than the target"):
        engine.generate([[1], [2]], PARAMS)


def test_a_chain_of_drafters_by_name():
    with Engine.load("toy", drafter="ngram+model", draft_model="toy") as engine:
        result = only(engine, "the cat sat on", SamplingParams(max_tokens=40, seed=1))
        assert result.text == only(engine, "the cat sat on", SamplingParams(max_tokens=40, seed=1), max_draft=0).text
        assert result.stats.acceptance_rate > 0.5
