"""Training: prompts held apart, answers kept soundly, the network that the drafter runs, and resuming after a kill."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiny_target import tiny_model  # noqa: E402  # behind the check that torch is there

from truedraw.drafters.mtp_modules import EntryCache, MtpModule, MtpShape, MtpWeights, fingerprint, load  # noqa: E402
from truedraw.errors import InvalidParameter, RunError  # noqa: E402
from truedraw.protocols import TokenMatrices  # noqa: E402
from truedraw.train import prompts, subjects  # noqa: E402
from truedraw.train.answers import HELD_OUT_SHARE, answers, is_held_out  # noqa: E402
from truedraw.train.batches import collate, order, teacher  # noqa: E402
from truedraw.train.learning import Learning, LearningOptions  # noqa: E402
from truedraw.train.mtp import TrainOptions, shape_for, train  # noqa: E402
from truedraw.train.network import first_weights, match, unrolled  # noqa: E402
from truedraw.train.store import Answer, Store  # noqa: E402

VOCAB = 24


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------- prompts


def text_of(made):
    return made.prompt if isinstance(made.prompt, str) else "\n".join(message["content"] for message in made.prompt)


def test_a_prompt_depends_on_seed_and_index_alone():
    assert prompts.make(3, 7) == prompts.make(3, 7)
    assert len({text_of(prompts.make(3, i)) for i in range(200)}) > 150
    assert [prompts.make(3, i) for i in range(20)] != [prompts.make(4, i) for i in range(20)]


def test_held_out_prompts_share_neither_template_nor_subject():
    assert not set(subjects.SUBJECTS) & set(subjects.HELD_OUT)
    for kind in prompts.KINDS:
        assert kind.held_out and not set(kind.templates) & set(kind.held_out)
    held_out = "\n".join(text_of(prompts.make(0, i, held_out=True)) for i in range(300))
    others = "\n".join(text_of(prompts.make(0, i)) for i in range(300))
    assert not any(f" {subject}." in held_out or f" {subject}?" in held_out for subject in subjects.SUBJECTS)
    assert not any(f" {subject}." in others or f" {subject}?" in others for subject in subjects.HELD_OUT)


def test_prompts_are_of_every_kind_and_filled_in():
    made = [prompts.make(1, i, held_out=held_out) for i in range(400) for held_out in (False, True)]
    assert {each.kind for each in made} == {kind.name for kind in prompts.KINDS}
    for each in made:
        assert not any(
            f"{{{part}}}" in text_of(each) for part in ("subject", "other", "name", "number", "items", "code", "lines")
        )
    assert all(isinstance(prompts.make(1, i, chat=False).prompt, str) for i in range(50))


def test_none_of_the_prompts_is_one_that_bench_measures():
    shipped = (Path(__file__).parent.parent / "benchmarks" / "workloads.jsonl").read_text().lower()
    assert not any(f" {subject.lower()}?" in shipped or f"about {subject.lower()}" in shipped for subject in subjects.SUBJECTS)


# ---------------------------------------------------------------- answers


def some_answers(number, seed=0, **options):
    model = tiny_model(VOCAB, num_slots=4, max_length=800)
    mass = np.zeros(VOCAB)
    made = answers(model, seed, 0, mass, **options)
    return [next(made) for _ in range(number)], mass, model


def test_answers_are_the_targets_own_with_the_states_they_were_drawn_behind():
    made, mass, model = some_answers(12)
    for answer in made:
        assert len(answer.tokens) == len(answer.states) == len(answer.norms)
        assert answer.held_out == is_held_out(answer.prompt)
        logits = answer.states.astype(np.float32) @ model.runner.output.T
        np.testing.assert_allclose(np.log(np.exp(logits).sum(axis=1)), answer.norms, atol=0.02)
    assert mass.sum() > sum(len(answer.tokens) for answer in made)  # rows of unfinished ones count too
    again, _, _ = some_answers(12)
    for left, right in zip(made, again, strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()


def test_answers_have_the_law_of_the_target():
    """Null: token i of a sampled answer ~ the row of its state. Sum of log p(x) minus its mean, over about 5,000 tokens, in
    standard deviations: above 4.9 with probability 1e-6; sampling at temperature 0.8 moves it by more than 10."""
    difference = variance = 0.0
    made, _, model = some_answers(110)
    for answer in made:
        logits = answer.states.astype(np.float64) @ model.runner.output.T.astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        if (logs.argmax(axis=1) == answer.tokens).all():
            continue  # a greedy one
        p = np.exp(logs)
        mean = (p * logs).sum(axis=1)
        difference += (logs[np.arange(len(logs)), answer.tokens] - mean).sum()
        variance += ((p * logs**2).sum(axis=1) - mean**2).sum()
    assert variance > 1000 and abs(difference) / np.sqrt(variance) < 4.9


def answer(i, n, *, held_out=False, width=4):
    generator = np.random.default_rng(i)
    states = generator.normal(size=(n, width)).astype(np.float16)
    return Answer(
        i, "chat", held_out, states, generator.integers(0, 9, n).astype(np.int32), generator.normal(size=n).astype(np.float32)
    )


def test_a_store_keeps_what_was_added_and_drops_what_was_torn(tmp_path):
    store = Store(tmp_path, 4, 9, 10_000)
    store.mass[3] = 2.5
    store.add([answer(0, 5), answer(1, 3, held_out=True)])
    store.add([answer(2, 7)])
    with (tmp_path / "states.f16").open("ab") as file:
        file.write(b"a kill in the middle of the next one")
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write('{"prompt": 3, "kind": "ch')
    again = Store(tmp_path, 4, 9, 10_000)
    assert again.num_tokens == 15 and again.count(held_out=True) == 3 and again.next_prompt == 3 and again.mass[3] == 2.5
    again.add([answer(3, 2)])
    for left, right in zip(
        Store(tmp_path, 4, 9, 10_000).answers(), [answer(0, 5), answer(1, 3), answer(2, 7), answer(3, 2)], strict=True
    ):
        np.testing.assert_array_equal(left.states, right.states)
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.norms, right.norms)


def test_reading_a_store_writes_nothing_but_away_with_what_was_torn(tmp_path):
    """A kill while the index is written anew would lose all answers."""
    Store(tmp_path, 4, 9, 10_000).add([answer(0, 5)])
    index = tmp_path / "index.jsonl"
    before, inode = index.read_bytes(), index.stat()
    Store(tmp_path, 4, 9, 10_000)
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == (inode.st_mtime_ns, inode.st_ino)
    index.write_bytes(before + b'{"prompt": 3, "kind": "ch')
    Store(tmp_path, 4, 9, 10_000)
    assert index.read_bytes() == before
    index.write_bytes(b"")  # a kill before the first line
    assert Store(tmp_path, 4, 9, 10_000).num_tokens == 0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("mass.npy", b""),
        ("states.f16", b"half"),
        ("index.jsonl", b'{"width": 4, "vocab_size": 9}\nno entry\n'),
        ("index.jsonl", b'{"width": 4, "vocab_size": 9}\n{"prompt": 1}\n'),
    ],
)
def test_a_damaged_store_is_told_in_a_line(tmp_path, file, content):
    Store(tmp_path, 4, 9, 10_000).add([answer(0, 5)])
    (tmp_path / file).write_bytes(content)
    with pytest.raises(RunError, match=r"^the answers in .* are damaged \(.*\): remove the folder to begin anew$"):
        Store(tmp_path, 4, 9, 10_000)


def test_a_store_is_bounded_and_of_one_target_and_seed(tmp_path):
    store = Store(tmp_path, 4, 9, 40, {"target": "a", "seed": 0})
    assert not store.full(4)
    assert store.full(5)
    store.add([answer(0, 5)])
    assert store.full()
    with pytest.raises(InvalidParameter, match="width"):
        Store(tmp_path, 8, 9, 40, {"target": "a", "seed": 0})
    for other in ({"target": "b", "seed": 0}, {"target": "a", "seed": 1}):
        with pytest.raises(InvalidParameter, match=r"it holds those of .*'target': 'a', 'seed': 0"):
            Store(tmp_path, 4, 9, 40, other)
    assert Store(tmp_path, 4, 9, 40).num_tokens == 5


# ---------------------------------------------------------------- the network


SHAPE = MtpShape(32, 50, heads=4, kv_heads=2, inner=48, window=32, target="x")


def test_the_network_is_the_module_that_drafts():
    """Depth by depth, within what rounding to 8 bits does; a chain that begins anywhere."""
    generator = np.random.default_rng(0)
    embedding = generator.normal(size=(50, 32)).astype(np.float32)
    weights = first_weights(SHAPE, torch.ones(32), 3)
    states, tokens = generator.normal(size=(12, 32)).astype(np.float32), generator.integers(0, 50, 12)
    made = unrolled(SHAPE, weights, torch.tensor(states)[None], torch.tensor(embedding[tokens])[None], 3)
    arrays = {name: weight.detach().numpy() for name, weight in weights.items()}
    module = MtpModule(MtpWeights(SHAPE, arrays, np.arange(50), fingerprint(embedding)), TokenMatrices(embedding, embedding))
    for first in (0, 5, 9):
        cache = EntryCache(SHAPE)
        if first:
            module.remember(states[:first], tokens[:first], cache)
        state = states[first : first + 1]
        for depth in range(3):
            state = module.step(state, tokens[first + depth : first + depth + 1], [cache])
            expected = made[depth][0, first + depth].detach().numpy()
            assert np.abs(state[0] - expected).max() < 0.06 * np.abs(expected).max(), (first, depth)


@pytest.mark.parametrize(("kl", "tv"), [(1.0, 0.0), (0.0, 1.0), (0.4, 0.6)])
def test_the_gradient_of_the_loss_is_that_of_autograd(kl, tv):
    torch.manual_seed(0)
    logits = torch.randn(6, 20, dtype=torch.float64, requires_grad=True)
    p = torch.rand(6, 20, dtype=torch.float64)
    p = p / p.sum(-1, keepdim=True) * 0.9  # a tenth of the mass lies outside the trimmed vocabulary
    losses, alpha, gradient = match(logits, p, kl, tv)
    q = torch.softmax(logits, -1)
    expected_alpha = torch.minimum(p, q).sum(-1)
    expected = kl * -(p * q.log()).sum(-1) + tv * (1 - expected_alpha)
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(alpha, expected_alpha.detach())
    torch.testing.assert_close(gradient, logits.grad)


def test_depths_may_reach_beyond_a_short_answer():
    weights = first_weights(SHAPE, torch.ones(32), 3)
    made = unrolled(SHAPE, weights, torch.ones(1, 2, 32), torch.ones(1, 2, 32), 7)
    assert len(made) == 7 and all(states.shape == (1, 2, 32) for states in made)


def test_the_teacher_is_the_targets_row_and_depths_look_ahead():
    made, _, model = some_answers(3)
    matrices = model.runner.token_matrices()
    read_out = torch.from_numpy(matrices.output[::2].copy())
    batch = collate(made, torch.from_numpy(matrices.embedding))
    p = teacher(batch, read_out)
    logits = made[1].states.astype(np.float64) @ matrices.output.T
    rows = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(p[1, : len(rows)], rows[:, ::2], atol=0.02)
    lengths = [len(each.tokens) for each in made]
    for depth in (1, 2, 3):
        assert batch.rows(depth).sum(1).tolist() == [max(0, n - depth) for n in lengths]
        assert not batch.rows(depth)[:, : depth - 1].any()


def test_every_answer_is_in_one_batch_of_an_epoch():
    lengths = np.random.default_rng(0).integers(2, 90, 70).tolist()
    first, second = order(lengths, 256, 5, 0), order(lengths, 256, 5, 1)
    assert sorted(i for batch in first for i in batch) == list(range(70))
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in order(lengths, 256, 5, 0)]
    assert [batch.tolist() for batch in first] != [batch.tolist() for batch in second]
    assert all(len(batch) * max(lengths[i] for i in batch) <= 256 + 90 for batch in first)


# ---------------------------------------------------------------- learning


def learning(folder, steps, **options):
    made, _, model = some_answers(40)
    matrices = model.runner.token_matrices()
    shape = shape_for(matrices.embedding.shape[1], VOCAB, "tiny")
    learn, held_out = [each for each in made if not each.held_out], [each for each in made if each.held_out]
    chosen = LearningOptions(steps=steps, batch_tokens=256, evaluate_every=1e9, checkpoint_every=1e9, **options)
    return Learning(shape, np.arange(0, VOCAB), matrices, learn, held_out, chosen, folder)


def test_learning_goes_on_exactly_where_its_checkpoint_was(tmp_path):
    for name in ("straight", "cut"):
        (tmp_path / name).mkdir()
    straight = learning(tmp_path / "straight", 14)
    straight.run()
    cut = learning(tmp_path / "cut", 14)
    for _ in range(6):
        cut._step()
    cut.checkpoint()
    for _ in range(3):
        cut._step()  # lost
    again = learning(tmp_path / "cut", 14)
    assert again.progress.step == 6
    again.run()
    assert again.progress.step == straight.progress.step == 14
    for name, weight in straight.weights.items():
        torch.testing.assert_close(again.weights[name], weight, rtol=0, atol=0)
    assert again.progress.history[-1]["acceptance"] == straight.progress.history[-1]["acceptance"]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    made = learning(tmp_path, 14)
    for number in (3, 2):
        for _ in range(number):
            made._step()
        if number == 3:
            made.checkpoint()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunError, match=r"step 5 cannot be written to .*make room.* sound") as caught:
            made.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*.part"))
    assert learning(tmp_path, 14).progress.step == 3


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    learning(tmp_path, 2).run()
    with pytest.raises(RunError, match="other options"):
        learning(tmp_path, 2, seed=1)
    (tmp_path / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(RunError, match="cannot be read"):
        learning(tmp_path, 2)


def test_it_learns_and_stops_when_it_gets_no_better(tmp_path):
    made = learning(tmp_path, 120)
    made.run()
    first, last = made.progress.history[0]["acceptance"], made.progress.history[-1]["acceptance"]
    assert last[0] > first[0] + 0.15
    made.options = replace(made.options, steps=1000, evaluate_every=20, patience=3, matrix_rate=0.0, vector_rate=0.0)
    ticks = iter(range(10**6))
    made.run(clock=lambda: float(next(ticks)))  # it learns no more
    assert made.progress.since == 3 and made.progress.step < 400
    best = made.progress.history[-4]["seconds"]
    made.options = replace(made.options, seconds=2000.0, steps=None, evaluate_every=20)  # half of the time has to pass as well
    made.run(clock=lambda: float(next(ticks)))
    assert best + 1000 <= made.progress.seconds < best + 1100


# ---------------------------------------------------------------- the whole of it


def options(**changes):
    learning = LearningOptions(steps=30, batch_tokens=256, evaluate_every=1e9)
    return replace(TrainOptions(minutes=2, draft_vocab=20, answer_share=0.5, answer_tokens=2500, learning=learning), **changes)


def test_training_leaves_modules_card_plot_and_report(tmp_path):
    seen = []
    model = tiny_model(VOCAB, num_slots=4, max_length=800)
    trained = train(model, tmp_path, options(), seen.append)
    weights = load(trained.path)
    assert len(weights.draft_ids) == 20 and len(trained.acceptance) == 3 and all(0 < alpha < 1 for alpha in trained.acceptance)
    assert "truedraw train mtp" in (tmp_path / "README.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seed"] == 0 and report["history"] and report["held_out_tokens"] > 0
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert seen[0].learning is None and seen[-1].learning is not None
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    rest = 1 - HELD_OUT_SHARE
    assert rest - 0.1 < report["tokens"] / (report["tokens"] + report["held_out_tokens"]) < rest + 0.05


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from test_train import options, tiny_model, VOCAB
from truedraw.train.learning import LearningOptions
from truedraw.train.mtp import train
from dataclasses import replace
chosen = options(learning=replace(options().learning, steps=60, checkpoint_every=0.0))
train(tiny_model(VOCAB, num_slots=4, max_length=800), Path({folder!r}), chosen, lambda told: print("told", flush=True))
"""


