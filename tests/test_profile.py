"""truedraw profile and what it is made of: the choice of threads, classes of rows, their TV to f32 arithmetic."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from truedraw import agreement, calibrate, profile, registry
from truedraw.agreement import Agreement, Comparison, History
from truedraw.cli import profile as command
from truedraw.cli import profile_output
from truedraw.errors import ConversionError, InvalidParameter
from truedraw.profile import CostPoint, ThreadChoice, ThreadTime
from truedraw.protocols import Rows
from truedraw.registry import LoadOptions, load_model
from truedraw.runners import gguf, llamacpp, machine
from truedraw.runners.toy import ToyRunner, hashed

VOCAB = 9
TEXT = np.arange(200, dtype=np.int32) % VOCAB


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "truedraw"


# ---------------------------------------------------------------- threads


class Timed:
    """A toy whose passes take what `cost(threads, size, number of the pass)` says, on a clock of its own."""

    def __init__(self, cost, thread_counts=(1, 2, 4), **options):
        self._toy = ToyRunner(hashed(VOCAB), VOCAB, **options)
        self._cost = cost
        self.thread_counts = thread_counts
        self.now, self.passes = 0.0, []
        self.small = self.large = thread_counts[-1]

    def __getattr__(self, name):
        return getattr(self._toy, name)

    def set_threads(self, small, large):
        self.small, self.large = small, large

    def forward(self, chunks):
        size = sum(len(chunk.tokens) for chunk in chunks)
        threads = self.small if size == 1 else self.large
        self.passes.append((threads, size))
        self.now += self._cost(threads, size, len(self.passes))
        return self._toy.forward(chunks)

    def choose(self, **options):
        return calibrate.threads(self, clock=lambda: self.now, **options)


def test_the_fastest_threads_are_taken_for_small_and_for_large_passes():
    runner = Timed(lambda threads, size, _: {1: 5.0, 2: 4.0, 4: 6.0}[threads] if size == 1 else size / threads, max_length=400)
    choice = runner.choose()
    assert (choice.small, choice.large, choice.steady) == (2, 4, True)
    assert (runner.small, runner.large) == (2, 4), "and used at once"
    assert ThreadTime(2, 1, 4.0) in choice.measured and ThreadTime(4, 32, 8.0) in choice.measured
    assert len(choice.measured) == 9 and runner._cells == [[]]


def test_all_cores_stay_unless_fewer_are_faster_by_three_percent():
    for gain, expected in ((0.02, 4), (0.04, 1)):
        runner = Timed(lambda threads, size, _, gain=gain: 1.0 - gain * (threads == 1), max_length=400)
        choice = runner.choose()
        assert (choice.small, choice.large) == (expected, expected)


def test_large_passes_are_judged_by_the_mean_ratio_over_their_sizes():
    """1 thread: half the time at 8 tokens, 1.4 times at 32, 0.95 in the mean; by seconds it would lose."""
    seconds = {(1, 8): 0.5, (4, 8): 1.0, (1, 32): 14.0, (4, 32): 10.0}
    runner = Timed(lambda threads, size, _: seconds.get((threads, size), 1.0), (1, 4), max_length=400)
    assert runner.choose().large == 1


def test_numbers_of_threads_are_interleaved_up_and_down():
    runner = Timed(lambda *_: 10.0, max_length=400)
    runner.choose(seconds=1.0)
    timed = [threads for threads, size in runner.passes if size == 1]
    assert timed == [1, 2, 4, 4, 2, 1, 1, 2, 4], "three rounds, however long they take"


def test_one_slow_pass_changes_nothing_and_a_busy_machine_leaves_all_cores():
    def cost(threads, size, number):
        return (1.0 if threads == 1 else 2.0) * (50 if number == 7 else 1)

    assert Timed(cost, max_length=400).choose().small == 1
    busy = Timed(lambda threads, size, number: 1.0 + 9 * (threads == 4 and number % 3 > 0), max_length=400)
    choice = busy.choose()
    assert (choice.small, choice.large, choice.steady) == (4, 4, False) and (busy.small, busy.large) == (4, 4)


def test_where_there_are_no_threads_none_are_chosen():
    assert calibrate.threads(ToyRunner(hashed(VOCAB), VOCAB)) is None
    small = Timed(lambda *_: 1.0, max_length=10)
    assert small.choose().large == 4 and {size for _, size in small.passes} == {1, 2, 8}


@pytest.mark.parametrize(
    ("physical", "available", "counts"),
    [(1, 1, (1,)), (2, 2, (1, 2)), (6, 12, (1, 2, 4, 6, 12)), (8, 8, (1, 2, 4, 8)), (64, 128, (4, 8, 16, 32, 64, 128))],
)
def test_the_numbers_of_threads_worth_trying(physical, available, counts):
    assert machine.thread_counts(physical, available) == counts


KEY = {"file": "test", "processor": "here"}
CHOICE = ThreadChoice(1, 2, (ThreadTime(1, 8, 0.5),))


def test_a_choice_of_threads_comes_back(cache):
    assert profile.load_threads(KEY) == (None, None)
    profile.store_threads(CHOICE, KEY)
    assert profile.load_threads(KEY) == (CHOICE, None)
    assert profile.load_threads({**KEY, "processor": "there"}) == (None, None)
    assert profile.load(KEY) == (None, None), "it is no cost curve"


@pytest.mark.parametrize(
    "change",
    ["", "[]", "\x00", {"format": 0}, {"key": {}}, {"key": 3}, {"small": 0}, {"small": "2"}, {"large": True}, {"measured": [{}]},
     {"measured": 5}, {"small": None}],
)  # fmt: skip
def test_a_damaged_or_stale_choice_is_told_once_in_one_line(cache, change):
    profile.store_threads(CHOICE, KEY)
    (path,) = profile.folder().iterdir()
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    choice, notice = profile.load_threads(KEY)
    assert choice is None and "taking all cores" in notice and "\n" not in notice
    assert profile.load_threads(KEY) == (None, None)


def test_a_cache_directory_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, tiny):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    profile.store_threads(CHOICE, KEY)
    assert profile.load_threads(KEY) == (None, None)
    load_model(str(tiny()), LoadOptions(context=64), pytest.fail).runner.close()


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_choices_that_are_none_are_refused(value):
    with pytest.raises(InvalidParameter, match="threads, small"):
        ThreadChoice(value, 1)


def threads_of(path, said=None, **options):
    model = load_model(str(path), LoadOptions(context=64, **options), None if said is None else said.append)
    try:
        return model, model.runner.identity["threads"]
    finally:
        model.runner.close()


def test_later_loads_of_the_model_take_the_choice_unless_told_otherwise(tiny):
    model, told = threads_of(tiny())
    cores = model.runner.thread_counts[-1]
    assert told == str(cores)
    registry.keep_threads(model, ThreadChoice(3, 5))
    assert threads_of(tiny())[1] == "5, 3 for single tokens"
    assert threads_of(tiny(), kv_type="bf16", slots=3)[1] == "5, 3 for single tokens", "whatever the other options"
    assert threads_of(tiny(), threads=2)[1] == "2"
    assert threads_of(tiny(), threads_small=7)[1] == f"{cores}, 7 for single tokens"
    assert threads_of(tiny("gemma2"))[1] == str(cores), "another file"


def test_a_load_with_a_damaged_choice_says_so_once_and_takes_all_cores(tiny):
    model, everything = threads_of(tiny())
    registry.keep_threads(model, ThreadChoice(3, 5))
    (path,) = profile.folder().iterdir()
    path.write_text("{")
    said = []
    assert threads_of(tiny(), said)[1] == everything and threads_of(tiny(), said)[1] == everything
    assert len(said) == 1 and "cannot be read" in said[0]


def test_threads_are_set_between_passes_and_the_identity_follows(tiny):
    import llama_cpp

    model = load_model(str(tiny()), LoadOptions(context=64, threads=2))
    runner = model.runner
    rows = agreement.decode(runner, TEXT, 0)
    before = dict(runner.identity)
    runner.set_threads(1, 3)
    assert (llama_cpp.llama_n_threads(runner._context), llama_cpp.llama_n_threads_batch(runner._context)) == (1, 3)
    assert runner.identity == {**before, "threads": "3, 1 for single tokens"}, "a cost curve belongs to its threads"
    np.testing.assert_allclose(agreement.decode(runner, TEXT, 0), rows, atol=1e-3)
    runner.close()


# ---------------------------------------------------------------- rows


class Kernels:
    """A toy whose rows move by shift(pass size, slot, how the slot's prompt was fed)."""

    def __init__(self, shift, num_slots=1):
        self._toy = ToyRunner(hashed(VOCAB), VOCAB, num_slots=num_slots)
        self._shift, self._fed = shift, {}
        self.sizes = []

    def __getattr__(self, name):
        return getattr(self._toy, name)

    def rollback(self, slot, length):
        if not length:
            self._fed[slot] = 0
        self._toy.rollback(slot, length)

    def forward(self, chunks):
        size = sum(len(chunk.tokens) for chunk in chunks)
        for chunk in chunks:
            if not chunk.rows_to_keep:
                self._fed[chunk.slot] = max(self._fed.get(chunk.slot, 0), size)
        self.sizes.append(size)
        one = np.eye(VOCAB)[0]
        shifts = [self._shift(size, chunk.slot, self._fed.get(chunk.slot, 0)) for chunk in chunks]
        return [Rows(rows.logits + shift * one) for rows, shift in zip(self._toy.forward(chunks), shifts, strict=True)]


def compare(runner, sizes, sequences=1, cached=20, reference=None):
    for slot in range(sequences):
        runner.rollback(slot, 0)
        calibrate.fill(runner, slot, TEXT[:cached])
    known = Comparison(agreement.decode(runner, TEXT, cached)[0], reference)
    return agreement.size_classes(runner, TEXT, cached, sizes, sequences=sequences, known=known)


def test_sizes_are_sorted_into_classes_of_identical_rows():
    runner = Kernels(lambda size, slot, fed: {1: 0.0, 2: 0.0, 3: 0.5, 24: 0.5}.get(size, 0.1))
    told = compare(runner, (1, 2, 3, 4, 24))
    assert [one.name for one in told] == ["a", "a", "b", "c", "b"]
    assert told[0].mean_tv == told[0].max_tv == 0 and 0 < told[3].mean_tv < told[2].mean_tv < told[2].max_tv < 1
    assert told[0].mean_tv_f32 is None and told[0].identical and not told[2].identical
    assert set(runner.sizes[1:]) == {1, 2, 3, 4, 24}, "passes keep their size to the end of the text"
    assert len(runner._cells[0]) == 20


def test_the_tv_is_that_of_the_laws():
    runner = Kernels(lambda size, slot, fed: 0.3 * (size > 1))
    (told,) = compare(runner, (8,))
    runner.rollback(0, 20)
    plain = agreement.decode(runner, TEXT, 20)[0]
    p = np.exp(plain) / np.exp(plain).sum(axis=1, keepdims=True)
    moved = plain + 0.3 * np.eye(VOCAB)[0]
    q = np.exp(moved) / np.exp(moved).sum(axis=1, keepdims=True)
    each = np.abs(p - q).sum(axis=1) / 2
    assert (told.mean_tv, told.max_tv) == (pytest.approx(each.mean()), pytest.approx(each.max()))


def test_rows_of_batches_are_compared_with_those_of_a_single_token():
    sizes = (1, 2, 3, 4, 8)
    like_passes = Kernels(lambda size, slot, fed: 0.1 * (size > 2), num_slots=4)
    assert [one.name for one in compare(like_passes, sizes, 2)] == ["a", "b", "b", "b"], "a batch of one does not exist"
    by_slot = Kernels(lambda size, slot, fed: 0.1 * slot, num_slots=4)
    told = compare(by_slot, sizes, 4)
    assert [one.name for one in told] == ["b", "b"] and told[0].mean_tv > 0, "slots that differ among themselves"


def test_the_tv_to_f32_is_told_for_each_class():
    exact = Kernels(lambda *_: 0.0)
    calibrate.fill(exact, 0, TEXT[:20])
    reference = agreement.laws(agreement.decode(exact, TEXT, 20)[0])
    told = compare(Kernels(lambda size, slot, fed: 0.2 if size == 1 else 0.0), (1, 2), reference=reference)
    assert told[0].mean_tv == 0 and told[0].max_tv_f32 > told[0].mean_tv_f32 > 0
    assert told[1].mean_tv > 0 and told[1].max_tv_f32 == 0, "larger passes may be nearer to f32"


def test_histories_compare_prompt_chunks_and_passes():
    by_chunk = Kernels(lambda size, slot, fed: 0.1 * (fed < 16))
    told = list(agreement.histories(by_chunk, TEXT, 100, (64, 16, 8)))
    assert [(one.chunk, one.size, one.cached, one.agreement.identical) for one in told] == [
        (64, 8, 100, True), (16, 1, 100, True), (8, 1, 100, False),
    ]  # fmt: skip
    assert told[2].agreement.max_tv > 0 and by_chunk._cells == [[]]
    by_pass = Kernels(lambda size, slot, fed: 0.1 * (size == 8 and fed != 8))
    assert [one.agreement.identical for one in agreement.histories(by_pass, TEXT, 100, (64, 16))] == [False, True]


def test_real_text_has_the_length_asked_for():
    from truedraw.runners.toy import ByteTokenizer

    text = agreement.real_text(ByteTokenizer(), 1000)
    assert len(text) == 1000 and bytes(text[:18].tolist()) == b"1. The lighthouse "


# ---------------------------------------------------------------- the f32 weights


@pytest.fixture
def small(tiny, tmp_path):
    """The tiny model in q8_0."""
    path = tmp_path / "small.gguf"
    llamacpp.quantise(tiny(), path, "q8_0")
    return path


def test_the_f32_twin_of_quantised_weights_is_a_file_for_a_while(small, cache):
    model = load_model(str(small), LoadOptions(context=128))
    said = []
    with registry.f32_twin(model, LoadOptions(context=128), said.append) as twin:
        (copy,) = cache.glob("*.part")
        assert twin.path == copy and twin.runner.has_f32_weights and not model.runner.has_f32_weights
        assert twin.runner.identity["kv"].startswith("f32") and twin.runner.identity["flash_attention"] == "off"
        rows = [agreement.laws(agreement.decode(one.runner, TEXT, 0)[0]) for one in (model, twin)]
    off = np.abs(rows[0] - rows[1]).sum(axis=1) / 2
    assert 0 < off.max() < 0.2, "the same weights, other arithmetic"
    assert list(cache.glob("*.part")) == [] and len(said) == 1 and "as f32" in said[0]
    model.runner.close()


def test_f32_weights_are_their_own_twin(tiny, cache):
    model = load_model(str(tiny()), LoadOptions(context=64))
    with registry.f32_twin(model, LoadOptions(context=64), pytest.fail) as twin:
        assert twin.path == model.path and not cache.exists()
    model.runner.close()


def test_there_is_no_twin_of_large_models_toys_and_full_disks(small, tmp_path, monkeypatch):
    def refused(model, message):
        with pytest.raises(ConversionError, match=message) as error, registry.f32_twin(model, LoadOptions(context=64), [].append):
            raise AssertionError
        assert "\n" not in str(error.value)

    refused(load_model("toy", LoadOptions()), "toy has no weights in a file")
    model = load_model(str(small), LoadOptions(context=64))
    with monkeypatch.context() as patch:
        patch.setattr(registry, "MAX_F32_BYTES", 1000)
        refused(model, r"takes 0\.0 GB as f32, and at most 1e-06 GB are written")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(small))
        refused(model, "could not be written .* make room")
    patched = replace(model, runner=ToyRunner(hashed(VOCAB), VOCAB))
    refused(patched, "no weights in a file")
    model.runner.close()


