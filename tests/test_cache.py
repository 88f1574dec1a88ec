import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from truedraw.cache import CachedModel, TokenBuffer, common_prefix
from truedraw.errors import RollbackUnsupported, RunnerError
from truedraw.runners.toy import ToyRunner, hashed

VOCAB = 5
NEXT = hashed(VOCAB, order=3)


def tokens(*values):
    return np.array(values, dtype=np.int32)


def fresh(text, last):
    return np.array([NEXT(tuple(text[: len(text) - last + 1 + i])) for i in range(last)]).reshape(last, VOCAB)


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of questions, whatever the slots held before, gets the rows of a fresh model."""

    def __init__(self):
        super().__init__()
        self.model = CachedModel(ToyRunner(NEXT, VOCAB, num_slots=2, max_length=40, max_pass_size=12))
        self.texts = [[1], [2]]

    @rule(
        slot=st.integers(0, 1),
        keep=st.integers(1, 30),
        more=st.lists(st.integers(0, VOCAB - 1), max_size=9),
        last=st.integers(0, 4),
    )
    def ask(self, slot, keep, more, last):
        text = (self.texts[slot][:keep] + more)[:40]
        last = min(last, len(text))
        rows = self.model.logits([(slot, tokens(*text))], [last])[0]
        np.testing.assert_allclose(rows.logits, fresh(text, last))
        assert list(self.model.held(slot)) == text
        self.texts[slot] = text

    @rule(more=st.tuples(*[st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)] * 2))
    def ask_both(self, more):
        texts = [(text[:20] + extra) for text, extra in zip(self.texts, more, strict=True)]
        rows = self.model.logits([(slot, tokens(*text)) for slot, text in enumerate(texts)], [1, 1])
        for text, row in zip(texts, rows, strict=True):
            np.testing.assert_allclose(row.logits, fresh(text, 1))
        self.texts = texts

    @rule(slot=st.integers(0, 1), bad=st.integers(VOCAB, 9))
    def fail(self, slot, bad):
        """A pass that raises in its middle leaves a cache that is still what it is said to be."""
        with pytest.raises(RunnerError, match="vocabulary"):
            self.model.logits([(slot, tokens(*self.texts[slot][:20], 1, bad))], [1])
        held = list(self.model.held(slot))
        assert held == self.texts[slot][: len(held)]

    @rule(slot=st.integers(0, 1))
    def tree(self, slot):
        text = self.texts[slot][:20]
        nodes, parents = [0, 1, 2, 3], (-1, -1, 0, 2)
        rows = self.model.logits([(slot, tokens(*text, *nodes))], [5], [parents])[0]
        paths = [(), (0,), (1,), (0, 2), (0, 2, 3)]
        np.testing.assert_allclose(rows.logits, [NEXT((*text, *path)) for path in paths])
        self.texts[slot] = text


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True)
TestCache = CacheMachine.TestCase


def test_only_what_lacks_is_fed():
    runner = ToyRunner(NEXT, VOCAB)
    model = CachedModel(runner)
    model.logits([(0, tokens(1, 2, 3, 4))], [1])
    assert runner.num_fed == 4
    model.logits([(0, tokens(1, 2, 3, 4, 0, 1))], [2])  # two drafts
    assert runner.num_fed == 6
    model.logits([(0, tokens(1, 2, 3, 4, 0, 3))], [1])  # the second was rejected
    assert runner.num_fed == 7


def test_a_pass_that_is_too_large_goes_in_parts():
    runner = ToyRunner(NEXT, VOCAB, max_pass_size=4)
    rows = CachedModel(runner).logits([(0, tokens(*[1, 2, 3] * 5))], [3])[0]
    np.testing.assert_allclose(rows.logits, fresh([1, 2, 3] * 5, 3))
    assert runner.num_passes == 4


def test_a_model_that_cannot_roll_back_starts_anew():
    runner = ToyRunner(NEXT, VOCAB, can_rollback=False)
    model = CachedModel(runner)
    model.logits([(0, tokens(1, 2, 3))], [1])
    rows = model.logits([(0, tokens(1, 2, 4))], [1])[0]
    np.testing.assert_allclose(rows.logits, fresh([1, 2, 4], 1))
    assert runner.num_fed == 6
    with pytest.raises(RollbackUnsupported):
        runner.rollback(0, 1)


def test_the_toy_cache_fails_loudly():
    runner = ToyRunner(NEXT, VOCAB, max_length=4)
    with pytest.raises(RunnerError, match="holds 0"):
        runner.rollback(0, 1)
    with pytest.raises(RunnerError, match="4 fit"):
        CachedModel(runner).logits([(0, tokens(1, 1, 1, 1, 1))], [1])


def test_common_prefix():
    assert common_prefix(tokens(1, 2, 3), tokens(1, 2, 4, 5)) == 2
    assert common_prefix(tokens(), tokens(1)) == 0
    assert common_prefix(tokens(1, 2), tokens(1, 2, 3)) == 2
    assert common_prefix(tokens(2), tokens(1)) == 0


def test_token_buffers_grow_and_shrink_and_hand_out_read_only_views():
    buffer = TokenBuffer([1, 2])
    buffer.extend(range(200))
    buffer.truncate(4)
    buffer.extend([9])
    assert list(buffer.array) == [1, 2, 0, 1, 9] and len(buffer) == 5
    with pytest.raises(ValueError, match="read-only"):
        buffer.array[0] = 3
