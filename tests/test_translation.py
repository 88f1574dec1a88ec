"""A draft model with another tokenizer: what is shared, what is read, the law of what is drafted, and refusals."""

import numpy as np
import pytest

from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.translation import LEAST_SHARE, PROBE, Translation, translated
from truedraw.engine import Engine
from truedraw.errors import IncompatibleModels
from truedraw.registry import Made, Model, make_drafter
from truedraw.runners.toy import ByteTokenizer, ToyRunner, hashed
from truedraw.types import SamplingParams


class Words:
    """A tokenizer by longest match. words: what each token stands for; control tokens are strings."""

    chat_template, bos_text, eos_text = None, "", ""

    def __init__(self, *words, begin=(), eos=()):
        self._words, self._begin = words, list(begin)
        self.vocab_size, self.eos_ids = len(words), frozenset(eos)

    def encode(self, text, *, add_special=True):
        content, found = text.encode(), list(self._begin) if add_special else []
        while content:
            fits = [i for i, word in enumerate(self._words) if isinstance(word, bytes) and content.startswith(word)]
            found.append(max(fits, key=lambda i: len(self._words[i])))
            content = content[len(self._words[found[-1]]) :]
        return found

    def token_bytes(self, token):
        word = self._words[token]
        return word if isinstance(word, bytes) else b""

    def token_text(self, token):
        word = self._words[token]
        return word if isinstance(word, bytes) else word.encode()


BYTES = [bytes([byte]) for byte in range(256)]
TARGET = Words("<s>", "</s>", b"a", b"b", b"ab", b"the ", b"\xf0\x9f", "<pad>")
DRAFT = Words("</s>", b"b", b"a", b"th", b"e", b" ", b"\xf0", b"<s>", "", "<start>", begin=[9])


def read(tokens, target=TARGET, draft=DRAFT):
    return Translation(target, draft).read(np.array(tokens, dtype=np.int32)).tolist()


def test_shared_tokens_stand_for_the_same_bytes_or_are_spelled_alike():
    """A control token is not the text that spells it: <s> of the target is not the draft model's word "<s>"."""
    translation = Translation(TARGET, DRAFT)
    assert translation.target_ids.tolist() == [1, 2, 3] and translation.draft_ids.tolist() == [0, 2, 1]


def test_texts_are_read_piece_by_piece_with_one_beginning():
    """B70: nothing is added at each reading; what no piece begins with is left out."""
    assert read([2, 3, 4, 5, 1]) == [9, 2, 1, 2, 1, 3, 4, 5, 0]
    assert read([6, 0, 7]) == [9, 6]
    assert read([]) == [9]
    marked = Words("<start>", b"a")
    assert read([0, 1], marked) == [9, 2] and read([1, 0], marked) == [9, 2, 9]


def test_a_longer_text_begins_as_its_beginning_does():
    generator = np.random.default_rng(0)
    translation = Translation(TARGET, DRAFT)
    text = generator.integers(0, TARGET.vocab_size, 60)
    whole = translation.read(text)
    for end in range(60):
        part = translation.read(text[:end])
        assert np.array_equal(part, whole[: len(part)])


def test_of_equal_words_the_last_counts():
    """SentencePiece has fallback bytes before its letters."""
    translation = Translation(Words(b"a"), Words(b"a", b"b", b"a"))
    assert translation.draft_ids.tolist() == [2]


def test_rows_hold_shared_tokens_only_and_the_rest_is_scaled_up():
    translation = Translation(TARGET, DRAFT)
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025]))
    row = translation.row(logits)
    assert np.isneginf(np.delete(row, [1, 2, 3])).all()
    assert translation.share(logits) == pytest.approx(0.6)
    runner = ToyRunner(lambda context: logits, 10)
    drafter = ModelDrafter(runner, TARGET.vocab_size, translation=translation)
    from test_contracts import request

    proposal = drafter.propose([request([2, 3], 3)])[0]
    assert len(proposal) == 3
    for i, token in enumerate(proposal.tokens):
        assert proposal.q.row(i, token, 8)[[1, 2, 3]] == pytest.approx([1 / 6, 1 / 2, 1 / 3])
    assert runner._cells[0][-1][:3] == (9, 2, 1), "the draft model reads its own ids, behind its own beginning"


