"""The audit of one's own pair: calm where the engine is right, loud where it is not.

Null of every run: each token is drawn from its row; an audit at alpha accuses it with probability alpha at most (Ville). Over 50
audits at alpha = 0.01 the number of accusations is below a binomial one; more than 5 come with a probability of 1.1e-5.
Power: a fault of the size asked for whose direction is looked at is found at the announced size with probability 0.95; fewer than
15 of 20 then come about once in three thousand times. Two of the faults are only partly along a direction (verified by
argmax, rows one too far): 15 and 16 of 20 at the seeds used. Seeds are fixed.
"""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from truedraw.audit.evidence import DIRECTIONS, NUM_BETS, Evidence
from truedraw.audit.model import CONTROL, EXACT, LAW, ModelAudit, _Audit, audit_model
from truedraw.audit.planted_model import in_a_share
from truedraw.audit.power import LAMBDAS, confidence_bound, log_goal, smallest_shift, tokens_needed
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.errors import InvalidParameter, PromptError, RunnerError
from truedraw.policy import FixedLength
from truedraw.prove import goodness
from truedraw.prove.planted_rules import _token_rule
from truedraw.registry import Model, find_rule
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed
from truedraw.types import SamplingParams, Verdict

VOCAB = 12
PROMPTS = ("abc", "cab", "bead", "face")
PARAMS = SamplingParams(ignore_eos=True)
GOAL = log_goal(NUM_BETS, 0.01)


def cached(next_logits):
    known = {}

    def look(context):
        key = (len(context), context[-3:])
        if key not in known:
            known[key] = next_logits(context)
        return known[key]

    return look


TARGET = cached(hashed(VOCAB, seed=3, order=2, sharpness=1.2))
DRAFT = cached(hashed(VOCAB, seed=3, order=2, sharpness=1.2, blend=0.7))


def pair(rule="token", drafter="model", slots=4, length=3):
    """A target of twelve letters and a draft model that resembles it."""
    tokenizer = LetterTokenizer(VOCAB)
    target = ToyRunner(TARGET, VOCAB, num_slots=slots, max_length=96)
    made = {
        "model": lambda: ModelDrafter(ToyRunner(DRAFT, VOCAB, num_slots=slots, max_length=96), VOCAB),
        "same": lambda: ModelDrafter(ToyRunner(TARGET, VOCAB, num_slots=slots, max_length=96), VOCAB),
        "tree": lambda: ModelDrafter(ToyRunner(DRAFT, VOCAB, num_slots=slots, max_length=96), VOCAB, width=2),
        "ngram": NGramDrafter,
        "suffix": SuffixDrafter,
        "none": lambda: None,
    }[drafter]()
    return Engine(
        Model("letters", target, tokenizer), made, FixedLength(length if drafter != "none" else 0), rule=rule, allow_lossy=True
    )


def asked(**changed):
    return ModelAudit(**{"params": PARAMS, "max_tokens": 60, "max_tokens_total": 300, **changed})


def modes(report):
    return {mode.mode: mode for mode in (*report.control, *report.modes)}


# ---------------------------------------------------------------- power and bounds


