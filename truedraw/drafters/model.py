"""A second, smaller model: the drafter of Leviathan et al. 2023, with an honest q."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from truedraw.acceptance import Acceptance
from truedraw.cache import CachedModel, TokenBuffer
from truedraw.drafters.drawing import advanced, drafting_stops_early, row_statistics
from truedraw.drafters.translation import Translation
from truedraw.errors import IncompatibleModels, InvalidParameter
from truedraw.protocols import Constraint, Drafter, DraftRequest, Forecast, ModelRunner, Outcome, Tokenizer
from truedraw.sampling import draw_draft, shape, shared_candidates
from truedraw.types import DenseRows, Probs, Proposal, TokenArray
from truedraw.verify.multidraft import Drawing, draw_candidates

_CATCH_UP = 4  # tokens that a draft's pass may have to read besides
_READ_AT_ONCE = 256
_LEAST_EXPECTED = 32


class ModelDrafter(Drafter):
    """Draws each draft token from the draft model's own law, shaped as the target's is.

    runner      with at least as many slots as the target
    vocab_size  of the target: draft logits behind it are dropped, missing ones are -inf, BEFORE
                anything is drawn, so that q is a law over the target's ids
    width       candidates for the first position, with a chain below each; 1: one chain
    drawing     how candidates are drawn (verify.multidraft); under shared noise they are the race's best
    translation  where the draft model has another tokenizer: between its ids and the target's
    pass_seconds  what a pass of so many tokens of the draft model takes: until drafts have been timed, and
                for prompts that it has not read

    How many to draw is asked before the first is drawn, with what is known by then: acceptance by depth
    so far, the time of a draft, and the prompt that the draft model would have to read first. A row that
    is no law ends its branch there, and a context longer than the draft model's gets no proposal: both
    are known before the draw.
    """

    samples = True

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        *,
        width: int = 1,
        drawing: Drawing = "without-replacement",
        translation: Translation | None = None,
        pass_seconds: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not runner.can_rollback:
            raise IncompatibleModels("the draft model is recurrent and cannot forget rejected drafts: take an attention model")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise InvalidParameter("width", width, "an integer >= 1")
        if width > 1 and not runner.can_score_trees:
            raise IncompatibleModels("the draft model's runner scores chains only: candidates need a runner that scores trees")
        if width > 1 and translation is not None:
            raise IncompatibleModels("candidates need a draft model with the target's tokenizer: this one has another")
        self._model = CachedModel(runner)
        self._vocab_size = vocab_size
        self._translation = translation
        self._width, self._drawing = width, drawing
        self.trees = width > 1
        self.forecasts = width == 1
        self._pass_seconds, self._clock = pass_seconds, clock
        self._seconds: float | None = None  # of a draft, as timed
        self._acceptance = Acceptance()
        self._asked: set[int] = set()

    def forecast(self, requests: Sequence[DraftRequest]) -> list[Forecast | None]:
        """See Drafter: by acceptance so far, and by what a draft and the unread context cost."""
        return [self._forecast(request) for request in requests]

    def _forecast(self, request: DraftRequest) -> Forecast | None:
        if not self.forecasts:
            return None
        context = self._read(request.context)
        if len(context) > self._model.runner.max_length:
            return Forecast(())
        survival = self._acceptance.survival(request.sequence, request.max_draft)
        if self._pass_seconds is None:
            return Forecast(survival, self._seconds or 0.0)
        seconds = self._pass_seconds(1) if self._seconds is None else self._seconds
        unread = len(context) - 1 - self._model.num_cached(request.slot, context)
        start = unread / _READ_AT_ONCE * self._pass_seconds(_READ_AT_ONCE) if unread > _CATCH_UP else 0.0
        return Forecast(survival, seconds, start / self._steps_left(request))

    def _steps_left(self, request: DraftRequest) -> float:
        """What is spent at the start is spread over these: a text is expected to go on for as long as it has
        been going on, within its budget."""
        emitted = len(request.context) - request.prompt_length
        return max(1.0, min(request.num_left, max(emitted, _LEAST_EXPECTED)) / 2)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.sequence in self._asked:
                self._acceptance.observe(outcome.sequence, outcome.tested)
        self._asked.clear()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        slots, room = self._model.runner.num_slots, self._model.runner.max_length
        if any(request.slot >= slots for request in requests):
            raise IncompatibleModels(f"the draft model has {slots} slots, fewer than the target: load it with as many")
        for request in requests:
            self._model.assign(request.slot, request.owner)
        drafts = [_Draft(request, self._num_drafts(request), self._width, self._drawing) for request in requests]
        self._asked = {draft.request.sequence for draft in drafts if draft.tips}
        for request in requests:
            self._model.adopt(request.slot, self._read(request.context)[:-1])
        while True:
            texts = [(draft, self._read(draft.context.array)) for draft in drafts if draft.tips]
            texts = [(draft, text) for draft, text in texts if 0 < len(text) <= room]
            if not texts:
                return [draft.proposal() for draft in drafts]
            active = [draft for draft, _ in texts]
            contexts = [(draft.request.slot, text) for draft, text in texts]
            caught_up = all(len(context) - self._model.num_cached(slot, context) <= _CATCH_UP for slot, context in contexts)
            started = self._clock()
            rows = self._model.logits(contexts, [draft.num_rows for draft in active], [draft.tree for draft in active])
            for draft, row in zip(active, rows, strict=True):
                draft.extend([self._fit(logits) for logits in row.logits])
            if caught_up:
                self._time(self._clock() - started)

    def _num_drafts(self, request: DraftRequest) -> int:
        forecast = self._forecast(request)
        return request.max_draft if forecast is None else min(request.max_draft, request.worth(forecast).length)

    def _time(self, seconds: float) -> None:
        self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds

    def _read(self, context: TokenArray) -> TokenArray:
        """A text as the draft model is fed it."""
        return context if self._translation is None else self._translation.read(context)

    def _fit(self, logits: Probs) -> Probs:
        """A row of the draft model over the target's ids."""
        if self._translation is not None:
            return self._translation.row(logits)
        if len(logits) >= self._vocab_size:
            return logits[: self._vocab_size]
        fitted = np.full(self._vocab_size, -np.inf)
        fitted[: len(logits)] = logits
        return fitted

    def close(self) -> None:
        self._model.close()


