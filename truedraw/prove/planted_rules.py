"""Faults in rules, in what a drafter claims, and in the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.prove.drafts import chain, tree
from truedraw.prove.exact import Context, Draft, Parts, Problem
from truedraw.prove.mutants import Mutant, by_certificate
from truedraw.prove.problems import Case, cases
from truedraw.randomness import Purpose
from truedraw.sampling import TargetRows, inverse_cdf, residual
from truedraw.types import DenseRows, PointMass, Probs, Proposal, Verdict
from truedraw.verify import Rule, block, children, lossy, multidraft, plain, probability, token


def drawn_cases() -> tuple[Case, ...]:
    """Those whose drafts are drawn."""
    return tuple(case for case in cases() if not case[0].point)


# ---------------------------------------------------------------- the token rule


def _token_rule(
    *,
    accepts: Callable[[float, float, float, Probs, int], bool] = lambda u, p, q, row, x: u * q < p,
    correction: Callable[[Probs, Probs, int], Probs] = lambda p, q, x: residual(p, q),
    unchecked: int | None = None,
    row_shift: int = 0,
) -> Rule:
    """The token rule with one of its pieces exchanged."""

    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        k = len(proposal)
        if not k:
            return plain(rows, noise)
        for i, x in enumerate(proposal.tokens):
            p, q = rows[min(i + row_shift, k)], proposal.q
            u = noise.uniform(Purpose.ACCEPT, i)
            if i != unchecked and not accepts(u, probability(p, x), q.prob(i, x), p, x):
                weights = correction(p, q.row(i, x, len(p)), x)
                return Verdict(tuple(range(i)), inverse_cdf(weights, noise.uniform(Purpose.RESIDUAL, i)), "residual")
        return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus")

    return verify


def _softmax_residual(p: Probs, q: Probs, x: int) -> Probs:
    weights: Probs = np.exp(np.maximum(p - q, 0.0))
    return weights


def _without_draft(p: Probs, q: Probs, x: int) -> Probs:
    rest = p.copy()
    rest[x] = 0.0
    return rest if rest.any() else p


def _ids_from_the_end(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
    """Reads p[x] for any x: -1 is the last token."""
    for i, x in enumerate(proposal.tokens):
        if not noise.uniform(Purpose.ACCEPT, i) < rows[i][x]:
            return Verdict(tuple(range(i)), inverse_cdf(rows[i], noise.uniform(Purpose.RESIDUAL, i)), "residual")
    k = len(proposal)
    return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus")


def _proposes_minus_one(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
    return Proposal((-1,) * k)


def _rule(name: str, source: str, **pieces: Any) -> Mutant:
    return Mutant(name, source, by_certificate(Parts(_token_rule(**pieces), chain)))


_TOKEN = [
    _rule("residual through softmax", "FAULTS B01", correction=_softmax_residual),
    _rule("residual with a floor", "FAULTS B05", correction=lambda p, q, x: np.maximum(p - q, 0.01)),
    _rule("residual padded beyond the vocabulary", "FAULTS B66", correction=lambda p, q, x: np.append(residual(p, q), 0.1)),
    _rule("resample from p after a rejection", "ALGORITHMS 1.5", correction=lambda p, q, x: p),
    _rule("residual p without x, though x was drawn", "FAULTS B14, N2 reversed", correction=_without_draft),
    _rule("ratio over max p instead of q", "FAULTS B06", accepts=lambda u, p, q, row, x: u * row.max() < p),
    _rule("ratio upside down", "FAULTS B06", accepts=lambda u, p, q, row, x: u * p < q),
    _rule("u hard-wired to 0", "FAULTS B07", accepts=lambda u, p, q, row, x: p > 0),
    _rule("u <= p/q accepts p = 0", "ALGORITHMS 1.2", accepts=lambda u, p, q, row, x: u * q <= p),
    _rule("verified by argmax", "FAULTS B16", accepts=lambda u, p, q, row, x: x == int(row.argmax())),
    _rule("first draft never checked", "FAULTS B17", unchecked=0),
    _rule("second draft never checked", "FAULTS B17", unchecked=1),
    _rule("target rows one too far", "FAULTS B18", row_shift=1),
    Mutant("id -1 reads the last token", "FAULTS B64", by_certificate(Parts(_ids_from_the_end, _proposes_minus_one))),
    Mutant("a lossy rule passed off as exact", "ALGORITHMS 5.2", by_certificate(Parts(lossy.lenience(0.8), chain))),
]


# ---------------------------------------------------------------- block verification


def _block_rule(*, cap: bool = True, token_residual: bool = False, token_coin: bool = False, forwards: bool = False) -> Rule:
    """Block verification with one of its pieces exchanged."""

    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        k = len(proposal)
        if not k:
            return plain(rows, noise)
        worth = [1.0]
        for i, x in enumerate(proposal.tokens):
            ratio = worth[-1] * probability(rows[i], x) / proposal.q.prob(i, x)
            worth.append(min(1.0, ratio) if cap else ratio)
        excess = [np.maximum(worth[i] * rows[i] - proposal.q.row(i, proposal.tokens[i], len(rows[i])), 0.0) for i in range(k)]
        coins = [float(excess[i].sum() / (excess[i].sum() + max(1 - worth[i], 0.0) or 1.0)) for i in range(1, k)] + [worth[k]]
        if token_coin:
            coins = [worth[i] for i in range(1, k + 1)]
        passed = [noise.uniform(Purpose.ACCEPT, i) < coin for i, coin in enumerate(coins)]
        length = (
            next((i for i, ok in enumerate(passed) if not ok), k)
            if forwards
            else max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        )
        if length == k:
            return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus")
        weights = residual(rows[length], proposal.q.row(length, proposal.tokens[length], len(rows[length])))
        if not token_residual and excess[length].any():
            weights = excess[length]
        return Verdict(tuple(range(length)), inverse_cdf(weights, noise.uniform(Purpose.RESIDUAL, length)), "residual")

    return verify


def _block(name: str, source: str, **pieces: Any) -> Mutant:
    return Mutant(name, source, by_certificate(Parts(_block_rule(**pieces), chain)))


_BLOCK = [
    _block("block with the token rule's residual", "ALGORITHMS 3.2, FAULTS B09", token_residual=True),
    _block("block stops at the first failed coin", "ALGORITHMS 3.2", forwards=True),
    _block("block with uncapped joint ratios", "ALGORITHMS 3.4", cap=False),
    _block("block with P_i as every coin", "ALGORITHMS 3.2", token_coin=True),
]


# ---------------------------------------------------------------- several candidates


def _candidates(*, keep_p: bool = False, same_q: bool = False, residual_of_first: bool = False) -> Rule:
    """The rule of several candidates with one of its pieces exchanged; one level."""

    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        left, tried = rows[0], children(proposal, -1)
        if not tried:
            return plain(rows, noise)
        for child in tried:
            x = proposal.tokens[child]
            q = proposal.q.row(tried[0] if same_q else child, x, len(left))
            if noise.uniform(Purpose.ACCEPT, child) * q[x] < left[x]:
                return Verdict((child,), inverse_cdf(rows[child + 1], noise.uniform(Purpose.BONUS, child + 1)), "bonus")
            if not keep_p:
                left = residual(left, q)
                left = left / left.sum()
        if keep_p or residual_of_first:
            left = residual(rows[0], proposal.q.row(tried[0], proposal.tokens[tried[0]], len(left)))
        return Verdict((), inverse_cdf(left, noise.uniform(Purpose.RESIDUAL, 0)), "residual")

    return verify


def _best_first(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
    """The greedy draft, reordered: its drawn candidate claims the whole row."""
    honest = tree("greedy", 2, depth=1)(problem, context, k, noise)
    if len(honest) < 2 or not honest.q.sampled:
        return honest
    row = problem.float_row("q", context)
    return Proposal(honest.tokens, DenseRows((row, *(honest.q.row(i, honest.tokens[i], len(row)) for i in (1,)))), honest.parents)


def _traversal_rule(*, update_worth: bool = True, update_law: bool = True) -> Rule:
    """Traversal verification with one of its updates left out."""

    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        if not len(proposal):
            return plain(rows, noise)
        left = {node: children(proposal, node) for node in range(-1, len(proposal))}
        law = {node: rows[node + 1] for node in left}
        worth = {-1: 1.0}
        node = -1
        while True:
            while left[node]:
                parent, node = node, left[node][0]
                x = proposal.tokens[node]
                worth.setdefault(node, min(1.0, worth[parent] * probability(law[parent], x) / proposal.q.prob(node, x)))
            if node == -1 or noise.uniform(Purpose.ACCEPT, node) < worth[node]:
                y = inverse_cdf(law[node], noise.uniform(Purpose.RESIDUAL, node + 1))
                return Verdict(proposal.path(node), y, "residual")
            parent = proposal.parent(node)
            left[parent].remove(node)
            q = proposal.q.row(node, proposal.tokens[node], len(law[parent]))
            excess = np.maximum(worth[parent] * law[parent] - q, 0.0)
            total = float(excess.sum())
            if update_law and total > 0:
                law[parent] = excess / total
            if update_worth:
                worth[parent] = total / (total + 1 - worth[parent]) if total > 0 else 0.0
            node = -1

    return verify


_flat = tree("without-replacement", 2, depth=1)

_TREES = [
    Mutant(
        "later candidates judged by p itself",
        "ALGORITHMS 3.5",
        by_certificate(Parts(_candidates(keep_p=True), _flat), drawn_cases),
    ),
    Mutant(
        "candidates judged by the first one's q",
        "ALGORITHMS 3.5",
        by_certificate(Parts(_candidates(same_q=True), _flat), drawn_cases),
    ),
    Mutant(
        "first candidate's residual after all failed",
        "ALGORITHMS 3.5",
        by_certificate(Parts(_candidates(residual_of_first=True), _flat), drawn_cases),
    ),
    Mutant(
        "greedy draft claims the whole row", "ALGORITHMS 3.5", by_certificate(Parts(multidraft.verify, _best_first), drawn_cases)
    ),
    Mutant(
        "traversal that keeps p after a rejection",
        "ALGORITHMS 3.6",
        by_certificate(Parts(_traversal_rule(update_law=False), _flat), drawn_cases),
    ),
    Mutant(
        "traversal that keeps W after a rejection",
        "ALGORITHMS 3.6",
        by_certificate(Parts(_traversal_rule(update_worth=False), chain), drawn_cases),
    ),
]


# ---------------------------------------------------------------- what the drafter claims


def _claims(choose: Callable[[Probs, StepNoise, int], int], record: Callable[[Probs], Probs] = lambda row: row) -> Draft:
    """Tokens chosen in one way, rows recorded in another."""

    def draft(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
        tokens: list[int] = []
        rows: list[Probs] = []
        for i in range(k):
            row = problem.float_row("q", (*context, *tokens))
            tokens.append(choose(row, noise, i))
            rows.append(record(row))
        return Proposal(tuple(tokens), DenseRows(tuple(rows)))

    return draft


def _sharp_draw(row: Probs, noise: StepNoise, i: int) -> int:
    return inverse_cdf(row**2, noise.uniform(Purpose.DRAFT, i))


def _rounded_draw(row: Probs, noise: StepNoise, i: int) -> int:
    """From logits rounded to sixteenths, as bfloat16 rounds those above 8."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return inverse_cdf(np.exp(np.round(np.log(row) * 16) / 16), noise.uniform(Purpose.DRAFT, i))


