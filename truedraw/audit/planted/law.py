"""How far a planted fault moves the law: the mean total variation per token, and the strength that makes it a given one.

Independent of decoder.py: nothing is drafted here. Whoever sees only the text doesn't know where steps began, whether the
fault acted or which place of a step a token has; so a belief over these is carried along texts drawn from the faulty law, and
the next token's law under this belief is compared with the target's, exactly, at each place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from truedraw.audit.planted.decoder import NUM_DRAFTS
from truedraw.audit.planted.faults import Fault
from truedraw.audit.planted.model import Counts, Floats, Model, Settings, shape
from truedraw.audit.planted.vocabulary import END, VOCAB

_PLAIN = 0
_BONUS, _LATE = NUM_DRAFTS, NUM_DRAFTS + 1
_PLACES = NUM_DRAFTS + 2
"""Of a step: its drafts, the bonus token, and the replacement after a rejected draft that stayed."""
_NUM_STATES = 1 + 2 * _PLACES


@dataclass(frozen=True, slots=True)
class Shift:
    """mean: total variation per token; error: its standard error, over texts; tokens: how many it was averaged over."""

    mean: float
    error: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Planting:
    """strength: to plant the fault with; shift: what it then has; reached: whether that is the size that was asked for."""

    strength: float
    shift: Shift
    reached: bool


def mean_tv(
    fault: Fault,
    settings: Settings | None = None,
    strength: float = 1.0,
    *,
    model: Model | None = None,
    length: int = 64,
    num_texts: int = 200,
    seed: int = 0,
) -> Shift:
    """The mean of TV(law of the next token given the text so far, p of the target) over the tokens of texts of `length`.

    settings  None: those under which the fault shows
    Faults that leave the law of unseeded text alone have 0.
    """
    if fault.shows != "law":
        return Shift(0.0, 0.0, 0)
    generator = np.random.default_rng([seed, 22])
    prompts = generator.integers(1, VOCAB - 2, size=(num_texts, 4))
    sums, counts = np.zeros(num_texts), np.zeros(num_texts)
    running = np.ones(num_texts, dtype=bool)
    for place in follow(fault, settings, strength, prompts, length, model=model, draw=lambda law, _: _draw(law, generator)):
        sums += running * 0.5 * np.abs(place.law - place.p).sum(axis=1)
        counts += running
        running &= place.tokens != END
    mean = sums.sum() / counts.sum()
    error = np.sqrt(((sums - mean * counts) ** 2).sum()) / counts.sum()
    return Shift(float(mean), float(error), int(counts.sum()))


@dataclass(frozen=True, slots=True)
class Place:
    """The next token of several texts: p of the target, the law that the faulty server has given the text, (texts, VOCAB)
    each, and the tokens that came, (texts,)."""

    p: Floats
    law: Floats
    tokens: Counts


def follow(
    fault: Fault,
    settings: Settings | None,
    strength: float,
    prompts: Counts,
    length: int,
    *,
    draw: Callable[[Floats, int], Counts],
    model: Model | None = None,
) -> Iterator[Place]:
    """Along texts side by side. prompts: (texts, at least 4) token ids; draw: (law, place of the output) to the tokens that
    come there, from the law or from a server's answers."""
    texts = _Texts(model or Model(), settings or fault.settings, prompts)
    belief = np.zeros((len(prompts), _NUM_STATES))
    belief[:, _PLAIN] = 1
    owed = np.zeros((len(prompts), VOCAB))
    for place in range(length):
        p = texts.row(texts.model.target, texts.settings)
        q = texts.row(texts.model.draft, texts.settings)
        moves, owed = _moves(fault, texts, p, q, owed)
        law: Floats = np.einsum("bs,bsv->bv", belief, moves[0] + moves[1] + moves[2])
        tokens = draw(law, place)
        texts.append(tokens)
        belief = _update(belief, moves, tokens, strength)
        yield Place(p, law, tokens)


def _draw(law: Floats, generator: np.random.Generator) -> Counts:
    edges = np.cumsum(law, axis=1)
    tokens: Counts = (edges > generator.random((len(law), 1)) * edges[:, -1:]).argmax(axis=1)
    return tokens


def strength_for(
    fault: Fault, tv: float, settings: Settings | None = None, *, model: Model | None = None, seed: int = 0
) -> Planting:
    """How often the fault has to act for a mean shift of `tv` per token; strength 1 where always is not enough, as for
    faults that leave the law of unseeded text alone."""
    chosen = model or Model()
    strength, shift = 1.0, mean_tv(fault, settings, model=chosen, seed=seed)
    if shift.mean < tv:
        return Planting(1.0, shift, False)
    for _ in range(3):  # the shift is nearly proportional to the strength
        strength = min(strength * tv / shift.mean, 1.0)
        shift = mean_tv(fault, settings, strength, model=chosen, seed=seed)
    return Planting(strength, shift, True)


