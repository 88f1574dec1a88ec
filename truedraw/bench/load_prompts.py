"""Prompts for a load generator: lines of text, or JSON lines with prompts or chat messages."""

from __future__ import annotations

import json
from itertools import chain, zip_longest
from typing import Any, TypeAlias

from truedraw.bench import workloads
from truedraw.errors import PromptError

Messages: TypeAlias = list[dict[str, Any]]
WORDING = '{"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'


def shipped() -> list[str | Messages]:
    """The project's own workloads, one prompt of each in turn: a short run has a bit of everything."""
    turns = zip_longest(*workloads.read(workloads.shipped(), raw=True).values())
    return [_prompt(prompt, "the project's workloads") for prompt in chain.from_iterable(turns) if prompt is not None]


def parse(text: str, name: str) -> list[str | Messages]:
    """The prompts of a file in order: JSON lines where the name ends in .jsonl, else a prompt in every line that is not blank.

    Raises PromptError, naming the line.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptError(f"{name} holds no prompts: give a text with one in each line, or a .jsonl of {WORDING}")
    if not name.lower().endswith(".jsonl"):
        return [line for _, line in lines]
    return [_from_json(line, f"{name}, line {number}") for number, line in lines]


def as_text(prompt: str | Messages) -> str:
    """For completions without a chat template: the contents of messages, a blank line between them. Raises PromptError."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) < len(contents):
        raise PromptError("a message whose content is no text cannot be sent with --raw: leave --raw out, or give texts")
    return "\n\n".join(texts)


def _from_json(line: str, place: str) -> str | Messages:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{place}: no JSON ({error}): {WORDING} is needed") from None
    if not isinstance(found, dict):
        raise PromptError(f"{place}: {WORDING} is needed")
    if "messages" not in found:
        return _prompt(found.get("prompt"), place)
    if not isinstance(found["messages"], list):
        raise PromptError(f"{place}: {WORDING} is needed")
    return _prompt(found["messages"], place)


def _prompt(given: object, place: str) -> str | Messages:
    """A text, or messages; these may stand under "prompt" too, as in the project's workloads."""
    if isinstance(given, str) and given.strip():
        return given
    if isinstance(given, list) and given and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in given):
        return [dict(each) for each in given]
    raise PromptError(f"{place}: {WORDING} is needed")
