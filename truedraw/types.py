"""The frozen values that pass between the parts. No behaviour beyond validation and ratios.

Shapes: `vocab` is the number of token ids, `k` the number of draft tokens of a proposal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import InvalidParameter, ProposalError, RowError

Probs: TypeAlias = npt.NDArray[np.float64]
TokenArray: TypeAlias = npt.NDArray[np.int32]
Origin = Literal["draft", "residual", "bonus", "plain"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_SEED = 2**64 - 1
ROW_SUM_TOLERANCE = 1e-3


# ---------------------------------------------------------------- what a request asks for


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request is sampled. Every field holds on every position of a block.

    temperature         >= 0; 0 is greedy, the first maximum wins ties
    top_k               keep the k most likely tokens, ties by token id; 0 keeps all
    top_p               keep the smallest set of most likely tokens with total >= top_p, at least one
    min_p               drop tokens less likely than min_p times the most likely one
    repetition_penalty  > 0; divides positive and multiplies negative logits of tokens seen in prompt or output
    presence_penalty    subtracted once from the logits of tokens seen in the output
    frequency_penalty   subtracted from the logits of tokens seen in the output, once per occurrence
    logit_bias          token id -> added to its logit (-inf bans it)
    max_tokens          tokens to generate at most; None: as many as the context holds
    min_tokens          before so many tokens no stop token can be drawn and no stop string begins
    stop                stop strings: the text ends before the first of them
    stop_token_ids      token ids that end the text, besides the model's own
    ignore_eos          go on after the model's own end-of-text tokens
    seed                0 .. 2**64 - 1; None: fresh noise for each request
    n                   how many choices; choice i is keyed by (seed, i)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0, allowed="a number >= 0 (0 is greedy)")
        _integer("top_k", self.top_k, low=0, allowed="an integer >= 0 (0 keeps all tokens)")
        _number("top_p", self.top_p, low=0, high=1, allowed="a number in [0, 1]")
        _number("min_p", self.min_p, low=0, high=1, allowed="a number in [0, 1]")
        _number("repetition_penalty", self.repetition_penalty, low=0, allowed="a number > 0 (1 is off)")
        if self.repetition_penalty == 0:
            raise InvalidParameter("repetition_penalty", self.repetition_penalty, "a number > 0 (1 is off)")
        _number("presence_penalty", self.presence_penalty, allowed="a finite number (0 is off)")
        _number("frequency_penalty", self.frequency_penalty, allowed="a finite number (0 is off)")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter("logit_bias", self.logit_bias, "a mapping of token id to number")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token", token, low=0, allowed="a token id >= 0")
            if bias != -math.inf and not _is_finite(bias):
                raise InvalidParameter(f"logit_bias of token {token}", bias, "a finite number, or -inf to ban it")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=0, allowed="an integer >= 0, or None for no limit")
        _integer("min_tokens", self.min_tokens, low=0, allowed="an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Sequence):
                raise InvalidParameter(name, getattr(self, name), "a list (an empty one for none)")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameter("stop", text, "non-empty strings")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidParameter("stop", text, "strings that are Unicode: this one holds a lone surrogate") from None
        object.__setattr__(self, "stop", tuple(self.stop))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0, allowed="token ids >= 0")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.seed is not None:
            _integer("seed", self.seed, low=0, high=MAX_SEED, allowed="an integer in [0, 2**64 - 1], or None")
            object.__setattr__(self, "seed", int(self.seed))
        _integer("n", self.n, low=1, allowed="an integer >= 1")


def _number(name: str, value: object, *, allowed: str, low: float = -math.inf, high: float = math.inf) -> None:
    if not _is_finite(value) or not low <= value <= high:  # type: ignore[operator]  # a finite number
        raise InvalidParameter(name, value, allowed)


def _is_finite(value: object) -> bool:
    """A number that a float can hold."""
    if not isinstance(value, int | float | np.floating | np.integer) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _integer(name: str, value: object, *, allowed: str, low: int, high: int | None = None) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]  # whole says so
        raise InvalidParameter(name, value, allowed)


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a sequence ends, derived once from the request and the model: stop beats length."""

    max_tokens: int
    token_ids: frozenset[int]
    strings: tuple[str, ...]