def test_a_copy_goes_even_where_its_use_fails(small, cache):
    with pytest.raises(KeyboardInterrupt), gguf.as_f32(small, llamacpp.quantise) as copy:
        assert copy.stat().st_size > small.stat().st_size
        raise KeyboardInterrupt
    assert list(cache.iterdir()) == []


# ---------------------------------------------------------------- the command


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "truedraw", "profile", *map(str, arguments)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "COLUMNS": "120", **environment},
    )  # fmt: skip


SHORT = ("--seconds", "0.01")


def test_the_object_holds_sizes_threads_and_histories(small, cache, tmp_path):
    result = run(small, "--json", *SHORT)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert set(told) == {"sizes", "threads", "histories", "key"}
    fields = {"size", "cached", "sequences", "seconds", "class", "mean_tv", "max_tv", "mean_tv_f32", "max_tv_f32"}
    assert all(set(row) == fields and None not in row.values() for row in told["sizes"])
    kinds = {(row["cached"], row["sequences"]) for row in told["sizes"]}
    assert kinds == {(length, sequences) for length in (0, 256) for sequences in (1, 2, 4)}, "as far as its context goes"
    assert [row["size"] for row in told["sizes"] if (row["cached"], row["sequences"]) == (0, 4)] == [4, 6, 8, 12, 16, 24, 32]
    first = told["sizes"][0]
    assert (first["size"], first["class"], first["mean_tv"]) == (1, "a", 0) and first["max_tv_f32"] > 0
    assert told["threads"]["measured"] and set(told["threads"]["measured"][0]) == {"threads", "size", "seconds"}
    assert [(row["kv"], row["chunk"], row["size"], row["cached"]) for row in told["histories"]] == [
        (kv, chunk, 8 if chunk == 256 else 1, 256) for kv in ("f16", "bf16", "q8_0") for chunk in (256, 64, 32)
        if kv != "q8_0"  # the tiny model's heads are 16 wide, and a block of q8_0 is 32
    ]  # fmt: skip
    assert "no rows with q8_0 KV" in result.stderr and result.stderr.count("\n") == 2
    stored = sorted(path.name for path in (cache / "profiles").iterdir())
    assert len(stored) == 1 + told["threads"]["steady"] and all(path.endswith(".json") for path in stored)
    known, notice = profile.load(told["key"])
    assert notice is None and len(known.points) == len(told["sizes"])