class _Texts:
    """Texts side by side: their last tokens and how often each token came."""

    def __init__(self, model: Model, settings: Settings, prompts: Counts) -> None:
        self.model, self.settings = model, settings
        self._tokens = list(prompts.T)
        self._prompt_counts: Counts = sum(
            (self._one_hot(tokens) for tokens in self._tokens), np.zeros((1, VOCAB), dtype=np.int64)
        )
        self._output = np.zeros((len(prompts), VOCAB), dtype=np.int64)

    def _one_hot(self, tokens: Counts) -> Counts:
        return np.eye(VOCAB, dtype=np.int64)[tokens]

    def row(self, table: Floats, settings: Settings, back: int = 0, uncounted: int = 0) -> Floats:
        """The law `back` places before the next token's, with penalties that leave out the last `uncounted` tokens."""
        last = len(self._tokens) - back
        logits = table[self._tokens[last - 2], self._tokens[last - 1]]
        output = self._output - sum(self._one_hot(tokens) for tokens in self._tokens[len(self._tokens) - uncounted :])
        return shape(logits, settings, output, output + self._prompt_counts)

    def append(self, tokens: Counts) -> None:
        self._output += self._one_hot(tokens)
        self._tokens.append(tokens)


Moves = tuple[Floats, Floats, Floats]
"""(texts, states, VOCAB) each: the mass with which a state emits a token and goes on to the next place of the step; ends the
step; or owes the replacement of a draft that it should have dropped."""


def _moves(fault: Fault, texts: _Texts, p: Floats, q: Floats, owed: Floats) -> tuple[Moves, Floats]:
    """owed: what replaces a draft that was rejected a token ago; returned for the next token as well."""
    on, end, late = (np.zeros((len(p), _NUM_STATES, VOCAB)) for _ in range(3))
    end[:, _PLAIN] = p
    good = np.minimum(p, q)
    replacement = owed
    for i in range(NUM_DRAFTS):
        on[:, _state(0, i)] = good
        end[:, _state(0, i)] = p - good
        judged = _judged_row(fault, texts, p, i)
        accepted = _accepted(fault, judged, q, i)
        corrected = _corrected(fault, judged, q, accepted)
        rejected = q - accepted
        on[:, _state(1, i)] = _at_best(judged, accepted.sum(axis=1)) if fault.greedy_accepted else accepted
        if fault.late_rejection:
            late[:, _state(1, i)] = rejected
            replacement = _normal(np.maximum(judged - q, 0), judged)  # the same at each place of a step
        else:
            end[:, _state(1, i)] = corrected
    end[:, _state(0, _BONUS)] = p
    end[:, _state(1, _BONUS)] = _at_best(p, np.ones(len(p))) if fault.greedy_bonus else p
    end[:, _state(1, _LATE)] = owed
    return (on, end, late), replacement


def _state(acts: int, place: int) -> int:
    return 1 + acts * _PLACES + place


def _judged_row(fault: Fault, texts: _Texts, p: Floats, place: int) -> Floats:
    """What the faulty verifier takes for the row of this draft."""
    if fault.shifted_row and place:
        return texts.row(texts.model.target, texts.settings, back=1, uncounted=1)
    if fault.stale_penalties:
        return texts.row(texts.model.target, texts.settings, uncounted=place)
    if fault.judged_without:
        return texts.row(texts.model.target, texts.settings.without(fault.judged_without))
    return p


def _accepted(fault: Fault, p: Floats, q: Floats, place: int) -> Floats:
    """The mass of drafts that are drawn and accepted."""
    if fault.threshold is not None:
        return np.where(p > fault.threshold * q, q, 0.0)
    return q if fault.unchecked_first and place == 0 else np.minimum(p, q)


def _corrected(fault: Fault, p: Floats, q: Floats, accepted: Floats) -> Floats:
    """The mass of replacements."""
    residual = _normal(np.maximum(p - q, 0), p)
    if fault.correction == "shared noise":
        return _with_shared_noise(residual, p, q)
    law = {"residual": residual, "target": p, "absolute difference": _normal(np.abs(p - q), p)}[fault.correction]
    mass: Floats = (q - accepted).sum(axis=1, keepdims=True) * law
    return mass


def _normal(weights: Floats, otherwise: Floats) -> Floats:
    """Rows that sum to 1; `otherwise` in the place of rows of zeros."""
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1), otherwise)


def _at_best(p: Floats, mass: Floats) -> Floats:
    law: Floats = np.eye(VOCAB)[p.argmax(axis=1)] * mass[:, None]
    return law


def _with_shared_noise(residual: Floats, p: Floats, q: Floats) -> Floats:
    """Draft x is rejected for u in [p/q, 1); u then also chooses from the residual: the overlap with each token's interval."""
    upper = np.cumsum(residual, axis=1)
    lower = upper - residual
    rejected = np.divide(p, q, out=np.ones_like(p), where=q > 0).clip(max=1.0)
    overlap = upper[:, None, :] - np.maximum(lower[:, None, :], rejected[:, :, None])
    mass: Floats = np.einsum("bx,bxv->bv", q, overlap.clip(min=0))
    return mass


def _update(belief: Floats, moves: Moves, tokens: Counts, strength: float) -> Floats:
    """The belief over the states after these tokens."""
    rows = np.arange(len(tokens))
    on, end, late = (belief * part[rows, :, tokens] for part in moves)
    after = np.zeros_like(belief)
    for acts in range(2):
        after[:, _state(acts, 1) : _state(acts, _BONUS) + 1] = on[:, _state(acts, 0) : _state(acts, _BONUS)]
        after[:, _state(acts, _LATE)] = late[:, _state(acts, 0) : _state(acts, _BONUS)].sum(axis=1)
        after[:, _state(acts, 0)] = end.sum(axis=1) * (strength if acts else 1 - strength)
    total = after.sum(axis=1, keepdims=True)
    return after / np.where(total > 0, total, 1)  # 0: after the end of a text that is only followed for form
