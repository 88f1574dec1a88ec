"""truedraw profile: what passes cost on this machine, and whether their rows are bit-identical."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.progress import Progress as Bar
from rich.table import Table

from truedraw.cli import options as opt
from truedraw.cli.output import Progress, stderr_console, stdout_console
from truedraw.cli.picture import check_picture, write_picture

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LENGTHS = (0, 256, 1100)
SEQUENCES = (1, 2, 4)


def profile(
    model: Annotated[str, typer.Argument(help=f"{opt.MODELS}.")] = "smollm2",
    threads: opt.Threads = None,
    kv_type: opt.KvType = "f16",
    seconds: Annotated[float, typer.Option(help="For each length and number of sequences.")] = 4.0,
    save: Annotated[str | None, typer.Option(help="A picture: FILE.png or FILE.svg.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Measure seconds per pass by size, cached length and sequences, and compare rows between sizes."""
    from truedraw import calibrate
    from truedraw import profile as profiles
    from truedraw.registry import LoadOptions, load_model

    if save is not None:
        check_picture(save)
    points: list[profiles.CostPoint] = []
    classes: dict[tuple[int, int], calibrate.SizeClass] = {}
    with Progress() as spinner:
        options = LoadOptions(context=1200, slots=max(SEQUENCES), threads=threads, kv_type=kv_type, clip_context=True)
        loaded = load_model(model, options, spinner.say)
    runner = loaded.runner
    try:
        lengths = [length for length in LENGTHS if length + max(SIZES) <= runner.max_length]
        with Bar(console=stderr_console(), transient=True) as bar:
            task = bar.add_task("measuring", total=len(lengths) * len(SEQUENCES) + len(lengths))
            for length in lengths:
                for sequences in SEQUENCES:
                    bar.update(task, description=f"{sequences} x {length} cached tokens")
                    points += calibrate.measure(runner, SIZES, length, sequences, seconds=seconds, rounds=40)
                    bar.update(task, advance=1)
            text = calibrate.real_text(loaded.tokenizer, max(lengths) + 64)
            for length in lengths:
                bar.update(task, description=f"rows behind {length} cached tokens")
                compared = calibrate.size_classes(runner, text, length + 1, SIZES)
                classes |= {(length, told.size): told for told in compared}
                bar.update(task, advance=1)
        measured = profiles.Profile(tuple(points), dict(runner.identity))
    finally:
        runner.close()
    rows = [_row(point, classes.get((point.cached, point.size))) for point in points]
    if as_json:
        print(json.dumps({"sizes": rows, "key": dict(measured.key)}, ensure_ascii=False))
    else:
        _print(rows)
    if save is not None:
        write_picture(save, _picture(rows, model))
    return 0


def _row(point: Any, told: Any) -> dict[str, Any]:
    return {
        "size": point.size,
        "cached": point.cached,
        "sequences": point.sequences,
        "seconds": point.seconds,
        "class": None if told is None else told.name,
        "mean_tv": None if told is None else told.mean_tv,
        "max_tv": None if told is None else told.max_tv,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tokens", justify="right")
    kinds = sorted({(row["cached"], row["sequences"]) for row in rows})
    for cached, sequences in kinds:
        table.add_column(f"{sequences} x {cached}", justify="right")
    for cached in sorted({row["cached"] for row in rows}):
        table.add_column(f"class at {cached}")
    for size in sorted({row["size"] for row in rows}):
        by_kind: Mapping[tuple[int, int], dict[str, Any]] = {
            (row["cached"], row["sequences"]): row for row in rows if row["size"] == size
        }
        times = [f"{1000 * by_kind[kind]['seconds']:.1f}" if kind in by_kind else "" for kind in kinds]
        shown = []
        for cached in sorted({row["cached"] for row in rows}):
            row = by_kind.get((cached, 1), {})
            same = not row.get("max_tv")
            shown.append(
                f"{row['class']}" + ("" if same else f" (TV {row['mean_tv']:.1%}, max {row['max_tv']:.1%})") if row else ""
            )
        table.add_row(str(size), *times, *shown)
    console = stdout_console()
    console.print("Milliseconds per pass: sequences x cached tokens. Sizes of one class have the same rows, bit for bit.")
    console.print(table)


def _picture(rows: list[dict[str, Any]], model: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for cached, sequences in sorted({(row["cached"], row["sequences"]) for row in rows}):
        chosen = [row for row in rows if (row["cached"], row["sequences"]) == (cached, sequences)]
        label = f"{sequences} sequence{'s' if sequences > 1 else ''}, {cached} cached"
        axes.plot(
            [row["size"] for row in chosen], [1000 * row["seconds"] for row in chosen], marker="o", markersize=3, label=label
        )
    axes.set(xlabel="tokens in a pass", ylabel="milliseconds", title=f"What a pass of {model} costs here", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
