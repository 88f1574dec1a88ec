"""The rules token, block and coupled over a ragged batch of tensors, on whatever device they are.

Nothing is copied to the host and nothing waits for the device: shapes follow from Python integers and from
the shapes that came in, the lengths of the drafts stay tensors, and what is wrong with a row is a status
instead of an error. Sources and laws: `verify/token.py`, `verify/block.py`, `verify/coupled.py`.

Packed: the drafts of sequence 0, then those of sequence 1, ...; of the target k + 1 rows for each sequence
that drafts k tokens, k = 0 included.

**What equality is promised.** Rows of any float type are widened to float64, and everything after that is the
reference's arithmetic in the reference's order, so that the same noise gives the same verdict, bit for bit,
wherever an addition, product or quotient of float64 is rounded as IEEE 754 says and a cumulative sum over the
first dimension runs from its start to its end: PyTorch does so on the CPU, and, as its sources read, on CUDA.
Where a device sums in another order, the verdict may differ if u lies within vocab * 2**-53 of an edge. Under
torch.compile, which may fuse a product with a sum, that is to be expected as well. On no device does a token
come out that has no mass. Not told, since that would wait: the rejection at p = q up to rounding, of which the
reference writes a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from truedraw.errors import RowError
from truedraw.protocols import StepNoise
from truedraw.randomness import RACE_BLOCK, Purpose
from truedraw.types import ROW_SUM_TOLERANCE, PointMass, Probs, Proposal
from truedraw.verify.torch_sampling import RaceNoise, at, first_true, inverse_cdf, race_draw, row_totals

ORIGINS = ("residual", "bonus", "plain", "broken")
"""What the codes of `Verdicts.origin` mean."""

MISPACKED = -(2**31)
"""The status of every sequence of a batch whose `num_drafts` do not add up to its drafts."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What is verified.

    drafts      (total_drafts,) token ids; one outside the vocabulary is legal and always rejected
    num_drafts  (batch,) integers in 0 .. max_drafts that sum to total_drafts, on the device
    p           (total_drafts + batch, vocab) the target's laws
    q           (total_drafts, draft vocab) the rows that the drafts were drawn from, or None: point masses
    max_drafts  a bound on num_drafts, which sizes all that is padded

    Raises RowError where the shapes do not fit one another.
    """

    drafts: Tensor
    num_drafts: Tensor
    p: Tensor
    q: Tensor | None
    max_drafts: int

    def __post_init__(self) -> None:
        rows = len(self.drafts) + len(self.num_drafts)
        if self.p.ndim != 2 or len(self.p) != rows:
            raise RowError(
                f"p has shape {tuple(self.p.shape)}: {rows} rows are needed, for {len(self.drafts)} drafts and one more for "
                f"each of {len(self.num_drafts)} sequences"
            )
        if self.q is not None and (self.q.ndim != 2 or len(self.q) != len(self.drafts)):
            raise RowError(f"q has shape {tuple(self.q.shape)}: {len(self.drafts)} rows are needed, one for each draft")


@dataclass(frozen=True, slots=True, eq=False)
class Uniforms:
    """Independent numbers in [0, 1), float64, keyed as `StepNoise.uniform` keys them.

    accept    (batch, max_drafts): for draft i of a sequence (block: for the prefix that ends with it)
    residual  (batch, max_drafts): for the token after i accepted drafts and a rejection
    bonus     (batch,): for the token after all drafts
    """

    accept: Tensor
    residual: Tensor
    bonus: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """One entry for each sequence, all (batch,) int64.

    num_accepted  the drafts that are emitted are the first so many
    next_token    the rule's own token behind them
    origin        index into ORIGINS
    status        0: sound. i + 1: target row i of the sequence, i = 0 .. k, is no law. -(i + 1): draft row i is
                  none, or its token has q = 0 there. MISPACKED. The first of them; target rows come first

    A broken sequence has num_accepted 0 and next_token -1, and leaves its neighbours alone.
    """

    num_accepted: Tensor
    next_token: Tensor
    origin: Tensor
    status: Tensor


# ---------------------------------------------------------------- the rules


def verify_token(batch: Batch, noise: Uniforms, race: RaceNoise | None = None) -> Verdicts:
    """Keep draft x while u q(x) < p(x); then draw from max(p - q, 0), or the bonus token from p.

    race  of `batch` rows: for the sequences without drafts, as plain decoding draws. None: they take
          their bonus uniform, which has the same law, but is not the reference's draw
    """
    layout = _layout(batch)
    p, q = _target_probs(batch, layout), _draft_probs(batch, layout)
    kept = _keeps(noise.accept[:, : layout.depth], q, p)
    accepted = first_true(~(kept & layout.inside))
    token = _own_token(batch, layout, accepted, torch.ones_like(noise.bonus), noise)
    return _verdicts(batch, layout, accepted, _unless_plain(batch, layout, token, race))


def verify_block(batch: Batch, noise: Uniforms, race: RaceNoise | None = None) -> Verdicts:
    """Accept the longest prefix whose own coin says so, then draw from max(P p - q, 0), or the bonus
    token from p. One whole row per sequence is held at a time. `race` as of `verify_token`."""
    layout = _layout(batch)
    worths = _prefix_worths(batch, layout)
    accepted = torch.zeros_like(layout.k)
    for i in range(1, layout.depth + 1):
        u, worth = noise.accept[:, i - 1], worths[:, i]
        passed = (layout.k == i) & (u < worth)
        if i < layout.depth:
            total = row_totals(_excess(batch, layout, layout.k.new_full((), i), worth))
            passed = passed | ((layout.k > i) & (u * (total + 1 - worth) < total))
        accepted = torch.where(passed, i, accepted)
    token = _own_token(batch, layout, accepted, at(worths, accepted), noise)
    return _verdicts(batch, layout, accepted, _unless_plain(batch, layout, token, race))


def verify_coupled(batch: Batch, race: RaceNoise) -> Verdicts:
    """Draw from p at each position with its race noise, and go on while a draft is that token.

    race  of `total_drafts + batch` rows: each with the noise of its absolute position
    """
    layout = _layout(batch)
    drawn = race_draw(batch.p, race)
    same = drawn[_target_row(layout, layout.depths)] == layout.tokens
    accepted = first_true(~(same & layout.inside))
    return _verdicts(batch, layout, accepted, drawn[_target_row(layout, accepted[:, None])][:, 0])


def _keeps(u: Tensor, q: Tensor, p: Tensor) -> Tensor:
    return u * q < p


def _prefix_worths(batch: Batch, layout: _Layout) -> Tensor:
    """P_0 .. P_k and whatever follows: (batch, depth + 1)."""
    p, q = _target_probs(batch, layout), _draft_probs(batch, layout)
    worths = [torch.ones_like(layout.k, dtype=torch.float64)]
    for i in range(layout.depth):
        worths.append((worths[-1] * p[:, i] / q[:, i]).clamp(max=1.0))
    return torch.stack(worths, 1)


# ---------------------------------------------------------------- where things lie


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Places of the packed batch. `depth`: no sequence drafts more.

    k         (batch,) draft lengths, within 0 .. depth whatever came in
    depths    (depth,) 0, 1, 2, ...
    inside    (batch, depth): there is such a draft
    tokens    (batch, depth): the drafts; where there is none, anything
    first     (batch,): the place of a sequence's first draft
    sequence  (batch,) 0, 1, 2, ...
    packed    (): the lengths add up
    """

    depth: int
    num_rows: int
    k: Tensor
    depths: Tensor
    inside: Tensor
    tokens: Tensor
    first: Tensor
    sequence: Tensor
    packed: Tensor


