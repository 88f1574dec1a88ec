"""What the vLLM plug-in draws, on vLLM's own sampler: runs where vLLM is installed (make test-vllm)."""

import copy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm makes an environment with it")

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from truedraw.integrations.vllm import sampling

VOCAB = 40


def batch_of(params, prompts, outputs, drafts=None):
    """An InputBatch as far as sampling reads it. params: vLLM's SamplingParams of each request."""
    n = len(params)
    processors = [
        make(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=512)), torch.device("cpu"), False)
        for make in BUILTIN_LOGITS_PROCESSORS
    ]
    added = [(i, one, prompts[i], outputs[i]) for i, one in enumerate(params)]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=n, removed=[], added=added, moved=[]))

    def column(values, dtype=torch.float32):
        return torch.tensor(list(values), dtype=dtype)

    longest = max(map(len, prompts))
    penalised = any(one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1 for one in params)
    allowed = None
    if any(one.allowed_token_ids for one in params):
        allowed = torch.zeros(n, VOCAB, dtype=torch.bool)
        for i, one in enumerate(params):
            if one.allowed_token_ids:
                allowed[i] = True
                allowed[i, one.allowed_token_ids] = False
    greedy = [one.temperature == 0 for one in params]
    metadata = SamplingMetadata(
        temperature=None if all(greedy) else column(one.temperature for one in params),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=column(one.top_p for one in params) if any(one.top_p < 1 for one in params) else None,
        top_k=column((one.top_k if one.top_k > 0 else VOCAB for one in params), torch.int32)
        if any(one.top_k > 0 for one in params)
        else None,
        generators={},
        max_num_logprobs=max((one.logprobs for one in params if one.logprobs is not None), default=None),
        no_penalties=not penalised,
        prompt_token_ids=torch.tensor([prompt + [VOCAB] * (longest - len(prompt)) for prompt in prompts]),
        frequency_penalties=column(one.frequency_penalty for one in params),
        presence_penalties=column(one.presence_penalty for one in params),
        repetition_penalties=column(one.repetition_penalty for one in params),
        output_token_ids=outputs,
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={i: one._bad_words_token_ids for i, one in enumerate(params) if one._bad_words_token_ids},
        logitsprocs=LogitsProcessors(processors),
        spec_token_ids=drafts,
    )
    generators = {i: torch.Generator().manual_seed(one.seed) for i, one in enumerate(params) if one.seed is not None}
    lengths = np.array([len(a) + len(b) for a, b in zip(prompts, outputs, strict=True)], np.int32)
    return SimpleNamespace(sampling_metadata=metadata, generators=generators, num_tokens_no_spec=lengths)


def spec_of(drafts):
    made = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    made.draft_token_ids = torch.tensor([token for one in drafts for token in one], dtype=torch.int32)
    return made


PARAMS = {
    "temperature 1": dict(temperature=1.0),
    "greedy": dict(temperature=0.0),
    "top-k": dict(temperature=0.8, top_k=5),
    "top-p": dict(temperature=0.7, top_p=0.8),
    "min-p": dict(temperature=1.0, min_p=0.2),
    "logit bias": dict(temperature=1.0, logit_bias={3: 4.0, 7: -50.0}),
    "penalties": dict(temperature=1.0, presence_penalty=0.9, frequency_penalty=1.5, repetition_penalty=1.4),
    "min tokens": dict(temperature=1.0, min_tokens=4, stop_token_ids=[1, 2, 3, 4, 5, 6]),
    "allowed tokens": dict(temperature=1.0, allowed_token_ids=[2, 3, 5, 8, 13]),
    "greedy, penalties": dict(temperature=0.0, frequency_penalty=2.0),
    "log-probabilities": dict(temperature=1.0, logprobs=3),
}


def params_of(name, seed):
    made = SamplingParams(seed=seed, **PARAMS[name])
    made.update_from_generation_config({}, None)
    return made


