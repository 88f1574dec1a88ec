"""One step for a batch of sequences: propose, score in one pass, verify each, commit each.

Everything about a sequence that changes lives in its ActiveSequence (sequence.py), and changes only in `commit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from truedraw.cache import LEAST_COPIED, CachedModel, common_prefix
from truedraw.errors import InvalidParameter, ProposalError, RowError
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
from truedraw.sampling import Law, TargetRows, largest, law, logprob
from truedraw.sequence import ActiveSequence
from truedraw.types import (
    FinishReason,
    Origin,
    Proposal,
    Record,
    Verdict,
)
from truedraw.verify.tested import tested

PREFILL_CHUNK = 256
"""Prompt tokens in one pass, all sequences together: running requests go on in between, and the
same chunks come up whether anybody else is running or not."""

SMALL_PASS = 32
"""The pass that reads the end of a prompt drafts only within such a size, up to which rows agree where they do at all
(DESIGN.md 5): else what the cache holds of the prompt would depend on the drafts."""


RawRows: TypeAlias = Callable[[int], Any]
"""The target's logits behind a draft that was fed, by its index, and behind the context, by -1."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did for one sequence; a step that only fed prompt is not reported, unless the prompt was all
    that was wanted.

    plain_seconds  what plain decoding is estimated to have taken for what was emitted
    """

    sequence: ActiveSequence
    num_proposed: int
    num_accepted: int
    num_emitted: int
    seconds: float
    plain_seconds: float | None = None


def step(
    batch: Sequence[ActiveSequence],
    target: CachedModel,
    drafter: Drafter,
    policy: LengthPolicy,
    clock: Callable[[], float],
) -> tuple[list[StepReport], StepTiming | None]:
    """Advance every unfinished sequence of the batch by one target pass; says what it did, and how long its parts took.

    Sequences whose prompt is not in the cache yet get their next chunk of it, copied where another slot
    holds it; all others emit 1 .. k + 1 tokens. Whatever fails while one sequence is verified (a row that is no law, its
    constraint, its rule) ends that sequence with the error, and nobody else's. Raises what runner
    and drafter raise; before `drafter.observe` nothing has been committed then.
    """
    started = clock()
    for sequence in batch:
        if not sequence.num_steps and sequence.prompt_logprobs is None:
            sequence.num_copied += target.adopt(sequence.slot, sequence.context.array[:-1])
    loading = [sequence for sequence in batch if _num_missing(sequence, target) > 0]
    readers = _first_readers(loading, target)
    ending, room = _ending(readers, target)
    ready = [sequence for sequence in batch if sequence not in loading or sequence in ending]
    for sequence in ready:
        if sequence.ready_at is None:
            sequence.ready_at = started
    states = tuple(sequence.state for sequence in ready)

    proposals = propose(ready, states, target, drafter, policy)
    drafted = clock()
    fed = [_fed(proposal, sequence, target) for proposal, sequence in zip(proposals, ready, strict=True)]
    still = [sequence for sequence in readers if sequence not in ending]
    rows, num_read = score(ready, proposals, fed, still, room, target, drafter.hidden)
    scored = clock()
    num_read += PREFILL_CHUNK - room
    plain, drafting = policy.pass_seconds(states, 0), policy.pass_seconds(states, sum(map(len, fed)))
    # what reading prompts took, plain decoding would have spent as well
    reading = max(0.0, scored - drafted - drafting) if drafting is not None and num_read else 0.0

    reports, outcomes = [], []
    for sequence in loading:
        if not sequence.num_left and not _num_missing(sequence, target):
            sequence.finish("length")  # nothing was wanted but its prompt
        if sequence.finish_reason is not None:
            reports.append(StepReport(sequence, 0, 0, 0, clock() - started))
    for sequence, proposal, nodes, row in zip(ready, proposals, fed, rows, strict=True):
        target_rows, raw = _target_rows(sequence, proposal, nodes, row), _raw_rows(nodes, row)
        length = len(sequence.context)
        verdict: Verdict | None = None
        told: Tested = ()
        try:
            proposal, verdict = _verify(sequence, proposal, target_rows)
            told = tested(sequence.rule_name, proposal, target_rows, verdict.path)
            commit(sequence, proposal, target_rows, verdict.path, (verdict.next_token, verdict.origin), raw)
            if verdict.drift is not None:
                sequence.drift = verdict.drift if sequence.drift is None else sequence.drift + verdict.drift
        except Exception as error:  # a constraint is the user's code and may raise anything
            _fail(sequence, proposal, target_rows, verdict, error, raw)
        emitted = tuple(int(token) for token in sequence.context.array[length:])
        finished = sequence.finish_reason is not None
        outcomes.append(Outcome(sequence.id, sequence.slot, emitted, proposal, verdict, row.hidden, finished, told))
        num_accepted = sequence.origins[length - sequence.prompt_length :].count("draft")
        # a plain step looks at one row for each token too, and so takes as long to verify what was emitted
        estimate = None if plain is None else len(emitted) * plain + reading + clock() - scored
        if sequence in ending:
            sequence.ready_at, sequence.num_with_prompt = clock(), len(emitted)
        elif estimate is not None:
            sequence.plain_seconds = (sequence.plain_seconds or 0.0) + estimate
        reports.append(StepReport(sequence, len(proposal), num_accepted, len(emitted), clock() - started, estimate))
    drafter.observe(outcomes)
    ended = clock()
    for sequence in ready:
        assert sequence.ready_at is not None
        sequence.seconds = ended - sequence.ready_at
    if not ready:
        return reports, None
    made = reports[len(reports) - len(ready) :]
    timing = StepTiming(
        pass_size=sum(map(len, fed)) + len(ready),
        draft_seconds=drafted - started,
        target_seconds=scored - drafted,
        verify_seconds=ended - scored,
        states=states,
        num_proposed=tuple(report.num_proposed for report in made),
        num_accepted=tuple(report.num_accepted for report in made),
        tested=tuple(outcome.tested for outcome in outcomes),
        num_read=num_read,
    )
    policy.observe(timing)
    return reports, timing


def _num_missing(sequence: ActiveSequence, target: CachedModel) -> int:
    """Prompt tokens before the pending one that the cache lacks. Once running, what lacks is the
    accepted path of a tree at most, and goes along with the next pass."""
    if sequence.num_steps:
        return 0
    before_pending = sequence.context.array[:-1]
    return len(before_pending) - target.num_cached(sequence.slot, before_pending)


def _ending(readers: Sequence[ActiveSequence], target: CachedModel) -> tuple[list[ActiveSequence], int]:
    """Those whose prompt ends in this pass: their first step is made in it too. And what room is left for others' prompts."""
    ending, room = [], PREFILL_CHUNK
    for sequence in readers:
        missing = _num_missing(sequence, target)
        if missing <= room and sequence.prompt_logprobs is None:
            ending.append(sequence)
            room -= missing
    return ending, room