# ---------------------------------------------------------------- proposals


@dataclass(frozen=True, slots=True)
class PointMass:
    """The draft tokens were not drawn: q is 1 at each of them."""

    @property
    def sampled(self) -> bool:
        return False

    def prob(self, index: int, token: int) -> float:
        return 1.0

    def row(self, index: int, token: int, vocab: int) -> Probs:
        """q of draft `index` over the target's vocabulary, shape (vocab,)."""
        row = np.zeros(vocab)
        if 0 <= token < vocab:
            row[token] = 1.0
        return row

    def select(self, indices: Sequence[int]) -> PointMass:
        return self


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """rows[i] is the very array that draft i was drawn from, shape (k, draft vocab), float64, read-only."""

    rows: tuple[Probs, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(probabilities(row, f"draft row at index {i}") for i, row in enumerate(self.rows)))

    @property
    def sampled(self) -> bool:
        return True

    def prob(self, index: int, token: int) -> float:
        row = self.rows[index]
        return float(row[token]) if 0 <= token < len(row) else 0.0

    def row(self, index: int, token: int, vocab: int) -> Probs:
        row = self.rows[index]
        if len(row) == vocab:
            return row
        fitted = np.zeros(vocab)
        fitted[: len(row)] = row[:vocab]
        return fitted

    def select(self, indices: Sequence[int]) -> DenseRows:
        return DenseRows(tuple(self.rows[i] for i in indices))


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """Draft i was drawn from `probs[i]` over the distinct token ids `ids[i]`; q is 0 elsewhere."""

    ids: tuple[npt.NDArray[np.int64], ...]
    probs: tuple[Probs, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.probs):
            raise ProposalError(f"sparse rows carry {len(self.ids)} id arrays and {len(self.probs)} probability arrays")
        object.__setattr__(
            self, "probs", tuple(probabilities(row, f"draft row at index {i}") for i, row in enumerate(self.probs))
        )
        for ids, probs in zip(self.ids, self.probs, strict=True):
            ascending = bool((ids[1:] > ids[:-1]).all())  # then they are distinct
            if len(ids) != len(probs) or not (ascending or len(np.unique(ids)) == len(ids)):
                raise ProposalError("a sparse row needs distinct token ids, one for each probability")

    @property
    def sampled(self) -> bool:
        return True

    def prob(self, index: int, token: int) -> float:
        return float(self.probs[index][self.ids[index] == token].sum())

    def row(self, index: int, token: int, vocab: int) -> Probs:
        row = np.zeros(vocab)
        inside = (self.ids[index] >= 0) & (self.ids[index] < vocab)
        row[self.ids[index][inside]] = self.probs[index][inside]
        return row

    def select(self, indices: Sequence[int]) -> SparseRows:
        return SparseRows(tuple(self.ids[i] for i in indices), tuple(self.probs[i] for i in indices))


DraftLaw: TypeAlias = PointMass | DenseRows | SparseRows