def problem(generator, names, seeds):
    """Requests with a text of a few tokens each, drafts for some, and rows of logits behind each."""
    n = len(names)
    prompts = [generator.integers(0, VOCAB, generator.integers(2, 6)).tolist() for _ in range(n)]
    outputs = [generator.integers(0, VOCAB, generator.integers(0, 4)).tolist() for _ in range(n)]
    drafts = [generator.integers(0, VOCAB, generator.integers(0, 4)).tolist() for _ in range(n)]
    rows = [torch.from_numpy(generator.normal(size=(len(one) + 1, VOCAB)) * 2).float() for one in drafts]
    params = [params_of(name, seed) for name, seed in zip(names, seeds, strict=True)]
    return params, prompts, outputs, drafts, rows


def plainly(params, prompt, output, row):
    """What vLLM draws behind this text with the plug-in, alone in its batch and without drafts."""
    drawn = sampling.sample(Sampler(), batch_of([params], [prompt], [output]), row[None].clone(), None)
    return int(drawn.sampled_token_ids[0, 0])


def steps(params, prompt, output, drafts, rows):
    """Plain decoding as far as the drafts agree with it."""
    emitted = []
    for j, row in enumerate(rows):
        emitted.append(plainly(params, prompt, [*output, *drafts[:j]], row))
        if j == len(drafts) or emitted[-1] != drafts[j]:
            return emitted


@pytest.mark.parametrize("name", PARAMS)
def test_a_step_emits_what_plain_decoding_would(name):
    """With a seed, for each kind of parameter on every position: token for token, whatever the batch holds besides."""
    generator = np.random.default_rng(sum(map(ord, name)))
    accepted = 0
    for trial in range(40):
        others = [str(other) for other in generator.choice(list(PARAMS), 3)]
        names, seeds = [name, *others], [int(seed) for seed in generator.integers(0, 2**40, 4)]
        params, prompts, outputs, drafts, rows = problem(generator, names, seeds)
        if trial % 2:  # drafts that will be accepted, at least at first
            for i in range(4):
                for j in range(len(drafts[i])):
                    drafts[i][j] = plainly(params[i], prompts[i], [*outputs[i], *drafts[i][:j]], rows[i][j])
        if not any(drafts):
            continue
        batch = batch_of(params, prompts, outputs, drafts)
        out = sampling.sample(Sampler(), batch, torch.cat(rows).clone(), spec_of(drafts))
        for i in range(4):
            emitted = [token for token in out.sampled_token_ids[i].tolist() if token != sampling.REJECTED]
            expected = steps(params[i], prompts[i], outputs[i], drafts[i], rows[i])
            assert emitted == expected, (names, i)
            accepted += len(emitted) - 1
    assert accepted > 40


def test_positions_of_one_text_have_noise_of_their_own():
    """n = 4,000 pairs of neighbouring positions, 16 cells of 2 x 2 tokens: independent up to chance."""
    row = torch.zeros(1, VOCAB)
    row[0, 4:] = -torch.inf
    drawn = np.array(
        [[plainly(params_of("temperature 1", seed), [1] * length, [], row[0]) for length in (5, 6)] for seed in range(4000)]
    )
    counts = np.histogram2d(drawn[:, 0], drawn[:, 1], bins=[range(5)] * 2)[0]
    assert ((counts - 250) ** 2 / 250).sum() < 45  # chi2(15) above 45 has probability 8e-5


def test_without_a_seed_the_law_is_the_rows():
    """Null: the first token ~ softmax(row). n = 20,000, 8 cells: chi2(7) above 35 has probability 1e-5; a draft that is kept
    too often by 0.02 is found with power > 0.99."""
    generator = np.random.default_rng(0)
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, :8] = torch.from_numpy(generator.normal(size=(2, 8))).float()
    n = 500
    counts = np.zeros(8)
    for _ in range(40):
        params = [params_of("temperature 1", None)] * n
        drafts = [[2]] * n
        batch = batch_of(params, [[1, 2]] * n, [[] for _ in range(n)], drafts)
        out = sampling.sample(Sampler(), batch, logits.repeat(n, 1), spec_of(drafts))
        counts += np.bincount(out.sampled_token_ids[:, 0].numpy(), minlength=8)
    expected = 40 * n * logits[0, :8].softmax(0).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 35


