"""The picture of truedraw plan: speed-up by draft length, and of one step by accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from truedraw.cli.picture import write_picture
from truedraw.economics import Costs, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE, _WIN, _LOSS, _MARK = "#4c6a92", "#2e7d4f", "#b3402f", "#d08700"


def save_picture(path: str, points: Sequence[Point], chosen: Point, costs: Costs, in_use: tuple[float, float] | None) -> None:
    """Write it. chosen: the draft length of the second panel; in_use: mean draft length and speed-up of a server."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(11, 4.8), layout=ConstrainedLayoutEngine(wspace=0.08))
    left, right = figure.subplots(1, 2)
    _by_length(left, points, chosen, in_use)
    _by_accepted(right, chosen, costs)
    for axes in (left, right):
        axes.axhline(1, color="black", linestyle="--", linewidth=1, label="plain decoding: break-even")
        axes.set_ylim(0, 1.12 * axes.dataLim.y1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)
    write_picture(path, figure)


def _by_length(axes: Axes, points: Sequence[Point], chosen: Point, in_use: tuple[float, float] | None) -> None:
    lengths, speedups = [point.length for point in points], [point.speedup for point in points]
    axes.plot(lengths, speedups, color=_LINE, marker="o", markersize=4, label="expected speed-up")
    best = max(points, key=lambda point: point.speedup)
    axes.plot(
        best.length, best.speedup, "*", color=_MARK, markersize=16, label=f"best: length {best.length}, {best.speedup:.2f}x"
    )
    if chosen is not best:
        axes.plot(chosen.length, chosen.speedup, "s", color=_LOSS, label=f"length {chosen.length}, {chosen.speedup:.2f}x")
    if in_use is not None:
        axes.plot(*in_use, "D", color=_WIN, label=f"in use: mean length {in_use[0]:.2f}, {in_use[1]:.2f}x")
    axes.set(xlabel="draft length (tokens)", ylabel="speed-up over plain decoding", title="On average, by draft length")


def _by_accepted(axes: Axes, chosen: Point, costs: Costs) -> None:
    """Where the claim that more than two accepted tokens cannot lose holds, and where it does not."""
    cost = costs.of(chosen.length)
    steps = [(accepted, (accepted + 1) / cost) for accepted in range(chosen.length + 1)]
    axes.plot(*zip(*steps, strict=True), color="#999999", linewidth=1, zorder=1)
    odd = [step for step in steps if (step[0] < 2 and step[1] > 1) or (step[0] > 2 and step[1] < 1)]
    for marked, style in (
        ([step for step in steps if step[1] > 1], {"c": _WIN, "marker": "o", "label": "the step wins"}),
        ([step for step in steps if step[1] <= 1], {"c": _LOSS, "marker": "X", "label": "the step does not win"}),
        (
            odd,
            {"facecolors": "none", "edgecolors": _MARK, "s": 170, "linewidths": 2, "label": "wins before it, or loses behind it"},
        ),
    ):
        if marked:
            axes.scatter(*zip(*marked, strict=True), zorder=2, **style)
    axes.axvline(2, color=_MARK, linestyle=":", label="two accepted: the claimed limit")
    axes.set(
        xlabel="accepted tokens",
        ylabel="speed-up of that step",
        title=f"One step of draft length {chosen.length} (cost {cost:.2f})",
    )
