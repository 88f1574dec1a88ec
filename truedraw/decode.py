"""One step for a batch of sequences: propose, score in one pass, verify each, commit each.

Everything about a sequence that changes lives in its ActiveSequence (sequence.py), and changes only in `commit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from truedraw.cache import CachedModel
from truedraw.errors import InvalidParameter, ProposalError
from truedraw.protocols import (
    Constraint,
    Drafter,
    DraftRequest,
    LengthPolicy,
    Mask,
    Outcome,
    PointProposal,
    Rows,
    SequenceState,
    StepTiming,
    Tested,
)
from truedraw.sampling import Law, TargetRows, law
from truedraw.sequence import ActiveSequence
from truedraw.types import (
    FinishReason,
    Origin,
    Probs,
    Proposal,
    Record,
    Verdict,
)
from truedraw.verify import probability
from truedraw.verify.tested import tested

PREFILL_CHUNK = 256
"""Prompt tokens in one pass, all sequences together: running requests go on in between, and the
same chunks come up whether anybody else is running or not."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did for one sequence; a step that only fed prompt has num_emitted 0 and is not reported."""

    sequence: ActiveSequence
    num_proposed: int
    num_accepted: int
    num_emitted: int
    seconds: float


def step(
    batch: Sequence[ActiveSequence],
    target: CachedModel,
    drafter: Drafter,
    policy: LengthPolicy,
    clock: Callable[[], float],
) -> list[StepReport]:
    """Advance every unfinished sequence of the batch by one target pass.

    Sequences whose prompt is not in the cache yet get their next chunk of it; all others emit
    1 .. k + 1 tokens. Whatever fails while one sequence is verified (a row that is no law, its
    constraint, its rule) ends that sequence with the error, and nobody else's. Raises what runner
    and drafter raise; before `drafter.observe` nothing has been committed then.
    """
    started = clock()
    loading = [sequence for sequence in batch if _num_missing(sequence, target) > 0]
    ready = [sequence for sequence in batch if sequence not in loading]
    for sequence in ready:
        if sequence.ready_at is None:
            sequence.ready_at = started
    states = tuple(sequence.state for sequence in ready)

    proposals = propose(ready, states, target, drafter, policy)
    drafted = clock()
    fed = [_fed(proposal, sequence, target) for proposal, sequence in zip(proposals, ready, strict=True)]
    rows = score(ready, proposals, fed, loading, target, drafter.hidden)
    scored = clock()

    reports, outcomes = [], []
    for sequence, proposal, nodes, row in zip(ready, proposals, fed, rows, strict=True):
        target_rows = _target_rows(sequence, proposal, nodes, row)
        length = len(sequence.context)
        verdict: Verdict | None = None
        told: Tested = ()
        try:
            proposal, verdict = _verify(sequence, proposal, target_rows)
            told = tested(sequence.rule_name, proposal, target_rows, verdict.path)
            commit(sequence, proposal, target_rows, verdict.path, (verdict.next_token, verdict.origin))
            if verdict.drift is not None:
                sequence.drift = verdict.drift if sequence.drift is None else sequence.drift + verdict.drift
        except Exception as error:  # a constraint is the user's code and may raise anything
            _fail(sequence, proposal, target_rows, verdict, error)
        emitted = tuple(int(token) for token in sequence.context.array[length:])
        finished = sequence.finish_reason is not None
        outcomes.append(Outcome(sequence.id, sequence.slot, emitted, proposal, verdict, row.hidden, finished, told))
        num_accepted = sequence.origins[length - sequence.prompt_length :].count("draft")
        reports.append(StepReport(sequence, len(proposal), num_accepted, len(emitted), clock() - started))
    drafter.observe(outcomes)
    ended = clock()
    for sequence in ready:
        assert sequence.ready_at is not None
        sequence.seconds = ended - sequence.ready_at
    if ready:
        policy.observe(
            StepTiming(
                pass_size=sum(map(len, fed)) + len(ready),
                draft_seconds=drafted - started,
                target_seconds=scored - drafted,
                verify_seconds=ended - scored,
                states=states,
                num_proposed=tuple(report.num_proposed for report in reports),
                num_accepted=tuple(report.num_accepted for report in reports),
                tested=tuple(outcome.tested for outcome in outcomes),
            )
        )
    return reports


