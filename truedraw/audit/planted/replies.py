"""Pieces as the objects that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from truedraw.audit.planted.asked import Asked
from truedraw.audit.planted.choices import Piece, Told
from truedraw.audit.planted.vocabulary import VOCAB, shown, token_bytes

_SHOWN = tuple(shown(token) for token in range(VOCAB))
_CHARACTERS = tuple(sum(byte & 0xC0 != 0x80 for byte in token_bytes(token)) for token in range(VOCAB))
"""How many characters begin in each token."""


@dataclass(slots=True)
class Reply:
    """The parts of one answer, and the counts that it ends with.

    ids: whether token ids are told, where they are asked for
    """

    asked: Asked
    number: int
    model: str
    speculates: bool
    ids: bool
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    offsets: dict[int, int] = field(default_factory=dict)

    def count(self, piece: Piece) -> None:
        self.steps += 1
        self.proposed += piece.proposed
        self.accepted += piece.accepted
        self.emitted += len(piece.tokens)

    def whole(self, choices: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer that is not streamed: of each choice its pieces."""
        listed = []
        for index, pieces in enumerate(choices):
            for piece in pieces:
                self.count(piece)
            joined = Piece(
                "".join(piece.text for piece in pieces),
                tuple(token for piece in pieces for token in piece.tokens),
                tuple(told for piece in pieces for told in piece.logprobs),
                pieces[-1].finish,
                0,
                0,
            )
            said = {"message": {"role": "assistant", "content": joined.text}} if self.asked.chat else {"text": joined.text}
            listed.append(self._choice(index, joined, said))
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {**self._head(kind), "choices": listed, "usage": self.usage, "speculation": self.statistics, **self._prompt_ids()}

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that begins a choice of a chat."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **(self._prompt_ids() if not index else {})}

    def chunk(self, index: int, piece: Piece, *, first: bool, last: bool) -> dict[str, Any]:
        """first, last: of the whole answer."""
        self.count(piece)
        said = {"delta": {"content": piece.text} if piece.text else {}} if self.asked.chat else {"text": piece.text}
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        ends = {"speculation": self.statistics} if last else {}
        begins = self._prompt_ids() if first and not self.asked.chat else {}
        return {**self._head(kind), "choices": [self._choice(index, piece, said)], **begins, **ends}

    def last(self) -> dict[str, Any]:
        """The chunk that include_usage asks for."""
        return {
            **self._head("chat.completion.chunk" if self.asked.chat else "text_completion"),
            "choices": [],
            "usage": self.usage,
        }

    @property
    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self.emitted, "total_tokens": prompt + self.emitted}

    @property
    def statistics(self) -> dict[str, Any]:
        return {
            "drafter": "toy" if self.speculates else "none",
            "steps": self.steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "tokens_per_step": self.emitted / self.steps if self.steps else None,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        name = "chatcmpl" if self.asked.chat else "cmpl"
        return {"id": f"{name}-{self.number}", "object": kind, "created": 1_700_000_000, "model": self.model}

    def _prompt_ids(self) -> dict[str, Any]:
        if not (self.asked.ids and self.ids):
            return {}
        prompts = [list(prompt) for prompt in self.asked.prompts]
        return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}

    def _choice(self, index: int, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        told = self._logprobs(index, piece) if piece.logprobs else None
        ids = {"token_ids": list(piece.tokens)} if self.asked.ids and self.ids else {}
        return {"index": index, **said, "logprobs": told, "finish_reason": piece.finish, **ids}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        if self.asked.chat:
            return {"content": [_entry(told) for told in piece.logprobs], "refusal": None}
        offsets = []
        for token in piece.tokens:
            offsets.append(self.offsets.get(index, 0))
            self.offsets[index] = offsets[-1] + _CHARACTERS[token]
        return {
            "tokens": [_SHOWN[told.token] for told in piece.logprobs],
            "token_logprobs": [told.value for told in piece.logprobs],
            "top_logprobs": [{_SHOWN[token]: value for token, value in told.top} for told in piece.logprobs]
            if self.asked.num_logprobs
            else None,
            "text_offset": offsets,
        }


def _entry(told: Told) -> dict[str, Any]:
    return {**_one(told.token, told.value), "top_logprobs": [_one(token, value) for token, value in told.top]}


def _one(token: int, value: float) -> dict[str, Any]:
    return {"token": _SHOWN[token], "logprob": value, "bytes": list(token_bytes(token))}