def probabilities(row: npt.ArrayLike, what: str) -> Probs:
    """`row` as a read-only float64 array, shape (vocab,). `what` names the model and the position.

    Raises RowError unless it is finite, >= 0 and sums to 1 within 1e-3: logits handed over as
    probabilities are the fault this catches.
    """
    array = np.asarray(row, dtype=np.float64)
    needed = "probabilities >= 0 that sum to 1 are needed"
    if array.ndim != 1 or not array.size:
        raise RowError(f"the {what} has shape {array.shape}: one number for each token is needed")
    total = float(array.sum())
    if not abs(total - 1.0) <= ROW_SUM_TOLERANCE or not float(array.min()) >= 0:
        wrong = ~np.isfinite(array) | (array < 0)
        if wrong.any():
            token = int(wrong.argmax())
            raise RowError(f"the {what} holds {array[token]:g} at token {token}: {needed}")
        raise RowError(f"the {what} sums to {total:.6g}: {needed}")
    if array.flags.writeable:  # a view would still change with the buffer that it shows
        array = array.copy()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """k >= 0 draft tokens and the law each was really drawn from.

    tokens   an empty proposal is an ordinary value: the step is plain decoding
    q        the very rows the tokens were drawn from, or point masses
    parents  for a tree, the index of each token's parent, -1 for the root; None: a chain
    survival of point masses, the drafter's estimate that a token and all before it are accepted; None: it has none

    A token outside the target's vocabulary is legal and always rejected. Raises ProposalError if
    a token has q = 0 in its own row (it cannot have been drawn from it), or if parents do not
    come before their children.
    """

    tokens: tuple[int, ...] = ()
    q: DraftLaw = PointMass()
    parents: tuple[int, ...] | None = None
    survival: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))
        rows = {DenseRows: lambda q: q.rows, SparseRows: lambda q: q.probs}.get(type(self.q))
        if rows is not None and len(rows(self.q)) != len(self.tokens):
            raise ProposalError(f"{len(self.tokens)} draft tokens and {len(rows(self.q))} draft rows: each token needs its own")
        for index, token in enumerate(self.tokens):
            if not self.q.prob(index, token) > 0:
                raise ProposalError(f"draft token {token} at index {index} has q = 0 in the row it is said to be drawn from")
        if self.survival is not None and len(self.survival) != len(self.tokens):
            raise ProposalError(f"{len(self.tokens)} draft tokens and {len(self.survival)} estimates of their survival")
        if self.parents is not None:
            if len(self.parents) != len(self.tokens):
                raise ProposalError(f"{len(self.tokens)} draft tokens and {len(self.parents)} parents")
            if any(not -1 <= parent < child for child, parent in enumerate(self.parents)):
                raise ProposalError(f"parents {self.parents} must come before their children (-1 is the root)")
            if self.is_chain:
                object.__setattr__(self, "parents", None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents is None or self.parents == tuple(range(-1, len(self.tokens) - 1))

    def parent(self, index: int) -> int:
        """The index of a token's parent; -1 is the root, the last token of the context."""
        return index - 1 if self.parents is None else self.parents[index]

    def path(self, index: int) -> tuple[int, ...]:
        """The indices from the root's child to `index`, `index` included."""
        nodes: list[int] = []
        while index >= 0:
            nodes.append(index)
            index = self.parent(index)
        return tuple(reversed(nodes))

    def cut(self, length: int) -> Proposal:
        """The first `length` tokens. Parents come first, so any prefix of a tree is a tree."""
        if length >= len(self.tokens):
            return self
        return self.select(range(length))

    def select(self, indices: Sequence[int]) -> Proposal:
        """The tokens at ascending `indices`, which must hold the parent of each."""
        places = {-1: -1, **{index: place for place, index in enumerate(indices)}}
        parents = None if self.parents is None else tuple(places[self.parents[index]] for index in indices)
        survival = None if self.survival is None else tuple(self.survival[index] for index in indices)
        return Proposal(tuple(self.tokens[index] for index in indices), self.q.select(indices), parents, survival)


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a lossy rule moved the law: of one step exactly, of a run as the sum over its steps.

    total_variation  added up over the decided positions; over a run it bounds the TV of the text in expectation
    kl_divergence    nats, from the target to what was drawn; over a run it adds up exactly, in expectation
    """

    total_variation: float
    kl_divergence: float

    def __add__(self, other: Drift) -> Drift:
        return Drift(self.total_variation + other.total_variation, self.kl_divergence + other.kl_divergence)

    @property
    def bound(self) -> float:
        """On the total variation of the whole text: the smaller of the added variations and Pinsker's
        sqrt(KL / 2), at most 1."""
        return min(1.0, self.total_variation, math.sqrt(self.kl_divergence / 2))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided: the accepted path, and the token that follows it."""

    path: tuple[int, ...]
    next_token: int
    origin: Literal["residual", "bonus", "plain"]
    drift: Drift | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.path)


