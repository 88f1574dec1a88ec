"""Every runner and every drafter through its contract. A new one adds one row to RUNNERS or DRAFTERS."""

import numpy as np
import pytest

from truedraw.drafters.chain import ChainDrafter
from truedraw.drafters.choice import ChoiceDrafter
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.none import NoDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.errors import RollbackUnsupported, RunnerError
from truedraw.protocols import Chunk, DraftRequest, Outcome, Worth
from truedraw.randomness import Noise
from truedraw.runners.toy import ToyRunner, hashed
from truedraw.types import PointMass, Proposal, SamplingParams, Verdict

VOCAB = 259  # of the tiny models


def llama(tiny, architecture, **options):
    from truedraw.runners.llamacpp import LlamaCppRunner

    return LlamaCppRunner(tiny(architecture), num_slots=3, context=128, **options)


def transformers(architecture, **options):
    pytest.importorskip("torch")
    import tiny_transformers

    from truedraw.runners.transformers import TransformersRunner

    return TransformersRunner(tiny_transformers.model(architecture), num_slots=3, context=128, threads=1, **options)


RUNNERS = {
    "toy": lambda tiny: ToyRunner(hashed(VOCAB), VOCAB, num_slots=3, max_length=128),
    "llama": lambda tiny: llama(tiny, "llama"),
    "llama, streams": lambda tiny: llama(tiny, "llama", kv_unified=False),
    "llama, bf16 KV": lambda tiny: llama(tiny, "llama", kv_type="bf16"),
    "sliding windows": lambda tiny: llama(tiny, "gemma2"),
    "transformers": lambda tiny: transformers("Qwen2"),
    "transformers, sliding windows": lambda tiny: transformers("Gemma2"),
}


@pytest.fixture(params=RUNNERS, scope="module")
def runner(request, tiny):
    made = RUNNERS[request.param](tiny)
    yield made
    made.close()
    made.close()  # idempotent


@pytest.fixture(autouse=True)
def _empty(request):
    if "runner" in request.fixturenames:
        runner = request.getfixturevalue("runner")
        for slot in range(runner.num_slots):
            runner.rollback(slot, 0)


def chunk(slot, tokens, rows, **options):
    return Chunk(slot, np.array(tokens, dtype=np.int32), rows, **options)


TEXT = [5, 9, 77, 3, 200, 41, 41, 8, 19, 33, 250, 4, 7, 7, 100, 101, 102, 103, 104, 105]


def close(left, right):
    np.testing.assert_allclose(left, right, atol=2e-3)


def test_rows_do_not_depend_on_how_the_text_was_fed(runner):
    whole = runner.forward([chunk(0, TEXT, 4)])[0].logits.copy()
    assert whole.shape == (4, runner.vocab_size)
    runner.forward([chunk(1, TEXT[:7], 0)])
    runner.forward([chunk(1, TEXT[7:16], 1)])
    close(runner.forward([chunk(1, TEXT[16:], 4)])[0].logits, whole)


def test_rollback_forgets_and_is_idempotent(runner):
    straight = runner.forward([chunk(0, TEXT, 3)])[0].logits.copy()
    runner.rollback(0, 12)
    runner.forward([chunk(0, [1, 2, 1, 2, 1], 1)])
    runner.rollback(0, 12)
    runner.rollback(0, 12)
    close(runner.forward([chunk(0, TEXT[12:], 3)])[0].logits, straight)


def test_a_rollback_beyond_the_cache_is_refused(runner):
    runner.forward([chunk(0, TEXT[:3], 0)])
    with pytest.raises(RunnerError, match="holds 3"):
        runner.rollback(0, 4)