def test_the_tables_and_the_picture(small, tmp_path):
    result = run(small, *SHORT, "--threads", 1, "--no-histories", "--save", tmp_path / "costs.png")
    assert result.returncode == 0 and (tmp_path / "costs.png").read_bytes()[:4] == b"\x89PNG"
    assert "Threads: 1 for passes of one token, 1 for larger ones, as asked for." in result.stdout
    assert "1x0" in result.stdout and "TV to f32" in result.stdout and "chunk" not in result.stdout
    assert not list((profile.folder()).glob("threads-*")), "what was asked for is not kept"


def test_a_toy_and_a_cache_that_cannot_be_written(small, tmp_path):
    toy = run("toy", "--json", *SHORT)
    assert toy.returncode == 0 and "rows are not compared with the f32 weights: toy has no weights" in toy.stderr
    told = json.loads(toy.stdout)
    assert told["threads"] is None and told["histories"] == [] and {row["class"] for row in told["sizes"]} == {"a"}
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    result = run(small, "--json", "--no-histories", *SHORT, XDG_CACHE_HOME=str(blocked))
    assert result.returncode == 0 and "Traceback" not in result.stderr and "make room" in result.stderr
    assert {row["mean_tv_f32"] for row in json.loads(result.stdout)["sizes"]} == {None}