def test_log_probabilities_stand_beside_their_tokens():
    generator = np.random.default_rng(3)
    params, prompts, outputs, drafts, rows = problem(generator, ["log-probabilities"] * 3, [1, 2, 3])
    drafts = [[5, 6], [], [7]]
    rows = [torch.from_numpy(generator.normal(size=(len(one) + 1, VOCAB))).float() for one in drafts]
    drafts[0][0] = plainly(params[0], prompts[0], outputs[0], rows[0][0])
    out = sampling.sample(Sampler(), batch_of(params, prompts, outputs, drafts), torch.cat(rows).clone(), spec_of(drafts))
    width = out.sampled_token_ids.shape[1]
    told = out.logprobs_tensors
    for i, row in enumerate(out.sampled_token_ids.tolist()):
        for j, token in enumerate(row):
            if token != sampling.REJECTED:
                expected = rows[i][j].log_softmax(0)
                assert told.logprob_token_ids[i * width + j, 0] == token
                assert told.logprobs[i * width + j, 0] == pytest.approx(float(expected[token]), abs=1e-5)
                assert told.logprobs[i * width + j, 1] == pytest.approx(float(expected.max()), abs=1e-5)


def test_the_batch_keeps_seeds_and_no_generators():
    """vLLM winds the generator back where a prompt is read in pieces: there is nothing to wind."""
    params, prompts, outputs, _, rows = problem(np.random.default_rng(1), ["temperature 1"], [9])
    batch = batch_of(params, prompts, outputs)
    first = sampling.sample(Sampler(), batch, rows[0][:1].clone(), None).sampled_token_ids.tolist()
    batch.generators[0].set_offset(batch.generators[0].get_offset() - 4)
    copied = copy.copy(batch)
    assert sampling.sample(Sampler(), copied, rows[0][:1].clone(), None).sampled_token_ids.tolist() == first


# ---------------------------------------------------------------- drafts that were drawn


def test_requests_that_are_not_judged_as_blocks_keep_log_probabilities_beside_their_tokens():
    """Beside others that are: vLLM takes the row's first column for the token."""
    generator = np.random.default_rng(4)
    names, drafts = ["temperature 1", "log-probabilities", "temperature 1"], [[5, 6], [1, 2], [7]]
    for _ in range(50):
        params, prompts, outputs, _, _ = problem(generator, names, [1, 2, 3])
        for one in params:
            one.seed = None
        rows = torch.from_numpy(generator.normal(size=(8, VOCAB))).float()
        q = torch.softmax(torch.from_numpy(generator.normal(size=(5, VOCAB))).float(), 1)
        batch = batch_of(params, prompts, outputs, drafts)
        out = sampling.sample(Sampler(), batch, rows.clone(), spec_of(drafts), q, [True, False, True])
        width = out.sampled_token_ids.shape[1]
        for j, token in enumerate(out.sampled_token_ids[1].tolist()):
            if token != sampling.REJECTED:
                assert out.logprobs_tensors.logprob_token_ids[width + j, 0] == token
                expected = float(rows[3 + j].log_softmax(0)[token])
                assert out.logprobs_tensors.logprobs[width + j, 0] == pytest.approx(expected, abs=1e-5)