def _drops(useless: Callable[[Problem, Context, int, Probs], bool]) -> Draft:
    """An honest chain, cut before the first token that is useless for what it is."""

    def draft(problem: Problem, context: Context, k: int, noise: StepNoise) -> Proposal:
        proposal = chain(problem, context, k, noise)
        if isinstance(proposal.q, PointMass):
            return proposal
        for i, x in enumerate(proposal.tokens):
            prefix = (*context, *proposal.tokens[:i])
            if useless(problem, prefix, x, problem.float_row("q", prefix)):
                return proposal.cut(i)
        return proposal

    return draft


def _later_row(problem: Problem, prefix: Context, x: int, q: Probs) -> bool:
    """The row behind the token looks unpromising."""
    return bool(problem.float_row("q", (*prefix, x)).max() < 0.6)


_DRAFTS = [
    Mutant(
        "argmax draft that claims q",
        "FAULTS B15",
        by_certificate(Parts(token.verify, _claims(lambda q, noise, i: int(q.argmax())))),
    ),
    Mutant("q recorded at another temperature", "FAULTS B23", by_certificate(Parts(token.verify, _claims(_sharp_draw)))),
    Mutant("drawn in low precision, recorded in high", "FAULTS B11", by_certificate(Parts(token.verify, _claims(_rounded_draw)))),
    Mutant(
        "drawn token dropped for its low q",
        "FAULTS B83",
        by_certificate(Parts(token.verify, _drops(lambda problem, prefix, x, q: q[x] < 0.4))),
    ),
    Mutant(
        "drawn token dropped for the row behind it", "ALGORITHMS 2.4", by_certificate(Parts(block.verify, _drops(_later_row)))
    ),
    Mutant(
        "drawn illegal token removed",
        "FAULTS B84",
        by_certificate(Parts(token.verify, _drops(lambda problem, prefix, x, q: problem.p(prefix)[x] == 0))),
    ),
]

RULES = [*_TOKEN, *_BLOCK, *_TREES, *_DRAFTS]
