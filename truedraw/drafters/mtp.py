"""Multi-token prediction: a small module that reads the target's own hidden states (mtp_modules.py), with an honest q."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from truedraw import kernels
from truedraw.acceptance import Acceptance, Confidence
from truedraw.cache import TokenBuffer
from truedraw.drafters.drawing import advanced, drafting_stops_early, draw_trimmed, row_statistics, trimmed_law
from truedraw.drafters.mtp_modules import DraftModule, Entries, Floats
from truedraw.protocols import Constraint, Drafter, DraftRequest, Forecast, Outcome
from truedraw.types import Probs, Proposal, SamplingParams, SparseRows

MOST_UNREAD = 16
"""Entries that are kept for a text whose drafts do not pay; what is older is not read any more when they do."""

PRIOR = 0.5
"""Acceptance of a draft before anything was seen."""

_LEAST_SURVIVAL = 0.005


class MtpDrafter(Drafter):
    """Draws each draft token from the module's own law over its trimmed vocabulary, shaped as the target's is.

    module       of this target
    draft_params  how drafts are sampled, where not as the request is; greedy requests have greedy drafts
    seconds      what a draft is taken to cost until some have been timed

    A text is known from its answer's first token on, by the states that came with the passes: what stands before that is
    in these states already. Nothing outlives its text, so nothing of one owner reaches another. A slot holds the keys and
    values of two windows, and MOST_UNREAD states.
    """

    samples = True
    forecasts = True
    hidden = ("final",)

    def __init__(
        self,
        module: DraftModule,
        *,
        draft_params: SamplingParams | None = None,
        seconds: float = 0.002,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._module = module
        self._draft_params = draft_params
        self._clock = clock
        self._seconds = seconds
        self._timed = False
        self._acceptance = Acceptance(PRIOR)
        self._confidence = {greedy: Confidence() for greedy in (False, True)}
        self._texts: dict[int, _Text] = {}  # by slot
        self._asked: dict[int, _Draft] = {}  # by sequence

    # ------------------------------------------------------------ what the target tells

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take in the states that came with the pass: entry i is the state after token i and the token behind it."""
        for outcome in outcomes:
            draft = self._asked.get(outcome.sequence)
            if draft is not None:
                self._acceptance.observe(outcome.sequence, outcome.tested)
                self._confidence[draft.greedy].observe(draft.confidence, outcome.tested)
            text = self._texts.get(outcome.slot)
            if text is not None and text.sequence != outcome.sequence:
                text = None
            if outcome.finished or outcome.verdict is None:
                if text is not None:
                    del self._texts[outcome.slot]
                continue
            if text is None:
                text = self._texts[outcome.slot] = _Text(outcome.sequence, self._module.new_cache())
            states = outcome.hidden.get("final")
            if states is None or not outcome.proposal.is_chain or len(states) < len(outcome.tokens):
                text.add(None, outcome.tokens)
            else:
                text.add(_floats(states)[: len(outcome.tokens)], outcome.tokens)
        self._asked.clear()

    def _text(self, request: DraftRequest) -> _Text | None:
        """What is known of the request's text; None: nothing that ends where the text does."""
        text = self._texts.get(request.slot)
        if text is None or text.sequence != request.sequence or not text.known:
            return None
        emitted = text.emitted.array
        return text if np.array_equal(request.context[len(request.context) - len(emitted) :], emitted) else None

    # ------------------------------------------------------------ drafting

    def forecast(self, requests: Sequence[DraftRequest]) -> list[Forecast | None]:
        """See Drafter: by acceptance so far, and by what a draft took."""
        return [self._forecast(request, self._text(request)) for request in requests]

    def _forecast(self, request: DraftRequest, text: _Text | None) -> Forecast:
        if text is None:
            return Forecast(())
        return Forecast(self._acceptance.survival(request.sequence, request.max_draft, _LEAST_SURVIVAL), self._seconds)

    def _goes_on(self, draft: _Draft) -> bool:
        """Whether another draft pays behind those that are drawn, which stay: by what the module thinks of these, and by
        acceptance so far at the depths to come."""
        request, drawn = draft.request, len(draft.tokens)
        before = self._acceptance.survival(request.sequence, request.max_draft, _LEAST_SURVIVAL)
        if len(before) <= drawn:
            return False
        alive = [1.0]
        for probability in draft.confidence:
            alive.append(alive[-1] * self._confidence[draft.greedy].acceptance(probability))
        ahead = [alive[-1] * later / before[drawn - 1] for later in before[drawn:]]
        return request.worth(Forecast((*alive[1:], *ahead), self._seconds, drawn=drawn)).length > drawn

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [_Draft(request, self._draft_params) for request in requests]
        active: list[tuple[_Draft, _Text]] = []
        for draft, request in zip(drafts, requests, strict=True):
            text = self._text(request)
            pays = request.worth(self._forecast(request, text)).length > 0
            if text is not None and pays and draft.begin():
                active.append((draft, text))
        self._asked = {draft.request.sequence: draft for draft, _ in active}
        if active:
            self._extend(active)
        return [draft.proposal() for draft in drafts]

    def _extend(self, active: list[tuple[_Draft, _Text]]) -> None:
        """All drafts level by level. What they put into the caches leaves them again, the entry that they begin with too."""
        module = self._module
        for _, text in active:
            text.read(module)
        behind = [(text, text.cache.position) for _, text in active]
        states = np.stack([text.states[-1] for _, text in active])
        tokens = np.array([text.tokens[-1] for _, text in active])
        try:
            while active:
                started = self._clock()
                states = module.step(states, tokens, [text.cache for _, text in active])
                rows = module.logits(states)
                going = [draft.extend(module, row) for (draft, _), row in zip(active, rows, strict=True)]
                self._time(self._clock() - started)
                going = [goes and self._goes_on(draft) for (draft, _), goes in zip(active, going, strict=True)]
                active = [pair for pair, goes in zip(active, going, strict=True) if goes]
                states = states[np.array(going)]
                tokens = np.array([draft.tokens[-1] for draft, _ in active], dtype=np.int64)
        finally:
            for text, position in behind:
                text.cache.truncate(position)

    def _time(self, seconds: float) -> None:
        self._seconds = 0.9 * self._seconds + 0.1 * seconds if self._timed else seconds
        self._timed = True


