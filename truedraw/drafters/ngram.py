"""Prompt lookup: what followed the last few tokens the last time they came up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from truedraw.errors import InvalidParameter
from truedraw.protocols import Drafter, DraftRequest
from truedraw.types import PointMass, Proposal, TokenArray


class NGramDrafter(Drafter):
    """Copies from prompt and output, longest suffix first (Saxena 2023, prompt lookup decoding).

    Proposals are copies of real history or empty, and point masses: nothing is drawn.

    max_match, min_match: the longest and the shortest suffix that is looked up. Four tokens at
    least: on a CPU a rejected proposal costs one to three plain steps, and replaying six workloads
    of the demo model against its measured pass costs the worst of them went from 0.85 of plain's
    speed (two tokens) to 0.95 (four), the geometric mean from 1.17 to 1.21.
    """

    def __init__(self, max_match: int = 8, min_match: int = 4) -> None:
        if not 1 <= min_match <= max_match:
            raise InvalidParameter("min_match", min_match, f"an integer in [1, max_match = {max_match}]")
        self.max_match, self.min_match = max_match, min_match

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            Proposal(lookup(request.context, request.max_draft, self.max_match, self.min_match), PointMass())
            for request in requests
        ]


def lookup(history: TokenArray, num_draft: int, max_match: int, min_match: int) -> tuple[int, ...]:
    """Up to `num_draft` tokens that followed an earlier occurrence of the end of `history`.

    Among the occurrences that agree over most tokens (max_match at most, min_match at least) the
    latest that still has `num_draft` tokens behind it, else the one with most. An occurrence may
    overlap the end itself but never is it.
    """
    end = len(history)
    if end < 2 or num_draft < 1:
        return ()
    ends = np.flatnonzero(history[:-1] == history[-1]) + 1  # behind each earlier copy of the last token
    length = 1
    while length < max_match and len(ends):
        longer = ends[ends > length]
        longer = longer[history[longer - length - 1] == history[end - length - 1]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < min_match or not len(ends):
        return ()
    with_room = ends[ends + num_draft <= end]
    start = int(with_room[-1] if len(with_room) else ends[0])
    return tuple(int(token) for token in history[start : start + num_draft])
