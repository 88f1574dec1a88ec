"""truedraw train: modules that draft, learned from the target itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from truedraw.cli import options as opt
from truedraw.cli import output
from truedraw.errors import InvalidParameter
from truedraw.registry import TRANSFORMERS, LoadOptions, load_model

if TYPE_CHECKING:
    from truedraw.train.mtp import Told, Trained

train_app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train what drafts, from nothing but the target.",
)


@train_app.command("mtp")
def mtp(
    save: Annotated[Path, typer.Option(help="A folder for modules, card, plot and checkpoint; an interrupted training goes on.")],
    model: opt.ModelName = "smollm2",
    minutes: Annotated[float, typer.Option(help="In all: answering and learning.")] = 15.0,
    seed: Annotated[int, typer.Option(help="Of prompts, answers and first weights.")] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that can be drafted, the target's likeliest.")] = 8192,
    depths: Annotated[int, typer.Option(help="Drafts in a row that are trained.")] = 3,
    cache_mb: Annotated[int, typer.Option(help="Hidden states on the disk at most, in MB.")] = 1024,
    slots: Annotated[int | None, typer.Option(help="Answers at a time (32, with transformers up to 128).")] = None,
    threads: opt.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Train multi-token prediction modules for a model; needs no data but the model's own answers."""
    from truedraw.train import use_threads
    from truedraw.train.answers import LONGEST
    from truedraw.train.mtp import TrainOptions, train

    for name, value in (("depths", depths), ("cache_mb", cache_mb), ("slots", slots), ("threads", threads)):
        if value is not None and value < 1:
            raise InvalidParameter(name, value, "an integer >= 1")
    if not 0 <= seed < 2**63:
        raise InvalidParameter("seed", seed, "an integer from 0 to 2**63 - 1")
    if save.exists() and not save.is_dir():
        raise InvalidParameter("save", str(save), "a folder")
    options = TrainOptions(minutes=minutes, seed=seed, draft_vocab=draft_vocab, cache_bytes=cache_mb * 1_000_000)
    options = replace(options, learning=replace(options.learning, depths=depths))
    if threads is not None:
        use_threads(threads)
    on_transformers = model.startswith(TRANSFORMERS)
    held = LoadOptions(context=LONGEST + 576, slots=slots or (128 if on_transformers else 32), threads=threads, clip_context=True)
    if model != "toy" and not on_transformers:
        held = replace(held, kv_unified=False)  # in one cache every answer would read past all the others
    with output.Progress() as progress:
        target = load_model(model, held, progress.say)
    try:
        with _Bar() as bar:
            trained = train(target, save, options, bar.tell)
    finally:
        target.runner.close()
    _print(trained, as_json)
    return 0


class _Bar:
    """Phase, share done and time left, on standard error."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %  {task.fields[left]}"))
        self._progress = Progress(*columns, console=output.stderr_console(), transient=True)
        self._task = self._progress.add_task("answering", total=1.0, left="")

    def tell(self, told: Told) -> None:
        left = f"{told.seconds_left / 60:.0f} min left" if told.seconds_left >= 60 else f"{told.seconds_left:.0f} s left"
        if told.learning is None:
            words = f"answering, {told.num_tokens:,} tokens"
        else:
            latest = told.learning.history[-1]["acceptance"] if told.learning.history else []
            words = "learning, held-out acceptance " + " ".join(f"{alpha:.2f}" for alpha in latest)
        self._progress.update(self._task, completed=told.done, description=words, left=left)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def _print(trained: Trained, as_json: bool) -> None:
    report: dict[str, Any] = {**trained.report, "modules": str(trained.path)}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    console = output.stdout_console()
    for depth, alpha in enumerate(trained.acceptance, 1):
        console.print(f"draft {depth}: {alpha:.3f} of held-out tokens accepted")
    console.print(f"learned from {report['tokens']:,} tokens in {report['steps']:,} steps: {trained.path}")
