"""The real model's sampled text against its own rows: score tests, and acceptance against sum min(p, q).

Null: every emitted token is drawn from p given the text before it. Directions: w = min(1, q/p) (finds
"resample from p"), log p, the drafter's favourite. P-values by Bernstein's bound for martingales
(`Score.safe_p_value`), honest at every sample size; rejected below 1e-6 over the whole family
(Bonferroni). Power for "resample from p": the score's mean is Var_p(w) per decided token, z near
sqrt(n Var w), and 1e-6 takes about 6.5.
"""

import shutil

import numpy as np
import pytest

from truedraw.engine import Engine
from truedraw.prove.watch import DIRECTIONS, Watch
from truedraw.registry import RULES
from truedraw.types import SamplingParams
from truedraw.verify import coupled, lossy

pytestmark = pytest.mark.model

ALPHA = 1e-6
PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
]
STORY = (
    "The history of the lighthouse begins with fires on hills. Later, towers were built of stone, and mirrors, lenses and "
    "clockwork made their light visible for many miles over the sea at night."
)


@pytest.fixture(scope="module")
def blurred(tmp_path_factory):
    """A draft model that really differs: four bits, and its final norm scaled by 0.8."""
    import gguf

    from truedraw.runners import llamacpp
    from truedraw.runners.gguf import locate

    path = tmp_path_factory.mktemp("draft") / "blurred.gguf"
    shutil.copyfile(locate("smollm2:q4_0", llamacpp.quantise, lambda message: None), path)
    reader = gguf.GGUFReader(path, "r+")
    norm = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    norm.data[:] = norm.data * np.float32(0.8)
    reader.data.flush()
    return str(path)


