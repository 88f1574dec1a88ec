"""From logits to p, one function for target and draft, and the two ways a token is drawn."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from truedraw import kernels
from truedraw.errors import ConstraintError, NoTokenLeft, RowError
from truedraw.protocols import Mask, RaceNoise, StepNoise
from truedraw.randomness import RACE_BLOCK, Purpose
from truedraw.types import Probs, SamplingParams, TokenArray, TokenLogprob, probabilities

logger = logging.getLogger("truedraw")

BOUNDARY_SLACK = 1e-6
"""Relative width in which a token counts as ON a top-p or min-p boundary, and is treated as if it
met it exactly: runners hand out float32 logits, whose rounding would else decide."""


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
    return law(logits, params, context, prompt_length, stop_ids=stop_ids, allowed=allowed, model=model).row()


def law(
    logits: npt.ArrayLike,
    params: SamplingParams,
    context: TokenArray,
    prompt_length: int,
    *,
    stop_ids: Collection[int] = (),
    allowed: Mask | None = None,
    model: str = "target",
) -> Law:
    """What `shape` answers, before it is written out over the whole vocabulary: where top-k, top-p, min-p
    or temperature 0 leave few tokens, only these are held."""
    adjusted = adjust(logits, params, context, prompt_length, stop_ids, allowed, model)
    vocab = len(adjusted)
    if params.temperature == 0:
        return Law.point(_most_likely(adjusted), vocab)
    ids = None
    if 0 < params.top_k < vocab:
        ids = kernels.top_k(adjusted, params.top_k)
        adjusted = adjusted[ids]
    weights = kernels.soften(adjusted, float(adjusted.max()), params.temperature)
    if params.top_p < 1:
        ids, weights = _only(_top_p(weights, params.top_p), ids, weights)
    if params.min_p > 0:  # the maximum is exp(0) = 1
        ids, weights = _only(np.flatnonzero(weights >= params.min_p * (1 - BOUNDARY_SLACK)), ids, weights)
    masses = kernels.block_sums(weights) if ids is None else kernels.block_sums_of_few(ids, weights, vocab)
    return Law(weights, ids, masses, 1.0 / kernels.total(masses), vocab)


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
            raise NoTokenLeft(
                f"the {model}'s row at position {len(context)} holds {best} after penalties and bias: take smaller ones"
            )
    if best == -np.inf:
        raise NoTokenLeft(
            f"the {model}'s row at position {len(context)} allows no token: every logit is -inf after bias and masks"
        )
    return raw


def logprob(logits: npt.ArrayLike, token: int, num_top: int = 0) -> TokenLogprob:
    """The log-probability of a token under a row as the target made it, before any parameter, and of the row's
    `num_top` most likely tokens. logits: (vocab,). Raises RowError for a row with NaN or +inf."""
    raw = np.asarray(logits)
    best = float(raw.max())
    if not -np.inf < best < np.inf:
        raise RowError(f"the target's row holds {best}: finite logits or -inf are needed")
    norm = best + math.log(kernels.total(kernels.block_sums(kernels.soften(raw, best, 1.0))))
    return TokenLogprob(token, float(raw[token]) - norm, tuple((i, value - norm) for i, value in largest(raw, num_top)))


def largest(row: npt.NDArray[Any], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` largest entries with their places, the largest first, ties by place. row: (n,)."""
    ids = np.arange(len(row)) if count >= len(row) else kernels.top_k(row, count) if count else np.arange(0)
    order = np.argsort(-row[ids], kind="stable")
    return tuple((int(i), float(row[i])) for i in ids[order])


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


def _most_likely(adjusted: npt.NDArray[np.floating[Any]]) -> int:
    """The first of the largest."""
    return int(adjusted.argmax())


def _only(kept: kernels.Ids, ids: kernels.Ids | None, weights: Probs) -> tuple[kernels.Ids, Probs]:
    """The ids and weights at the places `kept`."""
    return kept if ids is None else ids[kept], weights[kept]


