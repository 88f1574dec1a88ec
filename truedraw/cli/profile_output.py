"""What truedraw profile tells: the JSON object, the tables, the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from truedraw.agreement import Agreement, History
from truedraw.cli.output import stdout_console
from truedraw.profile import CostPoint, ThreadChoice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured of a model.

    threads    None: its runner has none to choose
    sizes      what a pass costs, and the class of its rows
    histories  by KV type; empty: not asked for
    key        what it was measured on, by name
    """

    model: str
    threads: ThreadChoice | None
    sizes: tuple[tuple[CostPoint, Agreement], ...]
    histories: tuple[tuple[str, History], ...]
    key: Mapping[str, str]


def as_json(report: Report) -> dict[str, Any]:
    """The object of `truedraw profile --json`."""
    return {
        "sizes": [{**asdict(point), **_told(agreement)} for point, agreement in report.sizes],
        "threads": None if report.threads is None else asdict(report.threads),
        "histories": [
            {
                "kv": kv_type,
                "chunk": history.chunk,
                "size": history.size,
                "cached": history.cached,
                "identical": history.agreement.identical,
                "mean_tv": history.agreement.mean_tv,
                "max_tv": history.agreement.max_tv,
            }
            for kv_type, history in report.histories
        ],
        "key": dict(report.key),
    }


def _told(agreement: Agreement) -> dict[str, Any]:
    fields = asdict(agreement)
    return {"class": fields.pop("name"), **fields}


def print_tables(report: Report) -> None:
    console = stdout_console()
    if report.threads is not None:
        console.print(_threads(report.threads) + "\n")
    _print_times(console, report)
    _print_classes(console, report)
    if report.histories:
        _print_histories(console, report)


def _threads(choice: ThreadChoice) -> str:
    """One line."""
    told = f"Threads: {choice.small} for passes of one token, {choice.large} for larger ones"
    if not choice.measured:
        return f"{told}, as asked for."
    times = []
    for size in sorted({time.size for time in choice.measured}):
        each = [f"{1000 * time.seconds:.1f} ({time.threads})" for time in choice.measured if time.size == size]
        times.append(f"{size} token{'s' if size > 1 else ''} {', '.join(each)}")
    kept = (
        "Kept for later runs without --threads."
        if choice.steady
        else "Not chosen, since other programs run (the same pass took far longer at times): all cores, and nothing is kept."
    )
    return f"{told}. Milliseconds per pass (threads): {'; '.join(times)}. {kept}"


def _print_times(console: Console, report: Report) -> None:
    points = [point for point, _ in report.sizes]
    kinds = sorted({(point.cached, point.sequences) for point in points})
    table = _table("tokens", *(f"{sequences}x{cached}" for cached, sequences in kinds))
    for size in sorted({point.size for point in points}):
        times = {(point.cached, point.sequences): f"{1000 * point.seconds:.1f}" for point in points if point.size == size}
        table.add_row(str(size), *(times.get(kind, "") for kind in kinds))
    console.print("Milliseconds per pass: sequences x cached tokens.")
    console.print(table)


def _print_classes(console: Console, report: Report) -> None:
    table = _table("cached", "class", "TV", "max", "TV to f32", "max", left="passes: sequences x tokens")
    shared: dict[tuple[int, Agreement], list[CostPoint]] = {}
    for point, agreement in report.sizes:
        shared.setdefault((point.cached, agreement), []).append(point)
    for (cached, told), points in shared.items():
        table.add_row(
            str(cached), told.name, *map(_share, (told.mean_tv, told.max_tv, told.mean_tv_f32, told.max_tv_f32)),
            _passes(points, report),
        )  # fmt: skip
    console.print("\nPasses of one class have the same rows, bit for bit; TV to those of single tokens, and to f32 arithmetic.")
    console.print(table)


def _passes(points: Sequence[CostPoint], report: Report) -> str:
    """As in `1x1 2x2-32`: consecutive sizes, of those measured, as a range."""
    parts = []
    for sequences in sorted({point.sequences for point in points}):
        cached = points[0].cached
        all_sizes = [point.size for point, _ in report.sizes if (point.cached, point.sequences) == (cached, sequences)]
        places = [all_sizes.index(point.size) for point in points if point.sequences == sequences]
        runs: list[list[int]] = []
        for place in places:
            if runs and place == runs[-1][-1] + 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        shown = [f"{all_sizes[run[0]]}-{all_sizes[run[-1]]}" if len(run) > 1 else f"{all_sizes[run[0]]}" for run in runs]
        parts.append(f"{sequences}x{','.join(shown)}")
    return " ".join(parts)


def _print_histories(console: Console, report: Report) -> None:
    first = report.histories[0][1]
    table = _table("KV", "chunk", "tokens", "TV", "max", left="rows")
    for kv_type, history in report.histories:
        told = history.agreement
        table.add_row(
            kv_type, str(history.chunk), str(history.size), _share(told.mean_tv), _share(told.max_tv),
            "identical" if told.identical else "differ",
        )  # fmt: skip
    console.print(
        f"\nBehind prompts of {first.cached} tokens in chunks, decoded in passes of so many tokens: rows against those of single "
        f"tokens behind chunks of {first.chunk}."
    )
    console.print(table)


def _table(*right: str, left: str | None = None) -> Table:
    """Columns of numbers, and a last one of words."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in right:
        table.add_column(heading, justify="right")
    if left is not None:
        table.add_column(left)
    return table


def _share(value: float | None) -> str:
    """A TV in percent; 0 only where nothing differs."""
    return "" if value is None else "0" if value == 0 else f"{value:.2%}" if value >= 0.0001 else f"{value:.0e}"


def picture(report: Report) -> Figure:
    """Milliseconds by pass size: a colour for each cached length, a marker for each number of sequences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({(point.cached, point.sequences) for point, _ in report.sizes})
    lengths, counts = (sorted({kind[i] for kind in kinds}) for i in range(2))
    for cached, sequences in kinds:
        chosen = [point for point, _ in report.sizes if (point.cached, point.sequences) == (cached, sequences)]
        axes.plot(
            [point.size for point in chosen],
            [1000 * point.seconds for point in chosen],
            color=f"C{lengths.index(cached)}",
            linestyle=("-", "--", ":")[counts.index(sequences) % 3],
            marker=("o", "s", "^")[counts.index(sequences) % 3],
            markersize=3.5,
            linewidth=1.2,
            label=f"{sequences} sequence{'s' if sequences > 1 else ''}, {cached} cached",
        )
    axes.set(xlabel="tokens in a pass", ylabel="milliseconds", title=f"What a pass of {report.model} costs here", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