def test_a_context_without_room_is_one_line(tiny):
    result = run(tiny("llama", context=32), *SHORT)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "at least 64 are needed" in result.stderr


def test_only_a_steady_choice_is_kept(monkeypatch):
    kept = []
    monkeypatch.setattr(command, "keep_threads", lambda model, choice: kept.append(choice))
    for steady in (True, False):
        choice = replace(CHOICE, steady=steady)
        monkeypatch.setattr(calibrate, "threads", lambda runner, choice=choice: choice)
        assert command._choose_threads(load_model("toy", LoadOptions()), LoadOptions()) == choice
    assert kept == [CHOICE]
    assert "nothing is kept" in profile_output._threads(replace(CHOICE, steady=False))
    assert "Kept for later runs" in profile_output._threads(CHOICE)


def test_classes_are_told_by_ranges_of_sizes(capsys):
    a, b = Agreement("a", 0, 0, 0.001, 0.01), Agreement("b", 0.00001, 0.02)
    points = [(CostPoint(size, 0, 1, 0.01), b if size == 4 else a) for size in (1, 2, 4, 8, 16)]
    points += [(CostPoint(size, 0, 2, 0.01), b) for size in (2, 4, 8)]
    report = profile_output.Report("m", CHOICE, tuple(points), (("bf16", History(64, 1, 1100, a)),), {})
    profile_output.print_tables(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 a 0 0 0.10% 1.00% 1x1-2,8-16" in shown and "0 b 1e-05 2.00% 1x4 2x2-8" in shown
    assert "bf16 64 1 0 0 identical" in shown
    profile_output.picture(report)


@pytest.mark.model
def test_arithmetic_in_q8_0_is_near_that_in_f32(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")  # the demo model lies there
    model = load_model("smollm2", LoadOptions(context=128))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = agreement.real_text(model.tokenizer, 32 + agreement.MARGIN)
    with registry.f32_twin(model, LoadOptions(context=128), [].append) as twin:
        calibrate.fill(twin.runner, 0, text[:32])
        exact = agreement.laws(agreement.decode(twin.runner, text, 32, 8)[0])
    calibrate.fill(model.runner, 0, text[:32])
    plain = agreement.decode(model.runner, text, 32)[0]
    told = Comparison(plain, exact)
    assert 0 < told.plain.mean_tv_f32 < 0.05  # 0.029 to 0.031 by the processor's instructions
    (eight,) = agreement.size_classes(model.runner, text, 32, (8,), known=told)
    assert eight.identical  # DESIGN.md 5: q8_0 weights, under 256 cached tokens
    model.runner.close()