def test_bets_are_those_of_goodness(monkeypatch):
    """The same factors as prove/goodness.py makes, on the support of p."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(goodness, "LAMBDAS", LAMBDAS)
    evidence, theirs = Evidence(0.01), [goodness.EProcess(2 * len(LAMBDAS)) for _ in DIRECTIONS]
    for _ in range(50):
        p, q = rng.dirichlet(np.full(6, 0.5), 2)
        drafted, token = bool(rng.random() < 0.7), int(rng.choice(6, p=p))
        evidence.add(p, q if drafted else None, token)
        for direction, process in zip(DIRECTIONS, theirs, strict=True):
            if direction.drafted == drafted:
                g = direction.values(p, q if drafted else p)
                if np.ptp(g) > 1e-12:
                    process.add(goodness.bets(p, g, [token]))
    for told, process in zip(evidence._log_wealth, theirs, strict=True):
        assert told.reshape(-1) == pytest.approx(process.log_wealth, abs=1e-9)
    mean = np.mean([process.e_value for process in theirs])
    assert math.exp(evidence.log_e) == pytest.approx(mean)


def test_a_forbidden_token_decides_at_once():
    evidence = Evidence(1e-12)
    evidence.add(np.array([0.5, 0.5, 0.0]), None, 2)
    assert evidence.rejects and evidence.violations == 1 and math.isinf(evidence.e_value) and evidence.fired() == ()
    evidence.add(np.array([0.5, 0.5, 0.0]), None, 1)
    assert evidence.rejects and math.isinf(evidence.path[-1][1])


def test_rows_with_one_token_say_nothing():
    evidence = Evidence(0.01)
    evidence.add(np.array([1.0, 0.0]), np.array([0.5, 0.5]), 0)
    assert abs(evidence.log_e) < 1e-12 and evidence.informative == 0 and evidence.directions() == ()


def test_the_path_is_thinned_and_ends_where_the_run_does():
    evidence, rng = Evidence(0.01), np.random.default_rng(1)
    for _ in range(3001):
        evidence.add(np.array([0.7, 0.3]), None, int(rng.random() > 0.7))
    counts = [count for count, _ in evidence.path]
    assert counts[0] == 0 and counts[-1] == 3001 and counts == sorted(set(counts)) and 150 < len(counts) < 450


def test_announced_sizes_fit_together():
    for shift in (0.02, 0.05, 0.1):
        n = tokens_needed(shift, GOAL)
        assert smallest_shift(n, GOAL) <= shift * 1.001 < smallest_shift(n - 5, GOAL) * 1.01
        assert 0.9 * 10 / shift**2 < n < 1.2 * 10 / shift**2  # (z + sqrt(z^2 + 2 goal))^2 / 4 = 9.7, were the grid of bets finer
    assert smallest_shift(1000, GOAL, 0.01) < smallest_shift(1000, GOAL) < smallest_shift(1000, log_goal(NUM_BETS, 1e-6))
    assert smallest_shift(3, GOAL) == 1.0 == smallest_shift(0, GOAL)


@pytest.mark.parametrize("shift", [0.0, -1.0, 0.5, float("nan")])
def test_sizes_that_no_run_could_have(shift):
    with pytest.raises(InvalidParameter, match=r"detect is .*: allowed is a total variation from 0.001 to 0.4"):
        tokens_needed(shift, GOAL)


def test_power_is_what_is_announced():
    """A binary event of probability 1/2 with a shift of 0.1: found in at least 85 of 100 runs (0.95: fewer come once in 1e4)."""
    rng, shift = np.random.default_rng(2), 0.1
    n = tokens_needed(shift, log_goal(2 * len(LAMBDAS), 0.01))
    hits = rng.random((100, n)) < 0.5 + shift
    factors = np.where(hits[:, None, :], 1 + LAMBDAS[:, None] / 2, 1 - LAMBDAS[:, None] / 2)
    wealth = np.exp(np.cumsum(np.log(factors), axis=2)).sum(axis=1) / (2 * len(LAMBDAS))
    found = (wealth.max(axis=1) >= 100).sum()
    assert found >= 85
    half = int((wealth[:, : n // 4].max(axis=1) >= 100).sum())
    assert half < 50, "a quarter of the tokens must not do"


def test_confidence_bounds_cover_at_every_moment():
    """200 runs with laws that change: |mean shift so far| above its bound at any of 20 moments in at most 2 of 100 runs by
    theory (alpha 0.02); more than 14 of 200 would come with a probability below 1e-4."""
    rng, missed = np.random.default_rng(3), 0
    for _ in range(200):
        a, shift = rng.uniform(0.05, 0.6, 400), rng.uniform(-0.05, 0.3, 400)
        d = (rng.random(400) < np.clip(a + shift, 0, 1)) - a
        true = np.clip(a + shift, 0, 1) - a
        missed += any(
            abs(true[:n].mean()) > confidence_bound(float(d[:n].sum()), float((d[:n] ** 2).sum()), n, 0.02)
            for n in range(20, 401, 20)
        )
    assert missed <= 14
    assert confidence_bound(0.0, 250.0, 1000, 0.005) < 0.08 and confidence_bound(0.0, 0.0, 0, 0.01) == 1.0


# ---------------------------------------------------------------- engines that are right


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("token", "model"), ("block", "model"), ("coupled", "model"), ("resample_from_target", "model"), ("traversal", "tree"),
        ("multidraft", "tree"), ("coupled", "tree"), ("coupled", "suffix"), ("block", "suffix"), ("token", "ngram"),
        ("auto", "none"),
    ],
)  # fmt: skip
def test_shipped_rules_pass(rule, drafter):
    with pair(rule, drafter) as engine:
        report = audit_model(engine, PROMPTS, asked(max_tokens_total=700, detect=0.2, seed=5))
    found = modes(report)
    assert found[LAW].verdict == "no evidence" == found[EXACT].verdict, found
    assert found[CONTROL].verdict == "fault found" and report.status == 0, found[CONTROL]
    assert found[LAW].samples >= 700 and 0.1 < found[LAW].detectable < 0.13
    assert all(each.bound >= abs(each.shift) and each.e_value < 100 for each in found[LAW].directions)


def accusations(seeds, **changed):
    accused = 0
    for seed in seeds:
        with pair("token" if seed % 2 else "block") as engine:
            audit = asked(detect=0.2, alpha=0.01, seed=seed, **changed)
            accused += audit_model(engine, PROMPTS, audit).status == 1
    return accused


def test_few_false_alarms():
    """Ten audits: more than 2 accusations come with a probability below 3e-4."""
    assert accusations(range(10), max_tokens_total=150) <= 2


@pytest.mark.long
def test_calibration_over_fifty_seeds():
    assert accusations(range(50), max_tokens_total=600) <= 5


def test_the_same_seed_gives_the_same_audit():
    def audit():
        with pair() as engine:
            return audit_model(engine, PROMPTS, asked(seed=9)).modes

    assert audit() == audit()


# ---------------------------------------------------------------- engines that are not


def hot(right):
    """Drafts are judged rightly, and the token behind them is drawn at another temperature."""

    def verify(proposal, rows, noise):
        verdict = right(proposal, rows, noise)
        if verdict.origin == "residual":
            return verdict
        p = rows[len(verdict.path)] ** 2
        return Verdict(
            verdict.path, int(np.searchsorted(np.cumsum(p) / p.sum(), np.random.default_rng(noise.start).random())), "bonus"
        )

    return verify


FAULTS = {
    "naive resample": lambda right: find_rule("biased_resample", allow_lossy=True),
    "ratio upside down": lambda right: _token_rule(accepts=lambda u, p, q, row, x: u * p < q),
    "u hard-wired to 0": lambda right: _token_rule(accepts=lambda u, p, q, row, x: p > 0),
    "verified by argmax": lambda right: _token_rule(accepts=lambda u, p, q, row, x: x == int(row.argmax())),
    "first draft never checked": lambda right: _token_rule(unchecked=0),
    "target rows one too far": lambda right: _token_rule(row_shift=1),
    "ratio over max p": lambda right: _token_rule(accepts=lambda u, p, q, row, x: u * row.max() < p),
}


def law_shift(name, num_steps=4000):
    """Mean total variation of a token's law under a fault at full strength: of a step's first token, from the frequencies of many
    draws at some positions, times the share of the tokens that such a fault acts on in a run of the right rule."""
    from truedraw.randomness import StepNoise
    from truedraw.types import DenseRows, Proposal

    rng = np.random.default_rng(11)
    rule, off = FAULTS[name](None), []
    for place in range(6):
        rows = [softmax(TARGET((1, place, i))) for i in range(VOCAB)]
        q = softmax(DRAFT((1, place, 0)))
        counts = np.zeros(VOCAB)
        for i in range(num_steps):
            drafts = tuple(int(x) for x in rng.choice(VOCAB, 2, p=q))
            verdict = rule(Proposal(drafts, DenseRows((q, q))), [rows[0], rows[drafts[0]], rows[1]], StepNoise(i, 0, place))
            counts[drafts[0] if verdict.path else verdict.next_token] += 1
        off.append(np.abs(counts / num_steps - rows[0]).sum() / 2)
    with pair("token") as engine:
        work = _Audit(engine, PROMPTS, asked(), lambda what, count, log_e: None)
        run = work._draw("audit", lambda right: right, work._watch(), 300)
    evidence = run.watch.evidence
    acts_on = run.steps if name == "first draft never checked" else evidence.drafted
    return float(np.mean(off)) * acts_on / evidence.count


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def found_in(name, detect, full, runs):
    """In how many of the runs a fault that shifts by `detect` is found within the tokens announced for that."""
    found = 0
    for seed in range(runs):
        with pair("token") as engine:
            audit = asked(detect=detect, max_tokens_total=None, seed=100 + seed)
            share = min(1.0, detect / full)

            def wrap(rule, share=share, seed=seed):
                return in_a_share(rule, FAULTS[name](rule), share, seed)

            found += law_of(engine, audit, wrap).verdict == "fault found"
    return found


def law_of(engine, audit, wrap):
    """The main verdict on an engine with a rule exchanged, without the control."""
    work = _Audit(engine, PROMPTS, audit, lambda what, count, log_e: None)
    return work._law(work._draw("audit", wrap, work._watch(), audit.limit), "")


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_and_named(name):
    with pair("token") as engine:
        law = law_of(engine, asked(max_tokens_total=4000), FAULTS[name])
    assert law.verdict == "fault found" and law.samples < 4000
    assert law.fired[0].e_value >= 100 and law.fired[0].usually and law.example.text


def test_the_naive_resample_is_called_by_its_name():
    with pair("token") as engine:
        law = law_of(engine, asked(max_tokens_total=4000), FAULTS["naive resample"])
    assert any("the target's whole row" in fired.usually for fired in law.fired)


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_at_the_announced_size(name):
    full = law_shift(name)
    detect = min(0.08, full)
    found = found_in(name, detect, full, 20)
    print(f"\n{name}: TV {full:.3f} at full strength, asked for {detect:.3f}: found in {found} of 20")
    assert found >= 15


def test_a_lossy_rule_is_a_fault_and_says_why():
    with pair("lenience:0.3") as engine:
        report = audit_model(engine, PROMPTS, asked(max_tokens_total=3000, detect=0.1))
    law = modes(report)[LAW]
    assert report.status == 1 and law.verdict == "fault found" and any("on purpose" in note for note in law.notes)


# ---------------------------------------------------------------- what must hold exactly


def test_the_target_as_its_own_draft_is_never_refused():
    with pair("block", "same") as engine:
        exact = modes(audit_model(engine, PROMPTS, asked()))[EXACT]
    assert exact.verdict == "no evidence" and any(
        "target's own rows: 0 of" in note and "0 of 0" not in note for note in exact.notes
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_rule_that_refuses_the_target_s_own_drafts_is_told(rule):
    def refuse(right):
        def verify(proposal, rows, noise):
            verdict = right(proposal, rows, noise)
            if len(verdict.path) < 2:
                return verdict
            return Verdict(verdict.path[:1], proposal.tokens[1], "residual")  # the right law, needlessly short

        return verify

    with pair(rule, "same") as engine:
        work = _Audit(engine, PROMPTS, asked(), lambda what, count, log_e: None)
        exact = work._exact(work._draw("audit", refuse, work._watch(), 300), "")
    assert exact.verdict == "fault found" and "refused drafts" in exact.example.text


def test_a_forbidden_token_is_told():
    def forbidden(right):
        def verify(proposal, rows, noise):
            verdict = right(proposal, rows, noise)
            p = rows[len(verdict.path)]
            return Verdict(verdict.path, int(p.argmin()), verdict.origin) if p.min() == 0 else verdict

        return verify

    with pair() as engine:
        work = _Audit(engine, PROMPTS, asked(params=SamplingParams(top_k=3, ignore_eos=True)), lambda what, count, log_e: None)
        run = work._draw("audit", forbidden, work._watch(), 300)
        law, exact = work._law(run, "truedraw audit model"), work._exact(run, "")
    assert law.verdict == exact.verdict == "fault found" and math.isinf(law.e_value) and law.p_value == 0
    assert "its row gives it no probability" in law.example.text and law.example.command == "truedraw audit model"


# ---------------------------------------------------------------- status 3, and what is refused


def test_greedy_decoding_has_no_law_to_test():
    with pair("coupled") as engine:
        report = audit_model(engine, PROMPTS, asked(params=SamplingParams(temperature=0, ignore_eos=True)))
    found = modes(report)
    assert found[LAW].verdict == "not testable" and "temperature 0" in found[LAW].reason
    assert found[EXACT].verdict == "no evidence" and found[CONTROL].verdict == "fault found" and report.status == 0


def test_a_control_that_is_not_seen_gives_status_3():
    with pair() as engine:
        report = audit_model(engine, PROMPTS, asked(max_tokens_total=20))
    assert report.status == 3 and not report.control_seen and "20 were allowed" in " ".join(modes(report)[LAW].notes)
    assert "where there was a draft: a fault that acts only there would hardly be seen" in modes(report)[LAW].notes[0]


def test_no_fault_that_could_be_planted_is_told():
    with pair("auto", "none") as engine:
        report = audit_model(engine, PROMPTS, asked(params=SamplingParams(temperature=0, ignore_eos=True)))
    assert report.status == 3 and modes(report)[CONTROL].verdict == "not testable"


def test_an_engine_that_fails_gives_a_partial_report(monkeypatch):
    with pair() as engine:
        passes, forward = [], engine.model.runner.forward

        def fail(chunks):
            passes.append(1)
            if len(passes) > 400:
                raise RunnerError("the device is gone")
            return forward(chunks)

        monkeypatch.setattr(engine.model.runner, "forward", fail)
        report = audit_model(engine, PROMPTS, asked(max_tokens_total=4000, detect=0.2))
    law = modes(report)[LAW]
    assert report.status == 3 and law.verdict == "not completed" and law.reason == "the device is gone"
    assert engine.wrap_rule is None


@pytest.mark.parametrize("when", ["sizing a planted fault", "planted fault", "audit"])
def test_ctrl_c_gives_a_partial_report(when):
    def stop(what, count, log_e):
        if what == when and count > 10:
            raise KeyboardInterrupt

    with pair() as engine:
        report = audit_model(engine, PROMPTS, asked(max_tokens_total=600, detect=0.2), on_progress=stop)
        assert engine.idle and engine.wrap_rule is None
    assert report.status == 3 and modes(report)[LAW].reason == "interrupted"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alpha": 0.0}, "alpha is 0.0"), ({"alpha": 1.0}, "alpha is 1.0"), ({"detect": 0.5}, "detect is 0.5"),
        ({"max_tokens_total": 0}, "max_tokens_total is 0"), ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(changed, message):
    with pytest.raises(InvalidParameter, match=message):
        asked(**changed)


def test_prompts_that_do_not_fit_are_refused_before_anything_runs():
    with pair() as engine:
        with pytest.raises(PromptError, match="the prompt has 96 tokens"):
            audit_model(engine, ("abc", "a" * 96), asked())
        with pytest.raises(InvalidParameter, match="at least one prompt"):
            audit_model(engine, (), asked())
        assert engine.idle


# ---------------------------------------------------------------- the command


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "truedraw", "audit", "model", "--model", "toy", *arguments], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def test_the_command(tmp_path):
    page = tmp_path / "report.html"
    done = command("--drafter", "suffix", "--detect", "0.2", "--seed", "4", "--save", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No evidence of a fault" in done.stdout and "seen, as it should be" in done.stdout
    assert done.stderr.startswith("truedraw: a shift of TV 0.2 takes ") and done.stderr.count("\n") == 1
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_convicts_and_its_line_repeats_it():
    arguments = ("--drafter", "suffix", "--rule", "lenience:0.2", "--allow-lossy", "--ignore-eos")
    done = command(*arguments, "--detect", "0.1", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 == told["status"] and not told["ok"] and told["findings"]
    assert "--seed" in told["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--detect", "0.6"], "detect is 0.6"), (["--alpha", "2"], "alpha is 2.0"),
        (["--save", "report.pdf"], "save is 'report.pdf'"),
        (["--seed", "-1"], "seed is -1"), (["--rule", "biased_resample"], "has to be allowed"),
        (["--prompts", "missing.txt"], "there is no such file"), (["--max-tokens-total", "0"], "max_tokens_total is 0"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr and not done.stdout


def test_reports_are_values():
    with pair() as engine:
        report = audit_model(engine, PROMPTS, asked())
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.alpha = 1.0