def _num_missing(sequence: ActiveSequence, target: CachedModel) -> int:
    """Prompt tokens before the pending one that the cache lacks. Once running, what lacks is the
    accepted path of a tree at most, and goes along with the next pass."""
    if sequence.num_steps:
        return 0
    before_pending = sequence.context.array[:-1]
    return len(before_pending) - target.num_cached(sequence.slot, before_pending)


# ---------------------------------------------------------------- propose


def propose(
    ready: Sequence[ActiveSequence],
    states: Sequence[SequenceState],
    target: CachedModel,
    drafter: Drafter,
    policy: LengthPolicy,
) -> list[Proposal]:
    """A proposal for each sequence, bounded by policy, budget, context and pass size.

    Every bound is known before anything is drawn. What is cut afterwards is cut whatever the
    token is worth: point masses by the policy, and whatever lies behind a stop token.
    """
    share = min(target.max_fed(drafter.hidden), target.runner.max_rows) // max(len(ready), 1) - 1
    limits = [
        max(0, min(_length(limit), sequence.num_left - 1, share, share if sequence.max_draft is None else sequence.max_draft))
        for limit, sequence in zip(policy.limits(states), ready, strict=True)
    ]
    asked = [i for i, limit in enumerate(limits) if limit > 0]
    answers = drafter.propose([_draft_request(ready[i], states[i], limits[i], policy) for i in asked]) if asked else []
    if len(answers) != len(asked):
        raise ProposalError(f"the drafter answered {len(asked)} requests with {len(answers)} proposals")
    proposals = [Proposal()] * len(ready)
    for i, proposal in zip(asked, answers, strict=True):
        if not isinstance(proposal, Proposal):
            raise ProposalError(f"the drafter answered with {proposal!r}: a Proposal is needed")
        if not proposal.is_chain and not target.runner.can_score_trees:
            raise ProposalError("the drafter proposed a tree, and this runner scores chains only")
        proposals[i] = _useful(proposal.cut(limits[i]), ready[i], target.runner.vocab_size)
    points = [i for i in asked if len(proposals[i]) and _may_be_cut(proposals[i], ready[i])]
    cuts = policy.cut([PointProposal(states[i], proposals[i].tokens, proposals[i].survival) for i in points]) if points else []
    for i, length in zip(points, cuts, strict=True):
        proposals[i] = proposals[i].cut(_length(length))
    return proposals


def _may_be_cut(proposal: Proposal, sequence: ActiveSequence) -> bool:
    """Point masses may be, and under the coupled rule everything; drafts drawn for a p/q rule may not."""
    return not proposal.q.sampled or (sequence.rule_name == "coupled" and proposal.survival is not None)