def _first_readers(loading: Sequence[ActiveSequence], target: CachedModel) -> list[ActiveSequence]:
    """Those that read prompt in this pass: one whose prompt begins as that of an earlier one, beyond what its own
    slot holds, waits, and takes over what that one has read."""
    readers: list[ActiveSequence] = []
    for i, sequence in enumerate(loading):
        prompt, owner = sequence.context.array[:-1], target.owner(sequence.slot)
        own = target.num_cached(sequence.slot, prompt) + LEAST_COPIED
        alone = sequence.prompt_logprobs is not None or not target.runner.can_copy
        if alone or not any(
            target.owner(other.slot) == owner and common_prefix(other.context.array[:-1], prompt) >= own for other in loading[:i]
        ):
            readers.append(sequence)
    return readers


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
    for i, sequence in enumerate(ready):
        if missing := _num_missing(sequence, target):
            limits[i] = min(limits[i], max(0, SMALL_PASS - 1 - missing))
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
        drafter=sequence.drafter,
        owner=sequence.owner,
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
    room: int,
    target: CachedModel,
    hidden: tuple[str, ...],
) -> tuple[list[Rows], int]:
    """ONE target pass: a row after the pending token and after each draft fed, and prompt chunks of `room` tokens
    for those still loading, whose rows are kept where the prompt is to be judged. Hidden states come with the rows of
    `ready`, but not where much of a prompt is read besides: some runners then make a row of every token. Returns the rows
    of `ready`, and how many tokens of others' prompts were read."""
    contexts = []
    parents: list[tuple[int, ...] | None] = []
    for sequence, proposal, nodes in zip(ready, proposals, fed, strict=True):
        seen = proposal.select(nodes)
        drafts = np.asarray(seen.tokens, dtype=np.int32)
        contexts.append((sequence.slot, np.concatenate([sequence.context.array, drafts])))
        parents.append(seen.parents)
    last = [len(nodes) + 1 for nodes in fed]
    num_read = sum(_num_missing(sequence, target) for sequence in ready)
    room = free = min(room, target.runner.max_pass_size - sum(last))
    row_room = target.runner.max_rows - sum(last)
    judged: list[tuple[ActiveSequence, int]] = []  # those whose prompt rows are kept, and where these begin
    for sequence in loading:
        missing = _num_missing(sequence, target)
        wanted = sequence.prompt_logprobs is not None
        taken = min(missing, room, row_room) if wanted else min(missing, room)
        if taken > 0:
            start = len(sequence.context) - 1 - missing
            contexts.append((sequence.slot, sequence.context.array[: start + taken]))
            last.append(taken if wanted else 0)
            parents.append(None)
            num_read += taken
            room -= taken
            row_room -= last[-1]
            if wanted:
                judged.append((sequence, start))
    small = num_read <= SMALL_PASS and num_read + sum(last) <= target.max_fed(hidden)
    rows = target.logits(contexts, last, parents, [hidden if small and i < len(ready) else () for i in range(len(contexts))])
    keepers = (row for row, kept in zip(rows[len(ready) :], last[len(ready) :], strict=True) if kept)
    for (sequence, start), row in zip(judged, keepers, strict=True):
        try:
            _judge_prompt(sequence, start, row)
        except RowError as error:
            sequence.finish("error", error)
    return rows[: len(ready)], free - room


