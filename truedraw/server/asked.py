"""One request over HTTP: what it asked for, and the shape of what it is told."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from truedraw.server.replies import (
    CompletionLogprobs,
    TokenTexts,
    chat_logprobs,
    statistics,
    traced_step,
    traced_tokens,
    usage,
)
from truedraw.types import Record, Result, Step, TokenLogprob


@dataclass(slots=True, eq=False)
class Asked:
    """Turns steps and results of the prompts of one request into chunks, or into one answer.

    chat       /v1/chat/completions, else /v1/completions
    num_logprobs  None: none wanted
    trace      None: not wanted; else alternatives told with each token
    echoes     the text of each prompt, where it is to be repeated
    """

    chat: bool
    model: str
    texts: TokenTexts
    prompts: Sequence[Sequence[int]]
    num_choices: int
    drafter: str
    num_logprobs: int | None = None
    trace: int | None = None
    token_ids: bool = False
    include_usage: bool = False
    echoes: Sequence[str] | None = None
    id: str = ""
    created: int = 0
    results: list[tuple[Result, ...]] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self.results = [()] * len(self.prompts)

    # ------------------------------------------------------------ one answer

    def answer(self, steps: Sequence[tuple[int, Step]]) -> dict[str, Any]:
        """Once all have ended. steps: of each prompt, as they came; kept only where a trace is wanted."""
        choices = []
        for place, results in enumerate(self.results):
            for result in results:
                choice = self._choice(place * self.num_choices + result.choice, result.finish_reason)
                text = (self.echoes[place] if self.echoes else "") + result.text
                if self.chat:
                    choice["message"] = {"role": "assistant", "content": text, "refusal": None}
                else:
                    choice["text"] = text
                choice["logprobs"] = self._told(choice["index"], place, result.records, result.prompt_logprobs, first=True)
                if self.token_ids:
                    choice["token_ids"] = list(result.tokens)
                if self.trace is not None:
                    own = [step for at, step in steps if at == place and step.choice == result.choice]
                    choice["speculation"] = {
                        "steps": [traced_step(step) for step in own],
                        "tokens": traced_tokens(result.records, self.texts, self.trace),
                    }
                choices.append(choice)
        return {
            **self._envelope(chunk=False),
            "choices": choices,
            "usage": usage(self.results),
            **self._last(),
            **self._prompt_ids(),
        }

    # ------------------------------------------------------------ in chunks

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any step: the role of each choice, as OpenAI's clients expect it."""
        if not self.chat:
            return []
        choices = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for i in range(len(self.prompts) * self.num_choices)
        ]
        return [{**self._envelope(chunk=True), "choices": [choice], **self._prompt_ids()} for choice in choices]

    def chunk(self, place: int, step: Step) -> dict[str, Any] | None:
        """Of a step of a prompt's choice; None where it has nothing to tell."""
        index = place * self.num_choices + step.choice
        first = index not in self._begun
        text = step.text
        if first and self.echoes:
            text = self.echoes[place] + text
        told = step.tokens or text or step.finish_reason or (first and self.echoes)
        if not told and self.trace is None:
            return None
        self._begun.add(index)
        choice = self._choice(index, step.finish_reason)
        if self.chat:
            choice["delta"] = {"content": text} if text or not step.finish_reason else {}
        else:
            choice["text"] = text
        choice["logprobs"] = self._told(index, place, step.records, step.prompt_logprobs, first=first)
        if self.token_ids:
            choice["token_ids"] = list(step.tokens)
        if self.trace is not None:
            choice["speculation"] = {
                "step": traced_step(step),
                "tokens": traced_tokens(step.records, self.texts, self.trace),
            }
        own = {"prompt_token_ids": list(self.prompts[place])} if self.token_ids and first and not self.chat else {}
        return {**self._envelope(chunk=True), "choices": [choice], **own}

    def closing(self, last: dict[str, Any]) -> list[dict[str, Any]]:
        """The last chunk, with the statistics, and the usage if it was asked for."""
        chunks = [{**last, **self._last()}]
        if self.include_usage:
            chunks.append({**self._envelope(chunk=True), "choices": [], "usage": usage(self.results)})
        return chunks

    # ------------------------------------------------------------ parts

    def _envelope(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        envelope = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None}
        return {**envelope, "usage": None} if chunk and self.include_usage else envelope

    def _choice(self, index: int, reason: str | None) -> dict[str, Any]:
        return {"index": index, "finish_reason": reason}

    def _told(
        self, index: int, place: int, records: Sequence[Record], prompt: Sequence[TokenLogprob], *, first: bool
    ) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        logprobs = [record.logprob for record in records if record.logprob is not None]
        if self.chat:
            return chat_logprobs(logprobs, self.texts, self.num_logprobs)
        pieces = self._logprobs.setdefault(index, CompletionLogprobs(self.texts, self.num_logprobs))
        tokens: list[tuple[int, TokenLogprob | None]] = [(each.token, each) for each in logprobs]
        if first and self.echoes is not None:
            tokens = [(self.prompts[place][0], None), *((each.token, each) for each in prompt), *tokens]
        return pieces.piece(tokens)

    def _prompt_ids(self) -> dict[str, Any]:
        if not self.token_ids:
            return {}
        return {
            "prompt_token_ids": list(self.prompts[0]) if len(self.prompts) == 1 else [list(prompt) for prompt in self.prompts]
        }

    def _last(self) -> dict[str, Any]:
        return {"speculation": statistics([result for results in self.results for result in results], self.drafter)}
