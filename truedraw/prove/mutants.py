"""Planted faults, each one that shipped somewhere (FAULTS.md) or that the theory warns of
(ALGORITHMS.md), and the check that must catch it.

A certificate that no fault can fail proves nothing: these are its positive controls.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truedraw import decode
from truedraw.cache import CachedModel
from truedraw.decode import ActiveSequence
from truedraw.protocols import StepNoise
from truedraw.prove import engine_check
from truedraw.prove.coupling import certify_coupling, coupled_draft, race_law
from truedraw.prove.exact import Parts, State, certify
from truedraw.prove.exact import draft as honest_draft
from truedraw.prove.problems import cases
from truedraw.randomness import Key, Noise, Purpose, RaceNoise, Source
from truedraw.sampling import TargetRows, inverse_cdf, residual, shape
from truedraw.types import DenseRows, PointMass, Probs, Proposal, Verdict
from truedraw.verify import coupled, probability, token

RACE_TOLERANCE = 1e-4
"""Error of the quadrature on the rows used here, with a margin of two."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted fault. `catch` runs the check and returns the evidence, or None if it got through."""

    name: str
    source: str
    catch: Callable[[], str | None]


def mutants() -> list[Mutant]:
    return [*_RULES, *_DRAFTS, *_KEYS, *_COUPLED, *_ENGINE]


# ---------------------------------------------------------------- how they are caught


def _by_certificate(parts: Parts) -> Callable[[], str | None]:
    """Any problem on which the exact law is off."""

    def catch() -> str | None:
        for problem, lengths in cases():
            certificate = certify(problem, parts, lengths)
            if not certificate.exact:
                return f"law off on {problem.name}, draft lengths {lengths}"
        return None

    return catch


def _by_text(rule: Any) -> Callable[[], str | None]:
    def catch() -> str | None:
        for problem, _lengths in cases():
            certificate = certify_coupling(problem, rule, range(20), (coupled_draft,))
            if not certificate.exact:
                return f"{certificate.num_different} of {certificate.num_tried} texts are not plain decoding's on {problem.name}"
        return None

    return catch


def _by_quadrature(draw: Any) -> Callable[[], str | None]:
    def catch() -> str | None:
        for row, block in RACE_ROWS:
            off = float(np.abs(race_law(np.array(row), block, draw=draw) - row).sum() / 2)
            if off > RACE_TOLERANCE:
                return f"TV {off:.4f} on p = {row}"
        return None

    return catch


RACE_ROWS: tuple[tuple[list[float], int], ...] = (
    ([0.9, 0.1], 2),
    ([1 / 3, 2 / 3], 1),
    ([0.5, 0.3, 0.2], 64),
    ([0.2, 0.5, 0.3], 2),
    ([0.1, 0.2, 0.3, 0.4], 2),
    ([0.5, 0.0, 0.3, 0.2], 2),
)


def _by_engine(owner: Any, name: str, replacement: Any) -> Callable[[], str | None]:
    """Exchange one function of the engine while its invariants are checked."""

    def catch() -> str | None:
        with _patched(owner, name, replacement):
            return engine_check.first_failure()

    return catch


@contextlib.contextmanager
def _patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


# ---------------------------------------------------------------- the rule


