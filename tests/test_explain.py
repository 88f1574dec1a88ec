"""One position explained: worked examples, exact enumeration of the shipped rules, and the command as a person meets it."""

import io
import json
import sys
import xml.etree.ElementTree
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from truedraw.cli import explain_inputs, main
from truedraw.errors import MissingExtra, RowError
from truedraw.prove.drafts import chain, tree
from truedraw.prove.exact import AnnouncedRows, table_problem, target_rows
from truedraw.prove.explain import explain
from truedraw.prove.explore import explore
from truedraw.registry import Model, find_rule
from truedraw.runners.toy import ByteTokenizer, ToyRunner, hashed
from truedraw.sampling import race
from truedraw.types import probabilities
from truedraw.verify import coupled, family, multidraft

REFERENCE = ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
TRUNCATED = ([0.7, 0.3, 0, 0], [0.35, 0.15, 0.3, 0.2])
"""p is q without its last two tokens, renormalised."""

WEIGHTS = st.one_of(st.integers(0, 6), st.floats(0, 1), st.sampled_from([5e-324, 1e-310, 1e-200, 1e-17]))


@st.composite
def two_rows(draw):
    vocab = draw(st.integers(1, 7))
    pair = [np.array(draw(st.lists(WEIGHTS, min_size=vocab, max_size=vocab)), dtype=np.float64) for _ in range(2)]
    for weights in pair:
        if weights.sum() < 1e-100:
            weights[draw(st.integers(0, vocab - 1))] = 1.0
    return tuple(weights / weights.sum() for weights in pair)


EDGES = [  # p = q, disjoint, point masses, truncation
    ([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]),
    ([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]),
    ([0.2, 0.3, 0.5], [0, 1, 0]),
    ([0, 1, 0], [0.2, 0.3, 0.5]),
    ([1.0], [1.0]),
    TRUNCATED,
]


def with_edges(test):
    for edge in EDGES:
        test = example(tuple(np.array(row) for row in edge))(test)
    return test


def close(value):
    return pytest.approx(value, abs=1e-12)


# ---------------------------------------------------------------- worked examples


def test_the_reference_example():
    told = explain(*REFERENCE)
    assert told.alpha == close(0.7) and told.total_variation == close(0.3) and told.a_star == close(0.4)
    assert list(told.keep) == close([1, 1, 0.4]) and list(told.residual) == close([1, 0, 0])
    assert list(told.naive.law) == close([0.35, 0.39, 0.26]) and list(told.bias) == close([-0.15, 0.09, 0.06])
    assert told.naive.drift.total_variation == close(0.15) and told.why_unbiased is None
    assert {rule.name: rule.acceptance for rule in told.rules} == close(
        {
            "token": 0.7,
            "block": 0.7,
            "coupled": 1 / 5 + 3 / 13 + 1 / 5,
            "resample_from_target": 0.4,
            # token 2 first, and rejected, with .3: token 0 is left alone, and is next with .2/.5
            "multidraft, without replacement": 0.7 + 0.3 * 0.4,
            # token 2, and one of (.4, .6): p(2) + min(.5, .4) + min(.3, .6)
            "multidraft, greedy draft": 0.2 + 0.4 + 0.3,
            "biased_resample": 0.7,
            "lenience:0.5": 0.2 + 0.3 + 0.4,
            "typical:0.3,0.09": 1,
        }
    )
    # of all sets H: p(H) + 1 - q(H)**2, at H = {2, 1}
    assert told.two_draft_bound == close(0.5 + 1 - 0.8**2)
    assert list(told.rule("lenience:0.5").law) == close([0.3, 0.3, 0.4])


def test_the_naive_rule_is_exact_where_p_is_a_truncation_of_q():
    told = explain(*TRUNCATED)
    assert told.alpha == close(0.5) == told.a_star and list(told.naive.law) == close(TRUNCATED[0])
    assert told.why_unbiased == "multiple" and list(told.residual) == close(TRUNCATED[0])


