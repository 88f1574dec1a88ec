import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw.drafters.automaton import SuffixAutomaton
from truedraw.drafters.evidence import ALONE, BUCKETS, GREEDY, MIXED, RESUMED, SAMPLED, Evidence, History
from truedraw.drafters.suffix import SuffixDrafter, Text
from truedraw.engine import Engine
from truedraw.errors import InvalidParameter
from truedraw.policy import FixedLength
from truedraw.randomness import Noise
from truedraw.registry import Model
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed, markov
from truedraw.types import PointMass, SamplingParams

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def automaton_of(tokens):
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.extend(token)
    return automaton


def longest_repeated_suffix(text):
    """The length of the longest suffix that also ends earlier, by trying all."""
    n = len(text)
    return next((m for m in range(n - 1, 0, -1) if any(text[e - m : e] == text[n - m :] for e in range(m, n))), 0)


def occurrences(text, string):
    return sum(text[i : i + len(string)] == string for i in range(len(text) - len(string) + 1))


# ---------------------------------------------------------------- the automaton


@given(TEXTS)
def test_the_match_is_the_longest_suffix_that_came_up_before(text):
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, 1):
        automaton.extend(token)
        assert automaton.match_length == longest_repeated_suffix(text[:i])
        end, length = automaton.match_end, automaton.match_length
        if length:
            assert end < i and text[end - length : end] == text[i - length : i]
            assert automaton.predicted() == text[end]


@given(TEXTS)
def test_followers_are_counted(text):
    """Against counting every continuation of the match by hand, at every token."""
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, 1):
        automaton.extend(token)
        length = automaton.match_length
        if length:
            suffix = text[i - length : i]
            counted = {y: occurrences(text[:i], [*suffix, y]) for y in range(3)}
            assert automaton.followers(automaton.match_state) == {y: n for y, n in counted.items() if n}
            assert automaton.count(automaton.match_state, 7) == 0


@given(TEXTS, st.integers(0, 2))
def test_walking_leads_to_what_the_longer_match_is_followed_by(text, token):
    automaton = automaton_of(text)
    if automaton.match_length and token in automaton.followers(automaton.match_state):
        state = automaton.walk(automaton.match_state, token)
        string = [*text[len(text) - automaton.match_length :], token]
        while string and not any(occurrences(text, [*string, y]) for y in range(3)):
            string = string[1:]
        counted = {y: occurrences(text, [*string, y]) for y in range(3)}
        assert (automaton.followers(state) if state else {}) == ({y: n for y, n in counted.items() if n} if string else {})


def test_copies_are_what_followed_and_repeat_where_the_text_does():
    automaton = automaton_of([5, 6, 7, 8, 9, 10, 11, 7, 8])
    assert automaton.match_length == 2 and automaton.copy(3) == [9, 10, 11] and automaton.copy(5) == [9, 10, 11, 7, 8]
    assert automaton_of([1, 2, 1, 2]).copy(5) == [1, 2, 1, 2, 1]
    assert SuffixAutomaton().copy(3) == []


def test_the_latest_occurrence_is_copied():
    automaton = automaton_of([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])
    assert automaton.predicted() == 4 and automaton.followers(automaton.match_state) == {3: 1, 4: 1}


@pytest.mark.parametrize("text", ["mixed", "one letter", "one sentence"])
def test_time_per_token_does_not_grow(text):
    """Amortised constant: states and transitions per token stay few over 20,000 tokens, and so do the
    suffixes that are counted at each, also where a text repeats itself throughout."""
    generator = random.Random(0)
    tokens = {
        "mixed": [generator.randrange(50) if i % 100 < 50 else i % 50 for i in range(20_000)],
        "one letter": [7] * 20_000,
        "one sentence": [i % 11 for i in range(20_000)],
    }[text]
    automaton = automaton_of(tokens)
    assert len(automaton._next) < 2 * 20_000 and sum(map(len, automaton._next)) < 3 * 20_000
    assert sum(automaton._count) < 33 * 20_000 + 32 * len(automaton._next)