def test_a_ragged_batch_equals_the_solo_runs(runner):  # B60
    texts = [TEXT[:3], TEXT[3:15], TEXT[5:8]]
    solo = []
    for slot, text in enumerate(texts):
        solo.append(runner.forward([chunk(slot, text, 2)])[0].logits.copy())
        runner.rollback(slot, 0)
    together = [rows.logits.copy() for rows in runner.forward([chunk(slot, text, 2) for slot, text in enumerate(texts)])]
    for left, right in zip(together, solo, strict=True):
        close(left, right)
    # after different rollbacks each slot goes on from its own length
    runner.rollback(0, 1)
    runner.rollback(1, 10)
    again = runner.forward([chunk(0, texts[0][1:], 2), chunk(1, texts[1][10:], 2)])
    close(again[0].logits, solo[0])
    close(again[1].logits, solo[1])


def test_hidden_states_come_with_the_rows_and_change_nothing(runner):
    plain = runner.forward([chunk(0, TEXT, 2)])[0].logits.copy()
    runner.rollback(0, 0)
    rows = runner.forward([chunk(0, TEXT, 2, hidden=("final",)), chunk(1, TEXT[:4], 1)])
    assert rows[0].hidden["final"].shape[0] == 2 and not rows[1].hidden
    close(rows[0].logits, plain)
    again = runner.forward([chunk(2, TEXT[:4], 1)])[0]
    assert again.logits.shape == (1, runner.vocab_size) and not again.hidden


def test_the_final_hidden_state_gives_the_logits(tiny):
    """What the output matrix is applied to: the tiny model's own matrix, read from its file."""
    import gguf

    made = llama(tiny, "llama")
    matrix = next(tensor.data for tensor in gguf.GGUFReader(tiny("llama")).tensors if tensor.name == "output.weight")
    rows = made.forward([chunk(0, TEXT, 3, hidden=("final",))])[0]
    np.testing.assert_allclose(rows.hidden["final"] @ matrix.T, rows.logits, atol=1e-2)
    made.close()


def test_passes_that_are_too_large_are_refused(runner):
    with pytest.raises(RunnerError):
        runner.forward([chunk(0, [1] * (runner.max_pass_size + 1), 0)])
    with pytest.raises(RunnerError):
        runner.forward([chunk(0, [1] * (runner.max_length + 1), 0)])


def test_a_full_slot_works_to_its_last_token(runner):  # B46
    runner.forward([chunk(0, [7] * (runner.max_length - 1), 0)])
    assert runner.forward([chunk(0, [8], 1)])[0].logits.shape == (1, runner.vocab_size)
    with pytest.raises(RunnerError):
        runner.forward([chunk(0, [9], 1)])


def test_a_slot_takes_over_what_another_holds_and_goes_on_by_itself(runner):
    straight = runner.forward([chunk(0, TEXT, 4)])[0].logits.copy()
    runner.forward([chunk(1, [1, 2, 3], 0)])
    runner.copy(0, 1, 16)
    copied = runner.forward([chunk(1, TEXT[16:], 4)])[0].logits.copy()
    close(copied, straight)
    runner.rollback(1, 10)  # the source does not see what becomes of the copy, nor the copy what becomes of the source
    runner.forward([chunk(1, [9, 9], 0)])
    runner.rollback(0, 17)
    close(runner.forward([chunk(0, TEXT[17:], 3)])[0].logits, straight[1:])
    runner.rollback(0, 0)
    runner.rollback(1, 10)
    close(runner.forward([chunk(1, TEXT[10:], 4)])[0].logits, straight)
    with pytest.raises(RunnerError, match="holds 20"):
        runner.copy(1, 2, 21)
    runner.copy(1, 2, 20)
    with pytest.raises(RunnerError):
        runner.rollback(2, 21)


def test_recurrent_models_forget_everything_or_nothing(tiny):
    made = llama(tiny, "mamba")
    assert not made.can_rollback
    straight = made.forward([chunk(0, TEXT, 1)])[0].logits.copy()
    with pytest.raises(RollbackUnsupported):
        made.rollback(0, 5)
    made.rollback(0, 0)
    close(made.forward([chunk(0, TEXT, 1)])[0].logits, straight)
    assert not made.can_copy
    with pytest.raises(RollbackUnsupported):
        made.copy(0, 1, 5)
    made.close()