def test_where_nothing_is_ever_rejected():
    told = explain([1 / 3, 2 / 3, 0], [1 / 3, 2 / 3, 0])
    assert told.residual is None and told.why_unbiased == "equal" and told.alpha == told.a_star == told.two_draft_bound == 1
    assert all(rule.acceptance == close(1) and list(rule.law) == close([1 / 3, 2 / 3, 0]) for rule in told.rules)


def test_where_all_is_rejected():
    told = explain([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5])
    assert told.alpha == told.a_star == told.two_draft_bound == 0 and told.total_variation == 1
    assert told.why_unbiased == "disjoint" and list(told.residual) == [0.5, 0.5, 0, 0]
    assert all(rule.acceptance == 0 and list(rule.law) == [0.5, 0.5, 0, 0] for rule in told.rules)


def test_a_draft_that_is_a_point_mass():
    told = explain([0.2, 0.3, 0.5], [0, 1, 0])
    assert told.a_star == 0 and list(told.residual) == close([2 / 7, 0, 5 / 7])
    kept = {rule.name: rule.acceptance for rule in told.rules if rule.exact}
    assert kept.pop("resample_from_target") == 0
    assert all(acceptance == close(0.3) for acceptance in kept.values())  # there is no second candidate
    assert list(told.naive.law) == close([0.14, 0.51, 0.35])


def test_rows_are_normalised():
    told = explain([0.4996, 0.4996], [0.25, 0.75])
    assert list(told.p) == [0.5, 0.5] and told.alpha == 1 - told.total_variation == 0.75


def test_the_tokens_shown_first():
    assert explain(*REFERENCE).top(3) == [0, 1, 2]
    assert explain([0.1, 0.2, 0.1, 0.6], [0.5, 0.2, 0.1, 0.2]).top(3) == [3, 0, 1]


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([0.5, 0.5], [0.5, 0.25, 0.25], "target row p has 2 tokens and the draft row q has 3"),
        ([1.5, -0.5], [0.5, 0.5], "target row p holds -0.5 at token 1"),
        ([0.5, 0.5], [np.nan, 1], "draft row q holds nan at token 0"),
        ([0.5, 0.5], [0, np.inf], "draft row q holds inf at token 1"),
        ([1e308, 1e308], [0.5, 0.5], "target row p sums to inf"),
        ([0.5, 0.4], [0.5, 0.5], "target row p sums to 0.9:"),
        ([], [], "target row p has shape (0,)"),
        ([[0.5, 0.5]], [0.5, 0.5], "target row p has shape (1, 2)"),
    ],
)
def test_rows_that_are_no_laws(p, q, message):
    with pytest.raises(RowError) as caught:
        explain(p, q)
    assert message in str(caught.value)


# ---------------------------------------------------------------- properties


@with_edges
@given(two_rows())
def test_exact_rules_give_p_and_lossy_ones_pay_for_what_they_accept(rows):
    told = explain(*rows)
    for rule in told.rules:
        assert rule.law.sum() == close(1) and rule.law.min() >= 0 and 0 <= rule.acceptance <= 1
        if rule.exact:
            assert np.abs(rule.law - told.p).max() <= 1e-12
        assert rule.exact or rule.drift.total_variation >= rule.acceptance - told.alpha - 1e-12
    assert told.alpha == close(1 - told.total_variation)
    acceptance = {rule.name: rule.acceptance for rule in told.rules}
    assert acceptance["token"] == close(told.alpha) == acceptance["block"]
    assert acceptance["resample_from_target"] == close(told.a_star)
    assert (1 - told.total_variation) / (1 + told.total_variation) - 1e-9 <= acceptance["coupled"] <= told.alpha + 1e-9
    assert acceptance["multidraft, without replacement"] >= told.alpha - 1e-12
    assert told.two_draft_bound >= told.alpha - 1e-12


