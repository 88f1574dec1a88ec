"""A toy target and a draft model that resembles it: tables of logits over the last two tokens, and from logits to a law."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from truedraw.audit.planted.vocabulary import END, FIRST_HALF, SECOND_HALF, VOCAB
from truedraw.errors import InvalidParameter

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_CLASSES = 64
"""Tokens beyond the vocabulary share the classes that it leaves free."""
_SHARPNESS, _DRAFT_NOISE = 2.6, 0.9


@dataclass(frozen=True, slots=True)
class Settings:
    """What shapes the law of a token. top_k 0 keeps all; presence and frequency count the output, repetition also the prompt."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def without(self, names: tuple[str, ...]) -> Settings:
        """The fields of these names at their defaults."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self) if field.name in names}
        return replace(self, **defaults)


PLAIN = Settings()


class Model:
    """Logits of the target and of its draft model, (64, 64, VOCAB) each: by the classes of the last two tokens.

    kernel_tv  each row of the target is moved by exactly this total variation, as another kernel would move it
    """

    def __init__(self, seed: int = 0, kernel_tv: float = 0.0) -> None:
        if not 0 <= kernel_tv < 0.25:
            raise InvalidParameter("kernel_tv", kernel_tv, "0 <= kernel_tv < 0.25")
        generator = np.random.default_rng([seed, 20])
        shape = (_CLASSES, _CLASSES, VOCAB)
        base, noise = generator.normal(size=shape), generator.normal(size=shape)
        self.target = _with_marks(_SHARPNESS * base)
        self.draft = _with_marks(_SHARPNESS * base + _DRAFT_NOISE * noise)
        if kernel_tv:
            self.target = np.log(_moved(_softmax(self.target), kernel_tv, np.random.default_rng([seed, 21])))


def classes(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which row of the tables a token selects."""
    return np.where(tokens < VOCAB, tokens, VOCAB + tokens % (_CLASSES - VOCAB))


CLASS_OF: tuple[int, ...] = tuple(classes(np.arange(VOCAB + 256)).tolist())


def _with_marks(logits: Floats) -> Floats:
    """The end is rare everywhere; the second half of a character follows the first and hardly anything else."""
    words = np.logaddexp.reduce(logits[..., 1:SECOND_HALF], axis=-1)
    logits[..., END] = words - 5.5 + 0.3 * logits[..., END]
    logits[..., SECOND_HALF] = words - 9.0
    logits[:, FIRST_HALF, SECOND_HALF] = words[:, FIRST_HALF] + 4.0
    return logits


def _softmax(logits: Floats) -> Floats:
    weights: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _moved(p: Floats, distance: float, generator: np.random.Generator) -> Floats:
    """Each row gives up exactly `distance` of the mass of one half of its tokens to the other half, in proportion."""
    giver = generator.random(p.shape) < 0.5
    giver[..., 0], giver[..., 1] = True, False  # neither half is empty
    mass = (p * giver).sum(axis=-1, keepdims=True)
    giver ^= mass < 2 * distance
    mass = (p * giver).sum(axis=-1, keepdims=True)
    moved: Floats = np.where(giver, p * (1 - distance / mass), p * (1 + distance / (1 - mass)))
    return moved


def shape(logits: Floats, settings: Settings, output: Counts | None = None, seen: Counts | None = None) -> Floats:
    """The law: penalties, bias, temperature, top-k, top-p, min-p, in this order.

    logits  (..., VOCAB), as the table has them
    output  (..., VOCAB), how often each token is in the output; seen: in prompt and output. Needed with penalties only.
    """
    row = logits
    if settings.penalised:
        assert output is not None and seen is not None
        factor = np.where(seen > 0, settings.repetition_penalty, 1.0)
        row = np.where(row > 0, row / factor, row * factor)
        row = row - settings.presence_penalty * (output > 0) - settings.frequency_penalty * output
    if settings.logit_bias:
        row = row.copy()
        for token, bias in settings.logit_bias:
            row[..., token] += bias
    if settings.temperature == 0:
        greedy: Floats = np.eye(VOCAB)[row.argmax(axis=-1)]
        return greedy
    weights = _softmax(row / settings.temperature)
    if 0 < settings.top_k < VOCAB or settings.top_p < 1:
        weights = _heads(weights, settings)
    if settings.min_p > 0:
        weights = np.where(weights >= settings.min_p * weights.max(axis=-1, keepdims=True), weights, 0.0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _heads(weights: Floats, settings: Settings) -> Floats:
    """Top-k, then the smallest set of most likely tokens that holds top_p of what is left; at least one."""
    order = np.argsort(-weights, axis=-1, kind="stable")
    values = np.take_along_axis(weights, order, axis=-1)
    if 0 < settings.top_k < VOCAB:
        values[..., settings.top_k :] = 0.0
    before = np.cumsum(values, axis=-1) - values
    goal = settings.top_p * values.sum(axis=-1, keepdims=True)
    if settings.top_p < 1:
        values = np.where((before < goal) | (np.arange(VOCAB) == 0), values, 0.0)
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, values, axis=-1)
    return kept
