"""What else can go wrong with a server, for tests of whoever talks to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TroubleKind = Literal[
    "dies",
    "stalls",
    "closes",
    "garbage",
    "half event",
    "no logprobs",
    "bare drafts",
    "429",
    "500",
    "other model",
    "drips",
    "floods",
    "drops",
]


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble, from some request on.

    kind         dies         the server is gone, and this request with it
                 stalls       half an answer, then nothing
                 drips        half an answer, then a comment now and then, without end
                 drops        the connection ends before anything was said, as one that was kept for too long
                 floods       half an answer, then a line without end
                 closes       half an answer, then the connection ends
                 garbage      an event, or a body, that is no JSON
                 half event   the answer ends in an orderly way, in the middle of an event or of the body
                 no logprobs  log-probabilities are missing
                 bare drafts  those of accepted drafts are
                 429, 500     refused; 429 with Retry-After
                 other model  another name, and another law
    after        so many requests for a completion are served before
    every        then each so manieth has the trouble
    retry_after  seconds, for 429
    """

    kind: TroubleKind
    after: int = 0
    every: int = 1
    retry_after: float = 0.05

    def hits(self, number: int) -> bool:
        """number: of the request, from 0."""
        return number >= self.after and (number - self.after) % self.every == 0
