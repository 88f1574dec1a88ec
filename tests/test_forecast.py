"""What drafts are expected to be worth: acceptance by depth, forecasts, and the choice between drafters."""

import numpy as np
import pytest

from truedraw.acceptance import Acceptance
from truedraw.drafters.chain import ChainDrafter
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.suffix import SuffixDrafter
from truedraw.engine import Engine
from truedraw.policy import Controller, FixedLength
from truedraw.profile import CostPoint, Profile
from truedraw.protocols import Drafter, DraftRequest, Forecast, Worth
from truedraw.randomness import Noise
from truedraw.registry import RULES, Model
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed, markov
from truedraw.sampling import TargetRows, draw_draft
from truedraw.types import DenseRows, PointMass, Proposal, SamplingParams
from truedraw.verify import tested as telling

VOCAB = 9
TARGET, DRAFT = hashed(VOCAB, seed=1), hashed(VOCAB, seed=2)

# ---------------------------------------------------------------- what a verification tells


def drawn(seed, rule, length=3):
    """A random problem of three depths, its drafts drawn, and the verdict."""
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.ones(5), size=length + 1)
    q = generator.dirichlet(np.ones(5), size=length)
    noise = Noise(seed).at(7)
    tokens = tuple(draw_draft(q[i], noise, i, coupled=rule == "coupled") for i in range(length))
    proposal, rows = Proposal(tokens, DenseRows(tuple(q))), TargetRows.of(p)
    return proposal, rows, RULES[rule](proposal, rows, noise)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_what_is_told_has_the_mean_of_what_happens(rule):
    """Null: E[sum of what was kept] = E[accepted tokens]. 4,000 problems; the difference of a problem has a
    standard deviation below 1.2, so five standard errors are .095; telling the coin of a neighbour, or the
    overlap of the wrong depth, moves the mean by .2 or more. The race has two levels only from 64 tokens on."""
    difference = []
    for seed in range(4000):
        proposal, rows, verdict = drawn(seed, rule)
        told = telling.tested(rule, proposal, rows, verdict.path)
        difference.append(sum(kept for _, kept in told) - verdict.num_accepted)
        assert all(0 <= kept <= 1 + 1e-12 and 0 <= reached <= 1 for reached, kept in told)
    assert abs(np.mean(difference)) < 5 * 1.2 / np.sqrt(4000)
    assert np.std(difference) > 0.1  # it is no copy of the coins


def test_point_masses_and_other_rules_tell_what_happened():
    rows = TargetRows.of(np.full((4, 4), 0.25))
    proposal = Proposal((1, 2, 3), PointMass())
    assert telling.tested("coupled", proposal, rows, (0,)) == ((1.0, 1.0), (1.0, 0.0))
    assert telling.tested("coupled", proposal, rows, (0, 1, 2)) == ((1.0, 1.0),) * 3
    tree = Proposal((1, 2, 3), PointMass(), (-1, -1, 1))
    assert telling.tested("multidraft", tree, rows, (1,)) == ((1.0, 1.0), (1.0, 0.0))
    assert telling.tested("multidraft", tree, rows, ()) == ((1.0, 0.0),)
    assert telling.tested("coupled", Proposal(), rows, ()) == ()


def test_acceptance_goes_from_the_prior_to_all_sequences_to_this_one():
    acceptance = Acceptance(prior=0.7)
    assert acceptance.survival(0, 3) == pytest.approx((0.7, 0.49, 0.343))
    for _ in range(100):
        acceptance.observe(0, ((1.0, 0.9), (0.9, 0.1)))
    first, second = acceptance.survival(0, 2)
    assert first == pytest.approx(0.9, abs=0.02) and second / first == pytest.approx(0.11, abs=0.03)
    assert acceptance.survival(1, 1)[0] == pytest.approx(100 / 190, abs=0.01)  # all kept over all reached
    assert len(acceptance.survival(0, 9, least=0.05)) < 9
    for sequence in range(2, 2000):
        acceptance.observe(sequence, ((1.0, 1.0),))
    assert len(acceptance._sequences) <= 256


# ---------------------------------------------------------------- the draft model


def request(context, prompt_length, worth, max_draft=8, sequence=0, num_left=200, seed=0):
    array = np.array(context, dtype=np.int32)
    return DraftRequest(
        sequence, 0, array, prompt_length, max_draft, SamplingParams(seed=1), frozenset(), None,
        Noise(seed).at(len(context)), True, lambda row: True, worth, num_left,
    )  # fmt: skip


class Counting(ToyRunner):
    fed = 0

    def forward(self, chunks):
        self.fed += sum(len(chunk.tokens) for chunk in chunks)
        return super().forward(chunks)


def test_an_unread_prompt_counts_once_over_the_steps_that_it_will_serve():
    runner = Counting(DRAFT, VOCAB, max_length=600)
    drafter = ModelDrafter(runner, VOCAB, pass_seconds=lambda size: 0.001 * size, clock=lambda: 0.0)
    prompt = [1, 2, 3, 4] * 100
    (cold,) = drafter.forecast([request(prompt, 400, None)])
    assert cold.seconds == 0.001 and cold.start == pytest.approx(0.399 / 16) and runner.fed == 0
    (short,) = drafter.forecast([request(prompt, 400, None, num_left=6)])
    assert short.start == pytest.approx(0.399 / 3)
    drafter.propose([request(prompt, 400, lambda forecast: Worth(2, 1.0))])
    (warm,) = drafter.forecast([request([*prompt, 5], 400, None)])
    assert warm.start == 0.0 and runner.fed > 399


