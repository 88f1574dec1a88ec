"""Prompts by workload, from a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from truedraw.errors import PromptError
from truedraw.text.prompt import Prompt

WORDING = '{"workload": NAME, "prompt": TEXT or a list of chat messages}'


def shipped() -> Path:
    """The project's own workloads: beside this file where the package was installed, else in the checkout."""
    beside = Path(__file__).with_name("workloads.jsonl")
    return beside if beside.exists() else Path(__file__).parents[2] / "benchmarks" / "workloads.jsonl"


def read(path: Path, *, raw: bool) -> dict[str, list[Prompt]]:
    """The prompts of each workload, in order. Texts become user messages unless `raw`.

    Raises PromptError, naming the line, for anything that is not such a line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is no UTF-8 text (byte {error.start}): lines of JSON are needed") from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from None
    workloads: dict[str, list[Prompt]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            name, prompt = _line(line, f"{path}, line {number}")
            is_text = isinstance(prompt, str)
            workloads.setdefault(name, []).append([{"role": "user", "content": prompt}] if is_text and not raw else prompt)
    if not workloads:
        raise PromptError(f"{path} holds no prompts: lines like {WORDING} are needed")
    return workloads


def _line(line: str, place: str) -> tuple[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{place}: no JSON ({error}): {WORDING} is needed") from None
    name, prompt = (found.get("workload"), found.get("prompt")) if isinstance(found, dict) else (None, None)
    messages = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt)
    )
    if not isinstance(name, str) or not name or not (messages or (isinstance(prompt, str) and prompt)):
        raise PromptError(f"{place}: {WORDING} is needed")
    return name, prompt
