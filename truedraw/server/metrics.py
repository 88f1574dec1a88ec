"""What /metrics tells, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from truedraw.engine import Engine, Request
from truedraw.types import Step

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 31)
_DEEPEST = 32


class Metrics:
    """One set of them for each server: no registry of the whole process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._decode = self._plain = 0.0

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"truedraw_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"truedraw_{name}", text, labels, buckets=buckets, registry=registry)

        self.responses = counter("responses", "Answers over HTTP.", "endpoint", "status")
        self.requests = counter("requests", "Prompts that ended, by how.", "reason")
        self.refused = counter("requests_refused", "Requests answered with 429.")
        self.errors = counter("errors", "Failures inside requests and steps, by kind.", "kind")
        self.running = Gauge("truedraw_choices_running", "Choices in a slot.", registry=registry)
        self.waiting = Gauge("truedraw_choices_waiting", "Choices that wait for a slot.", registry=registry)
        self.slots = Gauge("truedraw_slots", "Slots.", registry=registry)
        self.tokens = counter("tokens", "Tokens emitted, by where they came from.", "origin")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, by how they got into the cache.", "source")
        self.proposed = counter("drafts_proposed", "Draft tokens that were verified, by their depth.", "depth")
        self.accepted = counter("drafts_accepted", "Draft tokens that were accepted, by their depth.", "depth")
        self.draft_length = histogram("draft_length", "Draft tokens of a sequence in a step.", _LENGTHS)
        self.step_seconds = histogram("step_seconds", "Seconds of a step, by part.", _SECONDS, "part")
        self.first_token = histogram("first_token_seconds", "Seconds from admission to the first token.", _SECONDS)
        self.request_seconds = histogram("request_seconds", "Seconds of a prompt, queue included.", _SECONDS)
        self.decode_seconds = counter("decode_seconds", "Seconds of decoding, added up over choices.")
        self.plain_seconds = counter("plain_seconds", "What plain decoding is estimated to have taken for the same.")
        self.speedup = Gauge(
            "truedraw_speedup_estimate", "Estimated plain seconds over seconds, of all choices so far.", registry=registry
        )

    def stepped(self, steps: Sequence[Step], engine: Engine, seconds: float) -> None:
        """After each step of the engine."""
        timing, self_seconds = engine.last_timing, seconds
        self.running.set(engine.num_running)
        self.waiting.set(engine.num_waiting)
        if timing is not None:
            parts = {"draft": timing.draft_seconds, "target": timing.target_seconds, "verify": timing.verify_seconds}
            for part, value in parts.items():
                self.step_seconds.labels(part).observe(value)
                self_seconds -= value
            self.step_seconds.labels("rest").observe(max(self_seconds, 0.0))
            for length in timing.num_proposed:
                self.draft_length.observe(length)
        for step in steps:
            for origin in step.origins:
                self.tokens.labels(origin).inc()

    def finished(self, request: Request, seconds: float) -> None:
        """A prompt's choices have all ended by themselves."""
        self.request_seconds.observe(seconds)
        for result in request.results:
            assert result is not None
            self.requests.labels(result.finish_reason).inc()
            if result.error is not None:
                self.errors.labels(type(result.error).__name__).inc()
        self._count(request)

    def ended(self, request: Request, reason: str) -> None:
        """A prompt was ended before its time."""
        self.requests.labels(reason).inc()

    def _count(self, request: Request) -> None:
        for result in request.results:
            assert result is not None
            stats = result.stats
            computed = max(len(request.prompt) - stats.cached - stats.copied, 0)
            for source, count in (("cached", stats.cached), ("copied", stats.copied), ("computed", computed)):
                self.prompt_tokens.labels(source).inc(count)
            for counts, metric in ((stats.proposed_by_depth, self.proposed), (stats.accepted_by_depth, self.accepted)):
                for depth, count in enumerate(counts[:_DEEPEST], 1):
                    metric.labels(str(depth)).inc(count)
            if stats.plain_seconds is not None:
                self.decode_seconds.inc(stats.seconds)
                self.plain_seconds.inc(stats.plain_seconds)
                self._decode += stats.seconds
                self._plain += stats.plain_seconds
        if self._decode > 0:
            self.speedup.set(self._plain / self._decode)

    def text(self) -> bytes:
        return generate_latest(self.registry)