# ---------------------------------------------------------------- how likely a copy is right


@pytest.mark.parametrize("prior", [GREEDY, SAMPLED])
def test_priors_rise_with_match_and_count_and_fall_where_texts_went_apart(prior):
    for kind in (MIXED, ALONE, RESUMED):
        by_length = [prior.probability(Evidence(kind, length)) for length in (1, 2, 4, 8, 30)]
        assert all(0 < a < b < 1 for a, b in pairwise(by_length))
    for kind in (MIXED, ALONE):
        by_count = [prior.probability(Evidence(kind, 3, count)) for count in (1, 2, 3, 8)]
        assert all(a < b for a, b in pairwise(by_count))
    assert prior.probability(Evidence(MIXED, 3)) < prior.probability(Evidence(ALONE, 3))


def test_history_moves_the_estimate_to_what_was_seen_and_no_further():
    seen, far = Evidence(ALONE, 5), Evidence(ALONE, 30)
    history = History(GREEDY)
    before, before_far = history.probability(seen), history.probability(far)
    for _ in range(200):
        history.score(seen, False)
    assert history.probability(seen) < 0.35 * before and history.probability(far) == before_far
    assert history.probability(Evidence(ALONE, 3)) < GREEDY.probability(Evidence(ALONE, 3)), "the next bucket learns too"
    for _ in range(400):
        history.score(seen, True)
    assert before < history.probability(seen) < 1
    assert len({Evidence(ALONE, length).bucket for length in range(100)}) == len(BUCKETS)


# ---------------------------------------------------------------- what is proposed


def text_of(tokens, *, prompt_length=0):
    text = Text(prompt_length, History(GREEDY))
    text.follow(tokens)
    return text


def test_an_interrupted_copy_is_taken_up_again_behind_what_was_changed():
    source = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    text = text_of([*source, 1, 10, 11, 12, 13, 14, 99], prompt_length=11)  # 99 for 15: a substitute
    assert (text.copy.start, text.copy.length, text.copy.state) == (6, 0, None)
    assert text.survival(4)[0] == [16, 17, 18, 19]
    text = text_of([*source, 1, 10, 11, 12, 13, 14, 98, 99, 17], prompt_length=11)  # two for two
    assert text.copy.state is None and text.survival(2)[0] == [18, 19]
    text = text_of([*source, 17, 5, 6, 1, 10, 11, 12, 13, 14, 99, 17], prompt_length=14)
    assert text.survival(2)[0] == [18, 19], "near the place of the interruption, not where 17 came last"
    text = text_of([*source, 17, 5, 6, 7, 8, 1, 10, 11, 12, 13, 14, 99, 5, 6, 7], prompt_length=16)
    assert text.survival(1)[0] == [8], "a longer match goes first"


def test_where_several_tokens_followed_the_race_chooses_by_their_counts_as_the_dense_race_does():
    from truedraw.sampling import race

    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 70, 1, 2]
    text = text_of(tokens, prompt_length=len(tokens))
    dense = np.zeros(100)
    dense[[3, 4, 70]] = 0.5, 0.25, 0.25
    drawn = []
    for seed in range(200):
        noise = Noise(seed).at(len(tokens))
        token, seen = next(text.drafts(noise))
        assert token == race(dense, noise.race(len(tokens))) and seen.kind == MIXED
        drawn.append(token)
    assert set(drawn) == {3, 4, 70} and drawn.count(3) > 70


def run(drafter, target, params, rule="auto", length=6, prompts=([3, 5, 3, 5], [1, 1])):
    with Engine(Model("toy", ToyRunner(target, 9, num_slots=2), LetterTokenizer(9)), drafter, FixedLength(length)) as engine:
        return engine.generate([list(prompt) for prompt in prompts], params, rule=rule)


def test_the_text_is_plain_decodings():
    target = hashed(9, seed=2, order=2)
    for seed in range(8):
        params = SamplingParams(max_tokens=60, seed=seed, temperature=0.4 * (seed % 3), ignore_eos=True)
        texts = [[r.tokens for r in run(d, target, params)] for d in (None, SuffixDrafter(), SuffixDrafter(min_match=3))]
        assert texts[0] == texts[1] == texts[2]