def _layout(batch: Batch) -> _Layout:
    num_drafts, total = batch.num_drafts.to(torch.int64), len(batch.drafts)
    depth = min(batch.max_drafts, total)
    k = num_drafts.clamp(0, depth)
    depths = torch.arange(depth, device=k.device)
    first = k.cumsum(0) - k
    tokens = batch.drafts.to(torch.int64)[_draft_row(first, depths, total)]
    packed = (num_drafts == k).all() & (k.sum() == total)
    sequence = torch.arange(len(k), device=k.device)
    return _Layout(depth, len(batch.p), k, depths, _inside(k, depths), tokens, first, sequence, packed)


def _inside(k: Tensor, depths: Tensor) -> Tensor:
    return depths < k[:, None]


def _draft_row(first: Tensor, depths: Tensor, total: int) -> Tensor:
    """The places of drafts at `depths`, (depth,) or (batch, n), among the packed drafts; none is outside."""
    return (first[:, None] + depths).clamp(max=total - 1)


def _target_row(layout: _Layout, depths: Tensor) -> Tensor:
    """The same for target rows: each sequence before has one row more than drafts."""
    return (layout.first[:, None] + layout.sequence[:, None] + depths).clamp(max=layout.num_rows - 1)


# ---------------------------------------------------------------- rows