def test_logits_are_a_view_without_a_copy(tiny):
    made = llama(tiny, "llama")
    rows = made.forward([chunk(0, TEXT, 2)])[0].logits
    assert not rows.flags.owndata
    made.close()


# ---------------------------------------------------------------- drafters


def model_drafter(**options):
    return ModelDrafter(ToyRunner(hashed(9, **options), 9, num_slots=2, max_length=24), 9)


def mtp_drafter():
    import test_mtp

    return test_mtp.Hearing(test_mtp.module(vocab=9))


DRAFTERS = {
    "none": NoDrafter,
    "ngram": NGramDrafter,
    "random": lambda: RandomDrafter(9),
    "random, sampled": lambda: RandomDrafter(9, sampled=True),
    "model": model_drafter,
    "suffix": SuffixDrafter,
    "chain": lambda: ChainDrafter([NGramDrafter(min_match=3), model_drafter()]),
    "a choice": lambda: ChoiceDrafter({"suffix": SuffixDrafter(), "model": model_drafter()}, "suffix"),
    "mtp": mtp_drafter,
    "suffix and model": lambda: ChainDrafter([SuffixDrafter(), model_drafter()]),
}
HISTORIES = [[1], [3, 4, 5, 3, 4], [2] * 12, [1, 2, 3, 4, 5, 6, 7, 8]]


def request(history, max_draft, *, sequence=0, slot=0, coupled=False, seed=0, more=lambda row: True, params=None):
    context = np.array(history, dtype=np.int32)
    context.flags.writeable = False
    return DraftRequest(
        sequence, slot, context, len(history), max_draft, params or SamplingParams(), frozenset({0}), None,
        Noise(seed).at(len(history)), coupled, more,
        lambda forecast: Worth(len(forecast.survival), sum(forecast.survival)), 100,
    )  # fmt: skip


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_keep_their_contract(name, coupled):
    drafter = DRAFTERS[name]()
    for seed, history in enumerate(HISTORIES):
        for max_draft in (1, 4, 8):
            asked = [request(history, max_draft, sequence=seed, slot=slot, coupled=coupled, seed=seed) for slot in (0, 1)]
            forecasts = drafter.forecast(asked)
            first, second = drafter.propose(asked)
            assert len(first) <= max_draft and len(second) <= max_draft
            assert all(forecast is not None for forecast in forecasts) or not drafter.forecasts
            for again, forecast in zip(drafter.forecast(asked), forecasts, strict=True):
                assert again == forecast or again.survival == forecast.survival, "asking draws nothing"
            assert first.tokens == second.tokens, "the same question has the same answer in any slot"
            again = drafter.propose([asked[0]])[0]
            assert again.tokens == first.tokens, "and at any time"
            if first.q.sampled:
                for i, token in enumerate(first.tokens):
                    assert first.q.row(i, token, 9).sum() == pytest.approx(1) and first.q.prob(i, token) > 0
            drafter.observe([Outcome(0, 0, (1,), first, Verdict((), 1, "plain"), {}, False)])
    drafter.observe([Outcome(0, 0, (), Proposal(), None, {}, True)])
    drafter.close()


@pytest.mark.parametrize("coupled", [False, True])
def test_sampled_drafts_have_the_law_that_they_record(coupled):
    """Null: draft tokens ~ recorded q. n = 3,000 first tokens, 9 cells: chi2(8) above 37.3 has
    probability 1e-5; a draw from another temperature (TV > 0.05) is found with power > 0.99."""
    drafter = model_drafter()
    params = SamplingParams(temperature=0.7, top_k=6)
    n = 3000
    proposals = [drafter.propose([request([1, 2], 1, coupled=coupled, seed=seed, params=params)])[0] for seed in range(n)]
    q = proposals[0].q.rows[0]
    counts = np.bincount([proposal.tokens[0] for proposal in proposals], minlength=9)
    assert counts[q == 0].sum() == 0
    assert ((counts - n * q)[q > 0] ** 2 / (n * q[q > 0])).sum() < 37.3


