"""What a run could have reached, and what flatters it."""

from __future__ import annotations

from collections.abc import Sequence

from truedraw.drafters.automaton import SuffixAutomaton

LONGEST_PERIOD = 32


def hindsight_seconds(prompt: Sequence[int], output: Sequence[int], seconds: Sequence[float]) -> float:
    """The time of the steps that decode `output` when every step copies from the longest match and its
    length maximises (k + 1) / seconds(k + 1) over the k that will be accepted. A diagnostic, no law:
    better proposals pass it.

    seconds: of passes of 0, 1, 2, ... tokens
    """
    automaton = SuffixAutomaton()
    for token in prompt:
        automaton.extend(token)
    total, at = 0.0, 0
    while at < len(output):
        copied = automaton.copy(min(len(seconds) - 2, len(output) - at - 1))
        right = next((i for i, token in enumerate(copied) if token != output[at + i]), len(copied))
        k = max(range(right + 1), key=lambda k: (k + 1) / seconds[k + 1])
        total += seconds[k + 1]
        for token in output[at : at + k + 1]:
            automaton.extend(token)
        at += k + 1
    return total


def loop_share(output: Sequence[int], longest: int = LONGEST_PERIOD) -> float:
    """The share of tokens that repeat what stood one period before, where at least two periods of up to
    `longest` tokens have been repeated in full: a small greedy model that loops makes copying look good."""
    if not output:
        return 0.0
    inside = [False] * len(output)
    for period in range(1, longest + 1):
        run = 0
        for i in range(period, len(output)):
            run = run + 1 if output[i] == output[i - period] else 0
            enough = max(2 * period, 8)
            if run >= enough:
                first = i - run + 1 if run == enough else i
                inside[first : i + 1] = [True] * (i + 1 - first)
    return sum(inside) / len(output)