def _target_probs(batch: Batch, layout: _Layout) -> Tensor:
    """p of each draft, (batch, depth) float64; 0 outside the vocabulary."""
    return _prob(batch.p, _target_row(layout, layout.depths), layout.tokens)


def _draft_probs(batch: Batch, layout: _Layout) -> Tensor:
    """q of each draft, (batch, depth) float64."""
    if batch.q is None:
        return torch.ones_like(layout.tokens, dtype=torch.float64)
    return _prob(batch.q, _draft_row(layout.first, layout.depths, len(batch.drafts)), layout.tokens)


def _prob(rows: Tensor, row: Tensor, token: Tensor) -> Tensor:
    legal = (token >= 0) & (token < rows.shape[1])
    return torch.where(legal, rows[row, token.clamp(0, rows.shape[1] - 1)].to(torch.float64), 0.0)


def _excess(batch: Batch, layout: _Layout, depth: Tensor, worth: Tensor) -> Tensor:
    """max(worth p - q, 0) of each sequence at `depth`, (batch,) or (); worth (batch,). (batch, vocab) float64."""
    at = depth.expand(len(layout.k))[:, None]
    left = batch.p[_target_row(layout, at)[:, 0]].to(torch.float64) * worth[:, None]
    row = _draft_row(layout.first, at, len(batch.drafts))[:, 0]
    if batch.q is None:
        token, vocab = batch.drafts[row].to(torch.int64), left.shape[1]
        legal = ((token >= 0) & (token < vocab)).to(torch.float64)
        left.scatter_add_(1, token.clamp(0, vocab - 1)[:, None], -legal[:, None])
    else:
        shared = min(left.shape[1], batch.q.shape[1])
        left[:, :shared] -= batch.q[row, :shared]
    return left.clamp(min=0.0)


def _own_token(batch: Batch, layout: _Layout, accepted: Tensor, worth: Tensor, noise: Uniforms) -> Tensor:
    """The token behind the accepted drafts: of the residual, or the bonus. (batch,)."""
    p = batch.p[_target_row(layout, accepted[:, None])[:, 0]].to(torch.float64)
    if not layout.depth:
        return inverse_cdf(p, noise.bonus)
    all_kept = accepted >= layout.k
    excess = _excess(batch, layout, accepted, worth)
    from_p = all_kept | ~(excess.amax(1) > 0)  # rounding may leave nothing where p = q
    u = torch.where(all_kept, noise.bonus, at(noise.residual, accepted.clamp(max=layout.depth - 1)))
    return inverse_cdf(torch.where(from_p[:, None], p, excess), u)


def _unless_plain(batch: Batch, layout: _Layout, token: Tensor, race: RaceNoise | None) -> Tensor:
    """The race's token where nothing was drafted."""
    if race is None:
        return token
    first_rows = batch.p[_target_row(layout, layout.k.new_zeros((1, 1)))[:, 0]]
    return torch.where(layout.k == 0, race_draw(first_rows, race), token)


def _verdicts(batch: Batch, layout: _Layout, accepted: Tensor, token: Tensor) -> Verdicts:
    status = _status(batch, layout)
    sound = status == 0
    origin = torch.where(accepted < layout.k, 0, torch.where(layout.k > 0, 1, 2))
    return Verdicts(
        torch.where(sound, accepted, 0),
        torch.where(sound, token, -1),
        torch.where(sound, origin, len(ORIGINS) - 1),
        status,
    )


