"""What a user may give as a prompt, and its token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from truedraw.errors import PromptError
from truedraw.protocols import Tokenizer
from truedraw.text.chat import render_chat

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (mappings with "role" and "content")."""


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, vocab_size: int) -> list[int]:
    """The token ids of a prompt. Raises PromptError if it is empty or holds an id that is not below vocab_size."""
    if isinstance(prompt, str):
        tokens = _encode_text(tokenizer, prompt) if prompt else []
    elif not isinstance(prompt, Sequence | np.ndarray):
        raise _no_prompt(prompt)
    elif len(prompt) and isinstance(prompt[0], Mapping):
        text = render_chat(tokenizer, prompt)  # type: ignore[arg-type]  # the first is a message, so all are
        bos = tokenizer.bos_text
        tokens = _encode_text(tokenizer, text, add_special=not (bos and text.startswith(bos)))
    else:
        tokens = [_token_id(token) for token in prompt]
    if not tokens:
        raise PromptError("the prompt is empty: at least one token is needed")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise PromptError(f"prompt token {token} is outside the vocabulary: ids in [0, {vocab_size - 1}]")
    return tokens


def _encode_text(tokenizer: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
    try:
        return tokenizer.encode(text, add_special=add_special)
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt holds a lone surrogate, {text[error.start]!r} at character {error.start}") from None


def _token_id(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise _no_prompt(token)
    return int(token)


def _no_prompt(value: object) -> PromptError:
    return PromptError(f"the prompt is or holds {value!r}: a text, a list of token ids or a list of chat messages is needed")
