"""The module of drafters/mtp_modules.py as a torch network, and the loss that it learns by.

Depth d at position i reads the state that depth d - 1 made of position i - 1, and the token behind position i; depth 1 reads
the target's own. Its attention sees what it will see in use: the entries of target states up to the one that the chain
began at, and the chain's own entries since ("training-time test", EAGLE-3, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraw.drafters.mtp_modules import MATRICES, MtpShape


class Network(nn.Module):
    """shape: of the module; scale: (width,) the spread of the target's states, which its own states begin with."""

    def __init__(self, shape: MtpShape, scale: Tensor, seed: int) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        for name, size in shape.shapes().items():
            if name in MATRICES:
                start = torch.randn(size, generator=generator) * (size[1] ** -0.5)
                start *= 0.2 if name in ("attention_out", "down") else 1.0  # the block begins near the identity
            else:
                start = scale.clone() if name == "norm_out" else torch.ones(size)
            self.register_parameter(name, nn.Parameter(start))

    def forward(self, states: Tensor, embeddings: Tensor, depths: int) -> list[Tensor]:
        """states, embeddings: (texts, n, width), of the target and of the tokens behind it. For each depth the module's
        own states, (texts, n, width): those of depth d count from position d - 1 on."""
        shape, (texts, length, _) = self.shape, states.shape
        positions = torch.arange(length)
        cosines, sines = self._turns(positions)
        normed_embeddings = self._norm(embeddings, self.norm_embedding)
        chains: list[tuple[Tensor, Tensor]] = []  # keys and values of each depth
        made: list[Tensor] = []
        below = states
        for depth in range(depths):
            x = torch.cat([self._norm(below, self.norm_state), normed_embeddings], dim=-1) @ self.join.T
            rows = self._norm(x, self.norm_attention) @ self.query_key_value.T
            heads = rows.view(texts, length, -1, shape.head_size).transpose(1, 2)
            queries, keys, values = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            queries, keys = _turned(queries, cosines, sines), _turned(keys, cosines, sines)
            chains.append((keys, values))
            x = x + self._attention(queries, chains, positions) @ self.attention_out.T
            gate, up = (self._norm(x, self.norm_mlp) @ self.gate_up.T).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ self.down.T
            out = self._norm(x, self.norm_out)
            made.append(out)
            below = functional.pad(out[:, :-1], (0, 0, 1, 0))  # the next depth reads the state of the position before
        return made

    def _attention(self, queries: Tensor, chains: list[tuple[Tensor, Tensor]], positions: Tensor) -> Tensor:
        """(texts, n, width). Depth d at position i: entries of depth 1 up to i - d + 1, and of depth e at i - d + e."""
        texts, heads, length, size = queries.shape
        depth = len(chains)
        groups = heads // self.shape.kv_heads
        keys, values = chains[0]
        grouped = queries.reshape(texts, self.shape.kv_heads, groups, length, size) * size**-0.5
        scores = grouped @ keys.unsqueeze(2).transpose(-1, -2)
        distance = positions[:, None] - positions[None, :]
        hidden = (distance < depth - 1) | (distance >= self.shape.window)
        scores = scores.masked_fill(hidden, -1e9)
        own = []
        for place, (chain_keys, _) in enumerate(chains[1:], 1):
            own.append((grouped * _shifted(chain_keys, depth - 1 - place).unsqueeze(2)).sum(-1, keepdim=True))
        weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1)
        mixed = weights[..., :length] @ values.unsqueeze(2)
        for place, (_, chain_values) in enumerate(chains[1:], 1):
            weight = weights[..., length + place - 1, None]
            mixed = mixed + weight * _shifted(chain_values, depth - 1 - place).unsqueeze(2)
        return mixed.reshape(texts, heads, length, size).transpose(1, 2).reshape(texts, length, heads * size)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), gain, self.shape.epsilon)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.shape.head_size // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (positions[:, None] * frequencies).float()
        return angles.cos(), angles.sin()


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)


def _shifted(x: Tensor, back: int) -> Tensor:
    """Entry i - back at place i, along the last axis but one."""
    return x if back == 0 else functional.pad(x[..., :-back, :], (0, 0, back, 0))


class Match(torch.autograd.Function):
    """How well q matches p: kl x KL(p || q) + tv x (1 - sum of min(p, q)), one number for each position.

    p may lack the mass of tokens that q cannot give. The gradient is made beside the value: rows of the whole vocabulary
    are gone through a few times, and none is kept but this one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, kl: float, tv: float) -> tuple[Tensor, Tensor]:
        """logits, p: (n, trimmed vocab) -> the losses without the entropy of p, and the acceptance sum of min(p, q): (n,)."""
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
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(alpha)
        return losses, alpha

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None], None, None, None
