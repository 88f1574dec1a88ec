"""A second, smaller model: the drafter of Leviathan et al. 2023, with an honest q."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from truedraw.cache import CachedModel, TokenBuffer
from truedraw.errors import ConstraintError, IncompatibleModels, RowError
from truedraw.protocols import Constraint, Drafter, DraftRequest, ModelRunner, RowStatistics, Tokenizer
from truedraw.sampling import draw_draft, shape
from truedraw.types import DenseRows, Probs, Proposal

logger = logging.getLogger("truedraw")

T = TypeVar("T")


class ModelDrafter(Drafter):
    """Draws each draft token from the draft model's own law, shaped as the target's is.

    runner      with at least as many slots as the target
    vocab_size  of the target: draft logits behind it are dropped, missing ones are -inf, BEFORE
                anything is drawn, so that q is a law over the target's ids

    A row that is no law ends the proposal there, and a context longer than the draft model's gets
    none: both are known before the draw.
    """

    samples = True

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        if not runner.can_rollback:
            raise IncompatibleModels("the draft model is recurrent and cannot forget rejected drafts: take an attention model")
        self._model = CachedModel(runner)
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        slots, room = self._model.runner.num_slots, self._model.runner.max_length
        if any(request.slot >= slots for request in requests):
            raise IncompatibleModels(f"the draft model has {slots} slots, fewer than the target: load it with as many")
        drafts = [_Draft(request) for request in requests]
        while True:
            active = [draft for draft in drafts if not draft.done and len(draft.context) <= room]
            if not active:
                return [draft.proposal() for draft in drafts]
            contexts = [(draft.request.slot, draft.context.array) for draft in active]
            rows = self._model.logits(contexts, [1] * len(active))
            for draft, row in zip(active, rows, strict=True):
                draft.extend(self._fit(row.logits[0]))

    def _fit(self, logits: Probs) -> Probs:
        if len(logits) >= self._vocab_size:
            return logits[: self._vocab_size]
        fitted = np.full(self._vocab_size, -np.inf)
        fitted[: len(logits)] = logits
        return fitted

    def close(self) -> None:
        self._model.close()


class _Draft:
    """One proposal while it grows."""

    def __init__(self, request: DraftRequest) -> None:
        self.request = request
        self.context = TokenBuffer(request.context)
        self.constraint: Constraint | None = None
        self.tokens: list[int] = []
        self.rows: list[Probs] = []
        self.done = request.max_draft < 1
        if request.constraint is not None:
            self._guarded(lambda constraint: setattr(self, "constraint", constraint.fork()), request.constraint)

    def _guarded(self, use: Callable[[Constraint], T], constraint: Constraint | None) -> T | None:
        """Use a constraint. It is the user's code: where it fails, drafting stops, and the
        verification that meets the same failure ends its own request with it."""
        if constraint is None:
            return None
        try:
            return use(constraint)
        except Exception as error:
            logger.warning("drafting stops early: %s", error)
            self.done = True
            return None

    def extend(self, logits: Probs) -> None:
        request = self.request
        allowed = self._guarded(lambda constraint: constraint.mask(), self.constraint)
        if self.done:
            return
        try:
            row = shape(
                logits,
                request.params,
                self.context.array,
                request.prompt_length,
                stop_ids=request.stop_ids,
                allowed=allowed,
                model="draft model",
            )
        except (RowError, ConstraintError) as error:
            logger.warning("drafting stops early: %s", error)
            self.done = True
            return
        if not request.more(row_statistics(row, len(self.tokens) + 1)):
            self.done = True
            return
        token = draw_draft(row, request.noise, len(self.tokens), coupled=request.coupled)
        self.tokens.append(token)
        self.rows.append(row)
        self.context.extend([token])
        self.done = len(self.tokens) >= request.max_draft or token in request.stop_ids
        if not self.done:
            self._guarded(lambda constraint: constraint.advance(token), self.constraint)

    def proposal(self) -> Proposal:
        return Proposal(tuple(self.tokens), DenseRows(tuple(self.rows)))


def row_statistics(row: Probs, depth: int) -> RowStatistics:
    """What a policy may see of a q row, shape (vocab,), before a token is drawn from it."""
    top = np.partition(row, len(row) - 2)[-2:] if len(row) > 1 else np.array([0.0, 1.0])
    positive = row[row > 0]
    return RowStatistics(depth, float(-(positive * np.log(positive)).sum()), float(top[1]), float(top[1] - top[0]))


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
