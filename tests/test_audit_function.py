"""Somebody else's verifier, in Python: exact where its uniforms are injected, by samples where not, at the edges always."""

import json
import subprocess
import sys

import numpy as np
import pytest

from truedraw.audit import adapters, edge_cases, exact_law, function, own, sampled_law, vectors
from truedraw.audit.causes import BY_NAME, CAUSES, made, right
from truedraw.audit.convention import Answer, Refused, Request, WrongAnswer, given, impossible, read_answer
from truedraw.audit.function import PLANTED, Options, control_sampled, planted_subject, report_subject
from truedraw.errors import InvalidParameter, UsageError

OWN = ("block", "coupled", "multidraft", "resample_from_target", "token", "traversal")
ALL = exact_law.problems()
SMALL = [case for case in ALL if case[0].name in exact_law.FINGERPRINT]


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    """Those that tell faults apart are enough here; the command runs all."""
    monkeypatch.setattr(function, "problems", lambda min_drafts=0: SMALL)
    monkeypatch.setattr(exact_law, "problems", lambda min_drafts=0: SMALL)


def audited(verify, *, adapter="numpy", dtype="float64", **options):
    subject = adapters.subject(verify, "test:function", adapter=adapter, dtype=dtype)
    return report_subject(subject, "test:function", Options(**options), [])


def modes(report):
    return {mode.mode: mode for mode in report.modes}


# ---------------------------------------------------------------- what is right passes


@pytest.mark.parametrize("name", OWN)
def test_truedraws_own_rules_are_exact_in_fractions(name):
    report = audited(getattr(own, name))
    law = modes(report)["exact law"]
    assert report.status == 0 and report.control_seen and law.samples == len(SMALL)
    assert all("TV 0 after one step, 0 after" in note for note in law.notes[:-1])
    assert modes(report)["edge cases"].verdict == "no evidence"


def test_the_token_rule_agrees_with_its_vectors_and_block_verification_need_not():
    assert modes(audited(own.token, rule="token"))["token rule, answer by answer"].verdict == "no evidence"
    assert modes(audited(own.block, rule="token"))["token rule, answer by answer"].verdict == "fault found"


def careful(p, q, drafts, draw, dtype=np.float64):
    """The token rule in somebody else's words; `draw` gives the next uniform."""
    p = np.asarray(p, dtype=dtype)
    vocab = p.shape[1]
    q = np.zeros((len(drafts), vocab), dtype=dtype) if q is None else np.asarray(q, dtype=dtype)
    for rows in (p, q):
        if not (np.isfinite(rows).all() and (rows >= 0).all() and (abs(p.sum(axis=1) - 1) < 2e-3).all()):
            raise ValueError("rows that are no laws")
    for i, x in enumerate(drafts):
        law = np.zeros(vocab, dtype=dtype)
        law[: q.shape[1]] = q[i][:vocab]
        inside = 0 <= x < vocab
        if inside and not q.any():
            law[x] = 1
        if not (inside and draw() * law[x] < p[i][x]):
            left = np.maximum(p[i] - law, 0)
            return i, pick(left if left.any() else p[i], draw)
    return len(drafts), pick(p[len(drafts)], draw)


def pick(weights, draw):
    total = np.cumsum(weights)
    return int(np.flatnonzero(total > draw() * total[-1])[0])


def test_a_function_that_asks_for_the_next_uniform_is_gone_through_exactly():
    law = modes(audited(lambda p, q, drafts, rng: careful(p, q, drafts, rng)))["exact law"]
    assert law.verdict == "no evidence" and all("TV 0 after one step" in note for note in law.notes[:-1])


def test_a_function_that_swallows_every_exception_is_still_explored():
    def swallows(p, q, drafts, rng):
        def safe():
            try:
                return rng()
            except Exception:
                return 0.5

        return careful(p, q, drafts, safe)

    assert modes(audited(swallows))["exact law"].verdict == "no evidence"


def test_arithmetic_in_32_bits_is_no_fault():
    def single(p, q, drafts, uniforms):
        assert p.dtype == np.float32 and all(float(u) == u for u in uniforms)
        numbers = iter([*uniforms[: len(drafts)]])
        last = uniforms[-1]
        k = len(drafts)
        accepted = 0
        while (
            accepted < k and next(numbers) * (1 if q is None else q[accepted][drafts[accepted]]) < p[accepted][drafts[accepted]]
        ):
            accepted += 1
        if accepted == k:
            return k, pick(p[k], lambda: last)
        x = drafts[accepted]
        law = np.eye(p.shape[1], dtype=np.float32)[x] if q is None else q[accepted]
        left = np.maximum(p[accepted] - law, 0)
        return accepted, pick(left if left.any() else p[accepted], lambda: last)

    subject = adapters.subject(single, "test:single", dtype="float32")
    mode = exact_law.exact_mode(subject, picked=SMALL)
    assert mode.verdict == "no evidence" and 0 < mode.floor == exact_law.TOLERANCE
    assert exact_law.exact_mode(subject, picked=SMALL, tolerance=1e-12).verdict == "fault found"


