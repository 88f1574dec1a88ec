"""Where model files come from, and what happens when they are not what they should be."""

import shutil

import pytest

from truedraw.engine import Engine
from truedraw.errors import ConversionError, IncompatibleModels, InvalidParameter, ModelFileError, ModelNotFound, RunnerError
from truedraw.runners import gguf
from truedraw.types import SamplingParams


def never(*_args):
    raise AssertionError("nothing is to be converted")


def locate(spec, quantise=never):
    return gguf.locate(spec, quantise, lambda message: None)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda folder: folder / "none.gguf", ModelNotFound, "no model file .*smollm2.*hub:ORG/REPO"),
        (lambda folder: folder, ModelFileError, "is a directory"),
        (lambda folder: written(folder, b"PK\x03\x04"), ModelFileError, "begins with b'PK"),
        (lambda folder: written(folder, b""), ModelFileError, "begins with b''"),
    ],
)
def test_paths_that_are_no_model(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        locate(str(make(tmp_path)))


def written(folder, data):
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("keep", [5, 100, 5_000, 100_000])
def test_a_truncated_model_is_named_with_the_reason(tiny, tmp_path, keep):
    path = written(tmp_path, tiny("llama").read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.gguf cannot be loaded as a model: .+"):
        Engine.load(str(path))


# ---------------------------------------------------------------- the demo model in the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "truedraw"


def test_the_demo_model_is_converted_once_aside_and_renamed(cache):
    calls = []

    def quantise(source, target, weight_type):
        assert (
            source.read_bytes()[:4] == b"GGUF" and not (cache / target.name.partition(".gguf")[0]).with_suffix(".gguf").exists()
        )
        calls.append((target.name, weight_type))
        target.write_bytes(b"GGUF...")

    first, second = locate("smollm2", quantise), locate("smollm2:q8_0", quantise)
    assert first == second and first.read_bytes() == b"GGUF..." and len(calls) == 1
    assert calls[0][1] == "q8_0" and calls[0][0].endswith(".part")
    assert list(cache.iterdir()) == [first]
    assert locate("smollm2:f32", quantise) != first


@pytest.mark.parametrize(
    "failure", [ConversionError("write failed"), OSError(28, "No space left on device"), KeyboardInterrupt()]
)
def test_an_interrupted_conversion_leaves_nothing_broken(cache, failure):
    def quantise(source, target, weight_type):
        target.write_bytes(b"GGUF half")
        raise failure

    with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else ConversionError) as caught:
        locate("smollm2", quantise)
    assert list(cache.iterdir()) == []
    if not isinstance(failure, KeyboardInterrupt):
        assert "make room" in str(caught.value) and str(cache) in str(caught.value)


def test_leftovers_of_killed_conversions_are_swept(cache):
    import os

    cache.mkdir()
    old, fresh = cache / "a.gguf.1.part", cache / "b.gguf.2.part"
    for part in (old, fresh):
        part.write_bytes(b"x")
    os.utime(old, (0, 0))
    locate("smollm2", lambda source, target, weight_type: target.write_bytes(b"GGUF"))
    assert not old.exists() and fresh.exists()


def test_other_weight_types_are_refused():
    with pytest.raises(InvalidParameter, match=r"f32 \| bf16 \| q8_0 \| q4_0"):
        locate("smollm2:q2_k")


# ---------------------------------------------------------------- a hub's local cache


@pytest.fixture
def hub(tmp_path, monkeypatch, tiny):
    """A hub cache as huggingface_hub lays it out, with two repositories."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    for repository, files in (("one", ["model-q8.gguf"]), ("two", ["a.gguf", "b.gguf"])):
        folder = tmp_path / f"models--org--{repository}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        for file in files:
            shutil.copy(tiny("llama"), folder / "snapshots" / commit / file)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_hub_files_come_from_the_local_cache(hub):
    assert locate("hub:org/one").name == "model-q8.gguf"
    assert locate("hub:org/two:b.gguf").name == "b.gguf"
    with Engine.load("hub:org/one", drafter="ngram") as engine:
        assert len(engine.generate(["hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0].tokens) == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hub:org/two", r"2 GGUF files \(a.gguf, b.gguf\): name one"),
        ("hub:org/three", "neither in the hub's local cache nor could it be fetched"),
        ("hub:org/one:other.gguf", "neither in the hub's local cache nor could it be fetched"),
    ],
)
def test_hub_files_that_are_not_there(hub, spec, message):
    with pytest.raises(ModelNotFound, match=message) as error:
        locate(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["hub:", "hub:org", "hub:a/b/c", "hub:/x"])
def test_hub_names_that_are_none(spec):
    with pytest.raises(InvalidParameter, match="hub:ORG/REPO"):
        locate(spec)


# ---------------------------------------------------------------- kinds of models


def test_recurrent_models_run_plainly_and_are_refused_as_speculative_targets(tiny):
    path = str(tiny("mamba"))
    with pytest.raises(IncompatibleModels, match="recurrent or hybrid"):
        Engine.load(path, drafter="ngram")
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    with Engine.load(path) as engine:
        first = engine.generate(["hello there"], params)[0]
        assert len(first.tokens) == 12 and set(first.origins) == {"plain"}
        assert engine.generate(["hello there"], params)[0].tokens == first.tokens  # after a full reset


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tiny_models_give_the_same_text_with_and_without_drafts(tiny, architecture):
    params = SamplingParams(max_tokens=60, seed=3, temperature=0.3, ignore_eos=True)
    with Engine.load(str(tiny(architecture)), drafter="random", draft_length=3) as engine:
        plain = engine.submit("a b a b a b", params, max_draft=0)
        drafted = engine.submit("a b a b a b", params)
        while not engine.idle:
            engine.step()
        assert plain.results[0].tokens == drafted.results[0].tokens
        assert drafted.results[0].stats.proposed > 0


def test_draft_models_with_another_vocabulary_draft_on_what_is_shared(tiny):  # B70
    told = []
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)
    with Engine.load(
        str(tiny("llama")), draft_model=str(tiny("llama", last="zebra")), draft_length=3, drafter="model", on_progress=told.append
    ) as engine:
        drafted, plain = (engine.generate(["one two"], params, max_draft=most)[0] for most in (None, 0))
        assert drafted.tokens == plain.tokens and drafted.stats.proposed
    assert any("has another tokenizer than" in line and "258 shared tokens" in line for line in told)
    with Engine.load(
        str(tiny("llama")), drafter="model", draft_length=3, draft_model=str(tiny("llama", seed=9)), slots=2
    ) as engine:
        results = engine.generate(["one two", "three"], SamplingParams(max_tokens=20, ignore_eos=True))
        assert [result.rule for result in results] == ["block", "block"] and all(r.stats.proposed for r in results)


def test_a_model_without_a_vocabulary_is_refused(tiny):
    with pytest.raises(ModelFileError, match="holds no vocabulary"):
        Engine.load(str(tiny("llama", vocabulary=False)))


def test_a_closed_engine_says_so(tiny):
    engine = Engine.load(str(tiny("llama")), drafter="ngram")
    engine.close()
    engine.close()
    for use in (lambda: engine.encode("hello"), lambda: engine.generate([[5, 6]])):
        with pytest.raises(RunnerError, match="has been closed"):
            use()


def test_a_context_beyond_the_trained_one_is_refused(tiny):
    with pytest.raises(InvalidParameter, match="at most the 1024 tokens"):
        Engine.load(str(tiny("llama")), context=2000)


def test_a_draft_model_with_a_shorter_window_drafts_as_far_as_that_goes(tiny):  # B46
    short = str(tiny("llama", context=64))
    with Engine.load(str(tiny("llama")), drafter="model", draft_length=3, draft_model=short) as engine:
        result = engine.generate(["x" * 40], SamplingParams(max_tokens=80, seed=1, ignore_eos=True))[0]
        assert len(result.tokens) == 80 and result.stats.proposed > 0 and result.origins[-1] == "plain"


def test_chat_templates_come_from_the_file(tiny):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with Engine.load(str(tiny("llama", template=template))) as engine:
        tokens = engine.encode([{"role": "user", "content": "hi"}])
        assert b"".join(map(engine.model.tokenizer.token_bytes, tokens)).decode().replace("\u2581", " ").strip() == "<user>hi"
