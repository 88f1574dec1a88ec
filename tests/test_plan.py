"""The economics against closed forms and published numbers, and truedraw plan as a person meets it."""

import http.server
import json
import math
import re
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw import economics
from truedraw.cli import main, plan_inputs
from truedraw.economics import Costs, Counters, MeasuredCost, TokenCost
from truedraw.errors import InvalidParameter, MissingExtra

# milliseconds by pass size of a 135M model on two cores (DESIGN.md section 5)
Q8_0 = MeasuredCost((1, 2, 4, 8, 16, 32), (8, 16, 23, 29, 44, 76))
BF16 = MeasuredCost((1, 2, 4, 8, 16, 32), (10, 15, 19, 24, 35, 58))


def best_of(acceptance, costs, max_length=40):
    return economics.best(economics.curve(economics.constant_survival(acceptance, max_length), costs, max_length))


def one_step_look_ahead(survival, costs):
    """The rule that adds a token while that token alone pays."""
    length = 0
    while length < len(survival) and survival[length] > costs.of(length + 1) - costs.of(length):
        length += 1
    return economics.expected_tokens(survival, length) / costs.of(length)


# ---------------------------------------------------------------- against closed forms


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [  # best length and speed-up at draft costs .01 .03 .05 .1 .2
        (0.5, [(5, 1.88), (4, 1.73), (3, 1.63), (2, 1.46), (1, 1.25)]),
        (0.6, [(7, 2.30), (5, 2.07), (4, 1.92), (3, 1.67), (2, 1.40)]),
        (0.7, [(9, 2.97), (7, 2.60), (6, 2.35), (4, 1.98), (3, 1.58)]),
        (0.8, [(14, 4.23), (10, 3.52), (8, 3.09), (6, 2.47), (4, 1.87)]),
        (0.9, [(24, 7.49), (16, 5.63), (13, 4.67), (10, 3.43), (7, 2.37)]),
    ],
)
def test_the_table_of_best_lengths(acceptance, expected):
    found = [best_of(acceptance, Costs(draft=cost)) for cost in (0.01, 0.03, 0.05, 0.1, 0.2)]
    assert [(point.length, round(point.speedup, 2)) for point in found] == expected


@given(st.floats(0, 1), st.integers(0, 60))
def test_expected_tokens_in_closed_form(acceptance, length):
    summed = economics.expected_tokens(economics.constant_survival(acceptance, 60), length)
    assert economics.constant_tokens(acceptance, length) == pytest.approx(summed, rel=1e-12)


def test_two_examples_of_other_engines():
    slow = economics.curve(economics.constant_survival(0.3, 4), Costs(draft=0.25), 4)[4]
    fast = economics.curve(economics.constant_survival(0.8, 4), Costs(draft=0.05), 4)[4]
    assert slow.tokens_per_step == pytest.approx(1.4251) and slow.speedup == pytest.approx(0.71, abs=0.003)
    assert fast.tokens_per_step == pytest.approx(3.3616) and fast.speedup == pytest.approx(2.8, abs=0.002)


@pytest.mark.parametrize(
    ("passes", "survival", "speedup"),
    [(Q8_0, economics.constant_survival(0.97, 31), 2.34), (BF16, economics.depth_survival([0.45] + [1] * 30), 2.58)],
    ids=["q8_0", "bf16"],
)
def test_the_whole_curve_is_searched_where_the_first_token_loses(passes, survival, speedup):
    costs = Costs(passes)
    points = economics.curve(survival, costs, 31)
    assert points[1].speedup < 1
    assert one_step_look_ahead(survival, costs) == 1
    assert economics.best(points).speedup == pytest.approx(speedup, abs=0.005)


def test_break_even_in_closed_form():
    assert economics.break_even(Costs(draft=0.3), 1) == pytest.approx(0.3)  # 1 + a = 1 + c
    assert economics.break_even(Costs(draft=0.3), 2) == pytest.approx((math.sqrt(1 + 4 * 0.6) - 1) / 2)  # a + a**2 = 2 c
    assert economics.break_even(Costs(TokenCost(1)), 3) == 1
    assert economics.break_even(Costs(TokenCost(1), overhead=0.01), 3) is None
    assert economics.break_even(Costs(), 5) == 0


