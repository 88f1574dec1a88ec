"""MTP modules as public checkpoints ship them, on tiny random checkpoints of those shapes."""

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
import tiny_transformers as tiny_models  # noqa: E402

from truedraw.drafters import mtp_modules  # noqa: E402
from truedraw.engine import Engine  # noqa: E402
from truedraw.errors import IncompatibleModels, ModelFileError, ModelNotFound  # noqa: E402
from truedraw.protocols import TokenMatrices  # noqa: E402
from truedraw.runners import transformers_mtp  # noqa: E402
from truedraw.types import SamplingParams  # noqa: E402

FAMILIES = ("DeepseekV3", "Glm4Moe", "Qwen3Next")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, tiny_models.with_mtp(folder, request.param)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    return folder, tiny_models.with_mtp(folder, "Glm4Moe")


def matrices_of(model):
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return TokenMatrices(embedding.detach().numpy(), output.detach().numpy())


def loaded(folder, matrices):
    """For a target called x."""

    def check(embedding, whose):
        mtp_modules.check_trained_with(embedding, matrices, whose, "x")
        return matrices

    return transformers_mtp.load(folder, check)


def rms_norm(x, weight, model):
    """As the model's own kind of norm means its weight."""
    gain = 1 + weight if type(model).__name__.startswith("Qwen3Next") else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps) * gain


@torch.inference_mode()
def by_the_paper(three, states, tokens):
    """DeepSeek-V3 (arXiv 2412.19437), equations 21 to 23, over a whole text at once: states of the module."""
    own, n = three.own, len(tokens)
    embeddings = three.get_input_embeddings().weight[torch.tensor(tokens)]
    parts = rms_norm(embeddings, own["embedding_norm"], three), rms_norm(states, own["hidden_norm"], three)
    x = (torch.cat(parts, dim=-1) @ own["join"].T)[None]
    positions = torch.arange(n)[None]
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    layer, turns = three.model.layers[2], three.model.rotary_emb(x, positions)
    layer.self_attn.config._attn_implementation = "eager"
    made = layer(x, position_embeddings=turns, attention_mask=mask, position_ids=positions)
    return rms_norm(made[0], own["out_norm"], three)


def test_the_module_is_the_papers(family):
    """Read, cached, cut and continued entry by entry: the states and rows of the whole text at once."""
    folder, three = family
    module = loaded(folder, matrices_of(three))
    generator = np.random.default_rng(0)
    states = generator.normal(size=(12, 32)).astype(np.float32)
    tokens = generator.integers(0, tiny_models.VOCAB, 12)
    expected = by_the_paper(three, torch.from_numpy(states), tokens)
    cache, other = module.new_cache(), module.new_cache()
    module.remember(states[:5], tokens[:5], cache)
    module.step(states[:1], tokens[:1], [cache])  # a draft that leaves again
    cache.truncate(5)
    for i in range(5, 12):
        both = module.step(states[[i, 0]], tokens[[i, 0]], [cache, other])
        np.testing.assert_allclose(both[0], expected[i], atol=1e-4)
        if i == 5:
            np.testing.assert_allclose(both[1], expected[0], atol=1e-4)
    assert cache.position == 12 and other.position == 7
    rows = module.logits(expected.numpy())
    np.testing.assert_allclose(rows, expected.numpy() @ matrices_of(three).output.T, atol=1e-3)


def test_a_checkpoint_drafts_for_itself_and_no_text_changes(family):
    folder, _ = family
    params = SamplingParams(max_tokens=30, seed=3, temperature=0.7, ignore_eos=True)
    with Engine.load(f"hf:{folder}@f32", drafter="mtp", mtp_modules=folder, draft_length=2, context=128, threads=1) as engine:
        drafted, plain = (engine.generate(["hello there"], params, max_draft=most)[0] for most in (None, 0))
    assert drafted.tokens == plain.tokens and drafted.stats.proposed > 20


def test_without_a_module_in_it_a_checkpoint_is_refused(tmp_path, glm):
    _, three = glm
    tiny_models.save(tmp_path / "plain")
    with pytest.raises(ModelFileError, match=r"holds no MTP module: neither model\.layers\.2\.eh_proj nor mtp\.fc is in it"):
        loaded(tmp_path / "plain", matrices_of(three))
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        loaded(tmp_path, matrices_of(three))


def test_an_interrupted_download_is_told_by_what_it_lacks(tmp_path, glm):
    folder, three = glm
    shutil.copytree(folder, tmp_path / "part")
    names = list(safetensors.torch.load_file(folder / "model.safetensors"))
    index = {"weight_map": {name: f"model-0000{1 + (i > 40)}-of-00002.safetensors" for i, name in enumerate(names)}}
    (tmp_path / "part" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "part" / "model.safetensors").rename(tmp_path / "part" / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelFileError, match=r"lacks model-00002-of-00002\.safetensors \(1 missing in all\): fetch what is not"):
        loaded(tmp_path / "part", matrices_of(three))
    torn = (tmp_path / "part" / "model-00001-of-00002.safetensors").read_bytes()[:5000]
    (tmp_path / "part" / "model.safetensors.index.json").unlink()
    (tmp_path / "part" / "model.safetensors").write_bytes(torn)
    with pytest.raises(ModelFileError, match="cannot be read for its MTP module"):
        loaded(tmp_path / "part", matrices_of(three))


def test_another_models_module_is_refused(glm):
    folder, three = glm
    own = matrices_of(three)
    with pytest.raises(IncompatibleModels, match=r"32 wide, 259 tokens.*and x is 16 wide and has 259"):
        loaded(folder, TokenMatrices(own.embedding[:, :16], own.output[:, :16]))
    other = np.random.default_rng(1).normal(size=own.embedding.shape).astype(np.float32)
    with pytest.raises(IncompatibleModels, match="the embeddings of x are others"):
        loaded(folder, TokenMatrices(other, other))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.2.mlp.experts.3.up_proj.weight"), "does not fit a layer of Glm4MoeModel|cannot be read"),
        (lambda w: w.pop("model.layers.2.self_attn.q_proj.weight"), r"does not fit a layer of Glm4MoeModel: .*q_proj"),
        (lambda w: w.pop("model.layers.2.hnorm.weight"), "cannot be read for its MTP module.*hnorm"),
        (lambda w: w.update({"model.layers.2.self_attn.extra.weight": torch.ones(3)}), "does not fit .*extra"),
        (
            lambda w: w.update({"model.layers.2.eh_proj.weight": w["model.layers.2.eh_proj.weight"].to(torch.float8_e4m3fn)}),
            "has model.layers.2.eh_proj.weight as torch.float8_e4m3fn: bf16, f16 or f32 weights are needed",
        ),
    ],
)
def test_weights_that_do_not_fit_are_told(tmp_path, glm, change, words):
    folder, three = glm
    shutil.copytree(folder, tmp_path / "changed")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=words) as caught:
        loaded(tmp_path / "changed", matrices_of(three))
    assert "\n" not in str(caught.value)