@dataclass(frozen=True, slots=True)
class _Tip:
    """A node of the tree that is to be drawn behind: its index (-1 is the root) and its constraint."""

    node: int
    depth: int
    constraint: Constraint | None


class _Draft:
    """One proposal while it grows, level by level."""

    def __init__(self, request: DraftRequest, num_drafts: int, width: int, drawing: Drawing) -> None:
        self.request, self._num_drafts, self._width, self._drawing = request, num_drafts, width, drawing
        self.context = TokenBuffer(request.context)
        self._tokens: list[int] = []
        self._rows: list[Probs] = []
        self._parents: list[int] = []
        self.tips: list[_Tip] = []
        if num_drafts > 0:
            with drafting_stops_early():
                self.tips.append(_Tip(-1, 0, None if request.constraint is None else request.constraint.fork()))

    @property
    def num_rows(self) -> int:
        """Rows are wanted from the first tip on."""
        return len(self._tokens) - max(self.tips[0].node, 0) if self._tokens else 1

    @property
    def tree(self) -> tuple[int, ...] | None:
        return tuple(self._parents) if self._width > 1 and self._tokens else None

    def extend(self, logits: Sequence[Probs]) -> None:
        """Draw behind every tip, from the rows behind the first tip and all nodes after it."""
        first, tips = self.tips[0].node, self.tips
        self.tips = []
        for tip in tips:
            with drafting_stops_early():
                self._grow(tip, logits[tip.node - first])

    def _grow(self, tip: _Tip, logits: Probs) -> None:
        request, start = self.request, len(self._tokens)
        room = self._num_drafts - start
        if room < 1:
            return
        row = shape(
            logits,
            request.params,
            self._history(tip.node),
            request.prompt_length,
            stop_ids=request.stop_ids,
            allowed=None if tip.constraint is None else tip.constraint.mask(),
            model="draft model",
        )
        if not request.more(row_statistics(row, tip.depth + 1)):
            return
        tokens, rows = self._draw(row, tip, min(self._width if tip.node < 0 else 1, room))
        self._tokens += tokens
        self._rows += rows
        self._parents += [tip.node] * len(tokens)
        self.context.extend(tokens)
        for node, token in enumerate(tokens, start):
            if token not in request.stop_ids and len(self._tokens) < self._num_drafts:
                with drafting_stops_early():
                    self.tips.append(_Tip(node, tip.depth + 1, advanced(tip.constraint, token)))

    def _draw(self, row: Probs, tip: _Tip, count: int) -> tuple[list[int], list[Probs]]:
        noise = self.request.noise
        if count > 1 and self.request.coupled:
            return shared_candidates(row, noise.race(noise.start), count)
        if count > 1:
            return draw_candidates(row, count, self._drawing, noise, len(self._tokens))
        index = tip.depth if self.request.coupled else len(self._tokens)
        return [draw_draft(row, noise, index, coupled=self.request.coupled)], [row]

    def _history(self, node: int) -> TokenArray:
        """The context and the path to a node."""
        if self._width == 1:
            return self.context.array
        path: list[int] = []
        while node >= 0:
            path.append(self._tokens[node])
            node = self._parents[node]
        return np.concatenate([self.request.context, np.asarray(path[::-1], dtype=np.int32)])

    def proposal(self) -> Proposal:
        return Proposal(tuple(self._tokens), DenseRows(tuple(self._rows)), tuple(self._parents) if self._width > 1 else None)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Compare two vocabularies token by token.

    Sizes may differ by padding, that is by tokens that stand for no text. Raises
    IncompatibleModels with the first difference.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    for token in range(shared):
        if target.token_text(token) != draft.token_text(token):
            raise IncompatibleModels(
                f"draft token {token} is {_shown(draft, token)}, the target's is {_shown(target, token)}: "
                "the draft model must share the target's vocabulary"
            )
    for larger, name in ((target, "target"), (draft, "draft model")):
        for token in range(shared, larger.vocab_size):
            if larger.token_bytes(token):
                raise IncompatibleModels(
                    f"the target has {target.vocab_size} tokens, the draft model {draft.vocab_size}, and token {token} of the "
                    f"{name} is {_shown(larger, token)}: the draft model must share the target's vocabulary"
                )


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.token_text(token).decode("utf-8", "replace"))
