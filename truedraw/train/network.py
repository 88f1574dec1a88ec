"""The module of drafters/mtp_modules.py in torch, and what it learns by: functions of its weights.

Depth d at position i reads the state that depth d - 1 made of position i - 1, and the token behind position i; depth 1 reads
the target's own. Its attention sees what it will see in use: the entries of target states up to the one that the chain
began at, and the chain's own entries since ("training-time test", EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from truedraw.drafters.mtp_modules import MATRICES, MtpShape

Weights: TypeAlias = Mapping[str, Tensor]
"""By the names of MtpShape.shapes."""


def first_weights(shape: MtpShape, scale: Tensor, seed: int) -> dict[str, Tensor]:
    """scale: (width,) the spread of the target's states, which the module's own begin with."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in shape.shapes().items():
        if name in MATRICES:
            start = torch.randn(size, generator=generator) * (size[1] ** -0.5)
            start *= 0.2 if name in ("attention_out", "down") else 1.0  # the block begins near the identity
        else:
            start = scale.clone() if name == "norm_out" else torch.ones(size)
        weights[name] = start.requires_grad_()
    return weights


def unrolled(shape: MtpShape, weights: Weights, states: Tensor, embeddings: Tensor, depths: int) -> list[Tensor]:
    """states, embeddings: (texts, n, width), of the target and of the tokens behind it. For each depth the module's
    own states, (texts, n, width): those of depth d count from position d - 1 on."""
    texts, length, _ = states.shape
    positions = torch.arange(length)
    cosines, sines = _turns(shape, positions)
    first_key, first_value = shape.heads, shape.heads + shape.kv_heads
    normed = _norm(embeddings, weights["norm_embedding"], shape.epsilon)
    chains: list[tuple[Tensor, Tensor]] = []  # keys and values of each depth
    made: list[Tensor] = []
    below = states
    for _ in range(depths):
        x = torch.cat([_norm(below, weights["norm_state"], shape.epsilon), normed], dim=-1) @ weights["join"].T
        rows = _norm(x, weights["norm_attention"], shape.epsilon) @ weights["query_key_value"].T
        heads = rows.view(texts, length, -1, shape.head_size).transpose(1, 2)
        turned = _turned(heads[:, :first_value], cosines, sines)
        chains.append((turned[:, first_key:], heads[:, first_value:]))
        x = x + _attention(shape, turned[:, :first_key], chains, positions) @ weights["attention_out"].T
        both = _norm(x, weights["norm_mlp"], shape.epsilon) @ weights["gate_up"].T
        x = x + (functional.silu(both[..., : shape.inner]) * both[..., shape.inner :]) @ weights["down"].T
        made.append(_norm(x, weights["norm_out"], shape.epsilon))
        below = functional.pad(made[-1][:, :-1], (0, 0, 1, 0))  # the next depth reads the state of the position before
    return made


def _attention(shape: MtpShape, queries: Tensor, chains: list[tuple[Tensor, Tensor]], positions: Tensor) -> Tensor:
    """(texts, n, width). Depth d at position i: entries of depth 1 up to i - d + 1, and of depth e at i - d + e."""
    texts, heads, length, size = queries.shape
    depth = len(chains)
    keys, values = chains[0]
    grouped = queries.reshape(texts, shape.kv_heads, heads // shape.kv_heads, length, size) * size**-0.5
    scores = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    distance = positions[:, None] - positions[None, :]
    scores = scores.masked_fill((distance < depth - 1) | (distance >= shape.window), -1e9)
    own = [
        (grouped * _shifted(chain_keys, depth - 1 - place).unsqueeze(2)).sum(-1, keepdim=True)
        for place, (chain_keys, _) in enumerate(chains[1:], 1)
    ]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1)
    mixed = weights[..., :length] @ values.unsqueeze(2)
    for place, (_, chain_values) in enumerate(chains[1:], 1):
        mixed = mixed + weights[..., length + place - 1, None] * _shifted(chain_values, depth - 1 - place).unsqueeze(2)
    return mixed.reshape(texts, heads, length, size).transpose(1, 2).reshape(texts, length, heads * size)


def _norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), gain, epsilon)


def _turns(shape: MtpShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    half = shape.head_size // 2
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions[:, None] * frequencies).float()
    return angles.cos(), angles.sin()


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)


def _shifted(x: Tensor, back: int) -> Tensor:
    """Entry i - back at place i, along the last axis but one."""
    back = min(back, x.shape[-2])
    return x if back == 0 else functional.pad(x[..., :-back, :], (0, 0, back, 0))


def match(logits: Tensor, p: Tensor, kl: float, tv: float) -> tuple[Any, Any, Any]:
    """How well q = softmax(logits) matches p: kl x cross-entropy + tv x (1 - sum of min(p, q)) for each row.

    logits, p  (n, trimmed vocab); p may lack the mass of tokens that q cannot give
    Returns the losses, (n,), the acceptance sum of min(p, q), (n,), and the gradient of the losses by the logits, (n, trimmed
    vocab), made here since autograd would keep half a dozen such arrays.
    """
    with torch.no_grad():
        log_q = torch.log_softmax(logits, dim=-1)
        q = log_q.exp()
        alpha = torch.minimum(p, q).sum(-1)
        losses = tv * (1 - alpha)
        gradient = torch.zeros_like(q)
        if kl:
            losses = losses - kl * (p * log_q).sum(-1)
            gradient += kl * (q * p.sum(-1, keepdim=True) - p)
        if tv:
            gains = q * (q < p)  # raising such a q raises the minimum
            gradient += tv * (q * gains.sum(-1, keepdim=True) - gains)
    return losses, alpha, gradient
