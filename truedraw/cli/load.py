"""truedraw load: requests to a server, so many at a time, and what throughput and latencies came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from truedraw.cli import load_inputs as inputs
from truedraw.cli.output import stderr_console
from truedraw.cli.picture import check_picture, check_saved, write_picture
from truedraw.errors import RunError, UsageError

if TYPE_CHECKING:
    from truedraw.bench.load import Load, Run
    from truedraw.bench.load_figures import Sample
    from truedraw.cli.load_output import Report

_REQUEST = "Request"


def load(
    url: Annotated[str, typer.Argument(help="Of an OpenAI-compatible server, as http://localhost:8000.")],
    concurrency: Annotated[str, typer.Option(help="Requests at a time; a run for each number.")] = "1,4,16",
    requests: Annotated[int, typer.Option(help="Of each run.")] = 32,
    seconds: Annotated[float, typer.Option(help="Of each run, after which no request is sent.")] = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 120.0,
    abandon: Annotated[float, typer.Option(help="Share of the requests to cut off at a random moment.")] = 0.0,
    off: Annotated[bool, typer.Option("--off", help="Ask a truedraw server for plain decoding.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Each run twice, with speculation and without.")] = False,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="TRUEDRAW_API_KEY")] = None,
    header: Annotated[list[str] | None, typer.Option(help="'Name: value', may be repeated.")] = None,
    save: Annotated[
        str | None, typer.Option(help="A picture, FILE.png or FILE.svg; or the JSON object, FILE.json.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the server's first.", rich_help_panel=_REQUEST)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help='A text, one prompt a line; or FILE.jsonl with {"prompt"} or {"messages"}. Default: those of the project.',
            metavar="FILE",
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Completions of texts, not chat.", rich_help_panel=_REQUEST)] = False,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", rich_help_panel=_REQUEST)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_REQUEST)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Request i is sent with seed + i.", rich_help_panel=_REQUEST)] = None,
) -> int:
    """Measure throughput and latencies of a server at several concurrencies."""
    from truedraw.bench.load import Load, runs

    if off and compare:
        raise UsageError("--compare measures with speculation and without: leave --off out")
    if save is not None:
        check_saved(save, (".png", ".svg", ".json"))
        if not save.lower().endswith(".json"):
            check_picture(save)
    address, headers = inputs.address(url), inputs.headers(api_key, header or ())
    levels = inputs.concurrency(concurrency, requests)
    inputs.check_numbers(max_tokens, seconds, timeout, abandon, temperature)
    texts = inputs.prompts(prompts, raw=raw)
    asked = Load(texts, model or "", raw, max_tokens, temperature, seed, requests, seconds, abandon)
    session = _Session(address, headers, timeout, asked, runs(levels, off=off, compare=compare), compare)
    stopped: KeyboardInterrupt | RunError | None = None
    try:
        asyncio.run(session.measure())
    except (KeyboardInterrupt, RunError) as error:
        stopped = error  # told behind what was measured until then
    if any(run.samples for run in session.runs):
        _tell(session.report(stopped), as_json=as_json, save=save)
    if stopped is not None:
        raise stopped
    if not any(sample.outcome == "done" for run in session.runs for sample in run.samples):
        raise RunError(f"{address}: no request was answered to its end")
    return 0


@dataclass(slots=True)
class _Session:
    """What is measured, as far as it came."""

    url: str
    headers: Mapping[str, str]
    timeout: float
    load: Load
    runs: list[Run]
    compare: bool
    warm_up: Sample | None = None

    async def measure(self) -> None:
        """Fill the runs. Raises RunError."""
        from truedraw.bench.load import measure, warm_up
        from truedraw.bench.load_client import Client

        off = self.runs[0].off
        connections = max(run.concurrency for run in self.runs)
        console = stderr_console()
        bar = Progress(console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal)
        async with Client(self.url, self.headers, connections=connections, timeout=self.timeout) as client:
            models = await client.models()
            if not self.load.model:
                if not models:
                    raise RunError(f"{self.url} lists no models: name one with --model")
                self.load = replace(self.load, model=models[0])
            with bar:
                task = bar.add_task("one request before", total=self.load.requests * len(self.runs))
                self.warm_up = await warm_up(client, self.load, off=off)
                if (off or self.compare) and self.warm_up.outcome == "done" and self.warm_up.speculation is None:
                    option = "--compare" if self.compare else "--off"
                    raise RunError(f"{self.url} tells nothing of speculation: leave {option} out, only truedraw servers know it")
                for i, run in enumerate(self.runs):
                    bar.update(task, completed=i * self.load.requests, description=f"{run.concurrency} at a time")
                    await measure(
                        client, self.load, run, usual_seconds=self.warm_up.seconds,
                        on_sample=lambda sample: bar.update(task, advance=1),
                    )  # fmt: skip

    def report(self, stopped: BaseException | None) -> Report:
        from truedraw.cli.load_output import Report

        assert self.warm_up is not None
        told = None if stopped is None else "interrupted" if isinstance(stopped, KeyboardInterrupt) else str(stopped)
        figures = tuple(run.figures() for run in self.runs if run.samples)
        return Report(self.url, self.load, self.timeout, self.warm_up, figures, self.compare, told)


def _tell(report: Report, *, as_json: bool, save: str | None) -> None:
    from truedraw.cli.load_output import print_tables
    from truedraw.cli.load_picture import picture

    if as_json:
        print(json.dumps(report.as_json(), ensure_ascii=False), flush=True)
    else:
        print_tables(report)
    if save is None:
        return
    if save.lower().endswith(".json"):
        Path(save).write_text(json.dumps(report.as_json(), ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        write_picture(save, picture(report))