def _status(batch: Batch, layout: _Layout) -> Tensor:
    """Verdicts.status, from every row of the batch, whether the verdict looks at it or not. (batch,)."""
    rows = torch.arange(layout.depth + 1, device=layout.k.device)
    bad = _no_law(batch.p)[_target_row(layout, rows)] & (rows <= layout.k[:, None])
    undrawn = ~(_draft_probs(batch, layout) > 0)
    if batch.q is not None:
        undrawn = undrawn | _no_law(batch.q)[_draft_row(layout.first, layout.depths, len(batch.drafts))]
    target, draft = first_true(bad), first_true(undrawn & layout.inside)
    status = torch.where(target <= layout.depth, target + 1, torch.where(draft < layout.depth, -draft - 1, 0))
    return torch.where(layout.packed, status, MISPACKED)


def _no_law(rows: Tensor) -> Tensor:
    """(n, vocab) -> (n,): not finite, negative somewhere, or a sum that is not 1 within 1e-3."""
    off = (rows.sum(1, dtype=torch.float64) - 1.0).abs()
    return ~((off <= ROW_SUM_TOLERANCE) & (rows.amin(1) >= 0))


# ---------------------------------------------------------------- from the reference's values


def pack(proposals: Sequence[Proposal], rows: Sequence[Sequence[Probs]], device: str = "cpu") -> Batch:
    """A batch of chains with their target rows, k + 1 for each; q is None where no draft was drawn."""
    lengths = [len(proposal) for proposal in proposals]
    drafts = [token for proposal in proposals for token in proposal.tokens]
    p = np.array([row for each in rows for row in each], dtype=np.float64)
    drafts = [token if token >= 0 else p.shape[1] for token in drafts]  # no token, like all behind the target's own
    width = max(p.shape[1], *(token + 1 for token in drafts)) if drafts else p.shape[1]
    drawn = any(len(proposal) and not isinstance(proposal.q, PointMass) for proposal in proposals)
    places = [(proposal.q, i) for proposal in proposals for i in range(len(proposal))]
    q = [law.row(i, token, width) for (law, i), token in zip(places, drafts, strict=True)]
    return Batch(
        torch.tensor(drafts, dtype=torch.int64, device=device),
        torch.tensor(lengths, device=device),
        torch.from_numpy(p).to(device),
        torch.from_numpy(np.array(q)).to(device) if drawn else None,
        max(lengths),
    )


def uniforms_of(noises: Sequence[StepNoise], batch: Batch) -> Uniforms:
    """The reference's uniforms, one StepNoise for each sequence, by its keys."""
    lengths, device = batch.num_drafts.tolist(), batch.p.device

    def each(purpose: Purpose) -> Tensor:
        padded = np.full((len(noises), batch.max_drafts), 0.5)
        for b, (noise, k) in enumerate(zip(noises, lengths, strict=True)):
            padded[b, :k] = [noise.uniform(purpose, i) for i in range(k)]
        return torch.from_numpy(padded).to(device)

    bonus = [noise.uniform(Purpose.BONUS, k) for noise, k in zip(noises, lengths, strict=True)]
    return Uniforms(each(Purpose.ACCEPT), each(Purpose.RESIDUAL), torch.tensor(bonus, dtype=torch.float64, device=device))


def races_of(noises: Sequence[StepNoise], num_rows: Sequence[int], vocab: int, device: str = "cpu") -> RaceNoise:
    """The reference's race noise for the first `num_rows[b]` positions of each sequence's step."""
    races = [noise.race(noise.start + i) for noise, count in zip(noises, num_rows, strict=True) for i in range(count)]
    blocks = np.array([race.blocks(-(-vocab // RACE_BLOCK)) for race in races])
    tokens = np.array([race.tokens(0, vocab) for race in races])
    return RaceNoise(torch.from_numpy(blocks).to(device), torch.from_numpy(tokens).to(device))
