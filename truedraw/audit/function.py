"""Somebody else's verifier under audit: exactly where its uniforms can be injected, by samples where not, at its edges always."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np

from truedraw.audit import adapters, vectors
from truedraw.audit.causes import BY_NAME, Verify, right
from truedraw.audit.convention import Answer, Draw, Lost, Request, Subject, given, one_by_one, read_answer
from truedraw.audit.edge_cases import edge_mode
from truedraw.audit.exact_law import TOLERANCE, AsRule, TooManyDraws, as_subject, exact_mode, measure, problems
from truedraw.audit.findings import Example, Fired, ModeReport, Report
from truedraw.audit.process import program
from truedraw.audit.sampled_law import sampled_mode, tables
from truedraw.errors import InvalidParameter

T = TypeVar("T")
PLANTED = "resample from p after a rejection"
RULES = ("any", "token")


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of the audit.

    rule        "any": only the law counts; "token": the answers of the token rule are required, uniform by uniform
    tolerance   total variation that arithmetic may cost, in exact laws
    alpha       probability of a false alarm, of samples
    detect      the smallest shift that samples have to see with 95 % power
    max_tokens  at draft positions, of samples; None: as many as `detect` takes
    """

    rule: str = "any"
    tolerance: float = TOLERANCE
    alpha: float = 0.01
    detect: float = 0.05
    max_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InvalidParameter("rule", self.rule, ", ".join(RULES))
        for name, value, low, high in (
            ("alpha", self.alpha, 0, 1),
            ("detect", self.detect, 0, 1),
            ("tolerance", self.tolerance, -1, 1),
        ):
            if not low < value < high:
                raise InvalidParameter(name, value, f"a number between {max(low, 0)} and {high}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameter("max_tokens", self.max_tokens, "an integer >= 1")


OnProgress = Callable[[str, int, int, float], None]
"""(mode, done, of how many, log10 of the evidence so far)"""


def report_function(
    spec: str,
    *,
    adapter: str = "numpy",
    dtype: str = "float64",
    options: Options | None = None,
    command: str = "",
    on_progress: OnProgress | None = None,
) -> Report:
    """Audit MODULE:CALLABLE. Raises UsageError."""
    subject = adapters.subject(adapters.load_callable(spec), spec, adapter=adapter, dtype=dtype)
    facts = [("adapter", adapter), ("dtype", dtype)]
    again = command or f"truedraw audit function {shlex.quote(spec)} --adapter {adapter} --dtype {dtype}"
    return report_subject(subject, spec, options or Options(), facts, again, on_progress)


def report_process(
    command_line: str,
    *,
    timeout: float = 10.0,
    lanes: int = 16,
    options: Options | None = None,
    command: str = "",
    on_progress: OnProgress | None = None,
) -> Report:
    """Audit a program that speaks JSON lines. Raises UsageError where it cannot be started."""
    started, clock = datetime.now(UTC), time.monotonic()
    options = options or Options()
    command = command or f"truedraw audit process {shlex.quote(command_line)}"
    try:
        with program(command_line, timeout=timeout, lanes=lanes) as subject:
            return report_subject(subject, command_line, options, [("says it is", subject.name)], command, on_progress)
    except Lost as lost:
        mode = ModeReport("first line", "not completed", "does the program say what it speaks?", reason=str(lost))
        seconds = time.monotonic() - clock
        return Report(command_line, command, _time(started), seconds, options.alpha, None, (), (), (mode,))


def report_subject(
    subject: Subject,
    name: str,
    options: Options,
    facts: list[tuple[str, str]],
    command: str = "",
    on_progress: OnProgress | None = None,
) -> Report:
    """All modes that the subject allows; a mode in which it is lost is not completed, and neither are those behind it."""
    started, clock = datetime.now(UTC), time.monotonic()
    say = on_progress or (lambda mode, done, total, evidence: None)
    facts = [*facts, ("randomness", "injected: exact" if subject.injected else "its own: samples")]
    run = _Run(subject, options, say, command)
    for mode in run.modes():
        run.done.append(mode)
    return Report(
        subject=name,
        command=command,
        started=_time(started),
        seconds=time.monotonic() - clock,
        alpha=options.alpha,
        detect=options.detect if run.sampled else None,
        facts=tuple([*facts, *run.facts]),
        control=tuple(run.control),
        modes=tuple(run.done),
    )


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


@dataclass(slots=True)
class _Run:
    """One audit as it goes."""

    subject: Subject
    options: Options
    say: OnProgress
    command: str
    done: list[ModeReport] = field(default_factory=list)
    control: list[ModeReport] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    sampled: bool = False

    def modes(self) -> Iterator[ModeReport]:
        exact = self.subject.injected
        if exact:
            why = self._caught("exact law", lambda: _not_injected(self.subject))
            if isinstance(why, ModeReport):
                yield why
                return
            exact = why is None
            if why is not None:
                yield ModeReport("exact law", "not testable", "does the verifier use the uniforms it is given?", reason=why)
        law = self._caught("exact law", self._exact) if exact else self._caught("sampled law", self._sampled)
        if isinstance(law, str):
            yield ModeReport("exact law", "not testable", "the law of what a step emits, followed by p: is it p's?", reason=law)
            law = self._caught("sampled law", self._sampled)
        assert isinstance(law, ModeReport)
        yield self._with_command(law)
        if law.verdict == "not completed":
            return
        self.say("edge cases", 0, 1, 0.0)
        subject = self.subject if exact else _uninjected(self.subject)
        edges = self._caught("edge cases", lambda: edge_mode(subject, strict=self.options.rule == "token"))
        assert isinstance(edges, ModeReport)
        yield edges
        if exact and edges.verdict != "not completed":
            told = self._caught("token rule, answer by answer", self._vectors)
            if isinstance(told, ModeReport):
                yield told

    def _exact(self) -> ModeReport | str:
        self.say("exact law", 0, 1, 0.0)
        self.control.append(control_exact())
        try:
            return exact_mode(self.subject, tolerance=self.options.tolerance)
        except TooManyDraws as error:
            return str(error)

    def _sampled(self) -> ModeReport:
        self.sampled = True
        options = self.options
        self.control.append(control_sampled(options))
        return sampled_mode(
            _uninjected(self.subject),
            alpha=options.alpha,
            detect=options.detect,
            max_tokens=options.max_tokens,
            seed=options.seed,
            on_progress=lambda done, total, evidence: self.say("sampled law", done, total, evidence),
        )

    def _vectors(self) -> ModeReport | None:
        """A mode of its own where the token rule is required; else a fact."""
        total, wrong = vectors.disagreements(self.subject)
        self.facts.append(("answers of the token rule", f"{total - len(wrong)} of {total} vectors agree"))
        if self.options.rule != "token":
            return None
        return ModeReport(
            mode="token rule, answer by answer",
            verdict="fault found" if wrong else "no evidence",
            asked="does every vector get an answer that the token rule may give with these uniforms?",
            samples=total,
            unit="vectors",
            fired=(Fired("another answer", float("inf"), "another rule, or the uniforms in another order"),) if wrong else (),
            example=Example(wrong[0]) if wrong else None,
            notes=tuple(wrong[:20]),
        )

    def _caught(self, mode: str, work: Callable[[], T]) -> T | ModeReport:
        try:
            return work()
        except Lost as lost:
            return ModeReport(mode, "not completed", "could the verifier be asked to the end?", reason=str(lost))

    def _with_command(self, mode: ModeReport) -> ModeReport:
        if mode.example is None or mode.example.command:
            return mode
        return replace(mode, example=Example(mode.example.text, self.command))


def _uninjected(subject: Subject) -> Subject:
    return replace(subject, injected=False)


def _not_injected(subject: Subject) -> str | None:
    """Why the uniforms do not decide, if they do not: twelve requests, each twenty times with the same uniforms."""
    generator = np.random.default_rng(0)
    table = tables()[0]
    for _ in range(12):
        request = table.request(generator)
        uniforms = generator.random(request.num_uniforms)
        outcomes = subject.ask_many([(request, subject.draw_from(given(list(map(float, uniforms)))))] * 20)
        if not all(isinstance(outcome, Answer) for outcome in outcomes):
            return None  # the exact mode says what is wrong
        if len({outcome for outcome in outcomes if isinstance(outcome, Answer)}) > 1:
            return "the same request with the same uniforms got different answers: it draws others of its own"
    return None


# ---------------------------------------------------------------- positive controls


def control_exact() -> ModeReport:
    """A planted fault on one problem: if it is not seen, nothing else that is said counts."""
    problem, steps = problems()[0]
    off = measure(problem, steps, AsRule(as_subject(BY_NAME[PLANTED].verify)))
    seen = off.one > TOLERANCE
    return ModeReport(
        mode="planted fault, exactly",
        verdict="fault found" if seen else "no evidence",
        asked=f"is a planted fault seen: {PLANTED}, on {problem.name}?",
        samples=1,
        unit="problems",
        notes=(f"TV {off.one} after one step",),
    )


def control_sampled(options: Options) -> ModeReport:
    """The same fault, acting so rarely that the mean shift at draft positions is what has to be detected."""
    full = mean_shift_of_planted()
    share = min(1.0, options.detect / full)
    subject = planted_subject(BY_NAME[PLANTED].verify, share, options.seed + 1)
    mode = sampled_mode(subject, alpha=options.alpha, detect=options.detect, max_tokens=options.max_tokens, seed=options.seed + 2)
    told = f"{PLANTED}, in {share:.1%} of the steps: a mean shift of {share * full:.3g} at draft positions"
    return ModeReport(
        mode="planted fault, by samples",
        verdict=mode.verdict,
        asked=f"is a planted fault seen: {told}?",
        samples=mode.samples,
        unit=mode.unit,
        alpha=mode.alpha,
        e_value=mode.e_value,
        p_value=mode.p_value,
        detectable=mode.detectable,
        path=mode.path,
    )


def mean_shift_of_planted() -> float:
    """Mean TV between p and what the planted fault emits, over the draft positions that steps of the planted fault reach."""
    generator = np.random.default_rng(3)
    total = count = 0.0
    for _ in range(200):
        for table in tables():
            request = table.request(generator)
            verify = BY_NAME[PLANTED].verify
            accepted, _token = verify(request.p, request.q, request.drafts, generator.random(request.num_uniforms).tolist())
            for i in range(min(accepted + 1, len(request.drafts))):
                p = request.p[i]
                q = np.eye(len(p))[request.drafts[i]] if request.q is None else request.q[i]
                kept = np.minimum(p, q)
                total += float(np.abs(kept + (1 - kept.sum()) * p - p).sum() / 2)
                count += 1
    return total / count


def planted_subject(verify: Verify, share: float, seed: int) -> Subject:
    """A verifier with its own uniforms in which a fault acts in that share of the steps."""
    generator = np.random.default_rng(seed)

    def ask(request: Request, draw: Draw) -> Answer:
        chosen = verify if generator.random() < share else right
        return read_answer(
            *chosen(request.p, request.q, request.drafts, generator.random(request.num_uniforms).tolist()), request
        )

    return Subject("planted", ask, one_by_one(ask), injected=False, reproduce=lambda request, uniforms: "")
