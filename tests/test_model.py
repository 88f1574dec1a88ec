"""The real model: the same text with and without drafts wherever its rows are bit-identical."""

from dataclasses import replace

import numpy as np
import pytest

from truedraw.engine import Engine
from truedraw.policy import FixedLength
from truedraw.prove.watch import Watch
from truedraw.registry import RULES
from truedraw.types import SamplingParams
from truedraw.verify import token

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def acceptance_agrees(monkeypatch):
    """In every run here with the token rule: accepted / tested against sum min(p, q), as a martingale.
    Rejected below 1e-6 by Bernstein's bound, at any number of positions."""
    watch = Watch(token.verify, directions=())
    monkeypatch.setitem(RULES, "token", watch)
    yield
    assert watch.acceptance.safe_p_value > 1e-6


CHAT = [{"role": "user", "content": "Copy this list: red, green, blue, red, green, blue, red. Then write it once more."}]
PROMPTS = [
    CHAT,
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    [{"role": "user", "content": "What is gravity?"}],
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.8, seed=2, top_p=0.95, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=3, top_k=40, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=4, min_p=0.05, frequency_penalty=0.3, ignore_eos=True),
]


def plain_and_drafted(engine, prompt, params):
    requests = [engine.submit(prompt, params, max_draft=max_draft) for max_draft in (0, None)]
    for request in requests:
        for _step in engine.run(request):
            pass
    return [request.results[0] for request in requests]


@pytest.mark.parametrize("lengths", [(1, 8), pytest.param((2, 4), marks=pytest.mark.long)])
@pytest.mark.parametrize("drafter", ["ngram", "random", "model"])
def test_one_sequence_under_256_cached_tokens(drafter, lengths):
    draft = {"draft_model": "smollm2:q4_0"} if drafter == "model" else {}
    with Engine.load("smollm2", drafter=drafter, **draft) as engine:
        for length in lengths:
            engine.policy = FixedLength(length)
            for prompt, params in zip(PROMPTS, PARAMS, strict=True):
                plain, drafted = plain_and_drafted(engine, prompt, replace(params, max_tokens=40))
                assert drafted.tokens == plain.tokens and drafted.text == plain.text
                assert drafted.rule == "coupled"
                assert drafted.stats.proposed > 0 or drafter == "ngram"


def test_batches_with_bf16_kv_and_a_stream_each():
    options = {"kv_type": "bf16", "kv_unified": False, "context": 512}
    with Engine.load("smollm2", drafter="none", **options) as engine:
        solo = [engine.generate([prompt], params)[0].tokens for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for drafter in ("ngram", "random"):
        with Engine.load("smollm2", drafter=drafter, draft_length=5, slots=4, **options) as engine:
            assert [result.tokens for result in engine.generate(PROMPTS, PARAMS)] == solo


def test_rows_of_a_batch_equal_the_solo_rows():
    with Engine.load("smollm2", drafter="none", kv_type="bf16", kv_unified=False, context=256, slots=4) as engine:
        texts = [np.array(engine.encode(prompt), dtype=np.int32) for prompt in PROMPTS]
        model = engine._target
        solo = [model.logits([(i, text)], [2])[0].logits.copy() for i, text in enumerate(texts)]
        for i in range(4):
            engine.model.runner.rollback(i, 0)
            model._held[i].truncate(0)
        together = model.logits(list(enumerate(texts)), [2] * 4)
        for left, right in zip(together, solo, strict=True):
            np.testing.assert_array_equal(left.logits, right)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_with_itself_accepts_everything_where_rows_are_bit_identical(temperature):
    with Engine.load("smollm2", drafter="model", draft_model="smollm2", kv_type="bf16") as engine:
        for length in (1, 4):
            engine.policy = FixedLength(length)
            for rule in ("coupled", "token"):
                params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
                request = engine.submit(CHAT, params, rule=rule)
                list(engine.run(request))
                assert request.results[0].stats.acceptance_rate == 1


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_drafting_with_itself_over_200_tokens(length, temperature):
    with Engine.load("smollm2", drafter="model", draft_model="smollm2", kv_type="bf16", draft_length=length) as engine:
        for rule in ("coupled", "token"):
            params = SamplingParams(max_tokens=200, temperature=temperature, seed=5, ignore_eos=True)
            request = engine.submit(CHAT, params, rule=rule)
            list(engine.run(request))
            assert request.results[0].stats.acceptance_rate == 1 and len(request.results[0].tokens) == 200


@pytest.mark.long
@pytest.mark.parametrize(("slots", "max_tokens"), [(1, 200), (4, 100)])
def test_every_length_every_drafter_and_long_texts_with_bf16_kv(slots, max_tokens):
    options = {"kv_type": "bf16", "kv_unified": False, "context": 1024}
    params = [replace(param, max_tokens=max_tokens) for param in PARAMS]
    with Engine.load("smollm2", drafter="none", **options) as engine:
        solo = [engine.generate([prompt], param)[0].tokens for prompt, param in zip(PROMPTS, params, strict=True)]
    for drafter in ("ngram", "random", "model"):
        draft = {"draft_model": "smollm2:q4_0"} if drafter == "model" else {}
        with Engine.load("smollm2", drafter=drafter, slots=slots, **draft, **options) as engine:
            for length in range(1, 9):
                engine.policy = FixedLength(length)
                assert [result.tokens for result in engine.generate(PROMPTS, params)] == solo, (drafter, length)


def test_where_rows_differ_a_greedy_text_turns_only_at_a_close_call():
    """f16 KV: beyond 256 cached tokens sizes 1 and 8 differ in the last bits. The first greedy
    difference, if there is one, lies where the two best logits are as near as the rows differ."""
    with Engine.load("smollm2", drafter="random", draft_length=7, context=1024) as engine:
        plain, drafted = plain_and_drafted(engine, "Once upon a time " * 70, replace(PARAMS[0], max_tokens=80))
        differs = next((i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)) if a != b), None)
        if differs is not None:
            prefix = np.array(engine.encode("Once upon a time " * 70) + list(plain.tokens[:differs]), dtype=np.int32)
            several = engine._target.logits([(0, np.append(prefix, [1] * 7).astype(np.int32))], [8])[0].logits[0].copy()
            alone = engine._target.logits([(0, prefix)], [1])[0].logits[0].copy()
            best = np.sort(alone)[-2:]
            assert best[1] - best[0] <= 2 * np.abs(alone - several).max()


@pytest.mark.parametrize(("told", "repacks"), [(b"AVX512 = 1 | AMX_INT8 = 1 | ", False), (b"AVX512 = 1 | REPACK = 1 | ", True)])
def test_kernels_that_end_the_process_are_left_alone(monkeypatch, told, repacks):
    """AMX, where the library has it: GCC before 13.2 builds it wrongly."""
    from truedraw.runners import llamacpp

    monkeypatch.setattr(llamacpp.llama, "llama_print_system_info", lambda: told)
    assert llamacpp.model_params().use_extra_bufts is repacks
