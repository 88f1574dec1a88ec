"""From logits to p, one function for target and draft, and the two ways a token is drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from truedraw.errors import ConstraintError, RowError
from truedraw.protocols import Mask, RaceNoise, StepNoise
from truedraw.randomness import RACE_BLOCK, Purpose
from truedraw.types import Probs, SamplingParams, TokenArray, probabilities

logger = logging.getLogger("truedraw")

BOUNDARY_SLACK = 1e-6
"""Relative width in which a token counts as ON a top-p or min-p boundary, and is treated as if it
met it exactly: runners hand out float32 logits, whose rounding would else decide."""

_PARTITION_BLOCK = 64

T = TypeVar("T")


# ---------------------------------------------------------------- shaping


def shape(
    logits: npt.ArrayLike,
    params: SamplingParams,
    context: TokenArray,
    prompt_length: int,
    *,
    stop_ids: Collection[int] = (),
    allowed: Mask | None = None,
    model: str = "target",
) -> Probs:
    """The law of the next token: penalties, bias, masks, temperature, top-k, top-p, min-p, in this order.

    logits   (vocab,), any float type; -inf is legal, NaN and +inf are not
    context  the tokens before this row, drafts included, of which `prompt_length` are prompt
    stop_ids token ids that end the text: they cannot come before min_tokens of output
    allowed  (vocab,) mask of a constraint
    model    whose row it is, for messages
    Returns (vocab,) float64, read-only, sums to 1. Raises RowError if no law is left.
    """
    adjusted = adjust(logits, params, context, prompt_length, stop_ids, allowed, model)
    if params.temperature == 0:
        return _one_hot(int(adjusted.argmax()), len(adjusted))
    row: Probs = np.subtract(adjusted, adjusted.max(), dtype=np.float64)
    if params.temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the maximum to -inf, as it should
            row /= params.temperature
    if 0 < params.top_k < len(row):
        _keep_top_k(row, params.top_k)
    np.exp(row, out=row)
    if params.top_p < 1:
        _keep_top_p(row, params.top_p)
    if params.min_p > 0:
        row[row < params.min_p * (1 - BOUNDARY_SLACK)] = 0.0  # the maximum is exp(0) = 1
    row /= row.sum()
    row.flags.writeable = False
    return row


def adjust(
    logits: npt.ArrayLike,
    params: SamplingParams,
    context: TokenArray,
    prompt_length: int,
    stop_ids: Collection[int] = (),
    allowed: Mask | None = None,
    model: str = "target",
) -> npt.NDArray[np.floating[Any]]:
    """The first half of `shape`, on logits: penalties, bias and masks. Its argmax is the greedy token.

    Returns the logits themselves where nothing applies, else a new float64 array. Raises RowError.
    """
    raw = np.asarray(logits)
    best = float(raw.max())  # NaN wins every maximum
    if not best < np.inf:
        token = int((np.isnan(raw) | (raw == np.inf)).argmax())
        raise RowError(
            f"the {model}'s row at position {len(context)} holds {best} at token {token}: finite logits or -inf are needed"
        )
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    too_early = bool(stop_ids) and len(context) - prompt_length < params.min_tokens
    if penalised or params.logit_bias or too_early or allowed is not None:
        raw = np.array(raw, dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # told below
            _penalise(raw, params, context, prompt_length)
            for token, bias in params.logit_bias.items():
                raw[token] += bias
        if too_early:
            raw[list(stop_ids)] = -np.inf
        if allowed is not None:
            if not isinstance(allowed, np.ndarray) or allowed.dtype != np.bool_ or allowed.shape != raw.shape:
                shown = f"{type(allowed).__name__} {getattr(allowed, 'dtype', '')} {getattr(allowed, 'shape', '')}"
                raise ConstraintError(f"a mask is {shown}: a bool array of shape {raw.shape} is needed")
            raw[~allowed] = -np.inf
        best = float(raw.max())
        if not best < np.inf:
            raise RowError(
                f"the {model}'s row at position {len(context)} holds {best} after penalties and bias: take smaller ones"
            )
    if best == -np.inf:
        raise RowError(f"the {model}'s row at position {len(context)} allows no token: every logit is -inf after bias and masks")
    return raw


def _penalise(row: Probs, params: SamplingParams, context: TokenArray, prompt_length: int) -> None:
    """Repetition penalty over prompt and output (Keskar et al. 2019, section 4.1), presence and
    frequency penalties over the output alone (as the OpenAI interface words them). In place."""
    if params.repetition_penalty != 1:
        seen = np.unique(context)
        seen = seen[seen < len(row)]
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = np.unique(context[prompt_length:], return_counts=True)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counts


def _one_hot(token: int, vocab: int) -> Probs:
    row = np.zeros(vocab)
    row[token] = 1.0
    row.flags.writeable = False
    return row


def _keep_top_k(row: Probs, k: int) -> None:
    """Exactly k tokens survive; at the boundary the smaller token ids. In place, -inf elsewhere.

    The k-th largest of the maxima of blocks bounds the k-th largest entry from below, so that only
    few entries are looked at closely: a plain partition of 49k logits took four times as long.
    """
    blocks = len(row) // _PARTITION_BLOCK
    floor = -np.inf
    if blocks > k:
        maxima = row[: blocks * _PARTITION_BLOCK].reshape(blocks, -1).max(axis=1)
        floor = np.partition(maxima, blocks - k)[blocks - k]
    candidates = np.flatnonzero(row >= floor)
    values = row[candidates]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = candidates[values > threshold]
    ties = candidates[values == threshold][: k - len(above)]
    kept_values = np.concatenate([row[above], row[ties]])
    row[:] = -np.inf
    row[np.concatenate([above, ties])] = kept_values


def _keep_top_p(weights: Probs, top_p: float) -> None:
    """The smallest set of most likely tokens with total >= top_p, at least one; ties by token id.
    In place on unnormalised weights, 0 elsewhere.

    Tokens lighter than (1 - top_p) / vocab of the total weigh less than 1 - top_p together, so none
    of them is in the set: only the others are sorted. Sums are taken in float64.
    """
    total = float(weights.sum())
    # the slack: where all weigh the same, rounding must not leave them all below their own mean
    candidates = np.flatnonzero(weights >= total * (1 - top_p) / len(weights) * (1 - BOUNDARY_SLACK))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    cumulative = np.cumsum(weights[order])
    size = int(np.searchsorted(cumulative, total * top_p * (1 - BOUNDARY_SLACK), side="left")) + 1
    kept = order[:size]
    kept_weights = weights[kept]
    weights[:] = 0.0
    weights[kept] = kept_weights


class TargetRows:
    """The target's laws of one verification, each shaped when it is first looked at.

    rows[0] follows the last token of the context, rows[i + 1] draft token i. Rules never look
    behind the first rejection (block verification: backwards from the end).

    point  of a greedy request: row index -> the one token that has all the mass
    failed  the index of the row that could not be shaped, once that has happened
    """

    def __init__(self, length: int, compute: Callable[[int], Probs], point: Callable[[int], int] | None = None) -> None:
        self._compute = compute
        self._point = point
        self._rows: list[Probs | None] = [None] * length
        self.failed: int | None = None

    @classmethod
    def of(cls, rows: Any) -> TargetRows:
        """From probabilities, shape (k + 1, vocab). Raises RowError for anything that is no law."""
        if isinstance(rows, TargetRows):
            return rows
        checked = [probabilities(row, f"target row at index {i}") for i, row in enumerate(rows)]
        for i, row in enumerate(checked):
            if len(row) != len(checked[0]):
                raise RowError(
                    f"the target row at index {i} has {len(row)} tokens and row 0 has {len(checked[0])}: one vocabulary is needed"
                )
        return cls(len(checked), checked.__getitem__)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Probs:
        row = self._rows[index]
        if row is None:
            row = self._rows[index] = self._ask(self._compute, index)
        return row

    def _ask(self, compute: Callable[[int], T], index: int) -> T:
        try:
            return compute(index)
        except Exception:
            self.failed = index
            raise

    @property
    def greedy(self) -> bool:
        """Each row has one answer."""
        return self._point is not None

    def race(self, index: int, noise: RaceNoise) -> int:
        """Draw from row `index` by the race. A greedy row has one answer, whatever the noise: it is
        taken without shaping a row of a whole vocabulary, which cost a hundredth of a step."""
        return self._ask(self._point, index) if self._point is not None else race(self[index], noise)


# ---------------------------------------------------------------- drawing


def race(row: Probs, noise: RaceNoise, block: int = RACE_BLOCK) -> int:
    """argmin E_i / p_i over the tokens, in two levels: blocks of token ids by their mass, then inside
    the winning block. Both are races of independent exponentials, so P(token i) = p_i exactly
    (mass of its block) x (its share there), from about vocab / block + block noises.

    row: (vocab,), need not be normalised. Raises RowError if it has no mass.
    """
    vocab = len(row)
    masses = np.add.reduceat(row, np.arange(0, vocab, block))
    with np.errstate(divide="ignore", over="ignore"):
        winner = int(np.argmin(noise.blocks(len(masses)) / masses))
        first = winner * block
        inside = row[first : first + block]
        token = first + int(np.argmin(noise.tokens(first, len(inside)) / inside))
    if not row[token] > 0:
        raise RowError("a row without mass cannot be drawn from")
    return token


def sparse_race(ids: npt.NDArray[np.int64], weights: Probs, noise: RaceNoise, block: int = RACE_BLOCK) -> int:
    """The index of the winner of the same race over a row that is 0 outside `ids`.

    ids: (n,), ascending; weights: (n,), > 0. Blocks without mass have lost anyway.
    """
    blocks, starts = np.unique(ids // block, return_index=True)
    masses = np.add.reduceat(weights, starts)
    winner = int(np.argmin(noise.blocks(int(blocks[-1]) + 1)[blocks] / masses))
    first, end = int(starts[winner]), int(starts[winner + 1]) if winner + 1 < len(starts) else len(ids)
    inside = noise.tokens(int(blocks[winner]) * block, block)[ids[first:end] % block]
    return first + int(np.argmin(inside / weights[first:end]))


def inverse_cdf(row: Probs, u: float) -> int:
    """The first token whose cumulative weight exceeds u times the total, u in [0, 1).

    Cumulated in float64 and scaled by the sum as cumulated, so that the answer always has weight
    and is always < vocab. row: (vocab,), need not be normalised.
    """
    cumulative = np.cumsum(row)
    if not cumulative[-1] > 0:
        raise RowError("a row without mass cannot be drawn from")
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def draw_draft(row: Probs, noise: StepNoise, index: int, *, coupled: bool) -> int:
    """Draft token `index` of a step, from the very row that goes into the proposal.

    coupled: by the race with the target's own noise of that position; else by draft noise.
    """
    if coupled:
        return race(row, noise.race(noise.start + index))
    return inverse_cdf(row, noise.uniform(Purpose.DRAFT, index))


def draw_distinct(row: Probs, draws: Iterable[Callable[[Probs], int]]) -> tuple[list[int], list[Probs]]:
    """Distinct tokens, each by its own draw from what the tokens before it left of `row`, renormalised:
    the tokens, and the row that each was drawn from.

    row: (vocab,). Fewer tokens come back where `row` has fewer.
    """
    tokens: list[int] = []
    rows: list[Probs] = []
    left = row
    for draw in draws:
        if not left.any():
            break
        left = left / left.sum()
        tokens.append(draw(left))
        rows.append(left)
        left = left.copy()
        left[tokens[-1]] = 0.0
    return tokens, rows


def shared_candidates(row: Probs, noise: RaceNoise, n: int) -> tuple[list[int], list[Probs]]:
    """The first n of the race over `row`, as `draw_distinct`. With the target's own noise its draw is
    likely to be among them."""
    return draw_distinct(row, [lambda left: race(left, noise)] * n)


def residual(p: Probs, q: Probs) -> Probs:
    """max(p - q, 0), not normalised: where the token after a rejection comes from.

    Where rounding leaves it empty (p = q, yet rejected: an event of about 1e-16) it is p.
    """
    excess = np.maximum(p - q, 0.0)
    if not excess.any():
        logger.warning("a rejection at p = q up to rounding: the token is drawn from p")
        return p
    return excess
