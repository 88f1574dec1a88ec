"""The draws of `sampling.py` and the sums of `kernels.py`, each for many rows of tensors at once.

The same float64 operations in the same order; nothing is copied to the host and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truedraw.randomness import RACE_BLOCK

_BELOW_ONE = 1 - 2.0**-53


@dataclass(frozen=True, slots=True, eq=False)
class RaceNoise:
    """Independent Exp(1) numbers > 0 for races over rows, float64, as `randomness.RaceNoise` draws them.

    blocks  (rows, ceil(vocab / 64))
    tokens  (rows, vocab); or (rows, 64): of the ids in the block that won, whichever it is, which has
            the same law from less noise, but is not the reference's draw
    """

    blocks: Tensor
    tokens: Tensor


# ---------------------------------------------------------------- places


def at(table: Tensor, column: Tensor) -> Tensor:
    """table[b, column[b]], (batch,)."""
    return table.gather(1, column[:, None])[:, 0]


def first_true(mask: Tensor) -> Tensor:
    """For each row the first column that is true, or how many there are. (n, width) -> (n,)."""
    width = mask.shape[1]
    return torch.cat([torch.where(mask, _columns(mask), width), _columns(mask).new_full((len(mask), 1), width)], 1).amin(1)


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], device=table.device)


# ---------------------------------------------------------------- draws


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """`sampling.inverse_cdf` of each row: weights (n, vocab) float64 and u (n,) -> (n,)."""
    if weights.shape[1] <= RACE_BLOCK:
        return _step(weights, u)[0]
    block, u = _step(_block_sums(weights), u)
    first = block * RACE_BLOCK
    return first + _step(_block_at(weights, first), u)[0]


def _step(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first whose cumulative weight exceeds u times the total, and how far into it that lies.

    With weight always, even where the cumulative sums are not monotonic or u times the total is rounded up.
    """
    cumulative, heavy, width = _cumulative(weights), weights > 0, weights.shape[1]
    goal = u * cumulative[:, -1]
    reached = first_true((cumulative > goal[:, None]) & heavy)
    last = (width - 1 - first_true(heavy.flip(1))).clamp(min=0)
    place = torch.where(reached < width, reached, last)
    before = torch.where(place > 0, at(cumulative, (place - 1).clamp(min=0)), 0.0)
    return place, ((goal - before) / (at(cumulative, place) - before)).clamp(0.0, _BELOW_ONE)


def _cumulative(weights: Tensor) -> Tensor:
    """Along each row from its start, one after the other: over the first dimension of columns, two at least,
    since devices cut a scan over the last one, or over a single column, into pieces. (n, width)."""
    if len(weights) == 1:
        return _cumulative(weights.expand(2, -1))[:1]
    return weights.t().contiguous().cumsum(0).t()


def race_draw(rows: Tensor, noise: RaceNoise) -> Tensor:
    """`sampling.race` over each row: (n, vocab) -> (n,)."""
    first = (noise.blocks / _block_sums(rows)).argmin(1) * RACE_BLOCK
    inside = _block_at(rows, first).to(torch.float64)
    vocab = rows.shape[1]
    exponentials = noise.tokens
    if not exponentials.shape[1] == RACE_BLOCK < vocab:
        exponentials = exponentials.gather(1, _ids_at(first).clamp(max=vocab - 1))
    return first + (exponentials / inside).argmin(1)


def _ids_at(first: Tensor) -> Tensor:
    """The ids of the block that begins with `first`: (n,) -> (n, 64)."""
    return first[:, None] + torch.arange(RACE_BLOCK, device=first.device)


def _block_at(rows: Tensor, first: Tensor) -> Tensor:
    """Their entries, 0 behind the vocabulary's end: (n, vocab), (n,) -> (n, 64)."""
    ids, vocab = _ids_at(first), rows.shape[1]
    return torch.where(ids < vocab, rows.gather(1, ids.clamp(max=vocab - 1)), 0.0)


def _block_sums(rows: Tensor) -> Tensor:
    """`kernels.block_sums` of each row: (n, width) of any float type -> (n, ceil(width / 64)) float64."""
    whole = rows.shape[1] // RACE_BLOCK * RACE_BLOCK
    sums = [_sum_each(rows[:, :whole])] if whole else []
    if whole < rows.shape[1]:
        rest = rows[:, whole:]
        sums.append(_sum_each(torch.nn.functional.pad(rest, (0, RACE_BLOCK - rest.shape[1]))))
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


def _sum_each(blocks: Tensor) -> Tensor:
    """Sums of 64 neighbours: eight lanes one after the other, then two by two. (n, 64 m) -> (n, m)."""
    eights = blocks.view(len(blocks), blocks.shape[1] // RACE_BLOCK, 8, 8)
    lanes: Tensor = eights[:, :, 0].to(torch.float64)
    for i in range(1, 8):
        lanes = lanes + eights[:, :, i]
    for _ in range(3):
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def row_totals(rows: Tensor) -> Tensor:
    """`kernels.total` of each row's block sums: (n, width) -> (n,)."""
    sums = _block_sums(rows)
    while sums.shape[1] > 1:
        sums = _block_sums(sums)
    return sums[:, 0]