# ---------------------------------------------------------------- properties

COSTS = st.builds(Costs, st.builds(TokenCost, st.floats(0, 2)), st.floats(0, 2), st.floats(0, 2))


@given(st.floats(0, 1), st.floats(0, 1), COSTS)
def test_speedup_rises_with_acceptance(one, other, costs):
    low, high = (economics.curve(economics.constant_survival(a, 12), costs, 12) for a in sorted((one, other)))
    assert all(less.speedup <= more.speedup for less, more in zip(low, high, strict=True))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), COSTS)
def test_the_best_length_never_loses_and_no_length_is_better(rates, costs):
    points = economics.curve(economics.depth_survival(rates), costs, len(rates))
    best = economics.best(points)
    assert best.speedup >= 1 and all(point.speedup <= best.speedup for point in points)
    assert points[0].speedup == 1


@given(st.floats(0, 1), st.integers(1, 12), COSTS)
def test_break_even_parts_wins_from_losses(acceptance, length, costs):
    limit = economics.break_even(costs, length)
    speedup = economics.constant_tokens(acceptance, length) / costs.of(length)
    if limit is None:
        assert speedup < 1
    elif abs(acceptance - limit) > 1e-9:
        assert (speedup >= 1 - 1e-12) == (acceptance > limit)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), min_size=1, max_size=30))
def test_a_trace_survives_less_with_depth(steps):
    survival = economics.trace_survival([hits for hits, _ in steps], [length for _, length in steps])
    assert all(0 <= deep <= shallow <= 1 for shallow, deep in zip((1, *survival), survival, strict=False))
    assert len(survival) <= max(length for _, length in steps)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_a_trace_of_one_length_gives_back_its_mean(accepted):
    survival = economics.trace_survival(accepted, [6] * len(accepted))
    assert economics.expected_tokens(survival, 6) == pytest.approx(1 + sum(accepted) / len(accepted))


@given(COSTS, st.integers(1, 40))
def test_the_claim_agrees_with_its_steps(costs, longest):
    claim = economics.claim(costs, longest)
    assert {step.length for step in claim.wins} == {n for n in range(1, longest + 1) if 2 / costs.of(n) > 1}
    assert {step.length for step in claim.losses} == {n for n in range(3, longest + 1) if 4 / costs.of(n) < 1}
    assert all(step.accepted <= step.length for step in (*claim.wins, *claim.losses))
    for length in range(1, longest + 1):
        winning = [accepted for accepted in range(length + 1) if accepted + 1 > costs.of(length)]
        assert economics.needed(costs, length) == (winning[0] if winning else None)


# ---------------------------------------------------------------- worked examples


def test_a_trace_with_drafts_of_several_lengths():
    # depth 1: 3 of 4 (the empty draft is not counted); depth 2: 2 of 2 that got there and went on; depth 3: 1 of 2
    assert economics.trace_survival([2, 0, 1, 0, 3], [3, 3, 1, 0, 3]) == (0.75, 0.75, 0.375)
    # without lengths, the most accepted: 4
    assert economics.trace_survival([4, 1, 0, 1]) == economics.trace_survival([4, 1, 0, 1], [4] * 4) == (0.75, 0.25, 0.25, 0.25)
    assert economics.trace_survival([0, 0]) == (0,)
    assert economics.trace_survival([0, 0], [3, 3]) == (0, 0, 0)
    # nothing is known of depth 2: the only draft that went on was rejected before
    assert economics.trace_survival([1, 0], [1, 2]) == (0.5,)
    assert economics.trace_survival([3, 3], [3, 3], max_length=2) == (1, 1)
    assert economics.trace_survival([], []) == economics.trace_survival([0], [0]) == ()


