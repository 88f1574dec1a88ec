"""From steps and results to the objects that OpenAI's clients read."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from truedraw.protocols import Tokenizer
from truedraw.types import Record, Result, Stats, Step, TokenLogprob

_LEAST = -9999.0
"""What is told for the logarithm of 0, which JSON does not have."""


class TokenTexts:
    """Token ids to what clients are shown of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.shown = functools.lru_cache(maxsize=1 << 16)(self._shown)

    def _shown(self, token: int) -> str:
        """Its text; a control token's spelling in the vocabulary; bytes that are no text as OpenAI writes them."""
        data = self._tokenizer.token_bytes(token)
        if not data:
            return self._tokenizer.token_text(token).decode("utf-8", "replace")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def text(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.bytes, tokens)).decode("utf-8", "replace")


def chat_logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts, num_top: int) -> dict[str, Any]:
    """choices[i].logprobs of /v1/chat/completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": texts.shown(token), "logprob": max(value, _LEAST), "bytes": list(texts.bytes(token))}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*top) for top in each.top[:num_top]]} for each in logprobs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """choices[i].logprobs of /v1/completions, piece by piece: offsets count the characters before."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts, self._num_top = texts, num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """Of these tokens, which follow those before. None: there is none, for a prompt's first token."""
        offsets = []
        for token, _ in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes(token)))
        return {
            "tokens": [self._texts.shown(token) for token, _ in tokens],
            "token_logprobs": [None if each is None else max(each.logprob, _LEAST) for _, each in tokens],
            "top_logprobs": [None if each is None else self._top(each) for _, each in tokens] if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, each: TokenLogprob) -> dict[str, float]:
        return {self._texts.shown(token): max(value, _LEAST) for token, value in each.top[: self._num_top]}


def traced_tokens(records: Sequence[Record], texts: TokenTexts, num_top: int) -> list[dict[str, Any]]:
    """What `speculation.trace` asks for: of each token where it came from, and p and q of it."""
    return [
        {
            "id": record.token,
            "text": texts.text([record.token]) or texts.shown(record.token),
            "bytes": list(texts.bytes(record.token)),
            "origin": record.origin,
            "p": record.p,
            "q": record.q,
            "top": [{"id": token, "text": texts.shown(token), "p": p} for token, p in record.top[:num_top]],
        }
        for record in records
    ]


def traced_step(step: Step) -> dict[str, Any]:
    return {
        "proposed": step.num_proposed,
        "accepted": step.num_accepted,
        "emitted": step.num_emitted,
        "seconds": step.seconds,
        "estimated_plain_seconds": step.plain_seconds,
    }


def statistics(results: Sequence[Result], drafter: str) -> dict[str, Any]:
    """The `speculation` of an answer: counts pooled over all its choices."""
    stats = sum((result.stats for result in results), Stats())
    drift = stats.drift
    return {
        "drafter": drafter,
        "rule": results[0].rule if results else None,
        "steps": stats.steps,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_by_depth": list(stats.acceptance_by_depth),
        "seconds": stats.seconds,
        "estimated_plain_seconds": stats.plain_seconds,
        "drift": None
        if drift is None
        else {"total_variation": drift.total_variation, "kl_divergence": drift.kl_divergence, "bound": drift.bound},
    }


def usage(results: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """results: of each prompt, its choices."""
    prompt = sum(choices[0].prompt_tokens for choices in results if choices)
    completion = sum(len(result.tokens) for choices in results for result in choices)
    cached = sum(choices[0].stats.cached + choices[0].stats.copied for choices in results if choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
