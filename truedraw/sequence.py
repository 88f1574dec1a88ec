"""One choice of a request while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from truedraw.cache import TokenBuffer
from truedraw.protocols import Constraint, SequenceState
from truedraw.randomness import Noise
from truedraw.text.stream import TextStream
from truedraw.types import Drift, FinishReason, Origin, Record, SamplingParams, Stats, StopRule, TokenLogprob
from truedraw.verify import Rule


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """One choice of a request while it runs.

    context  prompt and output; its last token is pending: in no cache yet
    depths   for each emitted token its depth in the draft, 0 if it was not a draft token
    num_with_prompt  tokens emitted by the pass that read the end of the prompt: its time is the prompt's
    text, num_reported  what the engine has handed out so far
    top_records  None: keep no records; else so many most likely tokens with each
    top_logprobs  likewise, of the target's own row
    prompt_logprobs  of the prompt tokens but the first, as far as the prompt has been read; None: not wanted
    num_found, num_copied  prompt tokens that its slot's cache held, and that another one's did
    """

    id: int
    request: int
    choice: int
    slot: int
    context: TokenBuffer
    prompt_length: int
    params: SamplingParams
    rule_name: str
    rule: Rule
    noise: Noise
    stop: StopRule
    stream: TextStream
    constraint: Constraint | None = None
    top_records: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    max_draft: int | None = None
    drafter: str = ""
    owner: str = ""
    num_found: int = 0
    num_copied: int = 0
    origins: list[Origin] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    proposed_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drift: Drift | None = None
    text: list[str] = field(default_factory=list)
    num_reported: int = 0
    num_with_prompt: int = 0
    num_steps: int = 0
    admitted_at: float = 0.0
    ready_at: float | None = None
    seconds: float = 0.0
    plain_seconds: float | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def num_emitted(self) -> int:
        return len(self.context) - self.prompt_length

    @property
    def num_left(self) -> int:
        return self.stop.max_tokens - self.num_emitted

    @property
    def num_released(self) -> int:
        """Emitted tokens that no stop string can take back any more."""
        return self.stream.num_released

    @property
    def state(self) -> SequenceState:
        return SequenceState(
            sequence=self.id,
            length=len(self.context),
            num_emitted=self.num_emitted,
            num_left=self.num_left,
            rule=self.rule_name,
            proposed=sum(self.proposed_by_depth),
            accepted=sum(self.accepted_by_depth),
            drafter=self.drafter,
        )

    @property
    def stats(self) -> Stats:
        return Stats(
            steps=self.num_steps,
            proposed=sum(self.proposed_by_depth),
            accepted=sum(self.accepted_by_depth),
            emitted=self.num_emitted,
            proposed_by_depth=tuple(self.proposed_by_depth),
            accepted_by_depth=tuple(self.accepted_by_depth),
            prompt_seconds=0.0 if self.ready_at is None else self.ready_at - self.admitted_at,
            seconds=self.seconds,
            drift=self.drift,
            plain_seconds=self.plain_seconds,
            cached=self.num_found,
            copied=self.num_copied,
            with_prompt=min(self.num_with_prompt, self.num_emitted),
        )

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End the sequence: held text is released, tokens that a stop string took back are dropped."""
        self.finish_reason, self.error = reason, error
        self.stream.finish()
        kept = self.stream.num_released
        self.context.truncate(self.prompt_length + kept)
        for depth in filter(None, self.depths[kept:]):
            self.accepted_by_depth[depth - 1] -= 1
        for per_token in (self.origins, self.depths, self.records):
            del per_token[kept:]
