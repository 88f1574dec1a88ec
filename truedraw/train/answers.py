"""A target's own answers to made-up prompts: the data that modules learn from (self-distillation)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from truedraw import kernels
from truedraw.cache import CachedModel, TokenBuffer
from truedraw.errors import PromptError, RunError
from truedraw.protocols import ModelRunner, Rows, SideBySide, TextBatch
from truedraw.registry import Model
from truedraw.sampling import inverse_cdf
from truedraw.text.prompt import encode_prompt
from truedraw.train import prompts
from truedraw.train.store import Answer
from truedraw.types import Probs, TokenArray

LONGEST = 192
"""Tokens of an answer; the shortest limit is a third of it, so that beginnings weigh as much as they do in use."""

GREEDY_SHARE = 0.15
"""Of the answers that are greedy: others are sampled at temperature 1. Greedy texts loop, and loops are quickly learned."""

HELD_OUT_SHARE = 0.06
_MOST_REFUSED = 1000
_STREAM = 7  # keeps an answer's draws apart from what its prompt was made of


@dataclass(slots=True, eq=False)
class _Running:
    """One answer while it is made."""

    prompt: int
    asked: prompts.TrainingPrompt
    held_out: bool
    greedy: bool
    context: TokenBuffer
    limit: int
    generator: np.random.Generator
    states: list[np.ndarray] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def answer(self) -> Answer:
        tokens, norms = np.array(self.tokens, np.int32), np.array(self.norms, np.float32)
        return Answer(self.prompt, self.asked.kind, self.held_out, np.stack(self.states), tokens, norms)


def is_held_out(index: int) -> bool:
    """Whether prompt `index` is: one in 1 / HELD_OUT_SHARE."""
    return index % round(1 / HELD_OUT_SHARE) == 1


def answers(model: Model, seed: int, first: int, mass: Probs) -> Iterator[Answer]:
    """The answers to prompts `first`, `first + 1`, ... of a seed, as they are done, without end.

    As many at a time as the runner takes. Each text depends on its own prompt and draws alone, as far as the rows do.
    mass: (vocab,), to which every row is added. Raises what the runner raises.
    """
    texts = _together(model.runner)
    running: dict[int, _Running] = {}
    index = first
    while True:
        free = [place for place in range(texts.num_texts) if place not in running]
        if len(free) >= min(texts.refill, texts.num_texts):
            begun: list[_Running] = []
            refused = 0
            while len(begun) < len(free):
                made = _begin(model, seed, index)
                index += 1
                refused = refused + 1 if made is None else 0
                if refused == _MOST_REFUSED:
                    raise RunError(f"{refused} prompts in a row are longer than {model.name}'s {model.runner.max_length} tokens")
                begun += [] if made is None else [made]
            texts.begin(free, [text.context.array[:-1] for text in begun])
            running |= dict(zip(free, begun, strict=True))
        places = sorted(running)  # slots of a cache are read in one piece only in their own order
        rows = texts.step(places, np.array([running[place].context.array[-1] for place in places]))
        for place, logits, state in zip(places, rows.logits, rows.hidden["final"], strict=True):
            text = running[place]
            token = _draw(np.asarray(logits), np.asarray(state), text, mass)
            text.context.extend([token])
            full = len(text.context) >= model.runner.max_length
            if token in model.tokenizer.eos_ids or len(text.tokens) == text.limit or full:
                yield running.pop(place).answer()


def _together(runner: ModelRunner) -> TextBatch:
    """The runner's own way to generate many texts at once, or its slots."""
    made = runner.side_by_side() if isinstance(runner, SideBySide) else None
    return _Slots(runner) if made is None else made


class _Slots:
    """A TextBatch of a runner's slots."""

    refill = 1

    def __init__(self, runner: ModelRunner) -> None:
        self.num_texts = min(runner.num_slots, runner.max_rows)
        self._target = CachedModel(runner)
        self._contexts = [TokenBuffer() for _ in range(self.num_texts)]

    def begin(self, places: Sequence[int], texts: Sequence[TokenArray]) -> None:
        for place, tokens in zip(places, texts, strict=True):
            self._contexts[place] = TokenBuffer(tokens)
            self._target.adopt(place, tokens)
            self._target.logits([(place, tokens)], [0])

    def step(self, places: Sequence[int], tokens: TokenArray) -> Rows:
        for place, token in zip(places, tokens.tolist(), strict=True):
            self._contexts[place].extend([token])
        asked = [(place, self._contexts[place].array) for place in places]
        rows = self._target.logits(asked, [1] * len(asked), hidden=[("final",)] * len(asked))
        states = np.stack([np.asarray(row.hidden["final"][0]) for row in rows])
        return Rows(np.stack([np.asarray(row.logits[0]) for row in rows]), {"final": states})


def _begin(model: Model, seed: int, index: int) -> _Running | None:
    """None for a prompt that does not fit."""
    held_out = is_held_out(index)
    generator = np.random.default_rng((seed, index, _STREAM))
    asked = prompts.make(seed, index, held_out=held_out, chat=model.tokenizer.chat_template is not None)
    limit = int(generator.integers(LONGEST // 3, LONGEST + 1))
    greedy = bool(generator.random() < GREEDY_SHARE) and not held_out
    try:
        tokens = encode_prompt(model.tokenizer, asked.prompt, model.runner.vocab_size)
    except PromptError:
        return None
    if not 1 < len(tokens) < model.runner.max_length - 1:
        return None
    return _Running(index, asked, held_out, greedy, TokenBuffer(tokens), limit, generator)


def _draw(logits: np.ndarray, state: np.ndarray, text: _Running, mass: Probs) -> int:
    """Draw the next token, and keep what it was drawn from."""
    best = float(logits.max())
    weights = kernels.soften(logits, best, 1.0)
    masses = kernels.block_sums(weights)
    total = kernels.total(masses)
    mass += weights / total
    token = int(logits.argmax()) if text.greedy else inverse_cdf(weights, text.generator.random(), masses)
    text.states.append(state.astype(np.float16))
    text.norms.append(best + math.log(total))
    text.tokens.append(token)
    return token
