"""A local model as the reference: its rows, by teacher forcing, against the tokens that a server drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from truedraw.audit.client import Answer
from truedraw.audit.heads import Head
from truedraw.cache import CachedModel
from truedraw.registry import Model
from truedraw.sampling import shape
from truedraw.text.prompt import encode_prompt
from truedraw.types import Probs, SamplingParams

_NAMED = 24


@dataclass(frozen=True, slots=True)
class Forced:
    """The rows of an answer's tokens, or why there are none."""

    heads: tuple[Head | None, ...]
    why_not: str = ""


class Reference:
    """Rows of a local model. Tokens are found by their ids, or by the text of the answer where it splits in one way only."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cached = CachedModel(model.runner)

    def forced(self, prompt: str, answer: Answer, settings: Mapping[str, Any]) -> Forced:
        """Heads of the model's own rows for each token of the answer, sampling parameters applied."""
        before = encode_prompt(self._model.tokenizer, prompt, self._model.runner.vocab_size)
        ids = self._ids(prompt, before, answer)
        if ids is None:
            return Forced((None,) * len(answer.tokens), "its tokens cannot be told from its text")
        if len(before) + len(ids) > self._model.runner.max_length:
            return Forced((None,) * len(answer.tokens), "it is longer than the reference's context")
        whole = np.array([*before, *ids], dtype=np.int32)
        (rows,) = self._cached.logits([(0, whole[:-1])], [len(ids)])
        params = SamplingParams(**{name: value for name, value in settings.items() if name not in ("seed", "n")})
        heads: list[Head | None] = []
        for i, token in enumerate(ids):
            law = shape(rows.logits[i], params, whole[: len(before) + i], len(before))
            heads.append(self._head(law, token))
        return Forced(tuple(heads))

    def _head(self, law: Probs, token: int) -> Head:
        ids = np.argsort(-law, kind="stable")[:_NAMED]
        names = tuple(str(int(each)) for each in ids)
        probs = np.append(law[ids], max(1.0 - float(law[ids].sum()), 0.0))
        place = np.flatnonzero(ids == token)
        return Head(names, probs / probs.sum(), int(place[0]) if len(place) else len(names), 0.0)

    def _ids(self, prompt: str, before: Sequence[int], answer: Answer) -> list[int] | None:
        keys = [token.key for token in answer.tokens]
        if keys and all(isinstance(key, int) and 0 <= key < self._model.runner.vocab_size for key in keys):
            return [int(key) for key in keys]
        if not answer.text or answer.finish == "stop":
            return None  # what ended it is not in the text
        whole = encode_prompt(self._model.tokenizer, prompt + answer.text, self._model.runner.vocab_size)
        ids = whole[len(before) :]
        spelled = b"".join(map(self._model.tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        fits = whole[: len(before)] == list(before) and spelled == answer.text
        return ids if fits and (not answer.told or len(ids) == len(keys)) else None


def distance(reported: Head, own: Head, spell: Mapping[str, str]) -> float | None:
    """The total variation between what a server reports of a token and the reference's row, over the tokens that both name
    and the rest; None where they share none. spell: the reference's names to the report's."""
    theirs = dict(zip(reported.names, reported.probs[:-1].tolist(), strict=True))
    ours = {spell.get(name, name): p for name, p in zip(own.names, own.probs[:-1].tolist(), strict=True)}
    shared = [name for name in theirs if name in ours]
    if not shared:
        return None
    differences = [theirs[name] - ours[name] for name in shared]
    rest = -sum(differences)
    return 0.5 * (sum(map(abs, differences)) + abs(rest))
