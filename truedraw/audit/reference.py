"""A local model as the reference: its rows, by teacher forcing, against the tokens that a server drew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truedraw.audit.client import Abilities, Answer, Token
from truedraw.audit.draws import SelfConsistency
from truedraw.audit.heads import Head, head_of
from truedraw.cache import CachedModel
from truedraw.registry import Model
from truedraw.sampling import shape
from truedraw.text.prompt import encode_prompt
from truedraw.types import Probs, SamplingParams

_NAMED = 24


ASSUMED = 0.12
"""The floor where the server tells no log-probabilities to measure it by: engines that read the same file were up to TV 0.1 apart
(docs/audits/openvino.md)."""

_MEASURED = 256  # tokens that the floor is measured on, before anything is bet
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Forced:
    """The rows of an answer's tokens, or why there are none. logprobs: of the tokens, natural logarithms."""

    heads: tuple[Head | None, ...]
    why_not: str = ""
    logprobs: tuple[float, ...] = ()


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
        logprobs: list[float] = []
        for i, token in enumerate(ids):
            law = shape(rows.logits[i], params, whole[: len(before) + i], len(before))
            heads.append(self._head(law, token))
            logprobs.append(math.log(max(float(law[token]), 1e-30)))
        return Forced(tuple(heads), "", tuple(logprobs))

    def scored(self, prompt: str, answer: Answer) -> Answer:
        """The answer with what this model's rows at temperature 1 say of its tokens, for a server that tells no
        log-probabilities; as it was where its tokens cannot be told. It depends on prompt and answer alone."""
        forced = self.forced(prompt, answer, {"temperature": 1})
        if forced.why_not or len(forced.heads) != len(answer.tokens):
            return answer
        tokens = []
        for token, head, logprob in zip(answer.tokens, forced.heads, forced.logprobs, strict=True):
            assert head is not None
            name = head.names[head.drawn] if head.drawn < len(head.names) else ""
            tokens.append(Token(token.key, name, logprob, ((head.names[0], math.log(head.probs[0])),)))
        return replace(answer, tokens=tuple(tokens))

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
        keys = [] if answer.num_silent else [token.key for token in answer.tokens]
        if keys and all(isinstance(key, int) and 0 <= key < self._model.runner.vocab_size for key in keys):
            return [int(key) for key in keys]
        if not answer.text or answer.finish == "stop":
            return None  # what ended it is not in the text
        whole = encode_prompt(self._model.tokenizer, prompt + answer.text, self._model.runner.vocab_size)
        ids = whole[len(before) :]
        spelled = b"".join(map(self._model.tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        fits = whole[: len(before)] == list(before) and spelled == answer.text
        return ids if fits and (not keys or not answer.told or self.splits(answer, ids)) else None

    def splits(self, answer: Answer, ids: Sequence[int]) -> bool:
        """Whether the tokens that were reported have the texts of these."""
        told = [token.text for token in answer.tokens]
        spelled = [self._model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        return len(told) == len(spelled) and all(a == b or "\ufffd" in a or not a for a, b in zip(told, spelled, strict=True))

    def by_text(self, prompt: str, answer: Answer) -> bool | None:
        """Whether the answer's text alone, split again, would give the tokens that were drawn; None: nobody can tell."""
        if answer.num_silent or not answer.told or not answer.text or answer.finish == "stop":
            return None
        before = encode_prompt(self._model.tokenizer, prompt, self._model.runner.vocab_size)
        whole = encode_prompt(self._model.tokenizer, prompt + answer.text, self._model.runner.vocab_size)
        return whole[: len(before)] == list(before) and self.splits(answer, whole[len(before) :])


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
           quarter, over the first tokens of plain answers where there are any; and, for answers whose tokens are found
           by their text, the share of plain ones where that gave others than were drawn
    """

    def __init__(self, reference: Reference, abilities: Abilities) -> None:
        self._reference, self._abilities = reference, abilities
        self.evidence = SelfConsistency()
        self._distances: list[float] = []
        self._split_again = [0, 0]
        """Plain answers whose text, split again, gave other tokens; and those where one could tell."""
        self.delta: float | None = None if abilities.num_logprobs is not None and abilities.raw is not None else ASSUMED
        self._by_text = False
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
        tokens = tuple(Token(name, name) for name in names)
        if on.num_silent or not all(isinstance(token.key, int) for token in on.tokens):
            self._by_text = True
        self.evidence.add(replace(on, tokens=tokens), "", forced.heads, self.floor or 0.0)

    @property
    def floor(self) -> float | None:
        """The total variation that the null allows; None: not measured yet."""
        wrong, told = self._split_again
        share = wrong / told if told and self._by_text else 0.0
        return None if self.delta is None else min(self.delta + share, 0.9)

    def _measure(self, answer: Answer, prompt: str, settings: Mapping[str, Any]) -> None:
        forced = self._reference.forced(prompt, answer, settings)
        paired = not answer.num_silent and len(answer.tokens) == len(forced.heads)  # else nobody knows whose a report is
        for token, own in zip(answer.tokens, forced.heads, strict=True) if paired else ():
            reported = head_of(token, settings, raw=bool(self._abilities.raw), digits=self._abilities.digits)
            if own is not None and reported is not None:
                apart = distance(reported, own, self._reference.spelling(own.names))
                self._distances += [] if apart is None else [apart]
        same = self._reference.by_text(prompt, answer)
        if same is not None:
            self._split_again = [self._split_again[0] + (not same), self._split_again[1] + 1]
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
        if self._split_again[0]:
            wrong, known = self._split_again
            told.append(
                f"{wrong} of {known} plain answers split into other tokens than were drawn: allowed for where ids are not told"
            )
        if self.num_left_out:
            told.append(f"{self.num_left_out} answers left out: {self.why_not}")
        return tuple(told)
