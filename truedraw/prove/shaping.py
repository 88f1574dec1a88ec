"""From logits to p, against the definition written out with sorted lists and loops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np

from truedraw import sampling
from truedraw.types import SamplingParams

_SLACK = sampling.BOUNDARY_SLACK
_STOP_IDS = (0,)


def first_fault() -> str | None:
    """The first parameters and logits for which `sampling.shape` differs from the definition by more than 1e-12."""
    for params in _settings():
        for logits, context, prompt_length in _rows():
            got = sampling.shape(logits, params, np.array(context, dtype=np.int32), prompt_length, stop_ids=_STOP_IDS)
            wanted = definition(logits, params, context, prompt_length)
            if max(abs(a - b) for a, b in zip(got, wanted, strict=True)) > 1e-12:
                changed = {field.name: getattr(params, field.name) for field in fields(params)}
                told = {name: value for name, value in changed.items() if value != getattr(SamplingParams(), name)}
                rounded = [np.round(row, 3).tolist() for row in (logits, got, wanted)]
                return f"{told} on logits {rounded[0]}: {rounded[1]}, not {rounded[2]}"
    return None


def definition(logits: Sequence[float], params: SamplingParams, context: Sequence[int], prompt_length: int) -> list[float]:
    """Penalties, bias, mask, temperature, top-k, top-p, min-p, one after the other, over the tokens."""
    vocab = range(len(logits))
    row = [float(x) for x in logits]
    output = list(context[prompt_length:])
    for token in vocab:
        if token in context:
            row[token] = row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        if token in output:
            row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        row[token] += params.logit_bias.get(token, 0.0)
        if token in _STOP_IDS and len(output) < params.min_tokens:
            row[token] = -math.inf
    best = max(row)
    if params.temperature == 0:
        return [float(token == row.index(best)) for token in vocab]
    weights = [math.exp((x - best) / params.temperature) for x in row]
    order = sorted(vocab, key=lambda token: (-weights[token], token))
    kept = order[: params.top_k] if params.top_k else order
    total, reached, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        reached += weights[token]
        if params.top_p < 1 and reached >= params.top_p * total * (1 - _SLACK):
            break
    kept = [token for token in nucleus if weights[token] >= params.min_p * weights[order[0]] * (1 - _SLACK)]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in vocab]


def _settings() -> Iterator[SamplingParams]:
    yield SamplingParams()
    yield SamplingParams(temperature=0)
    yield SamplingParams(temperature=0.3, top_k=3)
    yield SamplingParams(top_k=2)
    yield SamplingParams(top_p=0.8)
    yield SamplingParams(top_p=0)
    yield SamplingParams(top_p=0.5, temperature=1.7)
    yield SamplingParams(min_p=0.5)
    yield SamplingParams(top_k=4, top_p=0.9, min_p=0.1, temperature=0.6)
    yield SamplingParams(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4)
    yield SamplingParams(logit_bias={1: -100.0, 3: 2.0})
    yield SamplingParams(min_tokens=3, temperature=0.5)


def _rows() -> Iterator[tuple[list[float], list[int], int]]:
    named = [[0.3, 0.1, 0.1, 0.5], [0.25] * 4, [0.6, 0.3, 0.1, 0.0], [0.999, 0.001, 0.0, 0.0]]
    for probs in named:
        yield [math.log(x) if x else -math.inf for x in probs], [1, 3, 3], 1
    for seed in range(6):
        generator = np.random.default_rng(seed)
        logits = np.round(generator.normal(size=9) * 2, 1).tolist()
        yield logits, generator.integers(0, 9, size=7).tolist(), seed