def test_pass_costs_are_linear_between_sizes_and_end_at_the_last():
    assert [Q8_0.of(size) for size in (1, 2, 3, 4, 6, 32)] == [1, 2, 19.5 / 8, 23 / 8, 26 / 8, 9.5]
    assert Costs(Q8_0, draft=0.5, overhead=0.25).of(2.5) == pytest.approx(21.25 / 8 + 1.25 + 0.25)
    assert Costs(Q8_0).max_length == 31
    assert MeasuredCost((4, 1), (3, 1)) == MeasuredCost((1, 4), (1, 3))
    with pytest.raises(InvalidParameter, match="pass size is 33: allowed is at most 32"):
        Q8_0.of(33)
    with pytest.raises(InvalidParameter, match="max_length is 32: allowed is at most 31"):
        economics.curve(economics.constant_survival(0.5, 40), Costs(Q8_0), 32)
    with pytest.raises(InvalidParameter, match="max_length is 3: allowed is at most 2"):
        economics.curve((0.5, 0.25), Costs(), 3)


def test_a_plain_step_pays_for_no_overhead():
    assert Costs(overhead=5).of(0) == 1 and Costs(overhead=5).of(1) == 6


def test_counters():
    counters = Counters(drafts=100, proposed=250, accepted=150, by_depth=(80, 50, 20))
    assert counters.survival == (0.8, 0.5, 0.2) and counters.mean_length == 2.5 and counters.tokens_per_step == 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: economics.constant_survival(math.nan, 3),
        lambda: economics.constant_survival(1.01, 3),
        lambda: economics.depth_survival([0.5, -0.1]),
        lambda: economics.depth_survival([True]),
        lambda: economics.trace_survival([2], [1]),
        lambda: economics.trace_survival([-1]),
        lambda: economics.trace_survival([1.5]),
        lambda: economics.trace_survival([1, 1], [1]),
        lambda: TokenCost(-1),
        lambda: Costs(draft=math.nan),
        lambda: Costs(overhead=math.inf),
        lambda: MeasuredCost((1, 2), (1,)),
        lambda: MeasuredCost((1, 2), (1, 0.5)),
        lambda: MeasuredCost((2, 3), (1, 1)),
        lambda: MeasuredCost((1,), (1,)),
        lambda: MeasuredCost((1, 1, 2), (1, 1, 1)),
        lambda: MeasuredCost((0, 1, 2), (1, 1, 1)),
        lambda: MeasuredCost((1, 2), (0, 1)),
        lambda: MeasuredCost((1, 2), (1, math.nan)),
    ],
)
def test_what_the_library_refuses(make):
    with pytest.raises(InvalidParameter):
        make()


# ---------------------------------------------------------------- the command


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*arguments): status, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["truedraw", "plan", *map(str, arguments)])
        status = main.run()
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def ask(run):
    """ask(*arguments): the JSON object of a call that works."""

    def call(*arguments):
        status, out, err = run(*arguments, "--json")
        assert (status, err, out.count("\n")) == (0, "", 1), err
        return json.loads(out)

    return call


@pytest.fixture
def written(tmp_path):
    """written(text or object): the path of a file with it."""

    def write(content):
        path = tmp_path / "input.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_it_tells_the_table_and_the_answer(run):
    status, out, err = run("--acceptance", "0.7", "--draft-cost", "0.1", "--max-draft", "6")
    assert status == 0 and err == ""
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[0] == ["0", "1.00", "1.00", "1.00x", "-"]
    assert rows[4] == ["4", "2.77", "1.40", "1.98x", "0.29", "best"] and len(rows) == 7
    assert "speculation pays: the best draft length is 4, 2.77 tokens for the price of 1.40 plain passes, 1.98x" in out