# ---------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token under the target's own row, before any sampling parameter: natural logarithms.

    top  the most likely tokens of the row, ties by token id
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One emitted token as the engine saw it: p and q of it, and the most likely tokens of its row.

    logprob  where it was asked for
    """

    token: int
    origin: Origin
    p: float
    q: float | None
    top: tuple[tuple[int, float], ...] = ()
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one target pass did for one choice of one request.

    tokens and text are what this step releases. A token whose text may turn out to begin a stop
    string is released by a later step, or never: joined over all steps, `tokens` and `text`
    are exactly those of the result. Only a cancelled choice ends without a step of its own: what
    was still held then is in its result.

    plain_seconds   what plain decoding is estimated to have taken for the tokens emitted; None: nothing is known
    prompt_logprobs  with a choice's first step, where they were asked for: of each prompt token but the first
    """

    request: int
    choice: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    num_proposed: int
    num_accepted: int
    num_emitted: int
    seconds: float
    records: tuple[Record, ...] = ()
    finish_reason: FinishReason | None = None
    plain_seconds: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one choice, and the only ratios there are.

    proposed_by_depth[i] counts proposals that reached depth i + 1; accepted_by_depth[i] the
    accepted tokens there. drift: of a lossy rule, added up over the steps; else None.
    plain_seconds: what plain decoding is estimated to have taken, in the same company; None: nothing is known.
    with_prompt: tokens emitted by the pass that read the end of the prompt, whose time counts to prompt_seconds.
    cached, copied: tokens of the prompt that were found in the slot's cache, and in another one's.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    proposed_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    drift: Drift | None = None
    plain_seconds: float | None = None
    cached: int = 0
    copied: int = 0
    with_prompt: int = 0

    def __add__(self, other: Stats) -> Stats:
        """Pooled counts: ratios of sums, never means of ratios."""
        return Stats(
            self.steps + other.steps,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.emitted + other.emitted,
            _add_padded(self.proposed_by_depth, other.proposed_by_depth),
            _add_padded(self.accepted_by_depth, other.accepted_by_depth),
            self.prompt_seconds + other.prompt_seconds,
            self.seconds + other.seconds,
            self.drift + other.drift if self.drift and other.drift else self.drift or other.drift,
            None if self._unknown or other._unknown else (self.plain_seconds or 0.0) + (other.plain_seconds or 0.0),
            self.cached + other.cached,
            self.copied + other.copied,
            self.with_prompt + other.with_prompt,
        )

    @property
    def _unknown(self) -> bool:
        """Whether steps were made of which nobody knows what plain decoding would have taken."""
        return self.plain_seconds is None and self.steps > 0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / proposed; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_per_step(self) -> float | None:
        """emitted / target passes, residual and bonus tokens counted; None before the first pass."""
        return self.emitted / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens per second of decoding, without the prompt and what came with it; None where no time was spent."""
        counted = self.emitted - self.with_prompt
        return counted / self.seconds if counted and self.seconds > 0 else None

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        return tuple(a / p for a, p in zip(self.accepted_by_depth, self.proposed_by_depth, strict=True) if p)


def _add_padded(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(left), len(right))
    return tuple(sum(counts[i] for counts in (left, right) if i < len(counts)) for i in range(length))


@dataclass(frozen=True, slots=True)
class Result:
    """One finished choice: tokens, text, origins and counts describe the same prefix."""

    request: int
    choice: int
    text: str
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    rule: str
    stats: Stats
    records: tuple[Record, ...] = ()
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