# ---------------------------------------------------------------- what is wrong is convicted, and named


@pytest.mark.parametrize("cause", CAUSES, ids=[cause.name for cause in CAUSES])
def test_a_planted_fault_is_convicted_exactly_and_named(cause):
    mode = exact_law.exact_mode(exact_law.as_subject(cause.verify), picked=SMALL)
    assert mode.verdict == "fault found"
    assert [(fired.name, fired.usually) for fired in mode.fired] == [(cause.name, cause.usually)]


def test_a_fault_of_mass_zero_is_convicted():
    """u = 0 alone: no law shows it."""
    strict = made(accepts=lambda u, p, q, x, i: u * q[x] < p[x] or (u == 0 and p[x] == 0))
    subject = exact_law.as_subject(strict)
    mode = exact_law.exact_mode(subject, picked=SMALL)
    assert mode.verdict == "fault found" and "p = 0, and was accepted" in mode.example.text
    assert all("TV 0 after" in note for note in mode.notes[:-1])


def test_an_unknown_fault_is_convicted_and_not_named():
    odd = made(accepts=lambda u, p, q, x, i: u * q[x] < p[x] * (0.3 if x == 1 else 1))
    mode = exact_law.exact_mode(exact_law.as_subject(odd), picked=SMALL)
    assert mode.verdict == "fault found" and mode.fired[0].name == "the law is off"


def test_a_small_fault_is_convicted_and_told_in_figures():
    lenient = made(accepts=lambda u, p, q, x, i: u * q[x] < p[x] * (1 + 1e-4))
    mode = exact_law.exact_mode(exact_law.as_subject(lenient), picked=SMALL[:1])
    assert mode.verdict == "fault found" and "instead of" in mode.example.text


def test_an_error_on_sound_rows_is_a_fault():
    def refuses(p, q, drafts, uniforms):
        raise RuntimeError("device-side assert")

    report = audited(refuses)
    assert report.status == 1 and "device-side assert" in modes(report)["exact law"].example.text


@pytest.mark.parametrize("answer", [None, 3, (0.5, 1), (0, 1, 2), (7, 0), (0, 99), (-1, 0), ("0", "1")])
def test_what_is_no_answer_is_a_fault(answer):
    report = audited(lambda p, q, drafts, uniforms: answer)
    assert report.status == 1 and modes(report)["exact law"].fired[0].name == "no answer to sound rows"


def test_numbers_of_arrays_are_answers():
    request = Request(np.full((3, 4), 0.25), None, (1, 2))
    assert read_answer(np.int64(1), np.array([2]), request) == Answer(1, 2)
    with pytest.raises(WrongAnswer):
        read_answer(True, 2, request)


# ---------------------------------------------------------------- edges


def naive(p, q, drafts, uniforms):
    """Reads p[x] for any x, compares with <=, checks nothing: what is often written."""
    for i, x in enumerate(drafts):
        with np.errstate(all="ignore"):
            ratio = p[i][x] / (1.0 if q is None else q[i][x])
        if uniforms[i] > ratio:
            left = np.maximum(p[i] - (0 if q is None else q[i][: p.shape[1]]), 0)
            return i, int(np.searchsorted(np.cumsum(left) / left.sum(), uniforms[-1])) % p.shape[1]
    return len(drafts), int(np.searchsorted(np.cumsum(p[-1]), uniforms[-1]))


def test_what_is_often_written_fails_at_the_edges():
    mode = edge_cases.edge_mode(adapters.subject(naive, "test:naive"))
    fired = {note.removeprefix("FAULT ").partition(": ")[0] for note in mode.notes if note.startswith("FAULT")}
    assert any(one.name.endswith(" more") for one in mode.fired) and len(mode.fired) < len(fired)
    assert {
        "p = 0 at the draft, u = 0",
        "draft -1 as a place holder, point mass",
        "p is NaN at the draft",
        "no draft, u = 0, the first token has p = 0",
        "no draft, u just below 1, the last tokens have p = 0",
        "p is infinite at the draft",
    } <= fired
    assert mode.example.command.startswith("python -c")


