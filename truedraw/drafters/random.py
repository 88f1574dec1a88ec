"""Rubbish on purpose: shows that a bad drafter costs speed and never correctness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from truedraw.protocols import Drafter, DraftRequest
from truedraw.randomness import Purpose
from truedraw.sampling import draw_draft
from truedraw.types import DenseRows, PointMass, Proposal


class RandomDrafter(Drafter):
    """Always drafts as much as it may, uniformly over the vocabulary.

    sampled=True says so (q is the uniform row); else the tokens are point masses. Its noise has a
    purpose of its own, so it never touches what a rule draws with.
    """

    def __init__(self, vocab_size: int, *, sampled: bool = False) -> None:
        self._row = np.full(vocab_size, 1.0 / vocab_size)
        self.samples = sampled

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Proposal:
        indices = range(request.max_draft)
        if self.samples:
            drawn = tuple(draw_draft(self._row, request.noise, i, coupled=request.coupled) for i in indices)
            return Proposal(drawn, DenseRows((self._row,) * len(drawn)))
        vocab = len(self._row)
        return Proposal(tuple(int(request.noise.uniform(Purpose.FILLER, i) * vocab) for i in indices), PointMass())
