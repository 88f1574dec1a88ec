"""The picture of truedraw load: throughput and latencies by concurrency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from truedraw.bench.load_figures import Figures, Percentiles
from truedraw.cli.load_output import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ON, _OFF = "#2e7d4f", "#4c6a92"


def picture(report: Report) -> Figure:
    """A panel each for throughput, time to first token, and time per token; a colour for each way where both were measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    throughput, first, each = figure.subplots(1, 3)
    runs = sorted(report.ordered(), key=lambda run: run.concurrency)
    unit = "tokens" if any(run.unit == "tokens" for run in runs) else "chunks"
    for off in (False, True):
        ways = [run for run in runs if run.speculation_off == off]
        if ways:
            name = ("without speculation" if off else "with speculation") if report.compare else ""
            colour = _OFF if off else _ON
            values = [(run.concurrency, run.tokens_per_second) for run in ways if run.tokens_per_second is not None]
            _line(throughput, values, colour, "-", name)
            _times(first, ways, lambda run: run.first_token_ms, colour, name)
            _times(each, ways, lambda run: run.per_token_ms, colour, name)
    throughput.set(title="Throughput", ylabel=f"{unit} per second")
    first.set(title="Time to first token", ylabel="milliseconds")
    each.set(title=f"Time per {unit[:-1]} after the first", ylabel="milliseconds")
    for axes in (throughput, first, each):
        _dress(axes, sorted({run.concurrency for run in runs}))
    figure.suptitle(f"{report.load.model} at {report.url}", fontsize=11)
    return figure


def _times(axes: Axes, runs: Sequence[Figures], which: Callable[[Figures], Percentiles], colour: str, name: str) -> None:
    told = [(run.concurrency, which(run)) for run in runs]
    for style, label, points in (
        ("-", "median", [(x, times.p50) for x, times in told if times.p50 is not None]),
        ("--", "p95", [(x, times.p95) for x, times in told if times.p95 is not None]),
    ):
        _line(axes, points, colour, style, f"{label}, {name}" if name else label)


def _line(axes: Axes, points: Sequence[tuple[int, float]], colour: str, style: str, name: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=4, label=name or None)


def _dress(axes: Axes, concurrency: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrency, [str(each) for each in concurrency])
    axes.minorticks_off()
    axes.set_xlabel("requests at a time")
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 if axes.has_data() else 1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
