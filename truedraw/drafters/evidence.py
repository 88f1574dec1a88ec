"""How likely the next token of a copy is right: a prior from what is known of the copy (how long the match
is, how often its continuation was seen, whether another one ever was, whether an interrupted copy is
taken up again), corrected by how copies of that kind fared in this request so far.

How far back the match lies, where in the answer it comes up and how sure the target was of the token
before it were tried too: none of them told anything more (log-likelihood of 24,000 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("mixed", "alone", "resumed", "elsewhere")
MIXED, ALONE, RESUMED, ELSEWHERE = range(4)
"""Other continuations were seen; this one only; an interrupted copy is taken up again; from a corpus."""

BUCKETS = (0, 1, 2, 3, 4, 6, 9, 14, 22, 40)
"""Match lengths from which on a request's own history is kept apart."""

MOST_COUNTED = 8

PRIOR_WEIGHT = 6.0
"""Tokens of a request that weigh as much as the prior."""

_FORGET = 0.95
_NEIGHBOUR = 0.5  # of what a match of one length tells about the lengths next to it
_SURE = 0.999
_LONGEST = 64
_BUCKET_OF = tuple(sum(length >= start for start in BUCKETS) - 1 for length in range(_LONGEST + 1))


class Evidence(NamedTuple):
    """What is known of a copy before its next token is.

    kind    an index of KINDS
    length  of the match; a copy taken up right behind a token that it does not hold has 0
    times   how often the token followed the match
    """

    kind: int
    length: int
    times: int = 1

    @property
    def features(self) -> tuple[float, float, float]:
        return 1.0, math.log(max(self.length, 1)), math.log(max(1, min(self.times, MOST_COUNTED)))

    @property
    def bucket(self) -> int:
        """The row of a request's history that it belongs to."""
        return _BUCKET_OF[min(self.length, _LONGEST)]


class Prior:
    """P(right) = 1 / (1 + exp(-w . features)), one w for each kind; as a table, since it is asked for every draft.

    substituted  added where a copy is taken up behind a token that it does not hold
    """

    def __init__(self, weights: Sequence[tuple[float, float, float]], substituted: float) -> None:
        self.weights, self.substituted = tuple(weights), substituted
        self._table = [
            [
                [self._logistic(Evidence(kind, length, count)) for count in range(MOST_COUNTED + 1)]
                for length in range(_LONGEST + 1)
            ]
            for kind in range(len(self.weights))
        ]

    def _logistic(self, seen: Evidence) -> float:
        score = sum(w * x for w, x in zip(self.weights[seen.kind], seen.features, strict=True))
        return 1.0 / (1.0 + math.exp(-score - (0.0 if seen.length else self.substituted)))

    def probability(self, seen: Evidence) -> float:
        """Matches longer than 64 tokens count as 64, more than 8 occurrences as 8."""
        kind, length, times = seen
        return self._table[kind][min(length, _LONGEST)][min(times, MOST_COUNTED)]


_ELSEWHERE = (-2.4, 1.3, 0.9)
"""Of copies from a corpus, about which nothing is known before: a match of 9 tokens is right in .6 of all cases."""
GREEDY = Prior(((-1.88, 0.44, 1.39), (-1.08, 1.45, 1.09), (-0.30, 1.05, 0.0), _ELSEWHERE), -0.11)
SAMPLED = Prior(((-2.67, 1.22, 1.45), (-1.58, 1.34, 1.19), (-0.96, 1.25, 0.0), _ELSEWHERE), -0.50)
"""At temperature 0 and above; from benchmarks/fit_priors.py."""


class History:
    """How copies of one request fared against the prior, the latest first: what each token that was
    emitted says about the copy that would have been proposed for it."""

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._surprise = [[0.0] * len(KINDS) for _ in BUCKETS]
        self._weight = [[0.0] * len(KINDS) for _ in BUCKETS]

    def probability(self, seen: Evidence) -> float:
        """That the next token of such a copy is right."""
        row, kind = seen.bucket, seen.kind
        corrected = self.prior.probability(seen) + self._surprise[row][kind] / (self._weight[row][kind] + PRIOR_WEIGHT)
        return min(max(corrected, 1 - _SURE), _SURE)

    def score(self, seen: Evidence, right: bool) -> None:
        """Take in whether the copy was right; lengths next to this one learn half of it."""
        surprise = right - self.prior.probability(seen)
        row, kind = seen.bucket, seen.kind
        for near in range(max(row - 1, 0), min(row + 2, len(BUCKETS))):
            weight = 1.0 if near == row else _NEIGHBOUR
            kept = 1 - (1 - _FORGET) * weight
            self._surprise[near][kind] = kept * self._surprise[near][kind] + weight * surprise
            self._weight[near][kind] = kept * self._weight[near][kind] + weight
