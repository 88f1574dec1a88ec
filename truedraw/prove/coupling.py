"""Certificates of the coupled rule: every noise vector gives the text of plain decoding, and the
race that both draw with has the law p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from truedraw.protocols import RaceNoise, StepNoise
from truedraw.prove.exact import Context, Draft, Problem, target_rows, verdict_on
from truedraw.prove.explore import ScriptedNoise
from truedraw.randomness import Noise
from truedraw.sampling import draw_draft, race, shared_candidates
from truedraw.types import DenseRows, Probs, Proposal
from truedraw.verify import Rule


def coupled_chain(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
    """k draft tokens by the race with the target's own noise."""
    tokens: list[int] = []
    rows: list[Probs] = []
    for i in range(k):
        row = problem.float_row("q", (*context, *tokens))
        if isinstance(noise, ScriptedNoise):
            noise.announce(row)
        tokens.append(draw_draft(row, noise, i, coupled=True))
        rows.append(row)
    return Proposal(tuple(tokens), DenseRows(tuple(rows)))


def coupled_tree(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
    """The two best of the race at the first position, and below each the winner of the next."""
    if k == 0:
        return Proposal()
    first, rows = shared_candidates(problem.float_row("q", context), noise.race(noise.start), 2)
    tokens, parents = list(first), [-1] * len(first)
    for node, token in enumerate(first):
        row = problem.float_row("q", (*context, token))
        tokens.append(draw_draft(row, noise, 1, coupled=True))
        rows.append(row)
        parents.append(node)
    return Proposal(tuple(tokens), DenseRows(tuple(rows)), tuple(parents))


def full_tree(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
    """The full tree of depth min(k, 2) over the vocabulary, as point masses."""
    vocab, depth = problem.vocab, min(k, 2)
    tokens, parents = [*range(vocab)][: vocab if depth else 0], [-1] * (vocab if depth else 0)
    if depth == 2:
        for node in range(vocab):
            tokens += range(vocab)
            parents += [node] * vocab
    return Proposal(tuple(tokens), parents=tuple(parents))


def text(problem: Problem, rule: Rule, draft: Draft, seed: int, draft_lengths: Sequence[int], horizon: int) -> Context:
    """Decode with the production noise of a seed; step i drafts draft_lengths[i % n] tokens."""
    context: Context = ()
    num_steps = 0
    while len(context) < horizon:
        step = Noise(seed).at(len(context))
        proposal = draft(problem, context, draft_lengths[num_steps % len(draft_lengths)], step)
        context += verdict_on(target_rows(problem, context, proposal), proposal, rule, step)
        num_steps += 1
    return context[:horizon]


def plain_text(problem: Problem, seed: int, horizon: int) -> Context:
    """Plain decoding, written without any of the engine: one race for each position."""
    context: Context = ()
    for position in range(horizon):
        context += (race(problem.float_row("p", context), Noise(seed).at(position).race(position)),)
    return context


@dataclass(frozen=True, slots=True)
class CouplingCertificate:
    """How many noise vectors gave another text than plain decoding."""

    problem: str
    num_tried: int
    num_different: int

    @property
    def exact(self) -> bool:
        return self.num_different == 0


COUPLED_DRAFTS: tuple[Draft, ...] = (coupled_chain, coupled_tree, full_tree)


def certify_coupling(
    problem: Problem,
    rule: Rule,
    seeds: Sequence[int] = range(20),
    drafts: Sequence[Draft] = COUPLED_DRAFTS,
    horizon: int = 7,
) -> CouplingCertificate:
    """Every seed, every kind of draft, draft lengths 1 to 3 and a mix with none."""
    tried = different = 0
    for seed in seeds:
        expected = plain_text(problem, seed, horizon)
        for kind in drafts:
            for lengths in ((1,), (2,), (3,), (2, 0, 1)):
                tried += 1
                different += text(problem, rule, kind, seed, lengths, horizon) != expected
    return CouplingCertificate(problem.name, tried, different)


# ---------------------------------------------------------------- the law of the race


Draw: TypeAlias = Callable[[Probs, RaceNoise, int], int]
"""The shipped race, or a mutant of it: (row, noise, block size) -> token."""

RACE_TOLERANCE = 1e-12

RACE_ROWS: tuple[tuple[list[float], int], ...] = (
    ([0.9, 0.1], 2),
    ([1 / 3, 2 / 3], 1),
    ([0.5, 0.3, 0.2], 64),
    ([0.2, 0.5, 0.3], 2),
    ([0.1, 0.2, 0.3, 0.4], 2),
    ([0.5, 0.0, 0.3, 0.2], 2),
    ([(1 + i * i % 7) / 71 for i in range(24)], 5),
)
"""Rows and block sizes; they sum to 1."""


@dataclass(frozen=True, slots=True)
class _Scripted:
    """Race noise with given exponentials."""

    token_noise: Probs
    block_noise: Probs

    def tokens(self, first: int, count: int) -> Probs:
        return self.token_noise[first : first + count]

    def blocks(self, count: int) -> Probs:
        return self.block_noise[:count]


def race_error(row: Probs, block: int, *, draw: Draw = race) -> float:
    """The total variation between the law of the shipped race on `row` and `row`, for Exp(1) noise.

    A race is won by i where E_j > c_ij E_i for all rivals j. Each c_ij is located to the last bit by
    bisection of the shipped code over the noise of j, at three values of E_i; that the winner is
    decided by these pairs alone is tried on scattered noise. Then P(i wins) = 1 / (1 + sum_j c_ij),
    and the two levels multiply. 1 where the code is no such race.
    """
    vocab, num_blocks = len(row), -(-len(row) // block)
    law = np.zeros(vocab)
    quiet_tokens, quiet_blocks = np.full(vocab, _LATE), np.full(num_blocks, _LATE)
    for winner in range(num_blocks):
        inside = range(winner * block, min(vocab, (winner + 1) * block))

        def drawn_block(noise: Probs) -> int:
            return draw(row, _Scripted(np.ones(vocab), noise), block) // block

        favoured = quiet_blocks.copy()
        favoured[winner] = 1.0

        def drawn_token(noise: Probs, favoured: Probs = favoured) -> int:
            return draw(row, _Scripted(noise, favoured), block)

        in_block = _win_probability(drawn_block, quiet_blocks, range(num_blocks), winner)
        for token in inside if in_block else ():
            law[token] = in_block * _win_probability(drawn_token, quiet_tokens, inside, token)
    return min(1.0, float(np.abs(law - row).sum() / 2))


_LATE = 1e250
"""Noise of those who take no part."""


def _win_probability(drawn: Callable[[Probs], int], quiet: Probs, runners: range, winner: int) -> float:
    """P(drawn(noise) = winner) for Exp(1) noise of the runners, all other noise as it stands; NaN-free:
    2 where the code is no race of pairs, which no law can mend."""
    rivals = [runner for runner in runners if runner != winner]
    ratios = {rival: _ratio(drawn, quiet, winner, rival, 1.0) for rival in rivals}
    for own in (1e-3, 30.0):
        if any(abs(_ratio(drawn, quiet, winner, rival, own) - ratios[rival]) > 1e-12 * ratios[rival] for rival in rivals):
            return 2.0
    for trial in range(20):
        noise = quiet.copy()
        noise[list(runners)] = -np.log1p(-((np.arange(len(runners)) * 0.7548776662 + trial * 0.5698402910 + 0.1) % 1))
        by_pairs = all(noise[rival] > ratios[rival] * noise[winner] for rival in rivals)
        if (drawn(noise) == winner) != (by_pairs and bool(np.isfinite(list(ratios.values())).all())):
            return 2.0
    return float(1.0 / (1.0 + sum(ratios.values())))


def _ratio(drawn: Callable[[Probs], int], quiet: Probs, winner: int, rival: int, own: float) -> float:
    """The smallest E_rival / E_winner at which the winner wins, over all positive floats; inf: never."""
    noise = quiet.copy()
    noise[winner] = own

    def wins(bits: int) -> bool:
        noise[rival] = np.int64(bits).view(np.float64)
        return drawn(noise) == winner

    low, high = (int(np.float64(value).view(np.int64)) for value in (1e-200, 1e200))
    if not wins(high):
        return np.inf
    if wins(low):
        return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return float(np.int64(high).view(np.float64)) / own