def test_shared_noise_is_accepted_more_often_than_a_point_mass():
    """Null: both equal. The target draws from (.4, .35, .25), counts say (.5, .25, .25). 3,000 seeds: a point
    mass is right at most in .4 of them, plus five standard errors .45; the race over the counts in .7 or more."""
    from truedraw.sampling import race

    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 5, 1, 2]
    text = text_of(tokens, prompt_length=len(tokens))
    law = np.array([0, 0, 0, 0.4, 0.35, 0.25])
    noises = [Noise(seed).at(len(tokens)) for seed in range(3000)]
    right = [next(text.drafts(noise))[0] == race(law, noise.race(len(tokens))) for noise in noises]
    assert np.mean(right) > 0.7


@pytest.mark.parametrize("rule", ["block", "token"])
def test_under_p_q_rules_drafts_are_drawn_from_the_counts_that_they_carry(rule):
    seen = []

    class Watched(SuffixDrafter):
        def propose(self, requests):
            proposals = super().propose(requests)
            for request, proposal in zip(requests, proposals, strict=True):
                text = self._texts[request.sequence]
                state = text.copy.state if text.copy else None
                if len(proposal):
                    assert proposal.q.sampled and not request.coupled
                if len(proposal) and state is not None:
                    counts = text.automaton.followers(state)
                    row = proposal.q.row(0, proposal.tokens[0], 9)
                    assert row == pytest.approx([counts.get(y, 0) / sum(counts.values()) for y in range(9)])
                    seen.append(len(counts))
            return proposals

    params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0)
    results = run(Watched(), hashed(9, seed=2, order=1), params, rule)
    assert max(seen) > 1 and sum(r.stats.accepted for r in results) > 0
    greedy = SuffixDrafter()
    assert all(
        r.stats.accepted <= r.stats.proposed
        for r in run(greedy, hashed(9, seed=2), SamplingParams(max_tokens=30, temperature=0), rule)
    )


def test_copies_of_what_was_seen_once_are_point_masses():
    proposals = []

    class Watched(SuffixDrafter):
        def propose(self, requests):
            proposals.extend(super().propose(requests))
            return proposals[-len(requests) :]

    run(Watched(), hashed(9, seed=2, order=2), SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
    assert any(isinstance(p.q, PointMass) and len(p) for p in proposals) and any(p.q.sampled for p in proposals)
    assert all(p.survival is not None and len(p.survival) == len(p) for p in proposals if len(p))


def toy(rows):
    return Model("toy", ToyRunner(markov(rows), len(rows)), LetterTokenizer(len(rows)))


def test_a_text_that_repeats_raises_the_estimate_and_one_that_does_not_lowers_it():
    cycle = np.roll(np.eye(5), 1, axis=1) * 0.999 + 0.0002
    drafter = SuffixDrafter()
    seen = []
    with Engine(toy(cycle), drafter, FixedLength(4)) as engine:
        for step in engine.stream([1, 2, 3, 4], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)):
            texts = list(drafter._texts.values())
            seen += [texts[0].history.probability(Evidence(ALONE, 3))] if texts else []
            assert step.num_accepted <= step.num_proposed
        assert engine.stats.tokens_per_step > 3 and seen[-1] >= seen[0]
    noisy = SuffixDrafter()
    with Engine(Model("toy", ToyRunner(hashed(9, order=4), 9), LetterTokenizer(9)), noisy, FixedLength(4)) as engine:
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
        for _ in range(120):
            engine.step()
        (text,) = noisy._texts.values()
        assert text.history.probability(Evidence(ALONE, 2)) < SAMPLED.probability(Evidence(ALONE, 2))
        engine.cancel(request)
        assert not noisy._texts  # forgotten with the request


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_match_length_that_is_none_is_refused(bad):
    with pytest.raises(InvalidParameter, match="min_match"):
        SuffixDrafter(min_match=bad)