@dataclass(slots=True)
class _Text:
    """What is known of one text.

    emitted  its tokens since it is known
    known    the state that its last token was drawn behind has come; a gap before that is passed over
    states, tokens  of the entries that are not in the cache yet, the newest of them
    """

    sequence: int
    cache: Entries
    emitted: TokenBuffer = field(default_factory=TokenBuffer)
    known: bool = False
    states: list[Floats] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, states: Floats | None, tokens: Sequence[int]) -> None:
        self.emitted.extend(tokens)
        self.known = states is not None
        if states is None:
            return
        self.states = [*self.states, *states][-MOST_UNREAD:]
        self.tokens = [*self.tokens, *tokens][-MOST_UNREAD:]

    def read(self, module: DraftModule) -> None:
        """All entries but the newest go into the cache."""
        if len(self.tokens) > 1:
            module.remember(np.stack(self.states[:-1]), np.array(self.tokens[:-1]), self.cache)
            del self.states[:-1], self.tokens[:-1]


class _Draft:
    """One proposal while it grows.

    confidence  the probability that the module itself, at temperature 1, gave each of the drafts
    """

    def __init__(self, request: DraftRequest, draft_params: SamplingParams | None) -> None:
        self.request = request
        self.greedy = request.params.temperature == 0
        self._params = request.params if self.greedy or draft_params is None else draft_params
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self._ids: list[Any] = []
        self._probs: list[Probs] = []
        self._context = TokenBuffer(request.context)
        self._constraint: Constraint | None = None

    def begin(self) -> bool:
        """Whether there is anything to draw."""
        with drafting_stops_early():
            self._constraint = None if self.request.constraint is None else self.request.constraint.fork()
            return self.request.max_draft > 0
        return False

    def extend(self, module: DraftModule, logits: Floats) -> bool:
        """Draw the next token from its row, (trimmed vocab,); says whether another one may follow."""
        request, index = self.request, len(self.tokens)
        with drafting_stops_early():
            mask = None if self._constraint is None else self._constraint.mask()
            row = trimmed_law(
                logits, module.draft_ids, module.vocab_size, request, self._params, self._context.array, mask
            )  # fmt: skip
            probs = row.weights * row.share
            probs.flags.writeable = False
            if not request.more(row_statistics(probs, index + 1)):
                return False
            token = draw_trimmed(row, probs, request.noise, index, coupled=request.coupled)
            self.tokens.append(token)
            self.confidence.append(_probability(logits, int(np.searchsorted(module.draft_ids, token))))
            self._ids.append(row.ids)
            self._probs.append(probs)
            self._context.extend([token])
            if token not in request.stop_ids and len(self.tokens) < request.max_draft:
                self._constraint = advanced(self._constraint, token)
                return True
        return False

    def proposal(self) -> Proposal:
        return Proposal(tuple(self.tokens), SparseRows(tuple(self._ids), tuple(self._probs)))


def _probability(logits: Floats, place: int) -> float:
    """Of one token of a row at temperature 1."""
    best = float(logits.max())
    return math.exp(float(logits[place]) - best) / float(kernels.soften(logits, best, 1.0).sum())


def _floats(states: Any) -> Floats:
    """States as the runner hands them out, an array or a tensor, as a copy of its own."""
    if hasattr(states, "detach"):
        states = states.detach().float().cpu().numpy()
    return np.array(states, dtype=np.float32)
