"""truedraw audit function, truedraw audit process: somebody else's verifier."""

from __future__ import annotations

import logging
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from truedraw.cli.audit_output import check_report, tell
from truedraw.cli.output import stderr_console

if TYPE_CHECKING:
    from truedraw.audit.function import Options

Rule = Annotated[str, typer.Option("--rule", help="any: only the law counts; token: its answers, uniform by uniform.")]
Tolerance = Annotated[float, typer.Option("--tolerance", help="Total variation that its arithmetic may cost.")]
Alpha = Annotated[float, typer.Option("--alpha", help="Probability of a false alarm, where samples decide.")]
Detect = Annotated[float, typer.Option("--detect", help="The smallest shift (total variation) that samples have to see.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Samples at most; default: as many as --detect takes.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the drafts that are drawn.")]
Save = Annotated[str | None, typer.Option("--save", metavar="FILE", help="The report as a page, FILE.html; or FILE.json.")]
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
    save: Save = None,
    as_json: AsJson = False,
) -> int:
    """Audit a verifier in Python: verify(p, q, drafts, uniforms) -> (accepted, token).

    Exact where it takes `uniforms` or `rng`, by samples where it draws its own.

    Status: 0 no evidence, 1 fault found, 2 usage, 3 could not be completed.
    """
    from truedraw.audit.function import Options, report_function

    check_report(save)
    _quiet()
    options = Options(rule, tolerance, alpha, detect, max_tokens, seed)
    with _Watch(options) as watch:
        report = report_function(
            target, adapter=adapter, dtype=dtype, options=options, command=_command(), on_progress=watch.progress
        )
    tell(report, json_wanted=as_json, save=save)
    return report.status


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
    save: Save = None,
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
    check_report(save)
    _quiet()
    options = Options(rule, tolerance, alpha, detect, max_tokens, seed)
    with _Watch(options) as watch:
        report = report_process(
            command, timeout=timeout, lanes=lanes, options=options, command=_command(), on_progress=watch.progress
        )
    tell(report, json_wanted=as_json, save=save)
    return report.status


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
