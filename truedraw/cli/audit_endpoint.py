"""truedraw audit endpoint: does any OpenAI-compatible server really sample from its target?"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from truedraw import __version__
from truedraw.cli.audit_output import check_report, tell
from truedraw.cli.files import read_text
from truedraw.cli.load_inputs import address
from truedraw.cli.load_inputs import headers as read_headers
from truedraw.cli.output import stderr_console
from truedraw.errors import InvalidParameter, UsageError

_SAID_EACH = 60.0
"""Seconds between the lines that tell of progress."""

if TYPE_CHECKING:
    from truedraw.audit.client import Arm
    from truedraw.audit.findings import Report
    from truedraw.audit.plan import Plan


def endpoint(
    url: Annotated[str, typer.Argument(help="Of an OpenAI-compatible server, as http://localhost:8000.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Default: the server's first.")] = "",
    off: Annotated[
        str | None,
        typer.Option(
            help="Plain decoding: JSON fields of the body, another URL, or model=NAME. Default: as truedraw servers know it."
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A local model whose rows are trusted: a GGUF file, or a name as truedraw generate takes.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Probability that a server without fault is accused, at most.")] = 0.01,
    detect: Annotated[float, typer.Option(help="Smallest shift to find: total variation, per token. The tokens follow.")] = 0.05,
    max_tokens_total: Annotated[int, typer.Option(help="Tokens to draw at most.", min=1000)] = 60_000,
    prompts: Annotated[
        str | None, typer.Option(help="A text, one prompt a line. Default: four that ask for copies and not.", metavar="FILE")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time, with speculation and without alike.", min=1, max=256)] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 60.0,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="TRUEDRAW_API_KEY")] = None,
    header: Annotated[list[str] | None, typer.Option(help="'Name: value', may be repeated.")] = None,
    control: Annotated[bool, typer.Option("--control/--no-control", help="First audit a planted fault of that size.")] = True,
    save: Annotated[str | None, typer.Option(help="The report as a page, FILE.html; or FILE.json.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Audit a server from what it streams: on against off, its own log-probabilities, seeds and parameters.

    Status: 0 no evidence, 1 fault found, 2 usage, 3 could not be completed. Ctrl-C ends it with a report of what was seen so far.
    """
    from truedraw.audit.client import Arm
    from truedraw.audit.plan import PROMPTS, Plan

    check_report(save)
    for name, value, good in (
        ("alpha", alpha, 0 < alpha < 0.5),
        ("detect", detect, 0.001 <= detect < 1),
        ("timeout", timeout, timeout > 0),
    ):
        if not good or not math.isfinite(value):
            allowed = {"alpha": "a number in (0, 0.5)", "detect": "a number in [0.001, 1)", "timeout": "a number of seconds > 0"}[
                name
            ]
            raise InvalidParameter(name, value, allowed)
    on = Arm(address(url), model)
    plan = Plan(
        on,
        _plain(off, on),
        PROMPTS if prompts is None else _lines(prompts),
        alpha,
        detect,
        max_tokens_total,
        concurrency,
        read_headers(api_key, header or ()),
        _reference(reference),
        timeout,
    )
    print(f"truedraw: {_announced(plan)}", file=sys.stderr)
    report = asyncio.run(_until_told(_audit(plan, control=control)))
    tell(report, json_wanted=as_json, save=save)
    return report.status


async def _until_told(audited: Coroutine[Any, Any, Report]) -> Report:
    """SIGTERM is taken as Ctrl-C is: the report tells what was seen until then."""
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await audited


async def _audit(plan: Plan, *, control: bool) -> Report:
    from truedraw.audit.endpoint import INTERRUPTED, audit
    from truedraw.audit.endpoint_control import control as planted
    from truedraw.audit.findings import ModeReport
    from truedraw.audit.findings import Report as Made

    started, begun = time.monotonic(), datetime.datetime.now(datetime.UTC)
    with _Bar() as bar:
        seen = await planted(plan, bar.of("control")) if control else []
        modes, facts = [ModeReport("audit", "not completed", "", INTERRUPTED)], dict[str, str]()
        if not any(mode.reason == INTERRUPTED for mode in seen):
            modes, facts = await audit(plan, bar.of("audit"))
    told = {"truedraw": __version__, **facts, "prompts": str(len(plan.prompts)), "requests at a time": str(plan.concurrency)}
    return Made(
        subject=f"{plan.on.url}{f', model {plan.on.model}' if plan.on.model else ''}",
        command=_command(),
        started=begun.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        alpha=plan.alpha,
        detect=plan.detect,
        facts=tuple(told.items()),
        control=tuple(seen),
        modes=tuple(modes),
    )


def _announced(plan: Plan) -> str:
    """What it will take, before it starts."""
    told = (
        f"a shift of TV {plan.detect:g} takes {plan.wanted:,} tokens in each of three settings (alpha {plan.alpha:g}, power 95 %)"
    )
    if plan.tokens_each < plan.wanted:
        told += f"; --max-tokens-total {plan.most:,} leaves {plan.tokens_each:,}, enough for TV {plan.reach:.2g}"
    return told


def _command() -> str:
    """As typed, without keys."""
    words = list(sys.argv[1:])
    for i, word in enumerate(words[:-1]):
        if word in ("--api-key", "--header"):
            words[i + 1] = "..."
    return shlex.join(["truedraw", *words])


def _plain(given: str | None, on: Arm) -> Arm | None:
    """Raises InvalidParameter."""
    from truedraw.audit.client import Arm

    if given is None:
        return None
    if given.startswith("{"):
        try:
            fields: Mapping[str, Any] = json.loads(given)
        except ValueError as error:
            raise InvalidParameter("off", given, f"a JSON object ({error})") from None
        return Arm(on.url, on.model, fields)
    if given.startswith("model="):
        return Arm(on.url, given.removeprefix("model="))
    return Arm(address(given), on.model)


def _lines(path: str) -> Sequence[str]:
    lines = [line for line in read_text("prompts", path, "a text file with a prompt on each line").splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"prompts: {path} holds no prompt: give at least one, on a line of its own")
    return lines


def _reference(name: str | None) -> Any:
    if name is None:
        return None
    from truedraw.audit.reference import Reference
    from truedraw.cli.output import Progress as Said
    from truedraw.registry import LoadOptions, load_model

    with Said() as said:
        return Reference(load_model(name, LoadOptions(context=2048), said.say))


class _Bar:
    """How far it is, and the evidence so far: a bar, or a line each minute where standard error is no terminal."""

    def __init__(self) -> None:
        console = stderr_console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("evidence 10^{task.fields[evidence]:.1f}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._said = time.monotonic()

    def of(self, part: str) -> Any:
        task = self._progress.add_task(part, total=1.0, evidence=0.0)

        def show(what: str, share: float, evidence: float) -> None:
            if not self._progress.disable:
                self._progress.update(task, description=f"{part}: {what}", completed=share, evidence=min(evidence, 99.0))
            elif time.monotonic() > self._said + _SAID_EACH:
                self._said = time.monotonic()
                print(
                    f"truedraw: {part}: {what}, {share:.0%}, evidence 10^{min(evidence, 99.0):.1f}", file=sys.stderr, flush=True
                )

        return show

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