def _length(value: object) -> int:
    """A draft length that a policy answered. Raises InvalidParameter."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidParameter("a policy's draft length", value, "an integer")
    return max(0, int(value))


def _draft_request(sequence: ActiveSequence, state: SequenceState, limit: int, policy: LengthPolicy) -> DraftRequest:
    return DraftRequest(
        sequence=sequence.id,
        slot=sequence.slot,
        context=sequence.context.array,
        prompt_length=sequence.prompt_length,
        max_draft=limit,
        params=sequence.params,
        stop_ids=sequence.stop.token_ids,
        constraint=sequence.constraint,
        noise=sequence.noise.at(len(sequence.context)),
        coupled=sequence.rule_name == "coupled",
        more=lambda row: policy.more(state, row),
        worth=lambda forecast: policy.worth(state, forecast),
        num_left=sequence.num_left,
    )


def _useful(proposal: Proposal, sequence: ActiveSequence, vocab: int) -> Proposal:
    """What is worth verifying: nothing hangs on a stop token, since its acceptance ends the text, nor
    on an id that the target does not know, since that is never accepted. The tokens themselves stay,
    as candidates: dropping a drawn one for what it is would move the law."""
    dead = {i for i, token in enumerate(proposal.tokens) if token in sequence.stop.token_ids or not 0 <= token < vocab}
    if not dead:
        return proposal
    kept: list[int] = []
    for i in range(len(proposal)):
        parent = proposal.parent(i)
        if parent == -1 or (parent in kept and parent not in dead):
            kept.append(i)
    return proposal.select(kept)


# ---------------------------------------------------------------- score


def _fed(proposal: Proposal, sequence: ActiveSequence, target: CachedModel) -> tuple[int, ...]:
    """The indices of the drafts that go to the target: all but those that end the text (nothing
    follows them) or that the target does not know (they are rejected unseen)."""
    stop_ids, vocab = sequence.stop.token_ids, target.runner.vocab_size
    return tuple(i for i, token in enumerate(proposal.tokens) if token not in stop_ids and 0 <= token < vocab)


def score(
    ready: Sequence[ActiveSequence],
    proposals: Sequence[Proposal],
    fed: Sequence[tuple[int, ...]],
    loading: Sequence[ActiveSequence],
    target: CachedModel,
    hidden: tuple[str, ...],
) -> list[Rows]:
    """ONE target pass: a row after the pending token and after each draft fed, and prompt chunks
    for those still loading. Returns the rows of `ready`."""
    contexts = []
    parents: list[tuple[int, ...] | None] = []
    for sequence, proposal, nodes in zip(ready, proposals, fed, strict=True):
        seen = proposal.select(nodes)
        drafts = np.asarray(seen.tokens, dtype=np.int32)
        contexts.append((sequence.slot, np.concatenate([sequence.context.array, drafts])))
        parents.append(seen.parents)
    last = [len(nodes) + 1 for nodes in fed]
    room = min(PREFILL_CHUNK, target.max_fed(hidden) - sum(last))
    for sequence in loading:
        missing = _num_missing(sequence, target)
        taken = min(missing, room)
        if taken > 0:
            end = len(sequence.context) - 1 - missing + taken
            contexts.append((sequence.slot, sequence.context.array[:end]))
            last.append(0)
            parents.append(None)
            room -= taken
    return target.logits(contexts, last, parents, hidden)[: len(ready)]


def _target_rows(sequence: ActiveSequence, proposal: Proposal, nodes: Sequence[int], rows: Rows) -> TargetRows:
    """The target's law behind each draft, shaped when the rule looks at it, with the draft prefix as
    its history. Where a draft was not fed, or the constraint forbids it or one before it, nothing is
    drawn: a place holder stands behind it, and the constraint is never asked.

    nodes: the drafts that were fed, in the order of the rows behind the first
    """
    params, stop_ids = sequence.params, sequence.stop.token_ids
    places = {-1: 0, **{node: place for place, node in enumerate(nodes, 1)}}
    committed = sequence.context.array  # as it stands now, also for rows that are looked at after the commit
    constraints: dict[int, Constraint | None] = {-1: sequence.constraint}
    masks: dict[int, Mask | None] = {}

    def constraint_after(node: int) -> Constraint | None:
        if node not in constraints:
            before = constraint_after(proposal.parent(node))
            constraints[node] = None if before is None else before.fork()
            if (after := constraints[node]) is not None:
                after.advance(proposal.tokens[node])
        return constraints[node]

    def mask_after(node: int) -> Mask | None:
        if node not in masks:
            constraint = constraint_after(node)
            masks[node] = None if constraint is None else constraint.mask()
        return masks[node]

    def allowed(node: int) -> bool:
        before = ((proposal.tokens[i], mask_after(proposal.parent(i))) for i in proposal.path(node))
        return all(mask is None or mask[token] for token, mask in before)

    def compute(index: int) -> Law:
        node, vocab = index - 1, rows.logits.shape[1]
        if node not in places or not allowed(node):
            return Law.point(max(0, min(proposal.tokens[node], vocab - 1)), vocab)
        drafts = np.asarray([proposal.tokens[i] for i in proposal.path(node)], dtype=np.int32)
        context = np.concatenate([committed, drafts]) if len(drafts) else committed
        prompt_length, mask = sequence.prompt_length, mask_after(node)
        return law(rows.logits[places[node]], params, context, prompt_length, stop_ids=stop_ids, allowed=mask)

    return TargetRows(len(proposal) + 1, compute)


# ---------------------------------------------------------------- commit


def commit(
    sequence: ActiveSequence, proposal: Proposal, rows: TargetRows, path: tuple[int, ...], last: tuple[int, Origin] | None
) -> None:
    """Append the accepted path and the rule's own token, up to the stop rule.

    last: that token and its origin; None where its row could not be shaped.
    """
    sequence.num_steps += 1
    for index in range(len(proposal)):
        depth = len(proposal.path(index))
        if depth > len(sequence.proposed_by_depth):  # parents come first: one deeper at most
            sequence.proposed_by_depth.append(0)
            sequence.accepted_by_depth.append(0)
        sequence.proposed_by_depth[depth - 1] += 1
    tokens = [*(proposal.tokens[i] for i in path), *(() if last is None else (last[0],))]
    num_kept, reason = cut(sequence, tokens)
    sequence.context.extend(tokens[:num_kept])
    parents = (-1, *path)
    for i, token in enumerate(tokens[:num_kept]):
        drafted = i < len(path)
        origin: Origin = "draft" if last is None or drafted else last[1]
        sequence.origins.append(origin)
        sequence.depths.append(i + 1 if drafted else 0)
        if drafted:
            sequence.accepted_by_depth[i] += 1
        if sequence.top_records is not None:
            q = proposal.q.prob(path[i], token) if drafted else None
            sequence.records.append(_record(token, origin, rows[parents[i] + 1], q, sequence.top_records))
    if sequence.constraint is not None:
        for token in tokens[:num_kept]:
            if token not in sequence.stop.token_ids:
                sequence.constraint.advance(token)
    if reason is not None:
        sequence.finish(reason)


def _verify(sequence: ActiveSequence, proposal: Proposal, rows: TargetRows) -> tuple[Proposal, Verdict]:
    """The verdict, and on how much of the proposal it was given.

    Where the row behind some draft of a chain cannot be shaped, the chain counts up to that draft: a
    verdict that falls before its end needs no more, and any other is the error.
    """
    noise = sequence.noise.at(len(sequence.context))
    try:
        return proposal, sequence.rule(proposal, rows, noise)
    except Exception:
        if rows.failed is None or not proposal.is_chain or not 0 < rows.failed < len(proposal):
            raise
        shorter = proposal.cut(rows.failed)
        return shorter, sequence.rule(shorter, rows, noise)


def _fail(sequence: ActiveSequence, proposal: Proposal, rows: TargetRows, verdict: Verdict | None, error: Exception) -> None:
    """End a sequence whose verification failed, with what had been accepted before: as plain
    decoding, which gets to the broken row one token at a time.

    Every rule asks last for the row that its verdict falls on, so where that one failed the drafts
    before it are accepted (traversal looks at others first, and keeps nothing).
    """
    walked = proposal.is_chain or sequence.rule_name != "traversal"
    if verdict is None and rows.failed and walked:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            commit(sequence, proposal, rows, proposal.path(rows.failed - 1), None)
    if sequence.finish_reason is None:
        sequence.finish("error", error)


def cut(sequence: ActiveSequence, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """How many of the tokens are emitted, and why the text ends there if it does: stop beats length."""
    for i, token in enumerate(tokens):
        ends = token in sequence.stop.token_ids
        if sequence.stream.feed(token, silent=ends) or ends:
            return i + 1, "stop"
        if i + 1 == sequence.num_left:
            return i + 1, "length"
    return len(tokens), None


def _record(token: int, origin: Origin, row: Probs, q: float | None, num_top: int) -> Record:
    top = np.argsort(-row, kind="stable")[:num_top] if num_top else ()
    return Record(token, origin, probability(row, token), q, tuple((int(i), float(row[i])) for i in top))