def test_the_policy_is_asked_before_each_draw():
    seen = []

    def more(row):
        seen.append(row)
        return row.depth < 3

    proposal = model_drafter().propose([request([1, 2], 8, more=more)])[0]
    assert len(proposal) == 2 and [row.depth for row in seen] == [1, 2, 3]
    assert all(0 < row.top_probability <= 1 and row.entropy >= 0 and 0 <= row.margin <= 1 for row in seen)


def test_a_draft_window_shorter_than_the_context_gives_up_without_a_word():  # B46
    drafter = model_drafter()
    assert len(drafter.propose([request([1] * 23, 8)])[0]) == 2  # rows after 23 and 24 tokens
    assert len(drafter.propose([request([1] * 25, 8)])[0]) == 0


def test_a_draft_row_that_is_no_law_ends_the_proposal(caplog):  # B67
    def next_logits(context):
        return np.full(4, np.nan) if len(context) > 3 else np.array([-np.inf, 0, 0, 0])

    drafter = ModelDrafter(ToyRunner(next_logits, 4), 4)
    assert len(drafter.propose([request([1, 2], 6)])[0]) == 2
    assert "drafting stops early" in caplog.text


@pytest.mark.parametrize("draft_vocab", [8, 12])
def test_draft_rows_are_fitted_to_the_targets_ids_before_the_draw(draft_vocab):  # B68
    logits = np.zeros(draft_vocab)
    logits[8:] = 5.0
    drafter = ModelDrafter(ToyRunner(lambda context: logits, draft_vocab), 10)
    proposal = drafter.propose([request([1], 6)])[0]
    assert all(len(row) == 10 and row.sum() == pytest.approx(1) for row in proposal.q.rows)
    assert (proposal.q.rows[0][8:] == 0).all() == (draft_vocab == 8)


@pytest.mark.parametrize(
    ("history", "num_draft", "min_match", "expected"),
    [
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 3, 2, (9, 10, 11)),  # B76
        ([1, 1, 1, 1], 3, 2, (1,)),  # B77: real history only; an overlap is fine, the end itself is not
        ([1, 2, 1], 4, 1, (2, 1)),  # a match at position 0
        ([1, 2], 4, 1, ()),
        ([7], 4, 1, ()),  # shorter than the n-gram
        ([1, 2, 3], 4, 5, ()),
        ([1, 2, 3, 9, 5, 2, 3, 7, 1, 2, 3], 1, 1, (9,)),  # the longest suffix, not the latest
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, 2, (9,)),  # of equally long ones the latest
        ([4, 1, 2, 5, 6, 7, 1, 2, 8, 1, 2], 3, 2, (8, 1, 2)),  # that still has enough behind it
    ],
)
def test_ngram_lookup(history, num_draft, min_match, expected):
    from truedraw.drafters.ngram import lookup

    assert lookup(np.array(history, dtype=np.int32), num_draft, max(min_match, 5), min_match) == expected


def test_a_chain_asks_the_next_only_where_nothing_came():
    class Fixed(NoDrafter):
        def __init__(self, answers):
            self.answers, self.asked = answers, 0

        def propose(self, requests):
            self.asked += len(requests)
            return [Proposal(self.answers.get(request.sequence, ()), PointMass()) for request in requests]

    first, second = Fixed({0: (1,)}), Fixed({0: (2,), 1: (3,)})
    proposals = ChainDrafter([first, second]).propose([request([1], 4, sequence=0), request([1], 4, sequence=1)])
    assert [proposal.tokens for proposal in proposals] == [(1,), (3,)]
    assert (first.asked, second.asked) == (2, 1)
