"""A draft model with another tokenizer: it drafts on the tokens that both vocabularies share, matched by their bytes.

Timor et al. 2025 (arXiv 2502.05202, "token-level intersection"). What the draft model gives other tokens is taken away
before anything is drawn, so that q is a law over the target's ids, and every rule judges it as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from truedraw.cache import CachedModel
from truedraw.errors import IncompatibleModels
from truedraw.protocols import ModelRunner, Tokenizer
from truedraw.types import Probs, TokenArray

LEAST_SHARE = 0.5
"""Of the draft model's mass, on shared tokens, in the mean over PROBE: with less it is refused."""

PROBE = (
    'The harbour was quiet when Anna opened the window. "How much is 17 + 25?" she asked; nobody answered.\n\n'
    'def total(items):\n    return sum(item.price for item in items)\n\n1. Boil the water.\n2. Add {"salt": 0.5}.\n'
)


class Translation:
    """Token ids of a target, as a draft model with another tokenizer reads and writes them.

    Two tokens are the same if they stand for the same bytes, or, for control tokens, are spelled the same. A token that
    the draft model lacks is read as the longest pieces of its bytes that the draft model has, from the left.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        ours, theirs = _tokens(target), _tokens(draft)
        shared = sorted((ours[text], theirs[text]) for text in ours.keys() & theirs.keys())
        self.target_vocab, self.draft_vocab = target.vocab_size, draft.vocab_size
        self.target_ids = np.array([pair[0] for pair in shared], dtype=np.int64)
        self.draft_ids = np.array([pair[1] for pair in shared], dtype=np.int64)
        pieces = {text.content: token for text, token in theirs.items() if not text.control}
        longest = max(map(len, pieces), default=0)
        known = dict(shared)
        read = [
            [known[token]] if token in known else list(_pieces(target.token_bytes(token), pieces, longest))
            for token in range(target.vocab_size)
        ]
        self._counts = np.array([len(part) for part in read])
        self._starts = np.cumsum(self._counts) - self._counts
        self._flat = np.array([token for part in read for token in part], dtype=np.int32)
        self._begin = np.array(draft.encode(""), dtype=np.int32)

    def read(self, tokens: TokenArray) -> TokenArray:
        """A text of the target in the draft model's ids, with what that wants at the start of a text. What a text
        begins with in the one, its beginning begins with in the other."""
        tokens = np.asarray(tokens)
        counts = self._counts[tokens]
        firsts = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(self._starts[tokens] - firsts, counts)
        read: TokenArray = self._flat[places]
        begins = len(self._begin) == 0 or np.array_equal(read[: len(self._begin)], self._begin)
        return read if begins else np.concatenate([self._begin, read])

    def row(self, logits: npt.NDArray[np.floating[Any]]) -> Probs:
        """A row of the draft model, (draft vocab,), over the target's ids, (target vocab,): -inf where none is shared."""
        row = np.full(self.target_vocab, -np.inf)
        row[self.target_ids] = logits[self.draft_ids]
        return row

    def share(self, logits: npt.NDArray[np.floating[Any]]) -> float:
        """Of a row's mass, (draft vocab,), on shared tokens."""
        weights = np.exp(logits - logits.max())
        return float(weights[self.draft_ids].sum() / weights.sum())


@dataclass(frozen=True, slots=True)
class _Text:
    """What a token stands for, or how a control token is spelled."""

    content: bytes
    control: bool = False


def _tokens(tokenizer: Tokenizer) -> dict[_Text, int]:
    """Ids by what they stand for: the last of several, which in SentencePiece is the word and not the fallback byte."""
    found = {}
    for token in range(tokenizer.vocab_size):
        content = tokenizer.token_bytes(token)
        text = _Text(content) if content else _Text(tokenizer.token_text(token), control=True)
        if text.content:
            found[text] = token
    return found


def _pieces(content: bytes, pieces: dict[bytes, int], longest: int) -> Iterator[int]:
    """The longest that fit, from the left; bytes that no piece begins with are left out."""
    start = 0
    while start < len(content):
        ends = range(min(len(content), start + longest), start, -1)
        end = next((end for end in ends if content[start:end] in pieces), None)
        if end is None:
            start += 1
            continue
        yield pieces[content[start:end]]
        start = end


def measured_share(translation: Translation, runner: ModelRunner, tokenizer: Tokenizer) -> float:
    """Of the draft model's mass behind each token of PROBE, on shared tokens, in the mean."""
    probe = np.array(tokenizer.encode(PROBE), dtype=np.int32)[: runner.max_length]
    model = CachedModel(runner)
    shares = []
    for end in range(0, len(probe), runner.max_rows):
        part = probe[: end + runner.max_rows]
        rows = model.logits([(0, part)], [len(part) - end])[0].logits
        shares += [translation.share(np.asarray(row)) for row in rows]
    model.forget(0)
    return float(np.mean(shares))


def translated(target: Tokenizer, draft: Tokenizer, runner: ModelRunner, names: tuple[str, str]) -> tuple[Translation, float]:
    """The translation, and the share of the draft model's mass that it keeps. names: of target and draft model.

    Raises IncompatibleModels where that is too little to draft on.
    """
    translation = Translation(target, draft)
    share = measured_share(translation, runner, draft) if len(translation.target_ids) else 0.0
    if share < LEAST_SHARE:
        raise IncompatibleModels(
            f"{names[1]} has another tokenizer than {names[0]}: they share {len(translation.target_ids):,} tokens, on which "
            f"{names[1]} has {share:.0%} of its mass, and at least {LEAST_SHARE:.0%} are needed: take a draft model with the "
            "target's vocabulary, or a closer one"
        )
    return translation, share
