"""The plug-in in vLLM itself, on the demo model in float32: runs where vLLM is installed (make test-vllm).

Texts are compared over 50 prompts. Where two runs differ, rows of passes of other sizes differed: the differences are
counted, told, and have to be few, and the first of each is looked at in the engine without drafts and without the plug-in.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm makes an environment with it")

from truedraw.runners.gguf import cache_directory

HERE = Path(__file__).parent
TOKENS = 40
MOST_DIFFERENT = 3
"""Texts of 50. Float32 rows of passes of other sizes differ by 1e-5 or so, and a race is that close now and then."""

SPECULATIVE = {"method": "custom_class", "model": "truedraw.integrations.vllm.Proposer", "num_speculative_tokens": 5}
GREEDY = [{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}] * 50
SEEDED = [{"temperature": 0.8, "seed": seed, "max_tokens": TOKENS, "ignore_eos": True} for seed in range(50)]


@pytest.fixture(scope="module")
def model():
    folders = sorted(cache_directory().glob("smollm2-*-transformers-f32"))
    if not folders:
        pytest.skip("no model in the cache directory: truedraw generate --model hf:smollm2@f32 makes it")
    return str(folders[-1])


@pytest.fixture(scope="module")
def prompts(model):
    """50 texts as token ids; half of them have something to copy."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    things = ["rain", "salt", "owls", "maps", "tea", "ice", "rope", "clay", "wool", "oak", "rye", "tin", "fog"]
    texts = [
        f"Write this line again and again: {thing}, {other}, {thing}."
        for thing, other in zip(things, things[1:] + things[:1], strict=True)
    ]
    texts += [f"Here is a list of facts about {thing}:\n1." for thing in things]
    texts += [f"for {thing} in {thing}s:\n    print({thing})\n\nfor {thing} in {thing}s:\n" for thing in things]
    texts += [f"Q: What is {thing}?\nA:" for thing in things[:11]]
    assert len(texts) == 50
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def run(model):
    """Runs vLLM in a process of its own; what was run already is kept."""
    kept = {}

    def run(runs, *, on=True, drafts=True, chosen=None, **options):
        engine = {"model": model, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "max_model_len": 1024, **options}
        engine["enable_prefix_caching"] = False
        if drafts:
            engine |= {
                "speculative_config": SPECULATIVE,
                "additional_config": {"truedraw": {"draft_length": 5, **(chosen or {})}},
            }
        else:
            engine["async_scheduling"] = False
        asked = json.dumps({"engine": engine, "runs": runs})
        environ = {**os.environ, "TRUEDRAW_VLLM": "1" if on else "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if (asked, on) not in kept:
            command = [sys.executable, str(HERE / "vllm_run.py")]
            result = subprocess.run(command, input=asked, capture_output=True, text=True, env=environ)
            assert result.returncode == 0, result.stderr[-3000:]
            kept[asked, on] = json.loads(result.stdout.splitlines()[-1])
        return kept[asked, on]

    return run


def different(left, right):
    """The numbers of the texts that differ, with the place of the first difference."""
    return {
        i: next((j for j, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for i, (one, other) in enumerate(zip(left, right, strict=True))
        if one != other
    }


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_texts_are_those_without_speculation(run, prompts, kind):
    """Alone and four at a time, with and without drafts: one text for each prompt."""
    params = GREEDY if kind == "greedy" else SEEDED
    runs = [{"prompts": prompts, "params": params, "together": together} for together in (1, 4)]
    alone, together = run(runs, drafts=False)["texts"]
    floor = different(alone, together)
    print(f"\n{kind}: without drafts, one against four at a time: {len(floor)} of 50 texts differ, first at {floor}")
    for name, texts in zip(("one at a time", "four at a time"), run(runs)["texts"], strict=True):
        found = different(alone, texts)
        print(f"{kind}: drafts, {name}: {len(found)} of 50 texts differ, first at {found}")
        assert len(found) <= len(floor) + MOST_DIFFERENT


def test_cancelled_and_preempted_requests_change_no_text(run, prompts):
    """Four at a time with room for little more than one: requests lose their cache in the middle, and two are cancelled."""
    params = [{**one, "max_tokens": 150} for one in SEEDED[:12]]
    small = {"block_size": 32, "max_model_len": 256, "num_gpu_blocks_override": 12}
    one = [{"prompts": prompts[:12], "params": params, "together": 1}]
    crowded = [{"prompts": prompts[:12], "params": params, "together": 4, "abort": [3, 8]}]
    alone = run(one, drafts=False, **small)["texts"][0]
    told = run(crowded, **small)
    assert told["preemptions"] > 0
    texts = told["texts"][0]
    assert texts[3] is None and texts[8] is None
    kept = [i for i in range(12) if i not in (3, 8)]
    found = different([alone[i] for i in kept], [texts[i] for i in kept])
    print(f"\n{told['preemptions']:.0f} preemptions, 2 cancelled: {len(found)} of 10 texts differ, first at {found}")
    assert len(found) <= MOST_DIFFERENT


def test_parameters_that_vllm_refuses_under_speculation_work(run, prompts):
    params = [
        {"temperature": 1.0, "seed": seed, "max_tokens": TOKENS, "min_p": 0.1, "logit_bias": {"28": -5.0}} for seed in range(8)
    ]
    runs = [{"prompts": prompts[:8], "params": params, "together": 4}]
    plain, drafted = (run(runs, drafts=drafts)["texts"][0] for drafts in (False, True))
    found = different(plain, drafted)
    print(f"\nmin-p and logit bias: {len(found)} of 8 texts differ, first at {found}")
    assert len(found) <= 1


def test_a_corpus_is_copied_from_and_changes_no_text(run, model, prompts, tmp_path):
    """Answers that were given before, as the file of a corpus: what was not to be copied is drafted, and accepted."""
    from transformers import AutoTokenizer

    runs = [{"prompts": prompts[13:21], "params": GREEDY[:8], "together": 4}]
    plain = run(runs, drafts=False)["texts"][0]
    (tmp_path / "answers.txt").write_text("\n\n".join(AutoTokenizer.from_pretrained(model).batch_decode(plain)))
    without, told = run(runs), run(runs, chosen={"corpus": str(tmp_path / "answers.txt")})
    print(f"\ncorpus: {told['accepted']:.0f} of {told['drafted']:.0f} drafts accepted, without {without['accepted']:.0f}")
    assert told["accepted"] > without["accepted"] + 50
    assert len(different(plain, told["texts"][0])) <= 1


def test_switched_off_vllm_draws_as_without_the_package(run, prompts):
    """And refuses what it refuses by itself."""
    runs = [{"prompts": prompts[:2], "params": [{"min_p": 0.1, "max_tokens": 4}] * 2}]
    with pytest.raises(AssertionError, match="not yet supported with speculative decoding"):
        run(runs, on=False)