def test_a_narrow_terminal_breaks_no_number(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert "break-even acceptance" in run("--acceptance", "0.7")[1]


def test_where_it_does_not_pay(run, ask):
    assert "does not pay: no draft length up to 16 is faster" in run("--acceptance", "0.2", "--draft-cost", "0.3")[1]
    assert ask("--acceptance", "0.2", "--draft-cost", "0.3")["best"]["length"] == 0


def test_the_claim_fails_both_ways(run, ask, written):
    options = ["--acceptance", "0.9", "--draft-cost", "0.1", "--pass-cost", "0.35"]
    claim = ask(*options)["claim"]
    assert claim["one_accepted_wins"]["longest"] == {
        "length": 2, "accepted": 1, "cost": pytest.approx(1.9), "tokens": 2, "speedup": pytest.approx(2 / 1.9)
    }  # fmt: skip
    assert claim["three_accepted_lose"]["shortest"]["length"] == 7
    out = run(*options)[1]
    assert "one accepted token is enough at draft lengths 1 to 2: length 1 gives 2 tokens for 1.45 plain passes, 1.38x" in out
    assert "three are too few at draft lengths 7 to 16: length 16 gives 4 tokens for 8.20 plain passes, 0.49x" in out
    assert "0.49x, 8 would win" in out


def test_the_claim_on_average(run):
    assert "the best length has 1.53 accepted tokens a step, fewer than two, and wins, 1.95x" in run(
        "--acceptance", "0.7", "--draft-cost", "0.1", "--max-draft", "3"
    )[1]  # fmt: skip
    out = run("--acceptance", "0.8", "--draft-cost", "0.6", "--max-draft", "6")[1]
    assert "length 6 has 2.95 accepted tokens a step, more than two, and loses, 0.86x" in out


def test_the_claim_holds_with_free_passes_and_the_ideal_is_called_one(run, ask):
    assert ask("--acceptance", "0.5")["claim"]["three_accepted_lose"] is None
    out = run("--acceptance", "0.5")[1]
    assert "that far the rule holds" in out and "all costs are 0" in out
    assert "all costs are 0" not in run("--acceptance", "0.5", "--overhead", "0.1")[1]


def test_acceptance_by_depth_ends_where_it_is_known(ask):
    told = ask("--acceptance", "0.8,0.5,0.25", "--draft-cost", "0.05")
    assert told["acceptance"]["survival"] == pytest.approx([0.8, 0.4, 0.1])
    assert [point["length"] for point in told["lengths"]] == [0, 1, 2, 3]
    assert any("known to depth 3" in note for note in told["notes"])
    assert len(ask("--acceptance", "0.8,0.5,0.25", "--max-draft", "2")["lengths"]) == 3


def test_traces(ask, written):
    told = ask("--acceptance", written([[3, 2], [3, 0], [1, 1], [0, 0], [3, 3]]))
    assert told["acceptance"]["survival"] == [0.75, 0.75, 0.375]
    assert any("1 of 5 steps proposed nothing" in note for note in told["notes"])
    told = ask("--acceptance", written([4, 1, 0, 1]))
    assert told["acceptance"]["survival"] == [0.75, 0.25, 0.25, 0.25]
    assert any("4 draft tokens per step" in note for note in told["notes"])


def test_what_generate_prints_is_survival_not_a_rate_by_depth(ask, written):
    by_depth = [6 / 7, 4 / 7, 3 / 7, 3 / 7]
    told = ask("--acceptance", written({"acceptance_by_depth": by_depth, "steps": 34, "choices": 3} | {"choices": None}))
    assert told["acceptance"]["survival"] == by_depth
    assert told["lengths"][4]["tokens_per_step"] == pytest.approx(1 + 16 / 7)  # 16 of 28 were accepted in 7 proposals
    lines = [{"acceptance_by_depth": [0.5, 0.25], "steps": 30}, {"acceptance_by_depth": [0.9], "steps": 10}]
    told = ask("--acceptance", written("\n".join(map(json.dumps, lines))))
    assert told["acceptance"]["survival"] == pytest.approx([0.6, 0.25])
    assert ask("--acceptance", written({**lines[0], "choices": lines}))["acceptance"] == told["acceptance"]
    told = ask("--acceptance", written("\n".join(map(json.dumps, [*lines, {"acceptance_by_depth": [], "steps": 5}]))))
    assert "1 of 3 runs proposed nothing: not counted" in told["notes"]
    told = ask("--acceptance", written({"acceptance_by_depth": [0.5, 0.8, 0.4]}))
    assert told["acceptance"]["survival"] == [0.5, 0.5, 0.4] and any("held at its minimum" in note for note in told["notes"])


def test_a_run_of_generate_goes_in_as_it_comes_out(ask, tmp_path):
    command = [sys.executable, "-m", "truedraw", "generate", "--model", "toy", "--drafter", "ngram", "--seed", "1"]
    printed = subprocess.run(
        [*command, "--draft-length", "4", "--json", "--max-tokens", "60", "abab abab abab"],
        capture_output=True,
        timeout=60,
        check=True,
    ).stdout
    (tmp_path / "run.json").write_bytes(printed)
    stats = json.loads(printed)
    assert ask("--acceptance", tmp_path / "run.json")["acceptance"]["survival"] == stats["acceptance_by_depth"]


def test_a_profile_of_one_sequence_at_the_shortest_cache(ask, written):
    profile = {"machine": "x", "sizes": [
        {"size": 4, "seconds": 0.02, "cached": 100, "sequences": 1},
        {"size": 1, "seconds": 0.01, "cached": 100, "sequences": 1},
        {"size": 1, "seconds": 0.03, "cached": 1000, "sequences": 1},
        {"size": 8, "seconds": 0.03, "cached": 0, "sequences": 4},
    ]}  # fmt: skip
    told = ask("--acceptance", "0.8", "--pass-cost", written(profile))
    assert told["costs"]["pass"] == {"sizes": [1, 4], "seconds": [0.01, 0.02]}
    assert [point["cost"] for point in told["lengths"]] == pytest.approx([1, 4 / 3, 5 / 3, 2])
    assert any("of 4 measured passes the 2 of one sequence at 100 cached" in note for note in told["notes"])
    assert any("passes are measured to size 4: drafts longer than 3 are left out" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --acceptance"),
        (["--acceptance", "0.5", "--metrics", "http://localhost:1"], "one of --acceptance"),
        (["--acceptance", "1.5"], "acceptance is 1.5: allowed is a number in [0, 1]"),
        (["--acceptance", "-0.5"], "acceptance is -0.5"),
        (["--acceptance", "nan"], "acceptance is nan"),
        (["--acceptance", "0.8,1.3"], "acceptance at depth 2 is 1.3"),
        (["--acceptance", "0.8,"], "acceptance is '0.8,'"),
        (["--acceptance", ""], "acceptance is ''"),
        (["--acceptance", "80%"], "there is no such file"),
        (["--acceptance", "/"], "Is a directory"),
        (["--acceptance", "0.5", "--draft-cost", "-1"], "draft_cost is -1.0"),
        (["--acceptance", "0.5", "--draft-cost", "nan"], "draft_cost is nan"),
        (["--acceptance", "0.5", "--overhead", "inf"], "overhead is inf"),
        (["--acceptance", "0.5", "--pass-cost", "-1"], "pass_cost is -1.0"),
        (["--acceptance", "0.5", "--pass-cost", "missing.json"], "there is no such file"),
        (["--acceptance", "0.5", "--max-draft", "0"], "max_draft is 0: allowed is an integer in [1, 4096]"),
        (["--acceptance", "0.5", "--save", "plan.gif"], "save is 'plan.gif': allowed is a file name that ends in .png or .svg"),
        (["--acceptance", "0.5", "--save", "/missing/plan.png"], "no directory '/missing'"),
        (["--metrics", "localhost:8000"], "metrics is 'localhost:8000': allowed is an address"),
        (["--metrics", "ftp://localhost"], "metrics is 'ftp://localhost'"),
        (["--metrics", "http://[::1"], "allowed is an address"),
    ],
)
def test_bad_options_are_one_line(run, arguments, message):
    assert_refused(run(*arguments), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("[1, 2", "is no JSON: Expecting"),
        ('{"acceptance_by_depth": [1]}\n{', "is no JSON: line 2"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no trace"),
        ('"hello"', "is no trace"),
        ("[1, [2, 1]]", "entry 1 of"),
        ("[[2, 3]]", "accepted of step 0 is 3: allowed is at most 2"),
        ("[1.5]", "accepted of step 0 is 1.5"),
        ("[true]", "accepted of step 0 is True"),
        ("[null]", "accepted of step 0 is None"),
        ("[-1]", "accepted of step 0 is -1"),
        ("[100000]", "allowed is an integer in [0, 4096]"),
        ("[[0, 0]]", "no proposed token"),
        ('{"acceptance_by_depth": [1.5]}', "acceptance at depth 1 is 1.5"),
        ('{"acceptance_by_depth": 1}', "has no acceptance_by_depth"),
        ('{"acceptance_by_depth": []}', "without a proposed token"),
        ('{"acceptance_by_depth": [1]}\n{"acceptance_by_depth": [1]}', "steps is None"),
    ],
)
def test_bad_traces_are_one_line(run, written, content, message):
    assert_refused(run("--acceptance", written(content)), message)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "is no profile"),
        ([1], "entry 0 of sizes"),
        ([{"size": 1}], "entry 0 of sizes"),
        ([{"size": 2, "seconds": 1}, {"size": 4, "seconds": 1}], "allowed is size 1"),
        ([{"size": 1, "seconds": 1}], "at least one larger"),
        ([{"size": 1, "seconds": 0}, {"size": 2, "seconds": 1}], "seconds of size 1 is 0"),
        ([{"size": 1, "seconds": -1}, {"size": 2, "seconds": 1}], "seconds of size 1 is -1"),
        ([{"size": 1, "seconds": math.nan}, {"size": 2, "seconds": 1}], "seconds of size 1 is nan"),
        ([{"size": 1, "seconds": 2}, {"size": 2, "seconds": 1}], "seconds of size 2 is 1.0: allowed is at least the 2 of size 1"),
        ([{"size": 1, "seconds": 1}, {"size": 1, "seconds": 1}], "every size once"),
        ([{"size": "1", "seconds": 1}, {"size": 2, "seconds": 1}], "size is '1'"),
        ([{"size": 1, "seconds": 1, "sequences": 2}, {"size": 2, "seconds": 1, "sequences": 2}], "no entry with sequences 1"),
        ([{"size": 1, "seconds": 1, "cached": "x"}, {"size": 2, "seconds": 1}], "cached is 'x'"),
    ],
)
def test_bad_profiles_are_one_line(run, written, entries, message):
    assert_refused(run("--acceptance", "0.5", "--pass-cost", written({"sizes": entries})), message)


