"""How an audit calls a verifier that is not truedraw's: one step, in numbers alone.

    verify(p, q, drafts, uniforms) -> (accepted, token)

    p         (k + 1, vocab): the target's law before each draft, and behind the last
    q         (k, vocab): the law each draft was drawn from; None: the drafts were not drawn (point masses)
    drafts    k token ids, k >= 0
    uniforms  k + 1 numbers in [0, 1): one for each draft in turn, then one for the token that follows

The step emits drafts[:accepted] and then `token`. What is audited is the law of that: emitted, and followed by p, it has
to be p's. Which of the uniforms a rule uses for what is its own affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from truedraw.errors import RunError
from truedraw.types import Probs

Draw: TypeAlias = Callable[[int], float]
"""The uniform with that index, in [0, 1)."""

FLOAT32_STEP = 2.0**-24


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a verifier is asked. Shapes: the module's docstring. Rows may be no laws, where that is what is tried."""

    p: Probs
    q: Probs | None
    drafts: tuple[int, ...]

    @property
    def num_uniforms(self) -> int:
        return len(self.drafts) + 1


@dataclass(frozen=True, slots=True)
class Answer:
    """0 <= accepted <= k drafts, then `token`, 0 <= token < vocab."""

    accepted: int
    token: int


class Refused(RunError):
    """The verifier answered with an error of its own: right for rows that are no laws, wrong for any that are."""


class WrongAnswer(RunError):
    """What came back is no answer: not two integers, or out of range."""


class Lost(RunError):
    """No verdict is possible any more: the program ended, stalled, or wrote what cannot be read."""


Outcome: TypeAlias = Answer | Refused | WrongAnswer


@dataclass(frozen=True, slots=True)
class Subject:
    """A verifier that can be asked.

    ask        raises Refused, WrongAnswer or Lost
    ask_many   the same for many requests with their uniforms, in order; raises Lost alone
    injected   it takes its randomness from the uniforms it is given, as it says
    float32    it computes in 32 bits: uniforms are multiples of 2**-24, as its own would be
    min_drafts fewer drafts are never asked of it
    lanes      how many requests may be under way at once
    reproduce  the command that repeats one request
    """

    name: str
    ask: Callable[[Request, Draw], Answer]
    ask_many: Callable[[Sequence[tuple[Request, Draw]]], list[Outcome]]
    injected: bool
    reproduce: Callable[[Request, Sequence[float]], str]
    float32: bool = False
    min_drafts: int = 0
    lanes: int = 1

    def draw_from(self, draw: Draw) -> Draw:
        """Uniforms that the verifier's own arithmetic can hold."""
        return (lambda i: math.floor(draw(i) / FLOAT32_STEP) * FLOAT32_STEP) if self.float32 else draw


def one_by_one(ask: Callable[[Request, Draw], Answer]) -> Callable[[Sequence[tuple[Request, Draw]]], list[Outcome]]:
    """ask_many for a verifier that is asked one request at a time."""

    def ask_many(requests: Sequence[tuple[Request, Draw]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for request, draw in requests:
            try:
                outcomes.append(ask(request, draw))
            except (Refused, WrongAnswer) as error:
                outcomes.append(error)
        return outcomes

    return ask_many


def given(uniforms: Sequence[float]) -> Draw:
    """Those uniforms, in order; behind their end scattered ones, always the same."""
    return lambda i: uniforms[i] if i < len(uniforms) else (0.5 + i * 0.6180339887498949) % 1


def read_answer(accepted: Any, token: Any, request: Request) -> Answer:
    """Raises WrongAnswer. Anything with an integer's value is one: NumPy's, a tensor of one element."""
    k, vocab = len(request.drafts), request.p.shape[1]
    numbers: list[int] = []
    for value in (accepted, token):
        plain = (
            value.item() if hasattr(value, "item") and getattr(value, "size", 1) != 0 and not isinstance(value, int) else value
        )
        if isinstance(plain, bool) or not isinstance(plain, int | np.integer):
            raise WrongAnswer(f"answered ({accepted!r}, {token!r})"[:200] + ": two integers are needed, accepted and token")
        numbers.append(int(plain))
    if not 0 <= numbers[0] <= k or not 0 <= numbers[1] < vocab:
        raise WrongAnswer(f"answered ({numbers[0]}, {numbers[1]}): 0 <= accepted <= {k} and 0 <= token < {vocab} are needed")
    return Answer(*numbers)


def impossible(request: Request, answer: Answer) -> str | None:
    """What of an answer the target cannot give, whatever the uniforms; None if all of it can come."""
    vocab = request.p.shape[1]
    for i, x in enumerate(request.drafts[: answer.accepted]):
        if not 0 <= x < vocab:
            return f"draft {i} is {x}, outside the {vocab} tokens, and was accepted"
        if not request.p[i][x] > 0:
            return f"draft {i} is token {x} with p = {request.p[i][x]:g}, and was accepted"
    mass = request.p[answer.accepted][answer.token]
    return None if mass > 0 else f"token {answer.token} was drawn after {answer.accepted} accepted, and has p = {mass:g} there"
