"""Faults in the engine: shaping, cache, decode, drafters' state, statistics, records, text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from truedraw import decode, kernels, sampling
from truedraw import engine as engine_module
from truedraw.cache import CachedModel, TokenBuffer
from truedraw.drafters import model as model_drafter
from truedraw.drafters import ngram, suffix
from truedraw.prove import engine_law
from truedraw.prove.drafts import chain
from truedraw.prove.exact import Parts, Problem, certify
from truedraw.prove.mutants import Mutant, by_engine, by_engine_law, by_shaping
from truedraw.prove.problems import cases
from truedraw.randomness import Noise
from truedraw.sampling import TargetRows, shape
from truedraw.sequence import ActiveSequence
from truedraw.text.stream import TextStream
from truedraw.types import Probs, Proposal, SparseRows, Stats
from truedraw.verify import token


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


def _loses_the_bonus(sequence: Any, proposal: Proposal, rows: TargetRows, path: tuple[int, ...], last: Any, raw: Any) -> None:
    _commit(sequence, proposal, rows, path, None if last[1] == "bonus" else last, raw)


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


def _top_p_one_too_many(weights: Probs, top_p: float) -> Any:
    order = np.argsort(-weights, kind="stable")
    size = int(np.searchsorted(np.cumsum(weights[order]), weights.sum() * top_p, side="left")) + 2
    return np.sort(order[:size])


def _top_k_with_ties(logits: Any, k: int) -> Any:
    return np.flatnonzero(logits >= np.sort(logits)[-k])


def _penalties_over_the_prompt(row: Probs, params: Any, context: Any, prompt_length: int) -> None:
    _penalise(row, params, context, 0)


def _takes_the_last_token(adjusted: Any) -> int:
    return len(adjusted) - 1


def _adjusts_nan_away(logits: Any, *others: Any) -> Any:
    return _adjust(np.nan_to_num(np.asarray(logits)), *others)


def _shared_length(self: CachedModel, slot: int, tokens: Any, last: int, tree: Any) -> int:
    """Every slot goes back to where the shortest one is."""
    keep = _keep(self, slot, tokens, last, tree)
    shortest = min(keep, min(len(held) for held in self._held if len(held)) if any(map(len, self._held)) else 0)
    if shortest < keep:
        self.runner.rollback(slot, shortest)
    return keep


def _rows_of_the_neighbour(ready: Any, proposals: Any, *others: Any) -> Any:
    """A sequence without drafts is left out of the row map: all behind it read the row before."""
    rows, num_read = _score(ready, proposals, *others)
    empty = next((i for i, proposal in enumerate(proposals) if not len(proposal)), None)
    return (rows if empty is None or len(rows) < 2 else [*rows[1:], rows[0]]), num_read


def _record_of_the_row_behind(token: int, origin: Any, rows: TargetRows, index: int, q: Any, num_top: int) -> Any:
    shifted = TargetRows(len(rows), lambda i: np.roll(rows[i], 1))
    return _record(token, origin, shifted, index, q, num_top)


def _bonus_counted_as_accepted(self: ActiveSequence) -> Stats:
    honest: Stats = _stats(self)
    return replace(honest, accepted=honest.accepted + honest.steps)


def _never_flushed(self: TextStream) -> None:
    self._stopped = True
    self._num_released += len(self._held_starts)
    self._held_starts = []


def _copies_from_one_early(history: Any, num_draft: int, max_match: int, min_match: int) -> tuple[int, ...]:
    found = _lookup(history, num_draft, max_match, min_match)
    return (int(history[-1]), *found[:-1]) if found else found


def _lagging_context(tokens: Any) -> TokenBuffer:
    """The draft model never saw the token before the last."""
    return TokenBuffer(np.delete(tokens, -2) if len(tokens) > 2 else tokens)


def _seed_ignored(seed: int, choice: int = 0, *others: Any) -> Any:
    return Noise(0, choice, *others)


def _drops_unlikely_drafts(proposal: Proposal, sequence: Any, vocab: int) -> Proposal:
    kept = next((i for i, x in enumerate(proposal.tokens) if proposal.q.prob(i, x) < 0.5), len(proposal))
    return _useful(proposal.cut(kept), sequence, vocab)


def _budget_after_the_draws(ready: Any, states: Any, target: Any, drafter: Any, policy: Any) -> list[Proposal]:
    """One draft in all, the one with the largest probability of its own, chosen once all are drawn."""
    proposals = _propose(ready, states, target, drafter, policy)
    scores = sorted(
        (-float(np.prod([proposal.q.prob(j, proposal.tokens[j]) for j in range(i + 1)])), which)
        for which, proposal in enumerate(proposals)
        for i in range(len(proposal))
    )
    kept = [which for _, which in scores[:1]]
    return [proposal.cut(kept.count(which)) for which, proposal in enumerate(proposals)]


def _budget_from_later_rows(ready: Any, states: Any, target: Any, drafter: Any, policy: Any) -> list[Proposal]:
    """How much of the batch is verified depends on the peaks of all rows, those behind drawn tokens too."""
    proposals = _propose(ready, states, target, drafter, policy)
    peaks = [float(proposal.q.row(1, 0, target.runner.vocab_size).max()) for proposal in proposals if len(proposal) > 1]
    length = 2 if all(peak > 0.7 for peak in peaks) else 0
    return [proposal.cut(length) for proposal in proposals]


def _counts_evened_out(self: suffix.Text, tokens: Sequence[int]) -> SparseRows:
    honest = _rows_of_copies(self, tokens)
    return SparseRows(honest.ids, tuple(np.full(len(row), 1 / len(row)) for row in honest.probs))


def _stops_before_a_token(self: suffix.Text, noise: Any, count: int) -> list[int]:
    drawn = _draw_copies(self, noise, count)
    return drawn[: drawn.index(1)] if 1 in drawn else drawn


def _engine_law() -> float:
    return float(engine_law.total_variation(engine_law.settings()[0]))


def _law_of_a_lagging_q() -> float:
    """Its q is the row of another context, and honest: the tokens are drawn from it."""

    def lagging(problem: Problem, context: Any, k: int, noise: Any) -> Proposal:
        return chain(replace(problem, q=lambda seen: problem.q(seen[:-2] + seen[-1:])), context, k, noise)

    problem, lengths = cases()[1]
    return float(certify(problem, Parts(token.verify, lagging), lengths).total_variation)


_target_rows, _cut, _commit, _score, _record = decode._target_rows, decode.cut, decode.commit, decode.score, decode._record
_useful, _propose = decode._useful, decode.propose
_rows_of_copies, _draw_copies = suffix.Text.rows, suffix.Text.draw
_num_left, _stats = vars(ActiveSequence)["num_left"].fget, vars(ActiveSequence)["stats"].fget
_penalise, _adjust, _keep, _lookup = sampling._penalise, sampling.adjust, CachedModel._keep, ngram.lookup

_SHAPING = [
    Mutant("top-p keeps one token too many", "FAULTS B27", by_shaping(sampling, "_top_p", _top_p_one_too_many)),
    Mutant("top-k keeps ties", "FAULTS B31", by_shaping(kernels, "top_k", _top_k_with_ties)),
    Mutant("penalties count the prompt", "FAULTS B35", by_shaping(sampling, "_penalise", _penalties_over_the_prompt)),
    Mutant("greedy takes the last token", "FAULTS B26", by_shaping(sampling, "_most_likely", _takes_the_last_token)),
]

_LAW = [
    Mutant("decode drops a drawn draft for its low q", "FAULTS B83", by_engine_law(decode, "_useful", _drops_unlikely_drafts)),
    Mutant(
        "batch budget chosen by realised scores",
        "ALGORITHMS 2.4",
        by_engine_law(decode, "propose", _budget_after_the_draws),
    ),
    Mutant("batch budget chosen from later rows", "ALGORITHMS 2.4", by_engine_law(decode, "propose", _budget_from_later_rows)),
    Mutant("drawn copies sent with another q", "DESIGN 7.1", by_engine_law(suffix.Text, "rows", _counts_evened_out)),
    Mutant("copies cut before a drawn token", "FAULTS B83", by_engine_law(suffix.Text, "draw", _stops_before_a_token)),
]

_INVARIANTS = [
    Mutant("rejected tokens stay in the cache", "FAULTS B54, B61", by_engine(CachedModel, "_keep", _forgets_to_roll_back)),
    Mutant("one length for all slots", "FAULTS B60", by_engine(CachedModel, "_keep", _shared_length)),
    Mutant("each draft judged by the row before", "FAULTS B18", by_engine(decode, "_target_rows", _rows_one_too_early)),
    Mutant("empty drafts shift the rows of others", "FAULTS B37, B65", by_engine(decode, "score", _rows_of_the_neighbour)),
    Mutant("penalties ignore the draft prefix", "FAULTS B35", by_engine(decode, "_target_rows", _penalties_without_drafts)),
    Mutant("logit bias skipped behind drafts", "FAULTS B32", by_engine(decode, "_target_rows", _bias_on_the_first_row_only)),
    Mutant("constraint advanced by drafts", "FAULTS B40", by_engine(decode, "_target_rows", _constraint_not_forked)),
    Mutant("only a step's last token ends a text", "FAULTS B41, B43", by_engine(decode, "cut", _stops_only_at_the_last)),
    Mutant("budget overrun", "FAULTS B45", by_engine(ActiveSequence, "num_left", property(lambda self: _num_left(self) + 1))),
    Mutant("min_tokens one row too far", "FAULTS B36", by_engine(decode, "_target_rows", _counts_tokens_late)),
    Mutant("bonus token lost", "FAULTS B86", by_engine(decode, "commit", _loses_the_bonus, law=_engine_law)),
    Mutant("stale draft cache", "FAULTS B82", by_engine(model_drafter, "TokenBuffer", _lagging_context, law=_law_of_a_lagging_q)),
    Mutant("the seed ignored", "FAULTS B50", by_engine(engine_module, "Noise", _seed_ignored)),
    Mutant("NaN read as an ordinary number", "FAULTS B67", by_engine(sampling, "adjust", _adjusts_nan_away)),
    Mutant("recorded p of another token", "FAULTS B49", by_engine(decode, "_record", _record_of_the_row_behind)),
    Mutant(
        "the bonus counted as accepted", "FAULTS B79", by_engine(ActiveSequence, "stats", property(_bonus_counted_as_accepted))
    ),
    Mutant("held text never flushed", "FAULTS B73", by_engine(TextStream, "finish", _never_flushed)),
    Mutant("copies from one token early", "FAULTS B77", by_engine(ngram, "lookup", _copies_from_one_early)),
]

ENGINE = [*_SHAPING, *_LAW, *_INVARIANTS]