def assert_refused(result, message, status=2):
    code, out, err = result
    assert code == status and out == ""
    assert err.startswith("truedraw: ") and err.count("\n") == 1 and message in err, err


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize(("acceptance", "suffix"), [("0.8", "png"), ("0.1", "svg")])
def test_the_picture(ask, tmp_path, acceptance, suffix):
    file = tmp_path / f"plan.{suffix}"
    assert ask("--acceptance", acceptance, "--draft-cost", "0.2", "--save", file)["picture"] == str(file)
    if suffix == "png":
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    else:
        assert xml.etree.ElementTree.parse(file).getroot().tag.endswith("svg")


def test_a_picture_without_matplotlib_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_refused(run("--acceptance", "0.5", "--save", tmp_path / "plan.png"), str(MissingExtra("matplotlib", "audit")))


# ---------------------------------------------------------------- a running server

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b \\"x\\",c"} 1.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a}b \\"x\\",c"} 3000.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a}b \\"x\\",c"} 1e+03
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="a}b \\"x\\",c"} 1.756e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a}b \\"x\\",c"} 9000.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a}b \\"x\\",c"} 3000.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a}b \\"x\\",c"} 5100.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="a}b \\"x\\",c"} 1500.0 1756000000000
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b \\"x\\",c",position="0"} 2300.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b \\"x\\",c",position="1"} 1600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a}b \\"x\\",c",position="2"} 1200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a}b \\"x\\",c",position="0"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1",engine="1"} 480.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a}b \\"x\\",c",position="2"} 320.0
"""


@pytest.fixture(scope="module")
def server():
    """A server whose /metrics answers `server.body`; /old redirects there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status = {"/metrics": 200, "/old": 302}.get(self.path, 404)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/metrics")
            self.end_headers()
            if status == 200:
                self.wfile.write(self.server.body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/old"])
@pytest.mark.parametrize("text", [METRICS, METRICS.replace("_total", "")], ids=["with total", "without"])
def test_a_server_answers(server, ask, path, text):
    server.body = text.encode()
    told = ask("--metrics", server.url + path, "--draft-cost", "0.05", "--pass-cost", "0.03")
    assert told["acceptance"]["survival"] == [0.75, 0.52, 0.38]
    assert told["server"]["mean_length"] == 3 and told["server"]["tokens_per_step"] == 2.65
    assert told["server"]["speedup"] == pytest.approx(2.65 / 1.24)
    assert "speculation pays on http://127.0.0.1" in told["answer"] and "no other draft length considered" in told["answer"]
    assert "the server drafts 3 tokens at most: longer drafts are left out" in told["notes"]


def test_a_server_for_which_it_does_not_pay(server, run, tmp_path):
    server.body = METRICS.encode()
    status, out, _err = run("--metrics", server.url, "--draft-cost", "0.6", "--save", tmp_path / "plan.png")
    assert status == 0 and "speculation does not pay on" in out
    assert "3.00 draft tokens a step give 2.65 tokens for the price of 2.80 plain passes, 0.95x" in out
    assert "the best draft length is 1, 1.75 tokens for the price of 1.60 plain passes, 1.09x" in out


def test_drafts_of_several_lengths_make_a_lower_bound(server, ask):
    server.body = METRICS.replace("3000.0", "2000.0").replace("} 1e+03", "} 2000.0").encode()
    told = ask("--metrics", server.url)
    assert told["server"]["mean_length"] == 2.75
    assert any("lower bound" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("spec_decode", "other", "has no vllm:spec_decode_num_drafts: needed is a vLLM server"),
        ("_per_pos", "_else", "has no vllm:spec_decode_num_accepted_tokens_per_pos"),
        (METRICS, "", "has no vllm:spec_decode_num_drafts"),
        (METRICS, "<html>hello</html>", "has no vllm:spec_decode_num_drafts"),
        ('position="1"', 'position="7"', "counters that do not fit together"),
        ('position="1"', 'place="1"', "has no label position"),
        ("} 5100.0", "} 99999.0", "counters that do not fit together"),
        ("} 480.0", "} 2480.0", "counters that do not fit together"),
        ("} 480.0", "} many", "is no counter"),
        ("} 480.0", "} NaN", "is no counter"),
        ("} 480.0", "} -1", "is no counter"),
        ("} 480.0", "}", "is no counter"),
    ],
)
def test_bad_metrics_are_one_line_with_the_address(server, run, old, new, message):
    server.body = METRICS.replace(old, new).encode()
    result = run("--metrics", server.url)
    assert_refused(result, message, status=1)
    assert server.url in result[2]


