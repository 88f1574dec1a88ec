import json
import subprocess
import sys

import numpy as np
import pytest

from truedraw.bench import workloads
from truedraw.bench.bounds import hindsight_seconds, loop_share
from truedraw.bench.measure import Pair, Stopwatch, Workload, run
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.errors import PromptError
from truedraw.policy import FixedLength
from truedraw.registry import Model
from truedraw.runners.toy import LetterTokenizer, ToyRunner, markov
from truedraw.types import SamplingParams

CYCLE = np.roll(np.eye(5), 1, axis=1) * 0.999 + 0.0002


def engine(**options):
    return Engine(Model("toy", ToyRunner(markov(CYCLE), 5), LetterTokenizer(5)), SuffixDrafter(), FixedLength(3), **options)


# ---------------------------------------------------------------- bounds


def test_hindsight_copies_what_will_be_right_and_no_more():
    flat = [0.0] + [1.0] * 32
    assert hindsight_seconds([1, 2, 3, 1], [2, 3, 1, 2, 3, 1], flat) == 1.0  # all in one pass: five copies and one token
    assert hindsight_seconds([1, 2, 3, 4], [4, 3, 2, 1], flat) <= 4.0
    assert hindsight_seconds([1, 2, 3, 9, 1], [2, 3, 4, 5], flat) == 2.0  # two copies are right, the third is not
    linear = [float(n) for n in range(33)]
    assert hindsight_seconds([1, 2, 3, 1], [2, 3, 1, 2], linear) == 4.0  # copying saves nothing where passes cost by the token


def test_the_share_of_loops():
    assert loop_share([]) == 0.0 and loop_share(list(range(50))) == 0.0
    assert loop_share([7] * 20) == pytest.approx(19 / 20)
    assert loop_share([1, 2, 3] * 10) == pytest.approx(27 / 30)
    assert loop_share([*range(40), *range(40)]) == 0.0  # said twice is no loop


# ---------------------------------------------------------------- measuring


def test_pairs_give_ratio_and_interval():
    told = Workload("x", [Pair(2.0, 100, 1.0, 100)] * 10)
    assert told.ratio == 2.0 and told.interval() == (2.0, 2.0) and told.plain_tps == 50
    mixed = Workload("x", [Pair(1.0, 100, 1.0 + 0.1 * (i % 3), 100) for i in range(30)])
    low, high = mixed.interval()
    assert low < mixed.ratio < high and high - low < 0.1


def test_a_run_alternates_and_counts_the_same_tokens_both_ways():
    under_test = engine()
    *_, told = run(
        under_test,
        "cycle",
        [[1, 2, 3], [2, 3, 4]],
        SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
        concurrency=1,
        repeats=3,
        seconds=5,
    )
    assert len(told.pairs) == 6 and all(pair.plain_tokens == pair.spec_tokens == 30 for pair in told.pairs)
    assert told.stats.tokens_per_step > 2 and len(told.texts) == 2
    assert 0 < told.spec.target < told.spec.wall and told.spec.other >= 0
    assert not isinstance(under_test.policy, Stopwatch)  # put back
    assert told.hindsight_ratio([0.0] + [1.0] * 32) > told.stats.tokens_per_step


# ---------------------------------------------------------------- prompts


def test_the_shipped_workloads_are_of_five_kinds():
    assert set(workloads.read(workloads.shipped(), raw=False)) == {
        "open chat",
        "editing code",
        "quoting",
        "structured output",
        "multi-turn",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"workload": "a", "prompt": "x"}\n{', "line 2: no JSON"),
        ('{"workload": "a", "prompt": ""}', "line 1: "),
        ('\n\n{"workload": 3, "prompt": "x"}', "line 3: "),
        ('["a"]', "line 1: "),
        ('{"workload": "a", "prompt": [{"role": "user"}]}', "line 1: "),
        ("\n", "holds no prompts"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(PromptError, match=message):
        workloads.read(path, raw=True)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "missing"):
        with pytest.raises(PromptError, match=name):
            workloads.read(tmp_path / name, raw=True)


def test_the_command(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"workload": "cat", "prompt": "the cat sat on"}\n{"workload": "dog", "prompt": "the dog saw"}\n')
    command = [
        sys.executable,
        "-m",
        "truedraw",
        "bench",
        "--model",
        "toy",
        "--prompts",
        str(prompts),
        "--repeats",
        "3",
        "--max-tokens",
        "20",
        "--raw",
    ]
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=True).stdout)
    assert set(told) == {"workloads", "machine"} and set(told["workloads"]) == {"cat", "dog"}
    assert {
        "plain_tps",
        "spec_tps",
        "ratio",
        "ratio_low",
        "ratio_high",
        "tokens_per_step",
        "acceptance_by_depth",
        "ideal_ratio",
        "hindsight_ratio",
        "loop_share",
    } <= set(told["workloads"]["cat"])
    assert "cat" in subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    bad = subprocess.run([*command, "--concurrency", "0"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2 and "concurrency is 0" in bad.stderr