def watched_run(monkeypatch, blurred, name, rule, num_tokens, drafter="model"):
    """Decode at temperature 1, without a seed, until so many tokens have been emitted."""
    watch = Watch(rule)
    monkeypatch.setitem(RULES, name, watch)
    with Engine.load("smollm2", drafter=drafter, draft_model=blurred, draft_length=3, rule=name, slots=8, context=320) as engine:
        params = SamplingParams(max_tokens=min(200, num_tokens // 8), ignore_eos=True)
        while watch.num_tokens < num_tokens:
            assert all(result.error is None for result in engine.generate([*PROMPTS, *PROMPTS], params))
        print(
            f"\n{name}: {watch.num_tokens} tokens, accepted {engine.stats.acceptance_rate:.3f} of the drafts,",
            ", ".join(f"{direction} z = {score.z:.2f}" for direction, score in watch.scores.items()),
        )
        return watch


def agrees(watch):
    """Accepted / tested against sum min(p, q), as a martingale: rejected below ALPHA."""
    told = watch.acceptance
    print(f"accepted minus sum min(p, q): {told.excess:.1f} over {told.count} positions, z = {told.z:.2f}")
    return told.safe_p_value > ALPHA


@pytest.mark.parametrize("name", [pytest.param("token", marks=pytest.mark.long), "block"])
def test_shipped_rules_draw_from_p(monkeypatch, blurred, name):
    watch = watched_run(monkeypatch, blurred, name, RULES[name], 800)
    assert watch.smallest_p_value() > ALPHA / len(DIRECTIONS)
    assert name != "token" or agrees(watch)


@pytest.mark.parametrize("name", ["token", pytest.param("block", marks=pytest.mark.long)])
def test_copies_drawn_from_counts_and_the_draft_model_in_turn(monkeypatch, blurred, name):
    """The drafter of `auto` with a draft model: each step is drafted by what is expected to gain more."""
    watch = watched_run(monkeypatch, blurred, name, RULES[name], 800, drafter="suffix+model")
    assert watch.smallest_p_value() > ALPHA / len(DIRECTIONS)
    assert name != "token" or agrees(watch)


@pytest.mark.parametrize("name", ["block", pytest.param("token", marks=pytest.mark.long)])
def test_the_shipped_mtp_modules_draw_from_p(monkeypatch, name):
    """A trimmed vocabulary: q is 0 on the other five tokens of six."""
    watch = watched_run(monkeypatch, None, name, RULES[name], 800, drafter="mtp")
    assert watch.smallest_p_value() > ALPHA / len(DIRECTIONS)
    assert name != "token" or agrees(watch)


@pytest.mark.long
@pytest.mark.parametrize("name", ["token", "block", "coupled"])
def test_the_shipped_mtp_modules_draw_from_p_over_20_000_tokens(monkeypatch, name):
    watch = watched_run(monkeypatch, None, name, RULES[name], 20_000, drafter="mtp")
    assert watch.smallest_p_value() > ALPHA / (7 * len(DIRECTIONS))
    assert name != "token" or agrees(watch)


@pytest.mark.long
def test_resampling_from_p_is_found_behind_mtp_drafts(monkeypatch):
    watch = watched_run(monkeypatch, None, "token", lossy.biased_resample, 1200, drafter="mtp")
    assert watch.smallest_p_value() < ALPHA / len(DIRECTIONS)


@pytest.mark.long
def test_resampling_from_p_is_found(monkeypatch, blurred):
    watch = watched_run(monkeypatch, blurred, "token", lossy.biased_resample, 1200)
    assert watch.smallest_p_value() < ALPHA / len(DIRECTIONS)
    assert watch.scores["residual_direction"].z > 6


@pytest.mark.long
@pytest.mark.parametrize("name", ["token", "block", "coupled"])
def test_shipped_rules_draw_from_p_over_20_000_tokens(monkeypatch, blurred, name):
    watch = watched_run(monkeypatch, blurred, name, RULES[name], 20_000)
    assert watch.smallest_p_value() > ALPHA / (7 * len(DIRECTIONS))
    assert name != "token" or agrees(watch)


@pytest.mark.long
def test_copies_and_the_draft_model_in_turn_over_10_000_tokens(monkeypatch, blurred):
    watch = watched_run(monkeypatch, blurred, "block", RULES["block"], 10_000, drafter="suffix+model")
    assert watch.smallest_p_value() > ALPHA / (7 * len(DIRECTIONS))


@pytest.mark.long
@pytest.mark.parametrize(("name", "num_tokens"), [("multidraft", 5_000), ("traversal", 5_000), ("resample_from_target", 3_000)])
def test_the_other_rules_over_fewer_tokens(monkeypatch, blurred, name, num_tokens):
    watch = watched_run(monkeypatch, blurred, name, RULES[name], num_tokens)
    assert watch.smallest_p_value() > ALPHA / (7 * len(DIRECTIONS))


@pytest.mark.long
def test_resampling_from_p_is_found_over_20_000_tokens(monkeypatch, blurred):
    watch = watched_run(monkeypatch, blurred, "token", lossy.biased_resample, 20_000)
    assert watch.smallest_p_value() < ALPHA / (7 * len(DIRECTIONS))


def test_what_the_two_level_race_gives_up_on_real_rows(blurred):
    """Flat and two-level acceptance of shared noise in closed form, against 1 - TV, over some forty positions."""
    from truedraw.cache import CachedModel
    from truedraw.registry import LoadOptions, load_model
    from truedraw.sampling import shape

    models = [load_model(spec, LoadOptions(context=256)) for spec in ("smollm2", blurred)]
    text = np.array(models[0].tokenizer.encode(STORY), dtype=np.int32)
    rows = [CachedModel(model.runner).logits([(0, text)], [len(text) - 4])[0].logits.astype(np.float64) for model in models]
    told = []
    for p_logits, q_logits in zip(*rows, strict=True):
        p, q = (shape(logits, SamplingParams(), text, len(text)) for logits in (p_logits, q_logits))
        told.append((coupled.acceptance(p, q), coupled.race_acceptance(p, q), float(np.minimum(p, q).sum())))
    flat, blocks, best = np.mean(told, axis=0)
    print(f"\nshared noise accepts {flat:.3f} flat, {blocks:.3f} in two levels; 1 - TV is {best:.3f}")
    assert blocks < best and flat < best and flat - blocks < 0.08
    for model in models:
        model.runner.close()
