"""What truedraw load tells: the JSON object and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from truedraw.bench.load import Load
from truedraw.bench.load_figures import Figures, Percentiles, Ratios, Sample, ratios
from truedraw.cli.output import stdout_console

_MUCH = 0.25  # of a processor for the client: its own work may then show in the figures


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured. stopped: why the last run is not whole, None if it is."""

    url: str
    load: Load
    timeout: float
    warm_up: Sample
    runs: tuple[Figures, ...]
    compare: bool
    stopped: str | None

    def ratios(self) -> tuple[Ratios, ...]:
        """Of the concurrencies that were measured both ways, in order."""
        ways: dict[int, dict[bool, Figures]] = {}
        for run in self.runs:
            ways.setdefault(run.concurrency, {})[run.speculation_off] = run
        return tuple(ratios(way[False], way[True]) for way in ways.values() if len(way) == 2)

    def ordered(self) -> list[Figures]:
        """As shown: by concurrency as given, with speculation before without."""
        order = list(dict.fromkeys(run.concurrency for run in self.runs))
        return sorted(self.runs, key=lambda run: (order.index(run.concurrency), run.speculation_off))

    def as_json(self) -> dict[str, Any]:
        """The object of `truedraw load --json`."""
        load = self.load
        names = ("model", "raw", "max_tokens", "temperature", "seed", "requests", "seconds", "abandon")
        return {
            "url": self.url,
            **{name: getattr(load, name) for name in names},
            "timeout": self.timeout,
            "prompts": len(load.prompts),
            "warm_up": {"outcome": self.warm_up.outcome, "seconds": self.warm_up.seconds},
            "runs": [asdict(run) for run in self.ordered()],
            "ratios": [asdict(each) for each in self.ratios()] if self.compare else None,
            "stopped": self.stopped,
        }

    def notes(self) -> list[str]:
        """Lines for what the tables do not say."""
        told = []
        for run in self.ordered():
            place = f"{run.concurrency} at a time{_way(run) if self.compare else ''}"
            told += [f"{place}: {each.count} x {each.kind}: {each.first}" for each in run.failures]
            sent = run.done + run.failed + run.abandoned
            if sent < self.load.requests and self.stopped is None:
                told.append(f"{place}: {sent} of {self.load.requests} requests, then the {self.load.seconds:g} s were over")
            if run.client_cpu > _MUCH:
                told.append(f"{place}: the client itself took {run.client_cpu:.0%} of a processor")
        if any(run.unit == "chunks" and run.done for run in self.runs):
            told.append("the server does not tell its tokens (usage): chunks are counted")
        return told


def print_tables(report: Report) -> None:
    console, load = stdout_console(), report.load
    runs = report.ordered()
    what = "text completions" if load.raw else "chats"
    console.print(
        f"{report.url}, model {load.model}: {what} of {load.max_tokens} tokens at most, temperature {load.temperature:g}",
        markup=False,
    )
    console.print(f"Warm-up, not counted: one request, {report.warm_up.outcome} after {report.warm_up.seconds:.2f} s\n")
    console.print(_throughput(report, runs))
    if any(run.speculation is not None for run in runs):
        console.print("\nSpeculation, as the server tells it")
        console.print(_speculation(report, runs))
    console.print("\nMilliseconds")
    console.print(_latencies(report, runs))
    if report.ratios():
        console.print("\nWith speculation over without: tokens/s (above 1 is faster), and medians of times (below 1 is faster)")
        console.print(_ratios(report.ratios()))
    if notes := report.notes():
        console.print()
        for note in notes:
            console.print(note, markup=False)


def _throughput(report: Report, runs: Sequence[Figures]) -> Table:
    unit = "tokens" if any(run.unit == "tokens" for run in runs) else "chunks"
    abandons = report.load.abandon > 0
    table = _table(
        *_places(report), "done", "failed", *(("abandoned",) if abandons else ()), "seconds", "prompt tokens", unit, f"{unit}/s",
        "requests/s", "tokens/chunk",
    )  # fmt: skip
    for run in runs:
        table.add_row(
            *_place(report, run), str(run.done), str(run.failed), *((str(run.abandoned),) if abandons else ()),
            f"{run.wall_seconds:.2f}", _shown(run.prompt_tokens, "d"), str(run.completion_tokens),
            _shown(run.tokens_per_second, ".1f"), _shown(run.requests_per_second, ".2f"), _shown(run.tokens_per_chunk, ".2f"),
        )  # fmt: skip
    return table


def _speculation(report: Report, runs: Sequence[Figures]) -> Table:
    table = _table(*_places(report), "steps", "tokens/step", "proposed", "accepted", "acceptance", "estimated speed-up")
    for run in runs:
        if (told := run.speculation) is not None:
            table.add_row(
                *_place(report, run), str(told.steps), _shown(told.tokens_per_step, ".2f"), str(told.proposed),
                str(told.accepted), _shown(told.acceptance_rate, ".1%"), _shown(told.estimated_speedup, ".2f"),
            )  # fmt: skip
    return table


def _latencies(report: Report, runs: Sequence[Figures]) -> Table:
    table = _table(*_places(report), left="", then=("n", "p50", "p95", "p99"))
    for run in runs:
        for i, (name, times) in enumerate(_times(run)):
            place = _place(report, run) if i == 0 else [""] * len(_places(report))
            table.add_row(*place, name, str(times.n), *(_shown(time, ".1f") for time in (times.p50, times.p95, times.p99)))
    return table


def _times(run: Figures) -> tuple[tuple[str, Percentiles], ...]:
    return (
        ("to first token", run.first_token_ms),
        ("between chunks", run.between_chunks_ms),
        ("per token" if run.unit == "tokens" else "per chunk", run.per_token_ms),
        ("whole request", run.whole_request_ms),
    )


def _ratios(told: Sequence[Ratios]) -> Table:
    table = _table("at a time", "tokens/s", "to first token", "between chunks", "per token", "whole request")
    for each in told:
        values = (each.tokens_per_second, each.first_token, each.between_chunks, each.per_token, each.whole_request)
        table.add_row(str(each.concurrency), *(_shown(value, ".2f") for value in values))
    return table


def _places(report: Report) -> list[str]:
    return ["at a time", "drafts"] if report.compare else ["at a time"]


def _place(report: Report, run: Figures) -> list[str]:
    return [str(run.concurrency), _way(run).strip(", ")] if report.compare else [str(run.concurrency)]


def _way(run: Figures) -> str:
    return ", off" if run.speculation_off else ", on"


def _table(*right: str, left: str | None = None, then: Sequence[str] = ()) -> Table:
    """Columns of numbers, and a column of words between them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    if left is not None:
        table.add_column(left, no_wrap=True)
    for heading in then:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