@pytest.mark.parametrize("case", edge_cases.edge_cases(), ids=lambda case: case.name)
def test_every_edge_case_can_be_failed(case):
    """By accepting everything, by accepting nothing and drawing the most or the least likely token, or by an error."""
    k, vocab = len(case.request.drafts), case.request.p.shape[1]
    answers = [Answer(accepted, token) for accepted in range(k + 1) for token in range(vocab)]
    judged = [edge_cases.judge(case, outcome, strict=True) for outcome in (*answers, Refused("no"), WrongAnswer("none"))]
    assert any(verdict.fault for verdict in judged)
    assert any(not verdict.fault for verdict in judged)
    assert case.errors != "required" or all(verdict.fault for verdict in judged[: len(answers)])


def test_equal_rows_that_are_not_accepted_are_noted_and_a_fault_for_the_token_rule():
    shy = made(accepts=lambda u, p, q, x, i: u * q[x] < p[x] and (p != q).any())
    cases = [case for case in edge_cases.edge_cases() if case.name == "p = q, u just below 1"]
    assert edge_cases.edge_mode(exact_law.as_subject(shy), cases).verdict == "no evidence"
    assert edge_cases.edge_mode(exact_law.as_subject(shy), cases, strict=True).verdict == "fault found"


# ---------------------------------------------------------------- uniforms of its own


def with_own_uniforms(verify, seed=0):
    return planted_subject(verify, 1.0, seed)


def test_a_bonus_that_is_no_draw_is_found_at_its_place():
    """No direction looks there: bets by place alone."""
    mode = sampled_law.sampled_mode(with_own_uniforms(BY_NAME["bonus by argmax"].verify), alpha=1e-4, detect=0.05, seed=1)
    assert mode.fired[0].name == sampled_law.BY_PLACE and mode.samples < 1500


FIVE = (PLANTED, "shared noise", "verified by argmax", "bonus by argmax", "target rows one too far")


@pytest.mark.parametrize("name", FIVE)
def test_a_planted_fault_is_found_by_samples(name):
    """Null: each token has law p given the step so far; e-process, alpha 1e-4, as many tokens as a shift of 0.05 takes
    with power 0.95. Over other seeds each of these was found before 4,000 tokens; the seed is fixed."""
    mode = sampled_law.sampled_mode(with_own_uniforms(BY_NAME[name].verify), alpha=1e-4, detect=0.05, seed=1)
    assert mode.verdict == "fault found" and mode.samples < 6000 and mode.e_value >= 1e4


def test_the_announced_power_is_reached():
    """A shift of exactly the size asked for, 20 runs: a true power of 0.95 fails 15 of 20 once in some thousand times."""
    found = [control_sampled(Options(detect=0.08, seed=10 * seed)).verdict == "fault found" for seed in range(20)]
    assert sum(found) >= 15


def test_a_right_verifier_is_not_convicted_by_samples():
    """20 runs at alpha 0.01: two false alarms or more have probability 0.017 at most; the seeds are fixed."""
    verdicts = [
        sampled_law.sampled_mode(with_own_uniforms(right, seed), alpha=0.01, detect=0.1, seed=seed + 100).verdict
        for seed in range(20)
    ]
    assert verdicts.count("fault found") <= 1


def test_block_verification_is_not_convicted_by_samples():
    generator = np.random.default_rng(5)

    def verify(p, q, drafts):
        return own.block(p, q, drafts, generator.random(len(drafts) + 1))

    report = audited(verify, detect=0.08)
    law = modes(report)["sampled law"]
    assert report.status == 0 and law.detectable <= 0.08 and law.path and ("randomness", "its own: samples") in report.facts


def test_uniforms_that_are_given_and_not_used_are_noticed():
    generator = np.random.default_rng(6)

    def verify(p, q, drafts, uniforms):
        return own.token(p, q, drafts, generator.random(len(uniforms)))

    report = audited(verify, detect=0.1)
    assert modes(report)["exact law"].verdict == "not testable"
    assert modes(report)["sampled law"].verdict == "no evidence" and report.status == 0


def test_more_uniforms_than_can_be_gone_through_are_sampled():
    def races(p, q, drafts, rng):
        for _ in range(100):
            rng()
        return careful(p, q, drafts, rng)

    report = audited(races, detect=0.1)
    assert modes(report)["exact law"].verdict == "not testable" and "64 uniforms" in modes(report)["exact law"].reason
    assert modes(report)["sampled law"].verdict == "no evidence"


