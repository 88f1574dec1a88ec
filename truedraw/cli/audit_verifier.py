"""truedraw audit function, truedraw audit process: somebody else's verifier."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from truedraw.cli.output import stderr_console

if TYPE_CHECKING:
    from truedraw.audit.findings import ModeReport, Report
    from truedraw.audit.function import Options

Rule = Annotated[str, typer.Option("--rule", help="any: only the law counts; token: its answers, uniform by uniform.")]
Tolerance = Annotated[float, typer.Option("--tolerance", help="Total variation that its arithmetic may cost.")]
Alpha = Annotated[float, typer.Option("--alpha", help="Probability of a false alarm, where samples decide.")]
Detect = Annotated[float, typer.Option("--detect", help="The smallest shift (total variation) that samples have to see.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Samples at most; default: as many as --detect takes.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the drafts that are drawn.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def function(
    target: Annotated[str, typer.Argument(metavar="MODULE:CALLABLE", help="Or FILE.py:CALLABLE.")],
    adapter: Annotated[str, typer.Option("--adapter", help="numpy, torch, hugging-face or vllm: how it is called.")] = "numpy",
    dtype: Annotated[str, typer.Option("--dtype", help="Of the arrays it is given: float64 or float32.")] = "float64",
    rule: Rule = "any",
    tolerance: Tolerance = 1e-6,
    alpha: Alpha = 0.01,
    detect: Detect = 0.05,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Audit a verifier in Python: verify(p, q, drafts, uniforms) -> (accepted, token).

    Exact where it takes `uniforms` or `rng`, by samples where it draws its own.

    Status: 0 no evidence, 1 fault found, 2 usage, 3 could not be completed.
    """
    from truedraw.audit.function import Options, report_function

    _quiet()
    options = Options(rule, tolerance, alpha, detect, max_tokens, seed)
    with _Watch(options) as watch:
        report = report_function(
            target, adapter=adapter, dtype=dtype, options=options, command=_command(), on_progress=watch.progress
        )
    return _tell(report, as_json)


def process(
    command: Annotated[str, typer.Argument(metavar="CMD", help="A program and its arguments, in quotes.")],
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one answer.")] = 10.0,
    lanes: Annotated[int, typer.Option("--lanes", help="Requests under way at once.")] = 16,
    rule: Rule = "any",
    tolerance: Tolerance = 1e-6,
    alpha: Alpha = 0.01,
    detect: Detect = 0.05,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Audit a verifier in any language: a program that speaks JSON lines (docs/audit-verifier.md).

    Exact where it uses the uniforms it is given, by samples where it draws its own.

    Status: 0 no evidence, 1 fault found, 2 usage, 3 could not be completed.
    """
    from truedraw.audit.function import Options, report_process
    from truedraw.errors import InvalidParameter

    if not timeout > 0:
        raise InvalidParameter("--timeout", timeout, "a number of seconds > 0")
    if not 1 <= lanes <= 256:
        raise InvalidParameter("--lanes", lanes, "1 to 256")
    _quiet()
    options = Options(rule, tolerance, alpha, detect, max_tokens, seed)
    with _Watch(options) as watch:
        report = report_process(
            command, timeout=timeout, lanes=lanes, options=options, command=_command(), on_progress=watch.progress
        )
    return _tell(report, as_json)


def _quiet() -> None:
    """truedraw's own rules, where they are audited, speak of rounding events that are visited on purpose."""
    logging.getLogger("truedraw").setLevel(logging.ERROR)


def _command() -> str:
    return shlex.join(["truedraw", *sys.argv[1:]])


class _Watch:
    """A progress bar on standard error, with the evidence so far; says before samples begin how many there will be."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._progress = Progress(console=stderr_console(), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def progress(self, mode: str, done: int, total: int, evidence: float) -> None:
        if mode not in self._tasks:
            self._tasks[mode] = self._progress.add_task(mode, total=None)
            if mode == "sampled law":
                told = f"truedraw: {total:,} tokens at draft positions at most, for a shift of {self._options.detect:g}"
                print(f"{told} at alpha {self._options.alpha:g} with 95 % power", file=sys.stderr)
        shown = f"{mode}, evidence 10^{evidence:.1f}" if total > 1 else mode
        self._progress.update(self._tasks[mode], completed=done, total=total if total > 1 else None, description=shown)

    def __enter__(self) -> _Watch:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


# ---------------------------------------------------------------- what is told


def _tell(report: Report, as_json: bool) -> int:
    if as_json:
        print(json.dumps(_json(report), ensure_ascii=False))
    else:
        print(told(report))
    return report.status


def _json(report: Report) -> dict[str, object]:
    """The report's own fields, without numbers that JSON lacks."""
    fields = {"ok": report.ok, "status": report.status, "findings": [mode.mode for mode in report.findings], **asdict(report)}
    finite: dict[str, object] = json.loads(json.dumps(fields), parse_constant=lambda _name: None)
    return finite


def told(report: Report) -> str:
    """The report as lines of text."""
    lines = [report.subject, *(f"  {name}: {value}" for name, value in report.facts)]
    if not report.control_seen:
        lines.append("NOT SEEN: the planted fault was not found, so that nothing below counts")
    for mode in (*report.control, *report.modes):
        lines += ["", *_mode(mode)]
    return "\n".join([*lines, "", _summary(report)])


def _mode(mode: ModeReport) -> list[str]:
    lines = [f"{mode.mode}: {mode.verdict}", f"  {mode.asked}"]
    if mode.reason:
        lines.append(f"  {mode.reason}")
    size = f"{mode.samples:,} {mode.unit}"
    if mode.e_value is not None:
        size += f", evidence {mode.e_value:.3g} (a fault is told from {1 / (mode.alpha or 1):g} on)"
    if mode.detectable is not None:
        size += f"; shifts below {mode.detectable:.2g} would not have been seen"
    if mode.samples:
        lines.append(f"  {size}")
    lines += [f"  fault: {fired.name}\n    usually: {fired.usually}" for fired in mode.fired]
    if mode.example is not None:
        lines.append(f"  first: {mode.example.text}")
        if mode.example.command:
            lines.append(f"  again: {mode.example.command}")
    return lines + [f"  - {note}" for note in mode.notes]


def _summary(report: Report) -> str:
    if report.status == 1:
        return "fault found: " + ", ".join(mode.mode for mode in report.findings)
    if report.status == 0:
        return "no evidence of a fault, in what was asked above"
    return "could not be completed: " + ("; ".join(mode.reason for mode in report.modes if mode.reason) or "see above")