@with_edges
@given(two_rows())
def test_lossy_rules_in_closed_form(rows):
    told = explain(*rows)
    p, q = told.p, told.q
    shared = np.minimum(1, np.divide(q, p, out=np.ones_like(p), where=p > 0)) if p.min() > 1e-300 else None
    lenient = told.rule("lenience:0.5")
    assert lenient.drift.total_variation == close(np.minimum(q, p / 0.5).sum() - told.alpha)
    assert list(told.naive.law) == close(list(np.minimum(p, q) + (1 - told.alpha) * p))
    if shared is not None:  # half the mean distance of min(1, q/p) from its mean
        assert told.naive.drift.total_variation == close((p * np.abs(shared - told.alpha)).sum() / 2)


@with_edges
@given(two_rows())
def test_the_least_ratio_is_the_acceptance_of_the_family(rows):
    told = explain(*rows)
    with np.errstate(over="ignore"):
        assert told.a_star == close(family.largest_acceptance(told.p, told.q, told.p))


@with_edges
@given(two_rows())
def test_two_candidates_without_replacement_against_the_plain_sum(rows):
    p, q = (np.asarray(row, dtype=np.float64) for row in rows)
    accepted = first = np.minimum(p, q).sum()
    left = np.maximum(p - q, 0)
    for x in np.flatnonzero(q > p):
        others = np.where(np.arange(len(q)) == x, 0, q)
        if others.any() and left.any():
            accepted += (q[x] - p[x]) * np.minimum(left / left.sum(), others / others.sum()).sum()
    assert multidraft.without_replacement_acceptance(p, q) == pytest.approx(min(1, accepted), abs=1e-9)
    assert first <= accepted + 1e-12


# ---------------------------------------------------------------- against the enumeration of the shipped rules