def test_a_thinking_budget_is_refused_with_drafts_and_left_alone_without():
    from vllm.exceptions import VLLMValidationError

    from truedraw.integrations.vllm import plugin

    code = (
        "import os; os.environ['TRUEDRAW_VLLM'] = '1'; from truedraw.integrations.vllm import plugin; plugin.register(); "
        "from vllm import SamplingParams; params = SamplingParams(thinking_token_budget=5, min_p=0.1)\n"
        "params._validate_spec_decode(None)\n"
        "try:\n    params._validate_spec_decode(object())\nexcept Exception as error: print(type(error).__name__, error)\n"
        "SamplingParams(min_p=0.1)._validate_spec_decode(object())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert told.startswith(VLLMValidationError.__name__)
    assert f"thinking_token_budget is not supported with drafts while {plugin.SWITCH} is on: leave it out" in told


def two_tokens(generator, params, n, rng):
    """n steps of two drafts each, drawn from q: the first two tokens emitted, those of a next step drawn from p itself."""
    p = torch.full((3, VOCAB), -torch.inf)
    p[:, :4] = torch.from_numpy(generator.normal(size=(3, 4))).float()
    q = torch.zeros(2, VOCAB)
    q[:, :4] = torch.from_numpy(generator.dirichlet(np.ones(4), 2)).float()
    shares = q[:, :4].double().numpy() / q[:, :4].double().sum(1, keepdim=True).numpy()
    drafts = rng.multinomial(1, np.broadcast_to(shares, (n, 2, 4))).argmax(-1).tolist()
    batch = batch_of([params] * n, [[1, 2]] * n, [[] for _ in range(n)], drafts)
    out = sampling.sample(Sampler(), batch, p.repeat(n, 1), spec_of(drafts), q.repeat(n, 1), [True] * n)
    return p[:, :4].softmax(1).numpy(), q[:, :4].numpy(), out.sampled_token_ids.numpy()


@pytest.mark.parametrize("name", ["temperature 1", "min-p"])
def test_drawn_drafts_leave_the_law_and_are_accepted_as_blocks(name):
    """Null: the first emitted token ~ p, and given it the second, where there is one in the step, has the law that block
    verification leaves; both are rows that do not depend on the text here, so that with a token from p for what a step lacks
    the pair ~ p x p. n = 20,000, 16 cells: chi2(15) above 54 has probability 3e-6; keeping drafts with min(1, p/q) and then
    drawing from p is found with power > 0.99."""
    rng = np.random.default_rng(5)
    counts, emitted = np.zeros((4, 4)), 0
    for _ in range(40):
        p, q, tokens = two_tokens(np.random.default_rng(7), params_of(name, None), 500, rng)
        if name == "min-p":
            p = np.where(p >= 0.2 * p.max(1, keepdims=True), p, 0)
            p /= p.sum(1, keepdims=True)
        for row in tokens:
            second = row[1] if row[1] != sampling.REJECTED else rng.choice(4, p=p[1] / p[1].sum())
            counts[row[0], second] += 1
            emitted += int((row != sampling.REJECTED).sum())
    expected = 20_000 * p[0][:, None] * p[1][None, :]
    inside = expected > 0
    assert not counts[~inside].any()
    assert ((counts - expected)[inside] ** 2 / expected[inside]).sum() < 54
    token_rule = np.minimum(p[0], q[0]).sum() * (1 + np.minimum(p[1], q[1]).sum())
    assert emitted / 20_000 - 1 > token_rule - 0.02, "blocks accept at least what single tokens would"


def test_seeds_and_greedy_requests_keep_their_text_with_drawn_drafts():
    generator = np.random.default_rng(2)
    for _ in range(30):
        names, seeds = ["temperature 1", "greedy", "top-p"], [5, None, 6]
        params, prompts, outputs, drafts, rows = problem(generator, names, seeds)
        if not any(drafts):
            continue
        q = torch.full((sum(map(len, drafts)), VOCAB), 1 / VOCAB)
        blocks = [False] * 3
        out = sampling.sample(
            Sampler(), batch_of(params, prompts, outputs, drafts), torch.cat(rows).clone(), spec_of(drafts), q, blocks
        )
        for i in range(3):
            emitted = [token for token in out.sampled_token_ids[i].tolist() if token != sampling.REJECTED]
            assert emitted == steps(params[i], prompts[i], outputs[i], drafts[i], rows[i])


def test_a_row_that_is_no_law_does_not_stop_a_request():
    drafts = [[3], [4]]
    params = [params_of("temperature 1", None)] * 2
    q = torch.zeros(2, VOCAB)  # the first draft's row gives its token nothing
    q[0, 9] = q[1, 4] = 1.0
    rows = torch.zeros(4, VOCAB)
    out = sampling.sample(Sampler(), batch_of(params, [[1], [1]], [[], []], drafts), rows, spec_of(drafts), q, [True, True])
    assert (out.sampled_token_ids[:, 0] >= 0).all()
