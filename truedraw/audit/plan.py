"""What an audit of a server is to find out, with how many tokens, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from truedraw.audit.client import Arm
from truedraw.audit.draws import NUM_BETS, SelfConsistency
from truedraw.audit.reference import Reference

ANSWER_TOKENS = 16
"""Of each answer whose law is tested: long enough for several steps, short enough that prefixes come again."""

SETTINGS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("temperature 1", {"temperature": 1}),
    ("temperature 0.7, top-p 0.9", {"temperature": 0.7, "top_p": 0.9}),
    ("penalties", {"temperature": 1, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
)

PROMPTS = (
    "red, green, blue, red, green, blue, red, green,",
    "The king said to the queen that the",
    "one two three one two three one",
    "In the morning we went to the market and",
)
"""Half of them ask for copies, half do not."""

_EFFORT = 20.0
"""Tokens that a fault of size TV takes, times TV squared, over the logarithm that has to be reached: measured on the
planted faults (tests/test_audit_endpoint.py), which shift only part of their TV in any one direction."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be found out, and with how much.

    alpha   probability of any false alarm, all modes together
    detect  the smallest total variation, per token, that is to be found with a power of 95 %
    most    tokens to draw at most
    reference  a local model whose rows are trusted, up to a floor that is measured
    off     where plain decoding is; None: it is asked for as truedraw servers know it, where that works
    """

    on: Arm
    off: Arm | None = None
    prompts: Sequence[str] = PROMPTS
    alpha: float = 0.01
    detect: float = 0.05
    most: int = 60_000
    concurrency: int = 4
    headers: Mapping[str, str] = field(default_factory=dict)
    reference: Reference | None = None
    timeout: float = 60.0

    @property
    def mode_alpha(self) -> float:
        """Each statistical mode's share."""
        return self.alpha / (2 * len(SETTINGS) + (self.reference is not None))

    @property
    def wanted(self) -> int:
        """Tokens of one setting, both arms together, that `detect` takes."""
        bets = len(SelfConsistency.DIRECTIONS) * NUM_BETS
        return math.ceil(_EFFORT * math.log(bets / self.mode_alpha) / self.detect**2)

    @property
    def tokens_each(self) -> int:
        """Tokens of one setting that are drawn at most: parameters and seeds take about a tenth of all."""
        return min(self.wanted, int(0.9 * self.most / len(SETTINGS)))

    @property
    def requests_each(self) -> int:
        """Requests that check one parameter: ten of them, with about 24 tokens each."""
        return max(1, min(24, int(0.1 * self.most / (10 * 24))))

    @property
    def reach(self) -> float:
        """The total variation that tokens_each are enough for."""
        return self.detect * math.sqrt(self.wanted / self.tokens_each)

    def seen_with(self, tokens: int) -> float | None:
        """The total variation that so many tokens of a setting, both arms together, find with a power of 95 %."""
        return min(self.detect * math.sqrt(self.wanted / tokens), 1.0) if tokens else None