def permuted(order):
    """The draft model of `hashed` with its tokens in another order, as another tokenizer of the same words would have them."""
    back = np.argsort(order)  # draft id -> target id

    def next_logits(context):
        return hashed(257, seed=3)(tuple(int(back[token]) for token in context))[back]

    return next_logits


@pytest.mark.parametrize("seed", [None, 5])
def test_a_permuted_vocabulary_of_equal_size_drafts_the_same(seed):
    """B70: sizes agree, ids do not. The same drafts, token for token, as with the target's own ids."""
    order = np.random.default_rng(1).permutation(257)  # target id -> draft id
    words = [*BYTES, "<end>"]
    tokenizer = Words(*[words[i] for i in np.argsort(order)], eos=[int(order[256])])
    target = Words(*words, eos=[256])
    params = SamplingParams(max_tokens=60, seed=11 if seed is None else seed, temperature=0.8)
    results = []
    for runner, translation in (
        (ToyRunner(hashed(257, seed=3), 257), None),
        (ToyRunner(permuted(order), 257), Translation(target, tokenizer)),
    ):
        drafter = ModelDrafter(runner, 257, translation=translation)
        model = Model("toy", ToyRunner(hashed(257, seed=3, blend=0.2), 257), target)
        with Engine(model, drafter, rule="coupled" if seed else "block") as engine:
            results.append(engine.generate(["some text"], params)[0])
    assert results[0].tokens == results[1].tokens and results[0].stats.accepted == results[1].stats.accepted > 10


def test_a_drafter_of_another_tokenizer_changes_no_text():
    """The toy target with a draft model that lacks a quarter of its bytes and has words that the target lacks."""
    lacking = Words(*BYTES[:192], b"the ", b" cat", "<end>", eos=[194])
    model = Model("toy", ToyRunner(hashed(257, sharpness=4.0), 257), ByteTokenizer())
    draft = Model("draft", ToyRunner(hashed(195), 195), lacking)
    told = []
    drafter = make_drafter("model", Made(model, draft, say=told.append))
    assert "draft has another tokenizer than toy: it drafts on 193 shared tokens" in told[0]
    params = SamplingParams(max_tokens=80, seed=2, ignore_eos=True)
    with Engine(model, drafter) as engine:
        drafted = engine.generate(["the cat sat"], params)[0]
        plain = engine.generate(["the cat sat"], params, max_draft=0)[0]
    assert drafted.tokens == plain.tokens and drafted.stats.proposed > 0


def test_too_little_in_common_is_told_with_its_share():
    target = Words(b"a", b"b")
    draft = ToyRunner(lambda context: np.zeros(257), 257)
    with pytest.raises(IncompatibleModels, match=r"toy has another tokenizer than two: they share 2 tokens, on which toy has 1%"):
        translated(target, ByteTokenizer(), draft, ("two", "toy"))
    with pytest.raises(IncompatibleModels, match="share 0 tokens, on which toy has 0%"):
        translated(Words(b"xyz"), ByteTokenizer(), draft, ("two", "toy"))
    assert LEAST_SHARE > 0.01


def test_the_share_is_that_of_the_rows_behind_a_text():
    """Rows of a model that gives 0.9 to the byte that follows in the probe, and 0.1 to a word that the target lacks."""
    text = PROBE.encode()

    def next_logits(context):
        row = np.full(257, -np.inf)
        row[[text[len(context) % len(text)], 256]] = np.log([0.9, 0.1])
        return row

    runner = ToyRunner(next_logits, 257, max_pass_size=50)
    words = Words(*BYTES, b"the ")
    assert translated(ByteTokenizer(), words, runner, ("toy", "words"))[1] == pytest.approx(0.9)
    assert not runner._cells[0], "what was fed to measure it is forgotten"


def test_trees_need_one_vocabulary():
    model = Model("toy", ToyRunner(hashed(257), 257), ByteTokenizer())
    draft = Model("draft", ToyRunner(hashed(256), 256), Words(*BYTES[::-1]))
    with pytest.raises(IncompatibleModels, match="target's tokenizer"):
        make_drafter("tree", Made(model, draft))