FRACTIONS = [
    ("1/2 3/10 1/5", "1/5 3/10 1/2"),
    ("7/10 3/10 0 0", "7/20 3/20 3/10 1/5"),
    ("1/2 1/4 1/4", "1/2 1/4 1/4"),
    ("1/2 1/2 0 0", "0 0 1/2 1/2"),
    ("1/5 3/10 1/2", "0 1 0"),
    ("0 1 0", "1/4 1/2 1/4"),
    ("1/8 1/8 1/4 1/4 1/4", "1/2 1/4 1/12 1/12 1/12"),
]
RULES = {
    "token": ("token", chain, 1),
    "block": ("block", chain, 1),
    "resample_from_target": ("resample_from_target", chain, 1),
    "multidraft, without replacement": ("multidraft", tree("without-replacement", 2, depth=1), 2),
    "multidraft, greedy draft": ("multidraft", tree("greedy", 2, depth=1), 2),
    "biased_resample": ("biased_resample", chain, 1),
    "lenience:0.5": ("lenience:0.5", chain, 1),
    "typical:0.3,0.09": ("typical:0.3,0.09", chain, 1),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("texts", FRACTIONS, ids=range(len(FRACTIONS)))
def test_law_and_acceptance_are_those_of_the_shipped_rule(name, texts):
    """One step through all of its randomness: drafting, acceptance and replacement."""
    p, q = ([Fraction(part) for part in text.split()] for text in texts)
    problem = table_problem("rows", [p], [q])
    shipped, draft, num_drafts = RULES[name]
    rule = find_rule(shipped, allow_lossy=True)

    def step(noise):
        proposal = draft(problem, (), num_drafts, noise)
        rows = target_rows(problem, (), proposal)
        verdict = rule(proposal, AnnouncedRows(len(rows), rows.__getitem__), noise)
        return (proposal.tokens[verdict.path[0]] if verdict.path else verdict.next_token, bool(verdict.path))

    law, accepted = [0.0] * len(p), 0.0
    for leaf in explore(step, 0):
        token, kept = leaf.outcome
        law[token] += float(leaf.mass)
        accepted += float(leaf.mass) * kept
    told = explain([float(mass) for mass in p], [float(mass) for mass in q]).rule(name)
    assert list(told.law) == close(law) and told.acceptance == close(accepted)


def test_every_rule_told_is_enumerated_or_coupled():
    assert {rule.name for rule in explain(*REFERENCE).rules} == {*RULES, "coupled"}


class Exponentials:
    """Race noise from a generator, the same at every look."""

    def __init__(self, generator, vocab, block):
        self._tokens, self._blocks = generator.exponential(size=vocab), generator.exponential(size=-(-vocab // block))

    def tokens(self, first, count):
        return self._tokens[first : first + count]

    def blocks(self, count):
        return self._blocks[:count]


def test_races_in_two_levels_agree_as_often_as_said():
    """20000 races with the shipped draw, blocks of 2 of 6 tokens: z within 5, a false alarm once in 10**6; the acceptance in one
    level is 11 standard deviations away."""
    p, q = np.array([0.3, 0.2, 0.1, 0.3, 0.05, 0.05]), np.array([0.05, 0.05, 0.3, 0.1, 0.2, 0.3])
    told, num_races, generator = coupled.race_acceptance(p, q, block=2), 20_000, np.random.default_rng(7)
    noises = (Exponentials(generator, 6, 2) for _ in range(num_races))
    same = sum(race(p, noise, block=2) == race(q, noise, block=2) for noise in noises)
    deviation = (told * (1 - told) / num_races) ** 0.5
    assert abs(same / num_races - told) < 5 * deviation < abs(coupled.acceptance(p, q) - told) / 2
    assert coupled.race_acceptance(p, q) == close(coupled.acceptance(p, q))


def test_a_vocabulary_of_a_real_model_takes_no_time():
    rows = [probabilities(row / row.sum(), "row") for row in np.random.default_rng(0).exponential(size=(2, 49_152)) ** 8]
    told = explain(*rows)
    assert told.rule("multidraft, without replacement").acceptance > told.alpha
    assert told.rule("coupled").acceptance < told.alpha and len(told.top(10)) == 10


# ---------------------------------------------------------------- the command


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*arguments): status, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["truedraw", "explain", *map(str, arguments)])
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
        return json.loads(out, parse_constant=pytest.fail)

    return call


@pytest.fixture
def written(tmp_path):
    """written(content, suffix): the path of a file with it."""

    def write(content, suffix="txt"):
        path = tmp_path / f"row.{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def assert_refused(result, message, status=2):
    code, out, err = result
    assert code == status and out == ""
    assert err.startswith("truedraw: ") and err.count("\n") == 1 and message in err, err


def test_it_tells_tables_and_the_answer(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run("--p", "0.5,0.3,0.2", "--q", "0.2,0.3,0.5")
    assert status == 0 and err == "" and max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "0.5000", "0.2000", "1", "1", "0.3500", "-0.1500", "0.3000", "0.2000"] in lines
    assert ["2", "0.2000", "0.5000", "0.4000", "0", "0.2600", "+0.0600", "0.4000", "0.5000"] in lines
    assert ["token", "1", "0.7000", "0", "0", "exact"] in lines
    assert ["biased_resample", "1", "0.7000", "0.1500", "0.0457", "lossy"] in lines
    assert " ".join(out.split()).endswith(
        "is biased here, by a TV of 0.1500: token 1 comes at 0.3900 instead of 0.3000, token 0 comes at 0.3500 instead of 0.5000."
    )


def test_a_narrow_terminal_breaks_no_number(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = run("--p", "1/2,1/2", "--q", "1/3,2/3")[1]
    assert "0.3333" in out and "multidraft, without replacement" in out and "…" not in out


@pytest.mark.parametrize(
    ("p", "q", "sentence"),
    [
        ("1/3,2/3", "1/3,2/3", "is exact here: p = q, so nothing is ever rejected."),
        ("1,0", "0,1", "is exact here: p and q share no token, so every draft is rejected and the residual is p."),
        ("0.7,0.3,0,0", "0.35,0.15,0.3,0.2", "though p and q differ: q = 0.5000 p wherever p > 0, so the residual is p."),
    ],
)
def test_where_the_naive_rule_is_exact_it_says_why(run, p, q, sentence):
    status, out, _err = run("--p", p, "--q", q)
    assert status == 0 and " ".join(out.split()).endswith(sentence) and "lossy\n" not in out
    assert ("no residual is needed" in " ".join(out.split())) == ("p = q" in sentence)


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        ("[0.5, 0.25, 0.25]", "json"),
        ("1/2\n1/4\n\n1/4\n", "txt"),
        ("0.5, 0.25, 0.25", "csv"),
        ("0.5 .25 25e-2", "txt"),
        (saved(np.array([0.5, 0.25, 0.25], dtype=np.float32)), "npy"),
    ],
)
def test_rows_in_files(ask, written, content, suffix):
    told = ask("--p", written(content, suffix), "--q", "1/4,1/4,1/2")
    assert [token["p"] for token in told["tokens"]] == [0.5, 0.25, 0.25] and told["alpha"] == 0.75
    assert ask("--q", written(content, suffix), "--p", "1/4,1/4,1/2")["tokens"][0]["q"] == 0.5