def test_the_sample_size_and_its_inverse_agree():
    for shift in (0.02, 0.05, 0.2):
        tokens = sampled_law.decided_tokens(shift, 0.01)
        assert sampled_law.detectable_shift(tokens, 0.01) <= shift < sampled_law.detectable_shift(tokens - 2, 0.01) * 1.001


# ---------------------------------------------------------------- adapters


def fake_torch(monkeypatch):
    monkeypatch.setattr(adapters, "_torch_array", lambda dtype: lambda values: np.array(values, dtype=dtype))


def speculative_sampling(generator, fault=False):
    """transformers' `_speculative_sampling`, word for word in NumPy, as far as its documented signature goes."""

    def _speculative_sampling(candidate_input_ids, candidate_logits, candidate_length, new_logits, is_done_candidate):
        ids = candidate_input_ids[:, -candidate_length:]
        with np.errstate(all="ignore"):
            q, p = np.exp(candidate_logits), np.exp(new_logits)
            ratio = p[0, np.arange(candidate_length), ids[0]] / q[0, np.arange(candidate_length), ids[0]]
        accepted = generator.random(candidate_length) <= ratio
        n_matches = int((np.cumsum(~accepted) < 1).sum())
        weights = p[0, n_matches]
        if n_matches < candidate_length and not fault:
            weights = np.clip(weights - q[0, n_matches], 0, None)
        token = generator.choice(len(weights), p=weights / weights.sum())
        return np.concatenate([ids[:, :n_matches], [[token]]], axis=1), n_matches

    return _speculative_sampling


def test_the_hugging_face_signature(monkeypatch):
    fake_torch(monkeypatch)
    report = audited(speculative_sampling(np.random.default_rng(0)), adapter="hugging-face", detect=0.1)
    assert modes(report)["sampled law"].verdict == "no evidence"
    wrong = audited(speculative_sampling(np.random.default_rng(0), fault=True), adapter="hugging-face", detect=0.1)
    assert modes(wrong)["sampled law"].verdict == "fault found" and "resid" in modes(wrong)["sampled law"].fired[0].name
    assert not any(case.startswith("no draft") for case in str(report.modes[-1].notes).split("'"))


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def verify(p, q, drafts, uniforms):
        assert isinstance(p, torch.Tensor)
        return own.token(p.numpy(), None if q is None else q.numpy(), drafts, uniforms.numpy())

    assert audited(verify, adapter="torch").status == 0


def test_without_torch_its_adapters_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    with pytest.raises(UsageError, match="torch is not installed"):
        adapters.subject(right, "x:y", adapter="torch")


def vllm_like(shift=0):
    def sampler(target_probs, bonus_token_ids, draft_probs, draft_token_ids, uniforms):
        k, vocab = target_probs.shape[1], target_probs.shape[2]
        out = np.full((1, k + 1), -1)
        p = np.concatenate([np.roll(target_probs[0], -shift, axis=0), np.full((1, vocab), 1 / vocab)])
        accepted, token = own.token(p, None if draft_probs is None else draft_probs[0], draft_token_ids[0].tolist(), uniforms)
        out[0, :accepted] = draft_token_ids[0, :accepted]
        out[0, accepted] = bonus_token_ids[0, 0] if accepted == k else token
        return out

    return sampler


def test_the_vllm_signature():
    subject = adapters.subject(vllm_like(), "x:sampler", adapter="vllm")
    assert exact_law.exact_mode(subject, picked=SMALL).verdict == "no evidence"
    shifted = adapters.subject(vllm_like(shift=1), "x:sampler", adapter="vllm")
    assert exact_law.exact_mode(shifted, picked=SMALL).verdict == "fault found"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "MODULE:CALLABLE"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("truedraw.audit.own:nothing", "has no 'nothing': names it has"),
        ("truedraw.audit.own:__doc__", "something that can be called"),
    ],
)
def test_what_cannot_be_called_is_told(spec, message):
    with pytest.raises(UsageError, match=message):
        adapters.load_callable(spec)


def test_a_file_can_be_named(tmp_path):
    (tmp_path / "mine.py").write_text("class Rules:\n    def verify(p, q, drafts, rng):\n        return 0, 0\n")
    found = adapters.load_callable(f"{tmp_path / 'mine.py'}:Rules.verify")
    assert adapters.injection(found) == "rng" and found(1, 2, 3, 4) == (0, 0)


