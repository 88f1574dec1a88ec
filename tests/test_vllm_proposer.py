"""The proposer of the vLLM plug-in, against the shapes that vLLM 0.32 calls it with; the engine itself is not needed."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from truedraw.drafters import corpus
from truedraw.errors import IncompatibleModels, InvalidParameter
from truedraw.integrations.vllm import Proposer, options, plugin, texts
from truedraw.integrations.vllm.metrics import Metrics
from truedraw.integrations.vllm.steps import LEAST_PASSES, Pass, PassTimes, lengths

MAX_LENGTH, VOCAB = 64, 1000


def config(most=4, seqs=4, rank=0, **own):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH, get_vocab_size=lambda: VOCAB),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        additional_config={"truedraw": own} if own else {},
    )


def made(**given):
    return Proposer(config(**{"draft_length": 4, **given}), version="0.32.0")


def call(proposer, rows):
    """rows: (tokens, how many of them the pass emitted), as vLLM lays them out: int32 arrays whose rest is left over."""
    table = np.full((8, MAX_LENGTH), 77, np.int32)
    counts = np.zeros(8, np.int32)
    sampled = []
    for row, (tokens, emitted) in enumerate(rows):
        table[row, : len(tokens)], counts[row] = tokens, len(tokens)
        sampled.append(list(tokens[len(tokens) - emitted :]))
    return proposer.propose(sampled, counts, table, slot_mappings=None)


@pytest.fixture
def read(monkeypatch):
    """How many texts were read from their beginning."""
    begun = []
    begin = texts.Texts._begin
    monkeypatch.setattr(texts.Texts, "_begin", lambda self, *args: begun.append(1) or begin(self, *args))
    return begun


A, B = [1, 2, 3, 4, 5, 6, 1, 2, 3], [9, 8, 7, 6, 9, 8, 7]


def test_what_followed_is_drafted_for_each_row():
    assert call(made(), [(A, 1), (B, 1), ([3, 1, 4], 1)]) == [[4, 5, 6, 1], [6, 9, 8, 7], []]


def test_a_row_that_is_still_read_gets_nothing():
    assert call(made(), [(A, 0), (B, 1)])[0] == []


def test_drafts_end_before_the_context_does():
    long = (A * 8)[: MAX_LENGTH - 3]
    assert [len(drafts) for drafts in call(made(), [(long, 1), ((A * 8)[: MAX_LENGTH - 1], 1)])] == [2, 0]


def test_drafts_end_before_the_request_does():
    """A pass emits a token more than it has drafts. Rows that the plug-in says nothing of are bounded by the context."""
    proposer = made()
    params = [SimpleNamespace(max_tokens=limit, temperature=1.0) for limit in (5, 3, 2, None)]
    batch = SimpleNamespace(
        req_ids=[str(i) for i in range(4)], num_prompt_tokens=np.full(8, len(A) - 1), max_model_len=MAX_LENGTH
    )
    proposer.asked = plugin.asked(batch, {str(i): SimpleNamespace(sampling_params=one) for i, one in enumerate(params)})
    told = call(proposer, [([*A[:-1], x], 1) for x in (3, 3, 3, 3)])
    assert [len(drafts) for drafts in told] == [3, 1, 0, 4]
    proposer.asked = ()
    assert [len(drafts) for drafts in call(proposer, [([*A, 4], 1)])] == [4]


def test_copies_of_a_greedy_request_are_trusted_more():
    params = [SimpleNamespace(max_tokens=None, temperature=temperature) for temperature in (0.0, 1.0)]
    batch = SimpleNamespace(req_ids=["0", "1"], num_prompt_tokens=np.full(8, len(A) - 1), max_model_len=MAX_LENGTH)
    proposer = made()
    proposer.asked = plugin.asked(batch, {str(i): SimpleNamespace(sampling_params=one) for i, one in enumerate(params)})
    call(proposer, [(A, 1), (B, 1)])
    call(without := made(), [(A, 1), (B, 1)])
    (greedy, sampled), (taken_so, same) = (
        [known.survival[0] for known in one._texts._known.values()] for one in (proposer, without)
    )
    assert greedy > taken_so and sampled == same


def test_a_text_is_found_wherever_its_row_goes(read):
    """Rows change places when others end, and a new text in an old row is not taken for the one that was there."""
    proposer = made()
    call(proposer, [(A, 1), (B, 1)])
    assert call(proposer, [([*B, 6], 1), ([*A, 4, 5], 2)]) == [[9, 8, 7, 6], [6, 1, 2, 3]]
    assert len(read) == 2
    assert call(proposer, [([5, 5, 2], 1), ([*B, 6, 9], 1)])[1] == [8, 7, 6, 9]
    assert len(read) == 3


def test_a_text_comes_back_after_a_preemption(read):
    """It may come back as it was, or with what it emitted while it was read again."""
    proposer = made()
    call(proposer, [(A, 1), (B, 1)])
    for step in range(1, 5):
        call(proposer, [([*B, *[6] * step], 1)])
    assert call(proposer, [([*B, *[6] * 5], 1), ([*A, 4], 1)])[1] == [5, 6, 1, 2]
    assert len(read) == 2


def test_texts_of_the_same_tokens_do_not_share_what_is_known(read):
    proposer = made()
    call(proposer, [(A, 1), (A, 1)])
    assert len(read) == 2
    assert call(proposer, [([*A, 4], 1), ([*A, 9], 1)]) == [[5, 6, 1, 2], []]
    assert len(read) == 2


def test_a_cancelled_text_leaves_nothing_that_another_could_meet():
    """The same beginning, and another continuation: what is known of the first is no prefix of the second."""
    proposer = made()
    call(proposer, [([*A, 4, 5], 1)])
    other = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert call(proposer, [(other, 1)]) == call(made(), [(other, 1)]) == [[4, 5, 9, 1]]


def test_any_order_of_rows_gets_the_same_drafts():
    """Random texts that begin, grow, move, pause and end: at each step the drafts of a proposer that has this text alone."""
    generator = np.random.default_rng(0)
    proposer, running, alone = made(seqs=8), {}, {}
    compared = 0
    for step in range(120):
        while len(running) < 5:
            running[step, len(running)] = generator.integers(0, 3, generator.integers(4, 12)).tolist()
        here = [key for key in running if generator.random() < 0.8]
        generator.shuffle(here)
        rows = []
        for key in map(tuple, here):
            emitted = int(generator.integers(1, 4))
            running[key] += generator.integers(0, 3, emitted).tolist()
            rows.append((running[key], emitted))
        drafts = call(proposer, rows)
        for key, row, found in zip(map(tuple, here), rows, drafts, strict=True):
            assert found == call(alone.setdefault(key, made()), [row])[0]
            compared += len(found) > 0
        for key in [key for key, tokens in running.items() if len(tokens) > 50 or generator.random() < 0.05]:
            del running[key]
    assert compared > 100


def test_memory_is_bounded():
    proposer = made(seqs=2)
    for first in range(60):
        call(proposer, [([first, 1, 2, 3], 1)])
    assert len(proposer._texts) == 4
    assert sum(map(len, proposer._texts._by_length.values())) == 4


def test_memory_is_bounded_in_tokens_but_for_what_runs():
    known = texts.Texts(100, 5, max_tokens=100)
    for first in range(20):
        known.find([(np.full(30, first, np.int32), 30)])
    assert len(known) == 3
    known.find([(np.full(60, first, np.int32), 60) for first in range(4)])
    assert len(known) == 4


def test_drafts_are_tokens_that_the_model_has(tmp_path):
    """A corpus of another tokenizer: vLLM looks up the embedding of a draft without a check."""
    proposer = made(learn=True)
    proposer._corpus.add([5, 6, 7, 8, VOCAB, VOCAB + 1] * 1000)
    assert call(proposer, [([1, 5, 6], 1)]) == [[7, 8]]


def test_answers_join_a_corpus_while_there_is_room_for_more_texts(monkeypatch):
    monkeypatch.setattr(corpus, "PENDING", 1)
    proposer = made(seqs=100, learn=True)
    call(proposer, [([1, 2], 1), ([70, 71], 1)])
    call(proposer, [([1, 2, 31, 32, 33, 34, 35], 5), ([70, 71, 72], 1)])
    running = [70, 71, 72]
    for step in range(texts.LEFT + 1):
        running = [*running, 73 + step]
        call(proposer, [(running, 1)])
    assert call(proposer, [([8, 32, 33], 1)]) == [[34, 35]]


def test_answers_join_a_corpus_only_where_that_is_wanted(monkeypatch):
    monkeypatch.setattr(corpus, "PENDING", 1)  # sorted in at once
    for learn in (False, True):
        proposer = made(seqs=1, learn=learn)
        call(proposer, [([1, 2], 1)])
        call(proposer, [([1, 2, 31, 32, 33, 34, 35], 5)])
        for other in range(4):
            call(proposer, [([50 + other, 3], 1)])
        assert call(proposer, [([8, 32, 33], 1)]) == ([[34, 35]] if learn else [[]])


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.3, 1.0])
def test_lengths_are_the_best_of_all_choices(slope):
    generator = np.random.default_rng(int(slope * 100))
    for _ in range(20):
        survivals = [np.cumprod(generator.uniform(0.2, 1.0, generator.integers(0, 4))).tolist() for _ in range(3)]

        def rate(chosen, survivals=survivals):
            expected = sum(1 + sum(alone[:n]) for alone, n in zip(survivals, chosen, strict=True))
            return expected / (1 + slope * sum(chosen))

        best = max(map(rate, itertools.product(*(range(len(alone) + 1) for alone in survivals))))
        chosen = lengths(survivals, slope)
        assert rate(chosen) >= best / 1.021 and (rate(chosen) == pytest.approx(best) or not any(chosen))


def test_the_cost_of_further_tokens_is_learned_from_the_passes():
    generator = np.random.default_rng(0)
    times = PassTimes()
    for step in range(200):
        extra = 0 if step % 2 else int(generator.integers(1, 12))
        times.observe(Pass(4, 4 + extra, 0.02 * (1 + 0.3 * extra) * generator.uniform(0.95, 1.05)))
    assert times.slope == pytest.approx(0.3, rel=0.05)
    times.observe(Pass(4, 4, 5.0))
    assert len(times) == 200, "a pass that read a prompt besides is left out"
    assert times.plain(3) == pytest.approx(0.02, rel=0.05) and PassTimes().plain(3) is None


def test_nothing_is_drafted_until_passes_were_timed_and_where_it_does_not_pay():
    for slope, drafted in ((0.01, True), (3.0, False)):
        now = [0.0]
        proposer = Proposer(config(), version="0.32.0", clock=lambda now=now: now[0])
        tokens, drafts, sizes = list(A), [], []
        for _ in range(45):
            new = [*drafts, tokens[len(tokens) + len(drafts) - 6]]  # the text goes round with period 6
            now[0] += 0.01 * (1 + slope * len(drafts))
            tokens += new
            if len(tokens) > MAX_LENGTH - 6:
                break
            drafts = call(proposer, [(tokens, len(new))])[0]
            sizes.append(len(drafts))
        assert not any(sizes[:LEAST_PASSES])
        assert (sum(sizes[LEAST_PASSES:]) > 8) == drafted


def test_batches_that_take_turns_are_timed():
    """Pipeline parallelism: two batches in flight, of which each call tells one."""
    now = [0.0]
    proposer = Proposer(config(), version="0.32.0", clock=lambda: now[0])
    lines, drafts, drafted = [list(A), list(B)], [[], []], 0
    for step in range(60):
        this = step % 2
        tokens, period = lines[this], (6, 4)[this]
        new = [*drafts[this], [*tokens, *drafts[this]][-period]]  # every draft is right
        now[0] += 0.01
        tokens += new
        if len(tokens) > MAX_LENGTH - 6:
            break
        drafts[this] = call(proposer, [(tokens, len(new))])[0]
        drafted += len(drafts[this])
    assert drafted > 8 and proposer._times.plain(1) == pytest.approx(0.01)


def test_a_pass_that_read_a_text_again_is_not_timed():
    now = [0.0]
    proposer = Proposer(config(), version="0.32.0", clock=lambda: now[0])
    a, b = list(A), list(B)
    call(proposer, [(a, 1), (b, 1)])
    for step in range(5):  # b was preempted
        now[0] += 0.01
        call(proposer, [(a := [*a, 20 + step], 1)])
    assert len(proposer._times) == 5
    now[0] += 0.5  # it is read again in this pass
    call(proposer, [([*a, 30], 1), ([*b, 6], 1)])
    assert len(proposer._times) == 5


def test_one_process_of_a_tensor_parallel_group_counts(monkeypatch):
    counted = []
    for rank in (0, 1, 2):
        registry = CollectorRegistry()
        proposer = Proposer(config(draft_length=4, rank=rank), version="0.32.0")
        proposer.metrics = Metrics(4, registry, counts=proposer.metrics._counts)
        call(proposer, [(A, 1)])
        call(proposer, [([*A, 4, 5, 9], 3)])
        counted.append(registry.get_sample_value("truedraw_draft_length_total", {"length": "4"}))
    assert counted == [1, None, 1]


def test_what_became_of_drafts_is_counted():
    registry = CollectorRegistry()
    proposer = made()
    proposer.metrics = Metrics(4, registry)

    def value(name, **labels):
        return registry.get_sample_value(f"truedraw_{name}_total", labels)

    call(proposer, [(A, 1)])
    call(proposer, [([*A, 4, 5, 9], 3)])  # 4 and 5 were accepted of 4 5 6 1
    assert [value("draft_tokens", depth=str(depth)) for depth in (1, 2, 3, 4)] == [1, 1, 1, None]
    assert [value("accepted_tokens", depth=str(depth)) for depth in (1, 2, 3)] == [1, 1, None]
    Metrics(4, registry)  # an engine that is made again in this process


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"corpsu": "x"},
            "option of truedraw is 'corpsu': allowed is corpus, learn, corpus_size, draft_length; corpus may be meant",
        ),
        ({"corpus": "/no/such/file"}, "truedraw.corpus is '/no/such/file': allowed is a file or folder that is there"),
        ({"draft_length": -1}, "truedraw.draft_length is -1: allowed is an integer >= 0"),
        ({"corpus_size": True}, "truedraw.corpus_size is True: allowed is an integer >= 1"),
        ({"learn": "yes"}, "truedraw.learn is 'yes': allowed is true or false"),
        ({"corpus": ""}, "truedraw.corpus is '': allowed is a file or folder that is there"),
        ({"corpus": "~nosuchuser/x"}, "truedraw.corpus is '~nosuchuser/x': allowed is a file or folder that is there"),
        ({"corpus": "a\0b"}, "truedraw.corpus is 'a\\x00b': allowed is a file or folder that is there"),
        ({"draft_length": 5}, "truedraw.draft_length is 5: allowed is 0 to num_speculative_tokens, which is 4"),
        ({"most": 129}, "num_speculative_tokens is 129: allowed is 1 to 128: vLLM judges no more in a step"),
    ],
)
def test_bad_options_are_told_at_the_start(own, message):
    with pytest.raises(InvalidParameter) as caught:
        Proposer(config(**own), version="0.32.0")
    assert str(caught.value) == message


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev"])
def test_another_vllm_is_refused(version):
    with pytest.raises(IncompatibleModels, match=f"vLLM {version} is installed, and truedraw knows 0.32 to below 0.33"):
        Proposer(config(), version=version)


def test_without_vllm_that_is_told(monkeypatch):
    monkeypatch.setattr(options, "PACKAGES", ("no-such-vllm",))
    with pytest.raises(IncompatibleModels, match="vLLM is not installed"):
        Proposer(config())


def test_importing_it_imports_neither_vllm_nor_torch():
    code = "import sys, truedraw.integrations.vllm; print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- the entry point


@pytest.mark.parametrize("value", ["", "0", "off", "OFF"])
def test_switched_off_the_plug_in_imports_nothing_and_changes_nothing(value):
    code = (
        "import sys; from truedraw.integrations.vllm import plugin; plugin.register(); "
        "print(sorted({'vllm', 'torch', 'prometheus_client'} & set(sys.modules)))"
    )
    environ = {"PYTHONPATH": ":".join(sys.path), plugin.SWITCH: value}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ).stdout == "[]\n"


def test_the_entry_point_is_where_vllm_looks():
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "truedraw"]
    assert found and found[0].load() is plugin.register


def test_a_runner_that_draws_in_its_own_way_is_refused():
    class Own:
        def _sample(self):
            pass

    plugin.check_runner(Own(), Own._sample)
    with pytest.raises(IncompatibleModels, match="this platform's model runner, Own, draws in its own way"):
        plugin.check_runner(Own(), lambda: None)


def test_which_requests_are_judged_as_blocks_is_asked_of_the_request_alone():
    """Not by what was drawn: a grammar cuts drafts that it forbids, and what is left is no block (p = .5 .5 0 becomes .65 .35 0
    behind drafts of q = .4 .1 .5 that are cut and then judged so)."""
    usual = {"temperature": 1.0, "seed": None, "structured_outputs": None, "logprobs": None, "logprob_token_ids": None}
    changes = (
        {},
        {"temperature": 0.0},
        {"seed": 3},
        {"structured_outputs": object()},
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
    )
    requests = {str(i): SimpleNamespace(sampling_params=SimpleNamespace(**usual | change)) for i, change in enumerate(changes)}
    requests["pooling"] = SimpleNamespace(sampling_params=None)
    found = plugin.as_block(SimpleNamespace(req_ids=list(requests)), requests)
    assert found == [True] + [False] * (len(requests) - 1)


def test_another_value_of_the_switch_is_told(monkeypatch):
    monkeypatch.setenv(plugin.SWITCH, "coupled")
    with pytest.raises(InvalidParameter, match="TRUEDRAW_VLLM is 'coupled': allowed is 1 or on, or 0 or off"):
        plugin.register()


@pytest.mark.parametrize(
    ("newer", "ahead", "message"),
    [
        (True, False, "newer model runner, which draws in its own way: set VLLM_USE_V2_MODEL_RUNNER=0"),
        (False, True, "start vLLM with --no-async-scheduling"),
    ],
)
def test_what_the_plug_in_does_not_know_is_refused_at_the_start(newer, ahead, message):
    given = config()
    given.use_v2_model_runner, given.scheduler_config.async_scheduling = newer, ahead
    with pytest.raises(IncompatibleModels, match=message):
        plugin.check(given)
    given.use_v2_model_runner, given.scheduler_config.async_scheduling = False, False
    plugin.check(given)
    given.speculative_config, given.scheduler_config.async_scheduling = None, True
    plugin.check(given)
