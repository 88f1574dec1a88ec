"""What drafting does, in vLLM's Prometheus output.

The engine is a process of its own: its counters reach the server's /metrics through the files of prometheus-client, where
PROMETHEUS_MULTIPROC_DIR names a folder for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class Metrics:
    """Counters from the start of the engine on.

    most    drafts of a request in a step at most
    counts  False: nothing is counted, where another process of a tensor-parallel group counts the same steps
    """

    def __init__(self, most: int, registry: CollectorRegistry = REGISTRY, *, counts: bool = True) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Any:
            full = f"truedraw_{name}"
            known = getattr(registry, "_names_to_collectors", {}).get(full)  # an engine may be made twice in a process
            return known or Counter(full, text, labels, registry=registry)

        self._most, self._counts = most, counts
        self._proposed = counter("draft_tokens_total", "Draft tokens that were verified, by depth", ["depth"])
        self._accepted = counter("accepted_tokens_total", "Draft tokens that were accepted, by depth", ["depth"])
        self._lengths = counter("draft_length_total", "Requests in steps, by the number of tokens drafted", ["length"])
        self._seconds = counter("pass_seconds_total", "Time of the passes that were timed")
        self._plain = counter("plain_seconds_total", "Estimated time of plain decoding for the tokens of those passes")
        self._off = counter("steps_off_total", "Steps in which nothing was drafted, as it would not have paid")

    def chosen(self, lengths: Sequence[int]) -> None:
        """How many tokens each request drafts in a step."""
        if not self._counts:
            return
        for length in lengths:
            self._lengths.labels(str(length)).inc()
        if not any(lengths):
            self._off.inc()

    def judged(self, proposed: int, accepted: int) -> None:
        """What became of a request's drafts: those behind the first rejected one were not judged."""
        if not self._counts:
            return
        for depth in range(1, min(proposed, accepted + 1, self._most) + 1):
            self._proposed.labels(str(depth)).inc()
        for depth in range(1, accepted + 1):
            self._accepted.labels(str(depth)).inc()

    def timed(self, seconds: float, plain: float | None, emitted: float) -> None:
        """A pass, and what a plain one takes (None: not known yet); emitted: tokens of a request, in the mean."""
        if plain is not None and self._counts:
            self._seconds.inc(seconds)
            self._plain.inc(plain * emitted)
