"""What a server's report of a token determines of the law that it was drawn from.

A report names the likeliest tokens (the head) and the drawn one, with logarithms of their probabilities. What is not named
is one bucket, the rest. Where sampling parameters stand between the report and the draw, the law over head and rest is
known exactly only if they can be applied to the head alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from truedraw.audit.client import Token
from truedraw.types import Probs

SLACK = 1e-6
"""Relative width in which a token counts as on a boundary of top-k, top-p or min-p: it may be in or out."""


@dataclass(frozen=True, slots=True)
class Head:
    """The law over the named tokens and, last, the rest.

    names  of the head, the likeliest first
    probs  (len(names) + 1,), sums to 1
    drawn  where the drawn token is; len(names): in the rest
    tv     by how much printed digits may shift it
    """

    names: tuple[str, ...]
    probs: Probs
    drawn: int
    tv: float

    @property
    def contradicted(self) -> bool:
        """A token was drawn that the report and the parameters forbid."""
        return bool(self.probs[self.drawn] <= 0)


def untestable(settings: Mapping[str, Any], *, num_top: int | None, raw: bool | None) -> str | None:
    """Why nothing can be said of draws with these parameters; None: the report determines their law."""
    if not num_top:
        return "the server tells no alternatives with its log-probabilities"
    temperature, top_k = settings.get("temperature", 1.0), settings.get("top_k", 0)
    if raw is None:
        return "it could not be told whether its log-probabilities come before or after the sampling parameters"
    if not raw:
        return None
    if (
        any(settings.get(name) for name in ("presence_penalty", "frequency_penalty", "logit_bias"))
        or settings.get("repetition_penalty", 1) != 1
    ):
        return "raw log-probabilities, and penalties reach tokens that they do not name"
    if temperature not in (0, 1) and not 0 < top_k <= num_top:
        named = f"the {num_top} named tokens"
        return f"raw log-probabilities, and what temperature {temperature} makes of {named} depends on those that are not"
    return None


def head_of(token: Token, settings: Mapping[str, Any], *, raw: bool, digits: int | None) -> Head | None:
    """None where the report does not reach: top-p not reached inside the head, or nothing was reported.

    Names that several tokens may share, halves of characters and tokens without a text, go with the rest.
    """
    if token.logprob is None or not token.top:
        return None
    clear = {name: value for name, value in token.top if _is_one(name)}
    if not clear or (len(clear) < len(token.top) and not _whole(settings)):
        return None
    names = tuple(sorted(clear, key=lambda name: -clear[name]))
    weights = np.exp(np.array([clear[name] for name in names]))
    drawn = names.index(token.text) if token.text in clear else len(names)
    half = 0.0 if digits is None else 0.5 * 10.0**-digits
    slack = float(weights.sum()) * math.expm1(half)
    rest = 1.0 - float(weights.sum())
    if rest < -max(slack, 1e-3):
        return None
    reported: Probs = np.append(weights, max(rest, 0.0))
    probs = _shaped(reported, settings) if raw else reported
    if probs is None:
        return None
    return Head(names, probs / probs.sum(), drawn, slack)


def _is_one(name: str) -> bool:
    return bool(name) and "\ufffd" not in name


def _whole(settings: Mapping[str, Any]) -> bool:
    """Nothing cuts the law: the rest is what is left over."""
    uncut = settings.get("top_k", 0) == 0 and settings.get("top_p", 1) == 1 and settings.get("min_p", 0) == 0
    return bool(uncut and settings.get("temperature", 1) == 1)


def log_bound(token: Token, settings: Mapping[str, Any], *, raw: bool, digits: int | None) -> float | None:
    """A bound on the logarithm of the drawn token's probability under the report and the parameters, also where the report does
    not determine the law; None where there is none.

    Temperature and what is cut off keep the likeliest token, so that p(token) / p(likeliest) to the power 1 / temperature bounds
    what the token got of the whole. Penalties and logit_bias after the report move tokens apart without a bound.
    """
    if token.logprob is None or not token.top:
        return None
    printed = 0.0 if digits is None else 10.0**-digits
    if not raw:
        return token.logprob + printed
    temperature = settings.get("temperature", 1.0)
    moved = any(settings.get(name) for name in ("presence_penalty", "frequency_penalty", "logit_bias"))
    if temperature <= 0 or moved or settings.get("repetition_penalty", 1) != 1:
        return None
    likeliest = max(value for _, value in token.top)
    return float((token.logprob - likeliest + printed) / temperature)


def _shaped(probs: Probs, settings: Mapping[str, Any]) -> Probs | None:
    """Temperature, top-k, top-p, min-p on head and rest. None where the rest would have to be known."""
    temperature, top_k = settings.get("temperature", 1.0), settings.get("top_k", 0)
    top_p, min_p = settings.get("top_p", 1.0), settings.get("min_p", 0.0)
    head, rest = probs[:-1].copy(), float(probs[-1])
    if temperature == 0:
        head[head < head.max() * (1 - SLACK)] = 0.0
        return np.append(head, 0.0)
    if 0 < top_k <= len(head):
        head[head < np.sort(head)[-top_k] * (1 - SLACK)] = 0.0
        rest = 0.0
    if temperature != 1:
        if rest:
            return None
        head = (head / head.max()) ** (1 / temperature)
    total = float(head.sum()) + rest
    if top_p < 1:
        order = np.argsort(-head, kind="stable")
        before = np.cumsum(head[order]) - head[order]
        inside = before < top_p * total * (1 + SLACK)
        if rest and inside.all() and float(head.sum()) < top_p * total:
            return None
        head[order[~inside]] = 0.0
        rest = 0.0
    if min_p > 0:
        least = min_p * float(head.max())
        if rest and float(head.min()) >= least:
            return None  # tokens of the rest may be in or out
        head[head < least * (1 - SLACK)] = 0.0
        rest = 0.0
    return np.append(head, rest)