def _top_p(weights: Probs, top_p: float) -> kernels.Ids:
    """Where the smallest set of most likely tokens with total >= top_p is, at least one; ties by token id.
    Ascending places in unnormalised weights.

    Tokens lighter than (1 - top_p) / vocab of the total weigh less than 1 - top_p together, so none
    of them is in the set. Of the others the largest are summed, more of them until they are enough:
    a sort of all took seven times as long.
    """
    total = kernels.total(kernels.block_sums(weights))
    goal = total * top_p * (1 - BOUNDARY_SLACK)
    # the slack: where all weigh the same, rounding must not leave them all below their own mean
    candidates = np.flatnonzero(weights >= total * (1 - top_p) / len(weights) * (1 - BOUNDARY_SLACK))
    values = weights[candidates]
    size, looked_at = 0, 256
    while size == 0:
        looked_at = min(looked_at, len(values))
        largest = np.sort(np.partition(values, len(values) - looked_at)[len(values) - looked_at :])[::-1]
        cumulative = np.cumsum(largest)
        if cumulative[-1] >= goal or looked_at == len(values):
            size = min(int(np.searchsorted(cumulative, goal, side="left")) + 1, len(values))
        looked_at *= 8
    return kernels.at_least(candidates, values, largest[size - 1], size)


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The law of one token, held over the whole vocabulary or over the few tokens that it allows.

    weights  float64: of `ids`, or of all tokens; probabilities once multiplied by `share`
    ids      ascending, or None: all tokens
    masses   (blocks,): the sums of RACE_BLOCK token ids, as kernels.block_sums takes them
    share    1 / the sum of all weights
    """

    weights: Probs
    ids: kernels.Ids | None
    masses: Probs
    share: float
    vocab: int

    @classmethod
    def point(cls, token: int, vocab: int) -> Law:
        """All mass on one token."""
        return cls(_ONE, np.array([token]), _ONE, 1.0, vocab)

    def row(self) -> Probs:
        """Over the whole vocabulary: (vocab,), read-only."""
        row = self.weights * self.share
        if self.ids is not None:
            few, row = row, np.zeros(self.vocab)
            row[self.ids] = few
        row.flags.writeable = False
        return row

    def prob(self, token: int) -> float:
        """0 for an id outside the vocabulary."""
        if self.ids is None:
            return float(self.weights[token] * self.share) if 0 <= token < self.vocab else 0.0
        place = int(np.searchsorted(self.ids, token))
        return float(self.weights[place] * self.share) if place < len(self.ids) and self.ids[place] == token else 0.0

    def race(self, noise: RaceNoise) -> int:
        """The token that `race` draws from the whole row: weights do as well as probabilities, whose
        rounding would decide one draw in 1e15. A token that is alone, in the row or in the block that
        won, needs no noise."""
        if self.ids is None:
            return _race(self.weights, self.masses, noise, RACE_BLOCK)
        if len(self.ids) == 1:
            return int(self.ids[0])
        first = _winner(self.masses, noise) * RACE_BLOCK
        start, stop = self.ids.searchsorted(first), self.ids.searchsorted(first + RACE_BLOCK)
        if stop - start == 1:
            return int(self.ids[start])
        inside = np.zeros(min(RACE_BLOCK, self.vocab - first))
        inside[self.ids[start:stop] - first] = self.weights[start:stop]
        return first + _inside(inside, first, noise)


_ONE = np.ones(1)
_ONE.flags.writeable = False


class TargetRows:
    """The target's laws of one verification, each shaped when it is first looked at.

    rows[0] follows the last token of the context, rows[i + 1] draft token i. Rules never look
    behind the first rejection (block verification: backwards from the end).

    compute  row index -> its law, or its probabilities
    failed   the index of the row that could not be shaped, once that has happened
    """

    def __init__(self, length: int, compute: Callable[[int], Law | Probs]) -> None:
        self._compute = compute
        self._laws: list[Law | Probs | None] = [None] * length
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

    def _law(self, index: int) -> Law | Probs:
        law = self._laws[index]
        if law is None:
            try:
                law = self._laws[index] = self._compute(index)
            except Exception:
                self.failed = index
                raise
        return law

    def __getitem__(self, index: int) -> Probs:
        row = self._rows[index]
        if row is None:
            law = self._law(index)
            row = self._rows[index] = law.row() if isinstance(law, Law) else law
        return row

    def prob(self, index: int, token: int) -> float:
        """rows[index][token], and 0 for an id outside the vocabulary, without writing out a whole row."""
        law = self._law(index)
        if isinstance(law, Law):
            return law.prob(token)
        return float(law[token]) if 0 <= token < len(law) else 0.0

    def is_point(self, index: int) -> bool:
        """Row `index` is known to have one answer."""
        law = self._law(index)
        return isinstance(law, Law) and len(law.weights) == 1

    def race(self, index: int, noise: RaceNoise) -> int:
        """Draw from row `index` by the race."""
        law = self._law(index)
        return law.race(noise) if isinstance(law, Law) else race(law, noise)


# ---------------------------------------------------------------- drawing


def race(row: Probs, noise: RaceNoise, block: int = RACE_BLOCK) -> int:
    """argmin E_i / p_i over the tokens, in two levels: blocks of token ids by their mass, then inside
    the winning block. Both are races of independent exponentials, so P(token i) = p_i exactly
    (mass of its block) x (its share there), from about vocab / block + block noises.

    row: (vocab,), need not be normalised. Raises RowError if it has no mass.
    """
    return _race(row, kernels.block_sums(row, block), noise, block)


def _race(row: Probs, masses: Probs, noise: RaceNoise, block: int) -> int:
    first = _winner(masses, noise) * block
    return first + _inside(row[first : first + block], first, noise)


def _winner(masses: Probs, noise: RaceNoise) -> int:
    """The block that wins."""
    return _earliest(noise.blocks(len(masses)), masses)


def _inside(block: Probs, first: int, noise: RaceNoise) -> int:
    """The place in its block of the token that wins there; `first` is the block's first token id."""
    place = _earliest(noise.tokens(first, len(block)), block)
    if not block[place] > 0:
        raise RowError("a row without mass cannot be drawn from")
    return place


