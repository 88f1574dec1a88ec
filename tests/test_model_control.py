"""The controller, the suffix drafter, profiles and strict mode on the real model."""

from dataclasses import replace

import numpy as np
import pytest

from truedraw import profile, strict
from truedraw.bench import workloads
from truedraw.engine import Engine
from truedraw.errors import IncompatibleModels, InvalidParameter
from truedraw.policy import Controller
from truedraw.registry import LoadOptions
from truedraw.types import SamplingParams, Stats

pytestmark = pytest.mark.model

TEXT = (
    "The river Thames flows through southern England, including London. At 215 miles, it is the longest river entirely in "
    "England. It rises near Kemble in Gloucestershire and flows into the North Sea."
)
COPY = [{"role": "user", "content": f"Copy this text exactly:\n\n{TEXT}"}]
OPEN = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture(autouse=True)
def own_profiles(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "folder", lambda: tmp_path / "profiles")


def test_the_first_use_measures_and_the_second_does_not():
    said = []
    for _ in range(2):
        with Engine.load("smollm2", context=1024, on_progress=said.append) as engine:
            assert isinstance(engine.policy, Controller)
            table = engine.policy.costs.table(32, 20, 1)
    assert len([line for line in said if "measuring" in line]) == 1 and len(list(profile.folder().iterdir())) == 1
    assert 0 < table[1] < table[32]


def test_a_damaged_profile_is_measured_again_with_one_line():
    with Engine.load("smollm2", context=256):
        (path,) = profile.folder().iterdir()
    path.write_text("{}")
    said = []
    with Engine.load("smollm2", context=256, on_progress=said.append):
        assert len(said) == 1 and "damaged" in said[0]


def test_seeded_texts_stay_plain_decodings_under_the_controller():
    with Engine.load("smollm2", kv_type="bf16", context=1024) as engine:
        for prompt in (COPY, OPEN):
            for temperature in (0.0, 0.8):
                params = SamplingParams(max_tokens=80, temperature=temperature, seed=3)
                plain, drafted = (engine.generate([prompt], params, max_draft=limit)[0] for limit in (0, None))
                assert plain.tokens == drafted.tokens


def test_copies_are_drafted_where_they_pay():
    with Engine.load("smollm2", context=1024) as engine:
        params = SamplingParams(max_tokens=100, temperature=0, seed=1, ignore_eos=True)
        copied = [
            engine.generate([prompt], params)[0].stats
            for prompt in workloads.read(workloads.shipped(), raw=False)["editing code"]
        ]
        assert sum(copied, Stats()).tokens_per_step > 1.15  # pass costs decide, and they differ
        opened = engine.generate([OPEN], replace(params, temperature=1.0))[0].stats
        assert opened.proposed < 60  # little is tried where nothing repeats


def test_strict_takes_q8_0_and_tells_the_price_and_refuses_bf16():
    said = []
    model = strict.load("smollm2", LoadOptions(context=600, slots=2), said.append)
    assert any("rows are bit-identical for passes of 1 to 32 tokens" in line and "times the fastest" in line for line in said)
    model.runner.close()
    with pytest.raises(IncompatibleModels, match=r"no configuration of smollm2:bf16 .* by a TV of \d"):
        strict.load("smollm2:bf16", LoadOptions(context=300), lambda message: None)
    with pytest.raises(InvalidParameter, match="leave it out"):
        strict.load("smollm2", LoadOptions(kv_type="q8_0"), lambda message: None)


def test_a_strict_engine_gives_plain_decodings_text_in_batches_beyond_256_tokens():
    with Engine.load("smollm2", strict=True, context=700, slots=2) as engine:
        prompts = ["Once upon a time there was a river. " * 30, "One, two, three, four. " * 50]
        params = [SamplingParams(max_tokens=50, temperature=0.7 * i, seed=i, ignore_eos=True) for i in range(2)]
        alone = [engine.generate([p], s, max_draft=0)[0].tokens for p, s in zip(prompts, params, strict=True)]
        assert [r.tokens for r in engine.generate(prompts, params)] == alone
        assert np.mean([len(engine.encode(p)) for p in prompts]) > 256