def test_no_drafts_yet(server, run):
    server.body = re.sub(r"\} \S+$", "} 0.0", METRICS, flags=re.MULTILINE).encode()
    assert_refused(run("--metrics", server.url), "no drafts were made yet", status=1)


def test_servers_that_do_not_answer(server, run):
    assert_refused(run("--metrics", f"{server.url}/nothing"), "answers 404 Not Found", status=1)
    assert_refused(run("--metrics", "http://127.0.0.1:1"), "http://127.0.0.1:1 cannot be read", status=1)
    server.body = b"\xff\xfe"
    assert_refused(run("--metrics", server.url), "no text", status=1)


def test_a_server_that_is_silent_or_endless(run, server, monkeypatch):
    server.body = METRICS.encode()
    monkeypatch.setattr(plan_inputs, "_MAX_BYTES", 100)
    assert_refused(run("--metrics", server.url), "sends no end", status=1)
    monkeypatch.setattr(plan_inputs, "_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert_refused(run("--metrics", f"http://127.0.0.1:{silent.getsockname()[1]}"), "did not answer within 0.2 s", status=1)


def test_a_server_whose_passes_were_not_measured(server, run, written):
    server.body = METRICS.encode()
    profile = written({"sizes": [{"size": 1, "seconds": 1}, {"size": 3, "seconds": 1.1}]})
    assert_refused(run("--metrics", server.url, "--pass-cost", profile), "passes are measured to size 3")