def test_the_object(ask):
    told = ask("--p", "0.5,0.3,0.2", "--q", "0.2,0,0.8", "--top", "2")
    assert told["vocab"] == 3 and [token["id"] for token in told["tokens"]] == [2, 0]
    assert told["others"] == {"tokens": 1, "p": close(0.3), "q": 0}
    assert told["a_star"] == 0 and told["total_variation"] == close(0.6)
    laws = {rule["name"]: rule["law"] for rule in told["rules"]}
    assert laws["token"] == close([0.2, 0.5]) and laws["biased_resample"] == close([0.2 + 0.6 * 0.2, 0.2 + 0.6 * 0.5])
    assert not told["naive"]["unbiased"] and told["picture"] is None and told["notes"] == []
    everything = ask("--p", "0.5,0.3,0.2", "--q", "0.2,0,0.8")
    assert everything["tokens"][1]["kept"] is None and everything["others"]["tokens"] == 0
    assert ask("--p", "1", "--q", "1")["tokens"][0]["residual"] is None


def test_the_others_are_summed(run):
    out = run("--p", "0.5,0.2,0.2,0.1", "--q", "0.4,0.1,0.1,0.4", "--top", "2")[1]
    assert ["2", "others", "0.4000", "0.2000", "1", "0.6667"] in [line.split()[:6] for line in out.splitlines()]


