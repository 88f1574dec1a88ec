import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truedraw.drafters.suffix import BUCKETS, GREEDY, SAMPLED, SuffixAutomaton, SuffixDrafter, bucket
from truedraw.engine import Engine
from truedraw.errors import InvalidParameter
from truedraw.policy import FixedLength
from truedraw.registry import Model
from truedraw.runners.toy import LetterTokenizer, ToyRunner, hashed, markov
from truedraw.types import SamplingParams


def longest_repeated_suffix(text):
    """The length of the longest suffix that also ends earlier, by trying all."""
    n = len(text)
    return next((m for m in range(n - 1, 0, -1) if any(text[e - m : e] == text[n - m :] for e in range(m, n))), 0)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_match_is_the_longest_suffix_that_came_up_before(text):
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, 1):
        automaton.extend(token)
        assert automaton.match_length == longest_repeated_suffix(text[:i])
        end, length = automaton.match_end, automaton.match_length
        if length:
            assert end < i and text[end - length : end] == text[i - length : i]
            assert automaton.predicted() == text[end]


def test_copies_are_what_followed_and_repeat_where_the_text_does():
    automaton = SuffixAutomaton()
    for token in [5, 6, 7, 8, 9, 10, 11, 7, 8]:
        automaton.extend(token)
    assert automaton.match_length == 2 and automaton.copy(3) == [9, 10, 11] and automaton.copy(5) == [9, 10, 11, 7, 8]
    automaton = SuffixAutomaton()
    for token in [1, 2, 1, 2]:
        automaton.extend(token)
    assert automaton.copy(5) == [1, 2, 1, 2, 1]
    assert SuffixAutomaton().copy(3) == []


def test_the_latest_occurrence_is_copied():
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]:
        automaton.extend(token)
    assert automaton.predicted() == 4 and not automaton.unanimous


def test_time_per_token_does_not_grow():
    """Amortised constant: links followed and made per token over 20,000 tokens stay few."""
    generator = random.Random(0)
    automaton = SuffixAutomaton()
    for i in range(20_000):
        automaton.extend(generator.randrange(50) if i % 100 < 50 else i % 50)
    assert len(automaton._next) < 2 * 20_000 and sum(map(len, automaton._next)) < 3 * 20_000


def test_buckets_and_priors_are_ordered():
    assert [bucket(m) for m in (1, 2, 5, 6, 39, 40, 1000)] == [0, 1, 3, 4, 7, 8, 8]
    for priors in (GREEDY, SAMPLED):
        assert len(BUCKETS) == len(priors) and all(several <= alone for several, alone in priors)
        for column in (0, 1):
            values = [row[column] for row in priors]
            assert values == sorted(values) and values[0] > 0 and values[-1] < 1


def toy(rows):
    return Model("toy", ToyRunner(markov(rows), len(rows)), LetterTokenizer(len(rows)))


def test_a_text_that_repeats_raises_the_estimate_and_one_that_does_not_lowers_it():
    cycle = np.roll(np.eye(5), 1, axis=1) * 0.999 + 0.0002
    drafter = SuffixDrafter()
    seen = []
    with Engine(toy(cycle), drafter, FixedLength(4)) as engine:
        for step in engine.stream([1, 2, 3, 4], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)):
            texts = list(drafter._texts.values())
            seen += [texts[0].probability(3)] if texts else []
            assert step.num_accepted <= step.num_proposed
        assert engine.stats.tokens_per_step > 3 and seen[-1] > seen[0]
    noisy = SuffixDrafter()
    with Engine(Model("toy", ToyRunner(hashed(9, order=4), 9), LetterTokenizer(9)), noisy, FixedLength(4)) as engine:
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
        for _ in range(120):
            engine.step()
        (text,) = noisy._texts.values()
        assert text.probability(1) < 0.2
        engine.cancel(request)
        assert not noisy._texts  # forgotten with the request


def test_the_text_is_plain_decodings():
    target = hashed(9, seed=2, order=2)
    for seed in range(8):
        params = SamplingParams(max_tokens=60, seed=seed, temperature=0.4 * (seed % 3), ignore_eos=True)
        texts = []
        for drafter in (None, SuffixDrafter(), SuffixDrafter(min_match=3)):
            with Engine(Model("toy", ToyRunner(target, 9, num_slots=2), LetterTokenizer(9)), drafter, FixedLength(6)) as engine:
                texts.append([result.tokens for result in engine.generate([[3, 5, 3, 5], [1, 1]], params)])
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_match_length_that_is_none_is_refused(bad):
    with pytest.raises(InvalidParameter, match="min_match"):
        SuffixDrafter(min_match=bad)