def _judge_prompt(sequence: ActiveSequence, start: int, rows: Rows) -> None:
    """The log-probabilities of the prompt tokens behind those that were read, the first of them at `start`."""
    assert sequence.prompt_logprobs is not None
    following = sequence.context.array[start + 1 : start + 1 + len(rows.logits)]
    for token, logits in zip(following.tolist(), rows.logits, strict=True):
        sequence.prompt_logprobs.append(logprob(logits, token, sequence.top_logprobs or 0))


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


def _raw_rows(nodes: Sequence[int], rows: Rows) -> RawRows:
    return lambda node: rows.logits[0 if node < 0 else nodes.index(node) + 1]


# ---------------------------------------------------------------- commit


def commit(
    sequence: ActiveSequence,
    proposal: Proposal,
    rows: TargetRows,
    path: tuple[int, ...],
    last: tuple[int, Origin] | None,
    raw: RawRows,
) -> None:
    """Append the accepted path and the rule's own token, up to the stop rule.

    last: that token and its origin; None where its row could not be shaped. raw: the logits behind a node
    that was fed (-1: behind the context), for records.
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
    recording = sequence.top_records is not None or sequence.top_logprobs is not None
    for i, token in enumerate(tokens[:num_kept]):
        drafted = i < len(path)
        origin: Origin = "draft" if last is None or drafted else last[1]
        sequence.origins.append(origin)
        sequence.depths.append(i + 1 if drafted else 0)
        if drafted:
            sequence.accepted_by_depth[i] += 1
        if recording:
            q = proposal.q.prob(path[i], token) if drafted else None
            record = _record(token, origin, rows, parents[i] + 1, q, sequence.top_records or 0)
            if sequence.top_logprobs is not None:
                record = replace(record, logprob=logprob(raw(parents[i]), token, sequence.top_logprobs))
            sequence.records.append(record)
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


def _fail(
    sequence: ActiveSequence, proposal: Proposal, rows: TargetRows, verdict: Verdict | None, error: Exception, raw: RawRows
) -> None:
    """End a sequence whose verification failed, with what had been accepted before: as plain
    decoding, which gets to the broken row one token at a time.

    Every rule asks last for the row that its verdict falls on, so where that one failed the drafts
    before it are accepted (traversal looks at others first, and keeps nothing).
    """
    walked = proposal.is_chain or sequence.rule_name != "traversal"
    if verdict is None and rows.failed and walked:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            commit(sequence, proposal, rows, proposal.path(rows.failed - 1), None, raw)
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


def _record(token: int, origin: Origin, rows: TargetRows, index: int, q: float | None, num_top: int) -> Record:
    top = largest(rows[index], num_top) if num_top else ()
    return Record(token, origin, rows.prob(index, token), q, top)