def test_rows_that_do_not_quite_sum_to_one_are_told(ask):
    told = ask("--p", "0.333,0.333,0.3336", "--q", "1/3,1/3,1/3")
    assert told["notes"] == ["p sums to 0.9996 and was divided by it"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "explain needs both --p and --q"),
        (["--p", "0.5,0.5"], "explain needs both --p and --q"),
        (["--p", "1", "--q", "1", "--prompt", "x"], "or --prompt alone"),
        (["--q", "1", "--prompt", "x"], "or --prompt alone"),
        (["--p", "0.5,0.5", "--q", "0.5,0.25,0.25"], "target row p has 2 tokens and the draft row q has 3"),
        (["--p", "-0.5,1.5", "--q", "0.5,0.5"], "target row p holds -0.5 at token 0"),
        (["--p", "0.5,0.5", "--q", "1.5,-0.5"], "draft row q holds -0.5 at token 1"),
        (["--p", "0.5,0.6", "--q", "0.5,0.5"], "target row p sums to 1.1"),
        (["--p", "0.5,0.5", "--q", "nan,1"], "draft row q holds nan at token 0"),
        (["--p", "0.5,inf", "--q", "0.5,0.5"], "target row p holds inf at token 1"),
        (["--p", "1e308,1e308", "--q", "0.5,0.5"], "target row p sums to inf"),
        (["--p", "1/0,1", "--q", "0.5,0.5"], "p is '1/0,1': allowed is numbers as in 0.5,0.3,0.2"),
        (["--p", "0.5,0.5,", "--q", "0.5,0.5"], "p is '0.5,0.5,'"),
        (["--p", "", "--q", "1"], "p is ''"),
        (["--p", "1", "--q", "missing.json"], "q is 'missing.json'"),
        (["--p", "1", "--q", "missing.npy"], "there is no such file"),
        (["--p", "1", "--q", "/"], "Is a directory"),
        (["--p", "1", "--q", "1", "--top", "0"], "top is 0: allowed is an integer >= 1"),
        (["--p", "1", "--q", "1", "--temperature", "0.5"], "--temperature goes with --prompt"),
        (["--p", "1", "--q", "1", "--draft-model", "toy"], "--draft-model goes with --prompt"),
        (["--p", "1", "--q", "1", "--save", "row.gif"], "save is 'row.gif': allowed is a file name that ends in .png or .svg"),
        (["--p", "1", "--q", "1", "--save", "/missing/row.png"], "no directory '/missing'"),
        (["--prompt", "", "--model", "toy"], "the prompt is empty"),
        (["--prompt", "x", "--model", "toy", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "x", "--model", "missing.gguf"], "missing.gguf"),
        (["--prompt", "abc", "--model", "toy", "--draft-model", "toy", "--context", "2"], "3 tokens and the target holds 2"),
    ],
)
def test_bad_options_are_one_line(run, arguments, message):
    assert_refused(run(*arguments), message)


@pytest.mark.parametrize(
    ("content", "suffix", "message"),
    [
        ("", "txt", "is empty"),
        ("0.5 half", "txt", "has 'half' for token 1: a number is needed"),
        ("1/0", "txt", "has '1/0' for token 0"),
        (b"\xff", "txt", "is not UTF-8: byte 0xff at offset 0"),
        ("[0.5, 0.5", "json", "is no JSON: Expecting"),
        ("[" * 100_000, "json", "is no JSON"),
        ('{"p": [1]}', "json", "holds no list"),
        ("[[0.5, 0.5]]", "json", "has [0.5, 0.5] for token 0: a number is needed"),
        ('[0.5, "0.5"]', "json", 'has "0.5" for token 1'),
        ("[1, true]", "json", "has true for token 1"),
        ("[NaN, 1]", "json", "target row p holds nan at token 0"),
        ("[1" + "0" * 400 + "]", "json", "an integer that no float can hold"),
        ("[]", "json", "target row p has shape (0,)"),
        (b"no array", "npy", "is no NumPy array"),
        (b"", "npy", "is no NumPy array"),
        (saved(np.array([None])), "npy", "is no NumPy array"),
        (saved(np.array(["a"])), "npy", "holds <U1"),
        (saved(np.array([[1.0]])), "npy", "target row p has shape (1, 1)"),
        (saved(np.array([1.0, 2.0])), "npy", "target row p sums to 3"),
    ],
)
def test_bad_files_are_one_line(run, written, content, suffix, message):
    assert_refused(run("--p", written(content, suffix), "--q", "1"), message)


# ---------------------------------------------------------------- two models


def test_a_model_that_drafts_for_itself(run, ask):
    options = ["--prompt", "the cat sat on the ", "--model", "toy", "--draft-model", "toy"]
    told = ask(*options, "--top", "3")
    assert told["alpha"] == 1 and told["naive"]["unbiased"] == "equal" and told["vocab"] == 257
    assert told["source"] == "Rows of toy (p) and toy (q) behind 19 prompt tokens."
    assert told["notes"] == ["toy has no chat template: the prompt is continued as it stands"]
    assert {token["name"] for token in told["tokens"]} == {'"c"', '"d"', '"l"'}
    assert ask(*options, "--raw")["notes"] == []
    names = [line.split()[0] for line in run(*options, "--top", "257")[1].splitlines() if line]
    assert {'"\\x00"', '"\\n"', '"a"', '"\\xe2"', "<end>"} <= set(names)
    greedy = ask(*options, "--temperature", "0", "--top", "1")["tokens"][0]
    assert greedy["p"] == greedy["q"] == greedy["kept"] == 1