@np.errstate(divide="ignore", over="ignore")
def _earliest(exponentials: Probs, rates: Probs) -> int:
    """argmin E_i / p_i."""
    return int((exponentials / rates).argmin())


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


def inverse_cdf(row: Probs, u: float, masses: Probs | None = None) -> int:
    """The first token whose cumulative weight exceeds u times the total, u in [0, 1).

    In two levels: the block where that is, then the token, by how far into the block u falls. A sum
    over 49k tokens one by one took five times as long. The answer always has weight and is always < vocab.
    row: (vocab,), need not be normalised; masses: its block sums, where they are known.
    """
    first = 0
    if len(row) > kernels.BLOCK:
        block, u = _step(kernels.block_sums(row) if masses is None else masses, u)
        first = block * kernels.BLOCK
    return first + _step(row[first : first + kernels.BLOCK], u)[0]


def _step(weights: Probs, u: float) -> tuple[int, float]:
    """The first whose cumulative weight exceeds u times the total, scaled by the sum as cumulated,
    and how far into it that lies: in [0, 1)."""
    cumulative = np.cumsum(weights)
    if not cumulative[-1] > 0:
        raise RowError("a row without mass cannot be drawn from")
    goal = u * cumulative[-1]
    i = int(np.searchsorted(cumulative, goal, side="right"))
    before = cumulative[i - 1] if i else 0.0
    return i, min(float((goal - before) / (cumulative[i] - before)), 1 - 2.0**-53)


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
    excess, masses = kernels.excess(p, q)
    if not masses.any():
        logger.warning("a rejection at p = q up to rounding: the token is drawn from p")
        return p
    return excess
