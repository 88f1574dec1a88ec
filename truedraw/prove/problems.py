"""Finite problems that the certificates run on: chosen by hand for their edges, or at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from truedraw.prove.exact import Lengths, Problem, table_problem

Case = tuple[Problem, Lengths]
"""A problem and the draft lengths of its consecutive steps."""


def rows(*texts: str) -> list[list[Fraction]]:
    """Rows from text: "1/2 1/3 1/6"."""
    return [[Fraction(mass) for mass in text.split()] for text in texts]


@cache
def cases() -> tuple[Case, ...]:
    """Vocabularies of 2 to 4, draft lengths 0 to 3, fixed or random, zeros, ties, point masses, p = q,
    truncated rows, disjoint supports."""
    reference = table_problem("R1", rows("1/2 3/10 1/5", "1/5 1/2 3/10"), rows("1/5 3/10 1/2", "1/2 1/5 3/10"))
    swapped = table_problem("swapped halves", rows("1/3 2/3", "3/4 1/4"), rows("2/3 1/3", "1/4 3/4"))
    zeros = table_problem("zeros in p and q", rows("1/2 1/2 0", "0 1/3 2/3", "1 0 0"), rows("2/5 1/10 1/2", "1/2 0 1/2"))
    equal = table_problem("p = q", rows("1/2 1/4 1/4", "1/6 1/3 1/2"), rows("1/2 1/4 1/4", "1/6 1/3 1/2"))
    point_mass_q = table_problem("q puts all on one token", rows("1/2 1/3 1/6", "1/6 1/6 2/3"), rows("0 1 0", "1 0 0"))
    truncated = table_problem("p is q, truncated", rows("2/3 1/3 0", "0 3/5 2/5"), rows("1/2 1/4 1/4", "1/6 1/2 1/3"))
    disjoint = table_problem("disjoint supports", rows("1/2 1/2 0 0", "1/4 3/4 0 0"), rows("0 0 1/2 1/2", "0 0 1/3 2/3"))
    points = table_problem(
        "point-mass drafts", rows("1/2 3/10 1/5", "1/5 3/10 1/2"), rows("1/5 3/10 1/2", "1/2 1/5 3/10"), point=True
    )
    greedy = table_problem("greedy target", rows("0 1 0", "1 0 0", "0 0 1"), rows("1/2 1/4 1/4", "1/3 1/3 1/3"))
    ties = table_problem("ties", rows("1/4 1/4 1/4 1/4", "1/2 1/2 0 0"), rows("1/2 1/6 1/6 1/6", "1/4 1/4 1/4 1/4"))
    gains = table_problem("two gains", rows("3/10 3/10 2/5", "3/5 3/10 1/10"), rows("2/5 2/5 1/5", "1/10 1/10 4/5"))
    return (
        (reference, (1, 1)),
        (reference, (2, 2)),
        (reference, (2, 0, 1)),
        (swapped, (2, 2, 2)),
        (swapped, (3, 3)),
        (swapped, ((0, 1, 3), (0, 2))),
        (gains, (2, 1)),
        (zeros, (2, 2)),
        (equal, (2, 2)),
        (point_mass_q, (2, 2, 2)),
        (truncated, (2, 2)),
        (disjoint, (1, 1, 1)),
        (points, (3, 3)),
        (greedy, (3, 3)),
        (ties, ((1, 2), 2)),
        *((random_problem(seed, vocab, denominator), lengths) for seed, vocab, denominator, lengths in _RANDOM),
    )


_RANDOM: Sequence[tuple[int, int, int, Lengths]] = (
    (1, 2, 5, (3, 3)),
    (7, 3, 4, (3, 1)),
    (3, 3, 6, (1, 2)),
    (4, 4, 5, ((0, 1), 1)),
)


def random_problem(seed: int, vocab: int, denominator: int) -> Problem:
    """Rows of multiples of 1 / denominator, zeros and ties included."""
    generator = random.Random(seed)

    def row() -> list[Fraction]:
        cuts = sorted(generator.randrange(denominator + 1) for _ in range(vocab - 1))
        return [Fraction(b - a, denominator) for a, b in zip([0, *cuts], [*cuts, denominator], strict=True)]

    return table_problem(f"random {seed} in 1/{denominator}", [row() for _ in range(vocab)], [row() for _ in range(vocab)])