@pytest.fixture
def other_draft(monkeypatch):
    """Named other: a draft model of a vocabulary of `other_draft.vocab`."""
    load = explain_inputs.load_model

    class Bytes(ByteTokenizer):
        pass

    def load_model(name, options, on_progress):
        if name != "other":
            return load(name, options, on_progress)
        tokenizer = Bytes()
        tokenizer.vocab_size = load_model.vocab
        return Model(name, ToyRunner(hashed(load_model.vocab), load_model.vocab, max_length=40), tokenizer)

    load_model.vocab = 257
    monkeypatch.setattr(explain_inputs, "load_model", load_model)
    return load_model


def test_a_draft_model_of_another_size(ask, run, other_draft):
    options = ["--model", "toy", "--draft-model", "other", "--top-k", "5", "--temperature", "0.7", "--prompt"]
    told = ask(*options, "the cat", "--top", "257")
    assert sum(token["p"] > 0 for token in told["tokens"]) == sum(token["q"] > 0 for token in told["tokens"]) == 5
    other_draft.vocab = 260  # padding
    assert sum(token["q"] > 0 for token in ask(*options, "the cat", "--top", "257")["tokens"]) <= 5
    assert_refused(run(*options, "x" * 41), "the prompt has 41 tokens and the draft model holds 40")
    other_draft.vocab = 256  # without the target's end of text, which so is never drafted
    assert ask(*options[:4], "--prompt", "the cat", "--top", "257")["tokens"][256]["q"] == 0
    other_draft.vocab = 200
    assert_refused(run(*options, "the cat"), "must share the target's vocabulary")


@pytest.mark.model
def test_a_real_step(ask, run, tmp_path):
    from truedraw.runners import llamacpp
    from truedraw.runners.gguf import locate

    locate("smollm2:q4_0", llamacpp.quantise, lambda message: None)  # converted once, with a notice
    options = ["--prompt", "Name a river in England.", "--top-p", "0.95", "--save", tmp_path / "step.png"]
    told = ask(*options)
    assert told["vocab"] > 40_000 and len(told["tokens"]) == 10 and 0.5 < told["alpha"] < 1
    assert '"The"' in [token["name"] for token in told["tokens"]] and (tmp_path / "step.png").stat().st_size > 10_000
    accepted = {rule["name"]: rule["acceptance"] for rule in told["rules"]}
    assert accepted["coupled"] < accepted["token"] < accepted["multidraft, without replacement"] < 1
    status, out, _err = run(*options[:2], "--raw")
    assert status == 0 and max(map(len, out.splitlines())) <= 80


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize(
    ("p", "q", "suffix"),
    [
        ("0.5,0.3,0.2", "0.2,0.3,0.5", "png"),
        ("1/2,1/2,0,0", "0,0,1/2,1/2", "svg"),
        ("1", "1", "png"),
        (",".join(["1/20"] * 20), ",".join(["1/10", "0"] * 10), "svg"),
    ],
)
def test_the_picture(ask, tmp_path, p, q, suffix):
    file = tmp_path / f"row.{suffix}"
    assert ask("--p", p, "--q", q, "--save", file)["picture"] == str(file)
    if suffix == "png":
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    else:
        assert xml.etree.ElementTree.parse(file).getroot().tag.endswith("svg")


def test_names_that_the_font_lacks_are_escaped_in_the_picture(tmp_path):
    from truedraw.cli.explain_picture import _printable

    assert _printable('"中 🙂 a"') == '"\\u4e2d \\U0001f...' and _printable('"$a$"') == '"$a$"'


def test_a_picture_without_matplotlib_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--p", "1", "--q", "1", "--save", tmp_path / "row.png")
    assert_refused(result, str(MissingExtra("matplotlib", "audit")))