def test_nothing_is_read_where_nothing_is_worth_drafting():
    runner = Counting(DRAFT, VOCAB, max_length=600)
    drafter = ModelDrafter(runner, VOCAB, pass_seconds=lambda size: 0.001 * size)
    (proposal,) = drafter.propose([request([1, 2, 3] * 50, 150, lambda forecast: Worth(0, 0.0))])
    assert len(proposal) == 0 and runner.fed == 0


def costs(base, each):
    return Profile(tuple(CostPoint(size, 0, 1, base + each * size) for size in (1, 2, 4, 8, 16, 32)), {"file": "test"})


def engine(drafter, policy, target=TARGET):
    return Engine(Model("toy", ToyRunner(target, VOCAB, max_length=600), LetterTokenizer(VOCAB)), drafter, policy)


@pytest.mark.parametrize("draft_seconds", [1e-6, 1.0])
def test_a_draft_model_is_used_where_it_pays_and_its_prompt_left_unread_where_it_does_not(draft_seconds):
    runner = Counting(TARGET, VOCAB, max_length=600)
    drafter = ModelDrafter(runner, VOCAB, pass_seconds=lambda size: draft_seconds)
    with engine(drafter, Controller(costs(0.01, 1e-5))) as under_test:
        params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
        (result,) = under_test.generate([[1, 2, 3] * 40], params)
    if draft_seconds < 0.01:
        assert result.stats.tokens_per_step > 3 and result.stats.acceptance_rate == 1
    else:
        assert result.stats.proposed == 0 and runner.fed == 0


# ---------------------------------------------------------------- the choice


class Told(Drafter):
    """Forecasts what it is told to, and proposes so many tokens of its own."""

    def __init__(self, token, survival, seconds=0.0, forecasts=True):
        self.token, self.told, self.forecasts = token, Forecast(tuple(survival), seconds), forecasts

    def forecast(self, requests):
        return [self.told if self.forecasts else None for _ in requests]

    def propose(self, requests):
        return [Proposal((self.token,) * len(self.told.survival), PointMass()) for _ in requests]


def worth(forecast):
    gain = sum(forecast.survival) - forecast.seconds
    return Worth(len(forecast.survival), gain) if gain > 0 else Worth(0, 0.0)


def chosen(*drafters):
    (proposal,) = ChainDrafter(drafters).propose([request([1, 2], 2, worth)])
    return proposal.tokens[0] if len(proposal) else None


def test_the_drafter_with_most_to_gain_is_asked():
    good, cheap, dear = Told(1, [0.9, 0.8]), Told(2, [0.5]), Told(3, [0.9, 0.9, 0.9], seconds=2.5)
    assert chosen(cheap, good) == chosen(good, cheap) == 1 and chosen(dear, cheap) == 2
    assert chosen(Told(3, [0.1], seconds=1.0), Told(4, [])) is None
    silent, eager = Told(5, [], forecasts=False), Told(6, [0.1], forecasts=False)
    assert chosen(good, eager) == 1 and chosen(eager, good) == 6, "who cannot forecast keeps its place"
    empty = Told(7, [0.9])
    empty.propose = lambda requests: [Proposal() for _ in requests]
    assert chosen(empty, eager) is None, "who was chosen and drafts nothing is not replaced by those behind"
    assert chosen(silent, good) == 1 and chosen(silent, eager) == 6 and chosen(Told(4, []), eager) == 6
    assert ChainDrafter([good, cheap]).forecast([request([1], 1, worth)]) == [good.told]
    assert ChainDrafter([eager]).forecast([request([1], 1, worth)]) == [None]


def test_copies_where_the_text_repeats_and_the_model_where_it_does_not():
    """A cycle that the draft model has never heard of, and a text without repetition that it knows."""
    cycle = markov(np.roll(np.eye(VOCAB), 1, axis=1) * 0.999 + 0.001 / VOCAB)
    params = SamplingParams(max_tokens=80, seed=3, ignore_eos=True)
    for target, draft, expected in (
        (cycle, DRAFT, "copies"),
        (hashed(VOCAB, seed=1, order=5), hashed(VOCAB, seed=1, order=5), "model"),
    ):
        model = ModelDrafter(ToyRunner(draft, VOCAB, max_length=600), VOCAB, pass_seconds=lambda size: 1e-5)
        asked = []
        propose = model.propose
        model.propose = lambda requests, propose=propose, asked=asked: asked.append(len(requests)) or propose(requests)
        with engine(ChainDrafter([SuffixDrafter(), model]), Controller(costs(0.01, 1e-5)), target) as under_test:
            (result,) = under_test.generate([[1, 2, 3, 4, 5, 6, 7, 8, 0] * 3], params)
        with engine(None, FixedLength(0), target) as plain:
            assert plain.generate([[1, 2, 3, 4, 5, 6, 7, 8, 0] * 3], params)[0].tokens == result.tokens
        assert result.stats.tokens_per_step > 2.5
        assert (sum(asked) < 0.3 * result.stats.steps) == (expected == "copies"), (asked, result.stats)