def _token_rule(
    *,
    accepts: Callable[[float, float, float, Probs, int], bool] = lambda u, p, q, row, x: u * q < p,
    correction: Callable[[Probs, Probs, int], Probs] = lambda p, q, x: residual(p, q),
    residual_purpose: Purpose = Purpose.RESIDUAL,
    accept_index: Callable[[int], int] = lambda i: i,
    first_checked: int = 0,
    row_shift: int = 0,
) -> Any:
    """The token rule with one of its pieces exchanged."""

    def verify(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
        k = len(proposal)
        for i, x in enumerate(proposal.tokens):
            p, q = rows[min(i + row_shift, k)], proposal.q
            u = noise.uniform(Purpose.ACCEPT, accept_index(i))
            if i >= first_checked and not accepts(u, probability(p, x), q.prob(i, x), p, x):
                weights = correction(p, q.row(i, x, len(p)), x)
                return Verdict(tuple(range(i)), inverse_cdf(weights, noise.uniform(residual_purpose, i)), "residual")
        return Verdict(tuple(range(k)), inverse_cdf(rows[k], noise.uniform(Purpose.BONUS, k)), "bonus" if k else "plain")

    return verify


def _softmax_residual(p: Probs, q: Probs, x: int) -> Probs:
    return np.exp(np.maximum(p - q, 0.0))


def _without_draft(p: Probs, q: Probs, x: int) -> Probs:
    rest = p.copy()
    rest[x] = 0.0
    return rest if rest.any() else p


def _greedy_verify(u: float, p: float, q: float, row: Probs, x: int) -> bool:
    return x == int(row.argmax())


def _rule(name: str, source: str, **pieces: Any) -> Mutant:
    return Mutant(name, source, _by_certificate(Parts(_token_rule(**pieces))))


_RULES = [
    _rule("residual through softmax", "FAULTS B01", correction=_softmax_residual),
    _rule("residual with a floor", "FAULTS B05", correction=lambda p, q, x: np.maximum(p - q, 0.01)),
    _rule("resample from p after a rejection", "ALGORITHMS 1.5", correction=lambda p, q, x: p),
    _rule("residual p without x although x was sampled", "FAULTS B14, N2 reversed", correction=_without_draft),
    _rule("ratio over max p instead of q", "FAULTS B06", accepts=lambda u, p, q, row, x: u * row.max() < p),
    _rule("ratio upside down", "FAULTS B06", accepts=lambda u, p, q, row, x: u * p < q),
    _rule("u hard-wired to 0", "FAULTS B07", accepts=lambda u, p, q, row, x: p > 0),
    _rule("u <= p/q accepts p = 0", "ALGORITHMS finding 8", accepts=lambda u, p, q, row, x: u * q <= p),
    _rule("verified by argmax", "FAULTS B16", accepts=_greedy_verify),
    _rule("first draft never checked", "FAULTS B17", first_checked=1),
    _rule("target rows one too far", "FAULTS B18", row_shift=1),
]


# ---------------------------------------------------------------- what the drafter claims


def _argmax_claims_q(state: State, k: int, noise: StepNoise) -> Proposal:
    rows: list[Probs] = []
    for _ in range(k):
        row = state.problem.float_row("q", state.context + tuple(state.drafts))
        state.drafts.append(int(row.argmax()))
        rows.append(row)
    return Proposal(tuple(state.drafts), DenseRows(tuple(rows)))


def _sharpened(row: Probs) -> Probs:
    sharp: Probs = row**2
    return sharp / float(sharp.sum())


def _draws_sharper(state: State, k: int, noise: StepNoise) -> Proposal:
    rows: list[Probs] = []
    for i in range(k):
        row = state.problem.float_row("q", state.context + tuple(state.drafts))
        state.drafts.append(inverse_cdf(_sharpened(row), noise.uniform(Purpose.DRAFT, i)))
        rows.append(row)
    return Proposal(tuple(state.drafts), DenseRows(tuple(rows)))


def _drops(state: State, k: int, noise: StepNoise, useless: Callable[[int, int, Probs], bool]) -> Proposal:
    proposal = honest_draft(state, k, noise)
    if isinstance(proposal.q, PointMass):
        return proposal
    vocab = state.problem.vocab
    dropped = (i for i, x in enumerate(proposal.tokens) if useless(i, x, proposal.q.row(i, x, vocab)))
    kept = next(dropped, len(proposal))
    state.drafts = state.drafts[:kept]
    return proposal.cut(kept)


def _drops_unlikely(state: State, k: int, noise: StepNoise) -> Proposal:
    return _drops(state, k, noise, lambda i, x, q: q[x] < 0.4)


def _drops_illegal(state: State, k: int, noise: StepNoise) -> Proposal:
    def illegal(i: int, x: int, q: Probs) -> bool:
        return state.problem.p(state.context + tuple(state.drafts[:i]))[x] == 0

    return _drops(state, k, noise, illegal)


_DRAFTS = [
    Mutant("argmax draft that claims q", "FAULTS B15", _by_certificate(Parts(token.verify, _argmax_claims_q))),
    Mutant("q recorded at another temperature", "FAULTS B11, B23", _by_certificate(Parts(token.verify, _draws_sharper))),
    Mutant("drawn token dropped for its low q", "FAULTS B83", _by_certificate(Parts(token.verify, _drops_unlikely))),
    Mutant("drawn illegal token removed", "FAULTS B84", _by_certificate(Parts(token.verify, _drops_illegal))),
]


# ---------------------------------------------------------------- the keying


def _rekeyed(change: Callable[[Key], Key]) -> Callable[[int, int, Source], Noise]:
    def factory(seed: int, choice: int, source: Source) -> Noise:
        return Noise(seed, choice, lambda key, first, count: source(change(key), first, count))

    return factory


def _keyed(name: str, source: str, change: Callable[[Key], Key]) -> Mutant:
    return Mutant(name, source, _by_certificate(Parts(token.verify, noise=_rekeyed(change))))


_KEYS = [
    _keyed("the same noise at every step", "FAULTS B50", lambda key: replace(key, position=0)),
    _keyed("the same noise at every index of a block", "FAULTS B20", lambda key: replace(key, index=0)),
    _keyed(
        "acceptance shares the draft's noise",
        "ALGORITHMS finding 7",
        lambda key: replace(key, purpose=Purpose.DRAFT) if key.purpose == Purpose.ACCEPT else key,
    ),
    _keyed(
        "residual shares the draft's noise",
        "ALGORITHMS 8.6",
        lambda key: replace(key, purpose=Purpose.DRAFT) if key.purpose == Purpose.RESIDUAL else key,
    ),
    _keyed(
        "the bonus shares the noise of the next step's first draft",
        "ALGORITHMS 1.3 d",
        lambda key: (
            Key(key.seed, key.choice, Purpose.DRAFT, key.position + key.index + 1) if key.purpose == Purpose.BONUS else key
        ),
    ),
]


# ---------------------------------------------------------------- the coupled rule and its race


def _fresh_draw_after_mismatch(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
    verdict = coupled.verify(proposal, rows, noise)
    if verdict.origin != "residual":
        return verdict
    return replace(verdict, next_token=inverse_cdf(rows[verdict.num_accepted], noise.uniform(Purpose.RESIDUAL, 0)))


def _race_keyed_by_step(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
    return coupled.verify(proposal, rows, _StepKeyed(noise))


@dataclass(frozen=True, slots=True)
class _StepKeyed:
    """Race noise that depends on where the step began."""

    noise: StepNoise

    @property
    def start(self) -> int:
        return self.noise.start

    def uniform(self, purpose: Any, index: int) -> float:
        return self.noise.uniform(purpose, index)

    def race(self, position: int) -> Any:
        return self.noise.race(self.noise.start * 1000 + position)


def _race_won_by_the_large_end(row: Probs, noise: RaceNoise, block: int) -> int:
    with np.errstate(divide="ignore", invalid="ignore"):
        return int(np.argmax(np.where(row > 0, noise.tokens(0, len(row)) * row, -1.0)))


def _race_of_block_maxima(row: Probs, noise: RaceNoise, block: int) -> int:
    starts = np.arange(0, len(row), block)
    with np.errstate(divide="ignore"):
        winner = int(np.argmin(noise.blocks(len(starts)) / np.maximum.reduceat(row, starts)))
        inside = row[winner * block : (winner + 1) * block]
        return winner * block + int(np.argmin(noise.tokens(winner * block, len(inside)) / inside))


_COUPLED = [
    Mutant("a fresh draw after a mismatch", "FAULTS N3", _by_text(_fresh_draw_after_mismatch)),
    Mutant("race noise keyed by the step", "FAULTS B53, DESIGN 4", _by_text(_race_keyed_by_step)),
    Mutant("the race won by the large end", "ALGORITHMS 8.5", _by_quadrature(_race_won_by_the_large_end)),
    Mutant("blocks raced by their largest entry", "DESIGN 4", _by_quadrature(_race_of_block_maxima)),
]


# ---------------------------------------------------------------- the engine


def _forgets_to_roll_back(self: CachedModel, slot: int, tokens: Any, last: int, tree: Any) -> int:
    keep = min(self.num_cached(slot, tokens), len(tokens) - max(last, len(tree or ())))
    self._held[slot].truncate(keep)
    return keep


def _rows_one_too_early(sequence: Any, proposal: Proposal, nodes: Sequence[int], rows: Any) -> TargetRows:
    honest = _target_rows(sequence, proposal, nodes, rows)
    return TargetRows(len(honest), lambda i: honest[max(i - 1, 0)])


def _penalties_without_drafts(sequence: Any, proposal: Proposal, nodes: Sequence[int], rows: Any) -> TargetRows:
    def compute(i: int) -> Probs:
        if i > len(nodes):
            place_holder = np.zeros(rows.logits.shape[1])
            place_holder[proposal.tokens[i - 1]] = 1.0
            return place_holder
        return shape(
            rows.logits[i], sequence.params, sequence.context.array, sequence.prompt_length, stop_ids=sequence.stop.token_ids
        )

    if sequence.constraint is not None:
        return _target_rows(sequence, proposal, nodes, rows)
    return TargetRows(len(proposal) + 1, compute)


def _constraint_not_forked(sequence: Any, proposal: Proposal, nodes: Sequence[int], rows: Any) -> TargetRows:
    if sequence.constraint is not None and nodes:
        mask = sequence.constraint.mask()
        legal = int(np.flatnonzero(mask)[0])
        sequence.constraint.advance(proposal.tokens[0] if mask[proposal.tokens[0]] else legal)
    return _target_rows(sequence, proposal, nodes, rows)


def _stops_only_at_the_last(sequence: Any, tokens: Any) -> Any:
    for i, x in enumerate(tokens[:-1]):
        sequence.stream.feed(x, silent=x in sequence.stop.token_ids)
        if i + 1 == sequence.num_left:
            return i + 1, "length"
    kept, reason = _cut(sequence, tokens[-1:])
    return len(tokens) - 1 + kept, reason or ("length" if len(tokens) >= sequence.num_left else None)


def _loses_the_bonus(sequence: Any, proposal: Proposal, rows: TargetRows, path: tuple[int, ...], last: Any) -> None:
    _commit(sequence, proposal, rows, path, None if last[1] == "bonus" else last)


def _bias_on_the_first_row_only(sequence: Any, proposal: Proposal, nodes: Sequence[int], rows: Any) -> TargetRows:
    unbiased = copy.copy(sequence)
    unbiased.params = replace(sequence.params, logit_bias={})
    first, later = _target_rows(sequence, proposal, nodes, rows), _target_rows(unbiased, proposal, nodes, rows)
    return TargetRows(len(first), lambda i: later[i] if i else first[i])


def _counts_tokens_late(sequence: Any, proposal: Proposal, nodes: Sequence[int], rows: Any) -> TargetRows:
    late = copy.copy(sequence)
    if sequence.params.min_tokens:
        late.params = replace(sequence.params, min_tokens=sequence.params.min_tokens + 1)
    return _target_rows(late, proposal, nodes, rows)


_target_rows, _cut, _commit = decode._target_rows, decode.cut, decode.commit
_num_left = ActiveSequence.num_left.fget  # type: ignore[attr-defined]  # a property has it

_ENGINE = [
    Mutant("rejected tokens stay in the cache", "FAULTS B54", _by_engine(CachedModel, "_keep", _forgets_to_roll_back)),
    Mutant("each draft judged by the row before", "FAULTS B18", _by_engine(decode, "_target_rows", _rows_one_too_early)),
    Mutant("penalties ignore the draft prefix", "FAULTS B35", _by_engine(decode, "_target_rows", _penalties_without_drafts)),
    Mutant("logit bias skipped behind drafts", "FAULTS B32", _by_engine(decode, "_target_rows", _bias_on_the_first_row_only)),
    Mutant("constraint advanced by drafts", "FAULTS B40", _by_engine(decode, "_target_rows", _constraint_not_forked)),
    Mutant("only a step's last token ends a text", "FAULTS B41, B43", _by_engine(decode, "cut", _stops_only_at_the_last)),
    Mutant("budget overrun", "FAULTS B45", _by_engine(ActiveSequence, "num_left", property(lambda self: _num_left(self) + 1))),
    Mutant("bonus token lost", "FAULTS B86", _by_engine(decode, "commit", _loses_the_bonus)),
    Mutant("min_tokens one row too far", "FAULTS B36", _by_engine(decode, "_target_rows", _counts_tokens_late)),
]
