"""Certificates of the coupled rule: every noise vector gives the text of plain decoding, and the
race that both draw with has the law p."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from truedraw.protocols import RaceNoise, StepNoise
from truedraw.prove.exact import Context, Draft, Problem, State
from truedraw.randomness import Noise
from truedraw.sampling import TargetRows, draw_draft, race
from truedraw.types import DenseRows, Probs, Proposal
from truedraw.verify import Rule


def coupled_draft(state: State, k: int, noise: StepNoise) -> Proposal:
    """k draft tokens by the race with the target's own noise."""
    rows: list[Probs] = []
    for i in range(k):
        row = state.problem.float_row("q", state.context + tuple(state.drafts))
        state.drafts.append(draw_draft(row, noise, i, coupled=True))
        rows.append(row)
    return Proposal(tuple(state.drafts), DenseRows(tuple(rows)))


def tree_draft(state: State, k: int, noise: StepNoise) -> Proposal:
    """The full tree of depth min(k, 2) over the vocabulary, as point masses."""
    vocab, depth = state.problem.vocab, min(k, 2)
    tokens, parents = [*range(vocab)][: vocab if depth else 0], [-1] * (vocab if depth else 0)
    if depth == 2:
        for node in range(vocab):
            tokens += range(vocab)
            parents += [node] * vocab
    return Proposal(tuple(tokens), parents=tuple(parents))


def text(problem: Problem, rule: Rule, draft: Draft, seed: int, draft_lengths: Sequence[int], horizon: int) -> Context:
    """Decode with the production noise of a seed; step i drafts draft_lengths[i % n] tokens."""
    state, noise, num_steps = State(problem), Noise(seed), 0
    while len(state.context) < horizon:
        step = noise.at(len(state.context))
        state.drafts = []
        proposal = draft(state, draft_lengths[num_steps % len(draft_lengths)], step)
        paths = [(), *(proposal.path(i) for i in range(len(proposal)))]
        prefixes = [state.context + tuple(proposal.tokens[j] for j in path) for path in paths]
        rows = TargetRows.of([problem.float_row("p", prefix) for prefix in prefixes])
        verdict = rule(proposal, rows, step)
        state.context = (*state.context, *(proposal.tokens[i] for i in verdict.path), verdict.next_token)
        num_steps += 1
    return state.context[:horizon]


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


def certify_coupling(
    problem: Problem,
    rule: Rule,
    seeds: Sequence[int] = range(25),
    drafts: Sequence[Draft] = (coupled_draft, tree_draft),
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


# ---------------------------------------------------------------- the law of the race, by quadrature


Draw: TypeAlias = Callable[[Probs, RaceNoise, int], int]
"""The shipped race, or a mutant of it: (row, noise, block size) -> token."""


@dataclass(frozen=True, slots=True)
class _Scripted:
    """Race noise with given exponentials."""

    token_noise: Probs
    block_noise: Probs

    def tokens(self, first: int, count: int) -> Probs:
        return self.token_noise[first : first + count]

    def blocks(self, count: int) -> Probs:
        return self.block_noise[:count]


def race_law(row: Probs, block: int, *, draw: Draw = race, num_nodes: int = 24) -> Probs:
    """The law of the shipped race on `row`, shape (vocab,), integrated over its noise.

    For each pair of winning block and token: the probability that the block wins, times that the
    token wins inside it. Each is an integral over the noise of the rivals (Gauss-Legendre in their
    uniforms) of the probability that the winner's own noise stays below the threshold at which the
    shipped float code changes its answer (found by bisection).
    """
    vocab, num_blocks = len(row), -(-len(row) // block)
    law = np.zeros(vocab)
    for winner in range(num_blocks):
        inside = range(winner * block, min(vocab, (winner + 1) * block))
        if not row[inside.start : inside.stop].any():
            continue

        def drawn_block(noise: Probs) -> int:
            return draw(row, _Scripted(np.ones(vocab), noise), block) // block

        favoured = np.full(num_blocks, 1e6)
        favoured[winner] = 1e-6

        def drawn_token(noise: Probs, favoured: Probs = favoured) -> int:
            return draw(row, _Scripted(noise, favoured), block)

        in_block = _win_probability(drawn_block, np.ones(num_blocks), range(num_blocks), winner, num_nodes)
        for token in inside:
            law[token] = in_block * _win_probability(drawn_token, np.ones(vocab), inside, token, num_nodes)
    return law


def _win_probability(drawn: Callable[[Probs], int], noise: Probs, runners: range, winner: int, num_nodes: int) -> float:
    """P(drawn(noise) = winner) for Exp(1) noise of the runners, all other noise as it stands."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    nodes, weights = (nodes + 1) / 2, weights / 2
    rivals = [runner for runner in runners if runner != winner]
    total = 0.0
    for indices in product(range(num_nodes), repeat=len(rivals)):
        scripted = noise.copy()
        scripted[rivals] = -np.log1p(-nodes[list(indices)])

        def wins(own: float, scripted: Probs = scripted) -> bool:
            scripted[winner] = own
            return drawn(scripted) == winner

        total += float(np.prod(weights[list(indices)])) * -math.expm1(-_threshold(wins))
    return total


def _threshold(wins: Callable[[float], bool]) -> float:
    """Up to which noise the winner wins: bisection in the exponent, to a relative 1e-9."""
    low, high = -40.0, 8.0
    if not wins(math.exp(low)):
        return 0.0
    if wins(math.exp(high)):
        return math.inf
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if wins(math.exp(middle)) else (low, middle)
    return math.exp(low)
