"""A local model as the reference: its rows, by teacher forcing, against the tokens that a server drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truedraw.audit.client import Abilities, Answer
from truedraw.audit.draws import SelfConsistency
from truedraw.audit.heads import Head, head_of
from truedraw.cache import CachedModel
from truedraw.registry import Model
from truedraw.sampling import shape
from truedraw.text.prompt import encode_prompt
from truedraw.types import Probs, SamplingParams

_NAMED = 24


ASSUMED = 0.03
"""The floor where the server tells no log-probabilities to measure it by."""

_MEASURED = 256  # tokens that the floor is measured on, before anything is bet
_MARGIN = 1.25


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

    def spelling(self, names: Sequence[str]) -> dict[str, str]:
        """Token ids, as heads here name them, to the texts that servers report."""
        return {name: self._model.tokenizer.token_bytes(int(name)).decode("utf-8", "replace") for name in names}

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
    return 0.5 * float(sum(map(abs, differences)) + abs(rest))


class Trust:
    """Evidence against a server whose rows should be within a floor of the reference's: the floor comes first.

    delta  the largest distance that was seen between what the server reports and the reference's rows, with a margin of a
           quarter, over the first tokens of plain answers where there are any
    """

    def __init__(self, reference: Reference, abilities: Abilities) -> None:
        self._reference, self._abilities = reference, abilities
        self.evidence = SelfConsistency()
        self._distances: list[float] = []
        self.delta: float | None = None if abilities.num_logprobs is not None and abilities.raw is not None else ASSUMED
        self.num_left_out = 0
        self.why_not = ""

    def add(self, on: Answer, off: Answer | None, prompt: str, settings: Mapping[str, Any]) -> None:
        if self.delta is None:
            self._measure(off if off is not None else on, prompt, settings)
            return
        forced = self._reference.forced(prompt, on, settings)
        if forced.why_not:
            self.num_left_out += 1
            self.why_not = forced.why_not
            return
        names = [head.names[head.drawn] if head is not None and head.drawn < len(head.names) else "" for head in forced.heads]
        tokens = tuple(replace(token, text=name) for token, name in zip(on.tokens, names, strict=True))
        self.evidence.add(replace(on, tokens=tokens), "", forced.heads, self.delta)

    def _measure(self, answer: Answer, prompt: str, settings: Mapping[str, Any]) -> None:
        forced = self._reference.forced(prompt, answer, settings)
        for token, own in zip(answer.tokens, forced.heads, strict=True):
            reported = head_of(token, settings, raw=bool(self._abilities.raw), digits=self._abilities.digits)
            if own is not None and reported is not None:
                apart = distance(reported, own, self._reference.spelling(own.names))
                self._distances += [] if apart is None else [apart]
        if len(self._distances) >= _MEASURED:
            self.delta = min(_MARGIN * max(self._distances), 0.5)

    @property
    def notes(self) -> tuple[str, ...]:
        told = []
        if self._distances:
            mean = sum(self._distances) / len(self._distances)
            told.append(
                f"floor measured on {len(self._distances)} tokens: TV {mean:.4f} on average, {max(self._distances):.4f} at most"
            )
        elif self.delta is not None:
            told.append(f"floor assumed, TV {self.delta:g}: the server tells nothing to measure it by")
        if self.num_left_out:
            told.append(f"{self.num_left_out} answers left out: {self.why_not}")
        return tuple(told)
