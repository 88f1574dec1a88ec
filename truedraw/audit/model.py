"""The audit of truedraw's own engine on somebody's own target and drafter, from inside: every emitted token against the row it
was drawn from.

First a fault of the size asked for is planted and has to be found; then the engine as it is. Every request has fresh noise,
so that each token is independent of what was seen before, given its row; what is bet on it is fixed before it is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from truedraw.audit.evidence import NUM_BETS, Evidence
from truedraw.audit.findings import Example, ModeReport, Report, Verdict
from truedraw.audit.planted_model import Sizes, in_a_share
from truedraw.audit.power import log_goal, smallest_shift, tokens_needed
from truedraw.audit.watch import Watch
from truedraw.engine import Engine, Request
from truedraw.errors import InvalidParameter, RunError, TruedrawError
from truedraw.registry import RULES
from truedraw.text.prompt import Prompt
from truedraw.types import SamplingParams, Step
from truedraw.verify import Rule

LAW = "law of the tokens"
EXACT = "what must hold exactly"
CONTROL = "planted fault"
_PILOT = 400  # tokens from which the size of planted faults is told

Told = Callable[[str, int, float], None]
"""(what is being done, tokens looked at, log of the evidence) as it goes on."""


@dataclass(frozen=True, slots=True)
class ModelAudit:
    """What is asked. Raises InvalidParameter.

    detect      the smallest total variation to find, averaged over all tokens; the number of tokens follows
    max_tokens_total  looked at at most, in the control and in the audit each; None: as many as `detect` needs
    max_tokens  of each answer at most
    """

    params: SamplingParams
    alpha: float = 0.01
    detect: float = 0.05
    max_tokens_total: int | None = None
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens_total", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(name, value, "an integer >= 1")
        tokens_needed(self.detect, log_goal(NUM_BETS, self.alpha))

    @property
    def needed(self) -> int:
        """Tokens after which `detect` is found with 95 % power."""
        return tokens_needed(self.detect, log_goal(NUM_BETS, self.alpha))

    @property
    def limit(self) -> int:
        return self.needed if self.max_tokens_total is None else self.max_tokens_total


@dataclass(slots=True)
class _Run:
    """One stretch of tokens under one rule, and what had to hold of it."""

    watch: Watch
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    wrong_counts: list[str] = field(default_factory=list)
    error: str = ""

    def take(self, step: Step) -> None:
        if not step.num_emitted:
            return  # it only read prompt
        self.steps += 1
        self.proposed += step.num_proposed
        self.accepted += step.num_accepted
        self.emitted += step.num_emitted
        short = step.finish_reason is not None and 1 <= step.num_emitted <= step.num_accepted + 1
        if step.num_accepted > step.num_proposed or not (step.num_emitted == step.num_accepted + 1 or short):
            self.wrong_counts.append(
                f"a step emitted {step.num_emitted} tokens with {step.num_accepted} of {step.num_proposed} drafts accepted"
            )


def audit_model(
    engine: Engine, prompts: Sequence[Prompt], asked: ModelAudit, *, command: str = "", on_progress: Told | None = None,
    facts: Sequence[tuple[str, str]] = (),
) -> Report:  # fmt: skip
    """Audit an engine that nobody else uses meanwhile. prompts: taken in turn, as often as needed.

    Ctrl-C and errors of the engine end it with a report of what was seen, "not completed". Raises InvalidParameter and
    PromptError where no request can be made at all.
    """
    return _Audit(engine, prompts, asked, on_progress or (lambda what, count, log_e: None)).report(command, facts)


class _Audit:
    def __init__(self, engine: Engine, prompts: Sequence[Prompt], asked: ModelAudit, told: Told) -> None:
        if not prompts:
            raise InvalidParameter("prompts", "none", "at least one prompt")
        self._engine, self._prompts, self._asked, self._told = engine, prompts, asked, told
        eos = frozenset() if asked.params.ignore_eos else engine.model.tokenizer.eos_ids
        self._stop_ids = frozenset(asked.params.stop_token_ids) | eos
        self._num_requests = 0
        self._rule = self._rule_name()
        self._lossy = self._rule not in RULES

    def _rule_name(self) -> str:
        """The rule that requests without a seed get here; checks the parameters and every prompt too."""
        params = replace(self._asked.params, seed=None, n=1, max_tokens=self._asked.max_tokens)
        names = []
        for prompt in self._prompts:
            request = self._engine.submit(prompt, params)
            self._engine.cancel(request)
            names.append(request.rule_name)
        return names[0]

    # ------------------------------------------------------------ drawing

    def _submit(self) -> Request:
        """The next prompt, with a seed of its own: noise that is met twice would tell what comes."""
        words = np.random.SeedSequence((self._asked.seed, self._num_requests)).generate_state(1, np.uint64)
        prompt = self._prompts[self._num_requests % len(self._prompts)]
        self._num_requests += 1
        params = replace(self._asked.params, seed=int(words[0]), n=1, max_tokens=self._asked.max_tokens)
        return self._engine.submit(prompt, params, rule=self._rule)

    def _draw(self, what: str, wrap: Callable[[Rule], Rule], watch: Watch, limit: int) -> _Run:
        """Tokens under `wrap`, until the evidence is enough or `limit` of them have been looked at."""
        run, engine, evidence = _Run(watch), self._engine, watch.evidence
        running: list[Request] = []
        idle = 0  # answers without a token, one after the other
        with _wrapped(engine, lambda rule: watch.around(wrap(rule))):
            try:
                while not evidence.rejects and evidence.count < limit and not run.error:
                    while len(running) < engine.model.runner.num_slots:
                        running.append(self._submit())
                    for step in engine.step():
                        run.take(step)
                    for request in [each for each in running if each.finished]:
                        running.remove(request)
                        result = request.results[0]
                        idle = 0 if result is not None and result.tokens else idle + 1
                        if result is not None and result.error is not None:
                            run.error = str(result.error)
                        elif idle > 2 * len(self._prompts):
                            run.error = "no answer has a token"
                    self._told(what, evidence.count, evidence.log_e)
            except KeyboardInterrupt:
                run.error = "interrupted"
            except TruedrawError as error:
                run.error = str(error)
            finally:
                for request in running:
                    engine.cancel(request)
        return run

    def _watch(self, *, sizing: bool = False) -> Watch:
        return Watch(
            Evidence(self._asked.alpha), self._stop_ids, coupled=self._rule == "coupled", sizes=Sizes() if sizing else None
        )

    # ------------------------------------------------------------ what is made of it

    def report(self, command: str, facts: Sequence[tuple[str, str]]) -> Report:
        started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        control = self._control(command)
        run = _Run(self._watch(), error=control.reason) if control.verdict == "not completed" else None
        if run is None:
            run = self._draw("audit", lambda rule: rule, self._watch(), self._asked.limit)
        return Report(
            subject=f"truedraw, target {self._engine.model.name}",
            command=command,
            started=started,
            seconds=time.monotonic() - clock,
            alpha=self._asked.alpha,
            detect=self._asked.detect,
            facts=(*facts, *self._facts(run)),
            control=(control,),
            modes=(self._law(run, command), self._exact(run, command)),
        )

    def _control(self, command: str) -> ModeReport:
        """A planted fault of the size asked for, found or not."""
        asked = self._asked
        pilot = self._draw("sizing a planted fault", lambda rule: rule, self._watch(sizing=True), min(_PILOT, asked.limit))
        sizes = pilot.watch.sizes
        assert sizes is not None
        fault, full = sizes.choose(asked.detect)
        question = f"Would this audit see a fault? Planted: {fault.name}."
        if pilot.error:
            return ModeReport(CONTROL, "not completed", question, reason=pilot.error, alpha=asked.alpha)
        if not full:
            return ModeReport(
                CONTROL, "not testable", question, alpha=asked.alpha,
                reason="no fault that could be planted here would change a token: there is one possible token at each position, "
                "and the drafts are these tokens",
            )  # fmt: skip
        share = min(1.0, asked.detect / full)
        run = self._draw(
            "planted fault", lambda rule: in_a_share(rule, fault.make(rule), share, asked.seed), self._watch(), asked.limit
        )
        size = share * full
        told = [f"It acts in {share:.0%} of the steps, which shifts the law of a token by a total variation of {size:.2g}."]
        if full < asked.detect:
            told.append(f"On this pair no planted fault shifts by the {asked.detect:g} asked for: this is the largest.")
        found = run.watch.evidence.rejects
        verdict: Verdict = "fault found" if found else "not completed" if run.error else "no evidence"
        reason = run.error or f"the planted fault was not found in {run.watch.evidence.count:,} tokens"
        return self._measured(CONTROL, verdict, question, run, reason="" if found else reason, notes=tuple(told))

    def _law(self, run: _Run, command: str) -> ModeReport:
        evidence, asked = run.watch.evidence, self._asked
        question = "Is every emitted token drawn from the target's law at its place?"
        notes = [self._drafted(evidence)] if run.proposed else []
        if self._rule in _WHAT:
            notes.append(_WHAT[self._rule])
        if self._lossy:
            notes.append(f"The rule {self._rule} changes the law on purpose.")
        if not run.proposed and evidence.count:
            notes.append("Nothing was drafted: this is plain decoding.")
        if asked.limit < asked.needed:
            notes.append(
                f"{asked.needed:,} tokens would see the {asked.detect:g} asked for with 95 % power; {asked.limit:,} were allowed."
            )
        if evidence.rejects:
            text = run.watch.forbidden or (
                f"The evidence passed {1 / asked.alpha:,.0f} after {evidence.count:,} tokens "
                f"(answers to {len(self._prompts)} prompts in turn, seed {asked.seed})."
            )
            return self._measured(LAW, "fault found", question, run, example=Example(text, command), notes=tuple(notes))
        if run.error:
            return self._measured(LAW, "not completed", question, run, reason=run.error, notes=tuple(notes))
        if not evidence.informative:
            reason = "there is one possible token at each position (temperature 0, or top-k 1): nothing is drawn"
            return ModeReport(LAW, "not testable", question, reason=reason, samples=evidence.count, alpha=asked.alpha)
        return self._measured(LAW, "no evidence", question, run, notes=tuple(notes))

    def _drafted(self, evidence: Evidence) -> str:
        """What is known of the places where faults of speculation act: the figure for all tokens does not tell it."""
        smallest = smallest_shift(evidence.drafted, log_goal(NUM_BETS, self._asked.alpha))
        told = "would hardly be seen" if smallest >= 1 else f"would be seen from a TV of {smallest:.2g} there"
        return f"{evidence.drafted:,} of these tokens came where there was a draft: a fault that acts only there {told}."

    def _measured(
        self, mode: str, verdict: Verdict, asked: str, run: _Run, *, reason: str = "", example: Example | None = None,
        notes: tuple[str, ...] = (),
    ) -> ModeReport:  # fmt: skip
        evidence, alpha = run.watch.evidence, self._asked.alpha
        count = evidence.count
        smallest = smallest_shift(count, log_goal(NUM_BETS, alpha)) if count else None
        return ModeReport(
            mode, verdict, asked, reason=reason, samples=count, alpha=alpha, e_value=evidence.e_value,
            p_value=min(1.0, 1 / evidence.e_value), detectable=smallest,
            fired=evidence.fired(), example=example, path=evidence.path, notes=notes, directions=evidence.directions(),
        )  # fmt: skip

    def _exact(self, run: _Run, command: str) -> ModeReport:
        question = "Does every step do what it must, without exception?"
        watch = run.watch
        broken = [
            *([watch.forbidden] if watch.forbidden else []),
            *run.wrong_counts[:1],
            *(
                [f"{watch.refused} of {watch.same:,} steps refused drafts that came from the target's own rows"]
                if watch.refused and not self._lossy
                else []
            ),
        ]
        notes = [
            f"Tokens that their row forbids: {watch.evidence.violations} of {watch.evidence.count:,}.",
            f"Steps that did not emit the accepted drafts and one token more: {len(run.wrong_counts)} of {run.steps:,}.",
            f"Steps that refused drafts from the target's own rows: {watch.refused} of {watch.same:,}.",
        ]
        if not watch.same:
            notes.append(
                "No draft came from rows equal to the target's: with the target as its own draft model that is tested too."
            )
        verdict: Verdict = "fault found" if broken else "not completed" if run.error else "no evidence"
        example = Example("; ".join(broken), command) if broken else None
        return ModeReport(
            EXACT, verdict, question, reason=run.error if verdict == "not completed" else "", samples=run.steps, unit="steps",
            example=example, notes=tuple(notes),
        )  # fmt: skip

    def _facts(self, run: _Run) -> list[tuple[str, str]]:
        accepted = f"{run.accepted:,} of {run.proposed:,}" + (f" ({run.accepted / run.proposed:.0%})" if run.proposed else "")
        return [
            ("rule", self._rule),
            ("prompts", str(len(self._prompts))),
            ("tokens emitted", f"{run.emitted:,}"),
            ("drafts accepted", accepted),
            ("seed", str(self._asked.seed)),
            ("tokens that see the shift asked for", f"{self._asked.needed:,}"),
        ]


_WHAT = {
    "coupled": "The coupled rule emits the target's own draw, whatever is drafted: tested is that this draw has the target's "
    "law, and that it leans neither towards the drafter's probabilities nor away from them. Every request has a seed of its own; "
    "that equal seeds give equal texts is not tested here."
}


@contextmanager
def _wrapped(engine: Engine, wrap: Callable[[Rule], Rule]) -> Iterator[None]:
    if engine.wrap_rule is not None:
        raise RunError("this engine is under watch already: let that end first")
    engine.wrap_rule = wrap
    try:
        yield
    finally:
        engine.wrap_rule = None