def test_options_are_checked():
    for wrong in ({"rule": "best"}, {"alpha": 0}, {"detect": 1.5}, {"max_tokens": 0}, {"tolerance": -2}):
        with pytest.raises(InvalidParameter):
            Options(**wrong)


# ---------------------------------------------------------------- vectors


def test_the_vectors_are_what_the_generator_makes():
    made_now = vectors.text()
    assert [json.loads(line) for line in made_now.splitlines()] == vectors.load() and len(made_now) < 300_000


def test_every_answer_vector_separates_right_from_wrong():
    """Answers of the rules that are right are in the set; some of every planted fault's are not."""
    kinds = [vector["kind"] for vector in vectors.load()]
    assert kinds[0] == "about" and min(kinds.count(kind) for kind in ("answer", "edge", "law")) >= 40
    assert vectors.disagreements(adapters.subject(own.token, "own:token"))[1] == []
    for name in (PLANTED, "ratio upside down", "shared noise", "bonus by argmax", "target rows one too far"):
        assert vectors.disagreements(exact_law.as_subject(BY_NAME[name].verify))[1], name


def test_edge_vectors_allow_what_the_own_rules_answer():
    subject = adapters.subject(own.block, "own:block")
    for vector in vectors.load():
        if vector["kind"] == "edge":
            outcome = edge_cases.ask(subject, vectors.request_of(vector), vector["uniforms"])
            if isinstance(outcome, Answer):
                assert outcome.token in vector["tokens"][outcome.accepted], vector["name"]
            else:
                assert vector["error"] != "wrong", vector["name"]


def test_law_vectors_are_laws_and_their_rules_differ():
    laws = [vector for vector in vectors.load() if vector["kind"] == "law"]
    from fractions import Fraction

    assert all(sum(Fraction(mass) for *_answer, mass in vector["law"]) == 1 for vector in laws)
    by_rule = {rule: [v["law"] for v in laws if v["rule"] == rule] for rule in vectors.LAW_RULES}
    assert by_rule["token"] != by_rule["block"] != by_rule["resample_from_target"]


def test_right_answers_are_two_on_an_edge():
    request = Request(np.array([[0.5, 0.3, 0.2]] * 2), np.array([[0.2, 0.3, 0.5]]), (2,))
    assert len(vectors.right_answers(request, (0.4, 0.1))) == 2
    assert vectors.right_answers(request, (0.39, 0.1)) == [[1, 0]]
    assert vectors.right_answers(request, (0.41, 0.1)) == [[0, 0]]


def test_impossible_answers_are_told():
    request = Request(np.array([[0.5, 0.5, 0.0]] * 2), None, (2,))
    assert impossible(request, Answer(0, 1)) is None
    assert "p = 0, and was accepted" in impossible(request, Answer(1, 0))
    assert "has p = 0 there" in impossible(request, Answer(0, 2))
    assert given((0.25,))(0) == 0.25 and 0 <= given((0.25,))(3) < 1


# ---------------------------------------------------------------- the command


def command(*words):
    done = subprocess.run([sys.executable, "-m", "truedraw", "audit", *words], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_the_command_tells_a_fault_and_how_to_see_it(tmp_path):
    (tmp_path / "engine.py").write_text(
        "import numpy as np\n"
        "from truedraw.audit.causes import BY_NAME\n"
        "def verify(p, q, drafts, uniforms):\n"
        "    return BY_NAME['resample from p after a rejection'].verify(p, q, drafts, uniforms)\n"
    )
    status, out, err = command("function", f"{tmp_path / 'engine.py'}:verify")
    assert status == 1, err
    told = " ".join(out.split())
    assert "The strongest sign: resample from p after a rejection. Usual cause: the token after a rejection" in told
    assert "truedraw audit function" in told and "lossless" not in told and "Traceback" not in err


def test_the_command_says_no_evidence_and_speaks_json():
    status, out, _err = command("function", "truedraw.audit.own:block", "--json")
    told = json.loads(out)
    assert status == 0 and told["ok"] and told["status"] == 0 and told["findings"] == []
    assert [mode["mode"] for mode in told["modes"]] == ["exact law", "edge cases"]
    assert told["modes"][0]["samples"] == len(ALL) >= 15
    assert told["control"][0]["verdict"] == "fault found" and "lossless" not in out


@pytest.mark.parametrize("words", [("no.such:thing",), ("truedraw.audit.own:token", "--adapter", "jax"), ("own", "--alpha", "2")])
def test_usage_is_status_2_in_one_line(words):
    status, out, err = command("function", *words)
    assert status == 2 and out == "" and len(err.strip().splitlines()) == 1
