"""What a runner, a drafter, a policy, a constraint and a tokenizer must do: the docstring is the contract.

Every implementation is run through the contract tests in tests/test_contracts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from truedraw.errors import InvalidParameter
from truedraw.types import Proposal, SamplingParams, TokenArray, Verdict

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Shape (vocab,): True where a token is allowed."""


# ---------------------------------------------------------------- noise


class RaceNoise(Protocol):
    """Independent Exp(1) noise for the race at one position."""

    def tokens(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """Of token ids first .. first + count, shape (count,)."""
        ...

    def blocks(self, count: int) -> npt.NDArray[np.float64]:
        """Of the first `count` blocks of token ids, shape (count,)."""
        ...


class StepNoise(Protocol):
    """All the randomness of one step. `start` is the position of the step's first token."""

    @property
    def start(self) -> int: ...

    def uniform(self, purpose: Any, index: int) -> float:
        """In [0, 1), keyed by the step's start, the purpose and the index in the block."""
        ...

    def race(self, position: int) -> RaceNoise:
        """Keyed by the absolute position alone."""
        ...


# ---------------------------------------------------------------- the target and the draft model


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one slot in a pass.

    slot          which KV cache
    tokens        shape (n,), n >= 1
    rows_to_keep  rows are wanted after the last so many tokens, 0 .. n
    parents       for each of the last len(parents) tokens the index of its parent among those
                  tokens, -1: the token before them; None: a chain
    hidden        names of the layers whose states are wanted with the rows
    """

    slot: int
    tokens: TokenArray
    rows_to_keep: int
    parents: tuple[int, ...] | None = None
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a pass computed for one chunk: a view, valid until the runner's next forward.

    logits  (rows_to_keep, vocab), float32, NumPy array or torch tensor where the runner lives
    hidden  layer name -> (rows_to_keep, width); "final" is what the output matrix is applied to
    """

    logits: Any
    hidden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TokenMatrices:
    """The embeddings of all tokens, and the matrix whose rows read out the state "final".

    embedding  (vocab, width) float32
    output     (vocab, width) float32, the same array where they are tied: logits are final @ output.T
    """

    embedding: npt.NDArray[np.float32]
    output: npt.NDArray[np.float32]


class ModelRunner(Protocol):
    """A causal language model with one KV cache per slot.

    max_length       tokens that one slot can hold
    max_pass_size    tokens of all chunks that one forward takes
    max_rows         rows that one forward keeps; with hidden states asked for, every token makes one
    can_rollback     rollback to any length works; without it only to 0
    can_copy         a slot can take over what another one holds
    can_score_trees  chunks may carry parents
    hidden_layers    the layer names that a chunk may ask for
    identity         what the cost of a pass depends on (file, library, threads, cache, processor), by name;
                     empty: passes are not worth measuring
    """

    vocab_size: int
    max_length: int
    num_slots: int
    max_pass_size: int
    max_rows: int
    can_rollback: bool
    can_copy: bool
    can_score_trees: bool
    hidden_layers: tuple[str, ...]
    identity: Mapping[str, str]

    def forward(self, chunks: Sequence[Chunk]) -> list[Rows]:
        """Append each chunk's tokens to its slot in ONE pass; at most one chunk per slot.

        Raises RunnerError; the cache then holds nothing that a rollback does not remove.
        """
        ...

    def rollback(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of a slot. Idempotent.

        Raises RollbackUnsupported, or RunnerError if the slot holds fewer tokens.
        """
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Make slot `target` hold the first `length` tokens of slot `source`, and nothing else.

        Raises RollbackUnsupported, or RunnerError if the source holds fewer tokens.
        """
        ...

    def token_matrices(self) -> TokenMatrices:
        """The embeddings of all tokens, and the matrix whose rows read out the state "final".

        Raises RunnerError where the model has none that can be told.
        """
        ...

    def close(self) -> None:
        """Free the model. Idempotent."""
        ...


@runtime_checkable
class Threaded(Protocol):
    """What a runner on CPU threads can do besides.

    thread_counts  the numbers of threads worth trying, ascending; the last is the default, all cores
    """

    thread_counts: tuple[int, ...]

    def set_threads(self, small: int, large: int) -> None:
        """Use so many threads for passes of one token, and for all others; `identity` follows."""
        ...


class TextBatch(Protocol):
    """Texts that grow by a token each at a time, none of which is ever cut.

    num_texts  at a time
    refill     how many places should be free before new texts are begun there
    """

    num_texts: int
    refill: int

    def begin(self, places: Sequence[int], texts: Sequence[TokenArray]) -> None:
        """Put new texts, their first tokens, in these places: what was there is forgotten."""
        ...

    def step(self, places: Sequence[int], tokens: TokenArray) -> Rows:
        """Append one token to each of these texts: their rows, (n, vocab), and final states."""
        ...


@runtime_checkable
class SideBySide(Protocol):
    """What a runner can do besides: generate texts in one pass for all, where its slots are computed one after the other."""

    def side_by_side(self) -> TextBatch | None:
        """As many as there are slots, fewer where memory asks for it. None: not with this model."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back to bytes.

    eos_ids        the ids that end a text
    chat_template  the model's own Jinja template, or None
    bos_text, eos_text  what a chat template may insert
    """

    vocab_size: int
    eos_ids: frozenset[int]
    chat_template: str | None
    bos_text: str
    eos_text: str

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids; control tokens written in the text are read as such. `add_special` prepends
        what the model wants at the start of a text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for control tokens."""
        ...

    def token_text(self, token: int) -> bytes:
        """The vocabulary's own spelling of a token, to compare two vocabularies."""
        ...


# ---------------------------------------------------------------- constraints


class Constraint(Protocol):
    """A stateful mask that follows the draft prefix: grammars, banned words."""

    def mask(self) -> Mask:
        """What may come next. Never asked after a token that ends the text."""
        ...

    def fork(self) -> Constraint:
        """An independent copy: drafts advance forks, only emitted tokens advance the original."""
        ...

    def advance(self, token: int) -> None:
        """Take in a token that the mask allowed."""
        ...


# ---------------------------------------------------------------- drafters and policies


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """What a policy may see of a q row before the next draft token is drawn from it.

    depth            1 for the first draft of the step
    entropy          nats
    top_probability  the largest q
    margin           the largest q minus the second largest
    """

    depth: int
    entropy: float
    top_probability: float
    margin: float


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What a policy may know of a sequence before its step: the past.

    sequence    an id that is never used again
    length      tokens of the context, prompt and output
    num_emitted tokens of the output
    num_left    tokens that may still be emitted
    rule        the rule that verifies it
    proposed, accepted  over the steps so far
    drafter     the name of the drafter that it chose; empty: the engine's
    """

    sequence: int
    length: int
    num_emitted: int
    num_left: int
    rule: str
    proposed: int
    accepted: int
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class PointProposal:
    """A proposal of which a policy may verify any prefix: point masses, or drafts under the coupled rule.

    survival  the drafter's own estimate for each token that it and all before it are accepted; None: it has none
    """

    state: SequenceState
    tokens: tuple[int, ...]
    survival: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a drafter expects of the drafts it could make, before any of them is drawn, or of those it could still make.

    survival  for each draft the probability that it and all before it are accepted
    seconds   what each draft costs to make
    start     what has to be spent before the first one, spread over the steps that it will serve
    drawn     so many drafts are drawn, and will be verified: the question is whether others pay behind them
    """

    survival: tuple[float, ...]
    seconds: float = 0.0
    start: float = 0.0
    drawn: int = 0


class Worth(NamedTuple):
    """How many drafts pay, and what they are expected to gain over none, in tokens."""

    length: int
    gain: float


Tested: TypeAlias = tuple[tuple[float, float], ...]
"""By depth what a verification tells of acceptance: with what probability the depth was reached, and with
what probability it was reached and its draft accepted (verify/tested.py)."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One pass as it was: what a policy learns from.

    pass_size      tokens of all sequences in the pass
    draft_seconds, target_seconds, verify_seconds
    states         the verified sequences, as they were before the step
    num_proposed, num_accepted, tested  for each of them
    num_read       prompt tokens that went along in the pass
    """

    pass_size: int
    draft_seconds: float
    target_seconds: float
    verify_seconds: float
    states: tuple[SequenceState, ...]
    num_proposed: tuple[int, ...]
    num_accepted: tuple[int, ...]
    tested: tuple[Tested, ...] = ()
    num_read: int = 0


class LengthPolicy(Protocol):
    """How many tokens to draft. Decides from the past and from rows, never from the token that it
    would keep or drop: with sampled drafts under p/q rules anything else moves the law."""

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        """Before proposing: an upper bound on the draft length of each."""
        ...

    def worth(self, sequence: SequenceState, forecast: Forecast) -> Worth:
        """How many drafts of a drafter that can forecast them, those that are drawn among them? All, unless overridden."""
        return Worth(len(forecast.survival), sum(forecast.survival))

    def more(self, sequence: SequenceState, row: RowStatistics) -> bool:
        """Between draft depths, before the next draw: go on?"""
        ...

    def cut(self, batch: Sequence[PointProposal]) -> list[int]:
        """Point masses, and drafts of the coupled rule that come with an estimate: how much of each to verify."""
        ...

    def observe(self, step: StepTiming) -> None: ...

    def pass_seconds(self, batch: Sequence[SequenceState], num_drafts: int) -> float | None:
        """What the target's pass for this batch is expected to take with so many drafts in all; None: nothing is known."""
        return None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that wants a proposal.

    sequence       an id that is never used again
    slot           its slot in the target, free for the drafter's own cache to use likewise
    context        (n,) prompt and output, the pending token last; read-only
    prompt_length  how much of it is prompt
    max_draft      draft at most so many tokens
    params         how the target is sampled: a drafter that samples shapes its rows likewise
    stop_ids       nothing is worth drafting behind these
    constraint     as committed; fork it before advancing
    noise          of this step
    coupled        draw drafts by the race with the target's own noise; else with draft noise
    more           asks the policy between depths; a drafter of point masses need not ask
    worth          asks the policy how many drafts pay: before anything is drawn, and again behind drafts that stay
    num_left       tokens that may still be emitted
    drafter        the name of the drafter that it chose; empty: no choice was made
    owner          whose text it is: what is learned from it serves nobody else
    """

    sequence: int
    slot: int
    context: TokenArray
    prompt_length: int
    max_draft: int
    params: SamplingParams
    stop_ids: frozenset[int]
    constraint: Constraint | None
    noise: StepNoise
    coupled: bool
    more: Callable[[RowStatistics], bool]
    worth: Callable[[Forecast], Worth]
    num_left: int
    drafter: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of a proposal.

    tokens    emitted by the step, after the stop rule
    hidden    the layers that the drafter asked for, a row after the pending token and after each draft fed in the pass;
              a view. Empty where the pass read much of a prompt, this one's or another's
    verdict   None: the step failed or the request was cancelled, and nothing was emitted
    tested    what it tells of acceptance by depth
    finished  the sequence has ended: forget it
    """

    sequence: int
    slot: int
    tokens: tuple[int, ...]
    proposal: Proposal
    verdict: Verdict | None
    hidden: Mapping[str, Any]
    finished: bool
    tested: Tested = ()


class Drafter(Protocol):
    """Proposes, never decides. A bad drafter costs speed, never correctness, as long as its q is honest.

    samples  its proposals may carry sampled rows (decides the rule of a request without a seed)
    trees    its proposals may be trees
    hidden   layers of the target that `observe` wants to see
    forecasts  it knows what to expect of its drafts, and asks `worth` for their number before it draws
    default  the name of the drafter that a request without a choice has; empty: there is no choice

    Derive from this class to inherit the defaults: a drafter of point masses then is one method.
    """

    samples: bool = False
    trees: bool = False
    hidden: tuple[str, ...] = ()
    forecasts: bool = False
    default: str = ""

    def forecast(self, requests: Sequence[DraftRequest]) -> list[Forecast | None]:
        """What it expects of its drafts, made from what was emitted, without drawing anything or running a
        model; None: it can't say."""
        return [None] * len(requests)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, in order; an empty one is fine."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the step; called once a step, also for finished sequences. May do nothing."""
        return None

    def named(self, name: str) -> Drafter:
        """The drafter that a request chose by name. Raises InvalidParameter where there is no choice."""
        raise InvalidParameter("drafter", name, "left out: this engine has one drafter only")

    def save(self) -> None:
        """Write what was learned and is to be kept."""
        return None

    def close(self) -> None:
        """Free what the drafter holds. Idempotent."""
        return None