def test_a_killed_training_goes_on(tmp_path):
    """SIGKILL while it answers, and while it learns: the third run ends as one that was never killed."""
    script = CHILD.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    for wanted in ("answers/index.jsonl", "checkpoint.pt"):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, env={**os.environ})
        ends = time.monotonic() + 120
        while child.poll() is None and not _begun(tmp_path / wanted):
            assert time.monotonic() < ends, "nothing was written"
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
    step = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"]
    tokens = Store(tmp_path / "answers", 16, VOCAB, 1 << 30).num_tokens
    chosen = options(learning=replace(options().learning, steps=60))
    report = train(tiny_model(VOCAB, num_slots=4, max_length=800), tmp_path, chosen).report
    assert report["steps"] == 60 and 0 < step < 60
    assert report["tokens"] + report["held_out_tokens"] == tokens, "what was answered is kept, and no more is asked for"


def _begun(path):
    try:
        return path.stat().st_size > 0 if path.suffix == ".pt" else path.read_text().count("\n") > 1
    except FileNotFoundError:
        return False


def test_one_training_in_a_folder_at_a_time(tmp_path):
    """The other one is refused, and what it would have overwritten stays."""

    def another(told):
        with pytest.raises(RunError, match="another training runs in"):
            train(tiny_model(VOCAB, num_slots=4, max_length=800), tmp_path, options())

    train(tiny_model(VOCAB, num_slots=4, max_length=800), tmp_path, options(), another)


def test_a_checkpoint_without_its_answers_is_told(tmp_path):
    train(tiny_model(VOCAB, num_slots=4, max_length=800), tmp_path, options())
    shutil.rmtree(tmp_path / "answers")
    with pytest.raises(RunError, match=r"the answers that .*checkpoint.pt was learned from are gone: remove it to begin anew"):
        train(tiny_model(VOCAB, num_slots=4, max_length=800), tmp_path, options())


def test_prompts_that_never_fit_end_the_training(tmp_path):
    with pytest.raises(RunError, match="1000 prompts in a row are longer than"):
        train(tiny_model(VOCAB, num_slots=4, max_length=2), tmp_path, options())


def test_what_cannot_be_trained_is_refused(tmp_path):
    from truedraw.errors import RunnerError
    from truedraw.registry import LoadOptions, load_model

    with pytest.raises(RunnerError, match="toy"):
        train(load_model("toy", LoadOptions()), tmp_path, options())
    with pytest.raises(RunError, match="minutes"):
        train(tiny_model(VOCAB, num_slots=2, max_length=800), tmp_path, options(answer_tokens=0))
    with pytest.raises(InvalidParameter, match="minutes"):
        options(minutes=0)
