"""truedraw profile: what passes cost on this machine, with how many threads, and whether rows depend on the pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer
from rich.progress import Progress as Bar

from truedraw import agreement, calibrate
from truedraw import profile as profiles
from truedraw.cli import options as opt
from truedraw.cli.output import Progress, stderr_console
from truedraw.cli.picture import check_picture, write_picture
from truedraw.cli.profile_output import Report, as_json, picture, print_tables
from truedraw.errors import IncompatibleModels, ModelFileError, RunError
from truedraw.registry import LoadOptions, Model, f32_twin, keep_threads, load_model
from truedraw.types import Probs, TokenArray

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LENGTHS = (0, 256, 1100)
SEQUENCES = (1, 2, 4)
KV_TYPES = ("f16", "bf16", "q8_0")
CHUNKS = (256, 64, 32)

Say = Callable[[str], None]


def profile(
    model: Annotated[str, typer.Argument(help=f"{opt.MODELS}.")] = "smollm2",
    threads: Annotated[
        int | None, typer.Option(help="Default: the fastest, measured, and kept for later runs.", rich_help_panel="Model")
    ] = None,
    kv_type: opt.KvType = "f16",
    device: opt.Device = "cpu",
    seconds: Annotated[float, typer.Option(help="For each length and number of sequences.")] = 4.0,
    histories: Annotated[bool, typer.Option(help="Also compare prompt chunks and KV types.")] = True,
    save: Annotated[str | None, typer.Option(help="A picture: FILE.png or FILE.svg.", metavar="FILE")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Measure seconds per pass by size, cached length and sequences, choose threads, and compare rows."""
    if save is not None:
        check_picture(save)
    options = LoadOptions(
        context=LENGTHS[-1] + 100, slots=max(SEQUENCES), threads=threads, kv_type=kv_type, clip_context=True, device=device
    )
    with Progress() as spinner:
        loaded = load_model(model, options, spinner.say)
    try:
        report = _measure(loaded, options, seconds, histories)
    finally:
        loaded.runner.close()
    if json_:
        print(json.dumps(as_json(report), ensure_ascii=False))
    else:
        print_tables(report)
    if save is not None:
        write_picture(save, picture(report))
    return 0


def _measure(loaded: Model, options: LoadOptions, seconds: float, histories: bool) -> Report:
    """Everything, under a progress bar. Stores the choice of threads and the cost curve."""
    runner = loaded.runner
    lengths = [length for length in LENGTHS if length + agreement.MARGIN <= runner.max_length]
    if not lengths:
        raise IncompatibleModels(
            f"{loaded.name} holds {runner.max_length} tokens: at least {agreement.MARGIN} are needed to compare rows"
        )
    sizes = [size for size in SIZES if size <= min(runner.max_pass_size, runner.max_rows)]
    text = agreement.real_text(loaded.tokenizer, lengths[-1] + agreement.MARGIN)
    kv_types = KV_TYPES if histories and loaded.path is not None else ()
    with _Steps(2 + len(lengths) * len(SEQUENCES) + len(kv_types)) as steps:
        with steps.one("threads"):
            choice = _choose_threads(loaded, options)
        if choice is not None:
            options = replace(options, threads=choice.large, threads_small=choice.small)
        with steps.one("rows of the f32 weights"):
            exact = _exact_laws(loaded, options, text, lengths, steps.say)
        points: list[profiles.CostPoint] = []
        agreements: list[agreement.Agreement] = []
        for length in lengths:
            _extend(loaded, 0, text[:length], lengths)
            known = agreement.Comparison(agreement.decode(runner, text, length)[0], exact.get(length))
            for sequences, before in zip(SEQUENCES, (1, *SEQUENCES), strict=False):
                with steps.one(f"{sequences} x {length} cached tokens"):
                    for slot in range(before, sequences):
                        calibrate.fill(runner, slot, text[:length])
                    points += calibrate.time_passes(runner, sizes, length, sequences, seconds=seconds, rounds=40)
                    agreements += agreement.size_classes(runner, text, length, sizes, sequences=sequences, known=known)
            for slot in range(1, max(SEQUENCES)):
                runner.rollback(slot, 0)
        measured = profiles.Profile(tuple(points), dict(runner.identity))
        if runner.identity:
            profiles.store(measured)
        told: list[tuple[str, agreement.History]] = []
        for kv_type in kv_types:
            with steps.one(f"prompts with {kv_type} KV"):
                told += _histories(loaded.name, replace(options, slots=1, kv_type=kv_type), text, lengths[-1], steps.say)
    return Report(loaded.name, choice, tuple(zip(points, agreements, strict=True)), tuple(told), measured.key)


def _extend(loaded: Model, slot: int, wanted: TokenArray, lengths: Sequence[int]) -> None:
    """Fill a slot that holds the text up to the length before this one."""
    held = max((length for length in lengths if length < len(wanted)), default=0)
    calibrate.fill(loaded.runner, slot, wanted[held:])


def _choose_threads(loaded: Model, options: LoadOptions) -> profiles.ThreadChoice | None:
    """Those asked for, or the fastest, kept for later loads if the machine was quiet; None where there are none to choose."""
    if options.threads is not None:
        return profiles.ThreadChoice(options.threads, options.threads)
    choice = calibrate.threads(loaded.runner)
    if choice is not None and choice.steady:
        keep_threads(loaded, choice)
    return choice


def _exact_laws(loaded: Model, options: LoadOptions, text: TokenArray, lengths: Sequence[int], say: Say) -> dict[int, Probs]:
    """By cached length, the laws of single tokens under the f32 weights; none where those cannot be had, told in a line."""
    exact: dict[int, Probs] = {}
    try:
        with f32_twin(loaded, replace(options, slots=1), say) as twin:
            for length in lengths:
                _extend(twin, 0, text[:length], lengths)
                exact[length] = agreement.laws(agreement.decode(twin.runner, text, length)[0])
    except (RunError, ModelFileError) as error:
        say(f"rows are not compared with the f32 weights: {error}")
        return {}
    return exact


def _histories(model: str, options: LoadOptions, text: TokenArray, cached: int, say: Say) -> list[tuple[str, agreement.History]]:
    """With a context of its own for the KV type; where the model cannot have one, that is told in a line."""
    try:
        loaded = load_model(model, options, say)
    except ModelFileError as error:
        say(f"no rows with {options.kv_type} KV: {error}")
        return []
    try:
        return [(options.kv_type, told) for told in agreement.histories(loaded.runner, text, cached, CHUNKS)]
    finally:
        loaded.runner.close()


class _Steps:
    """A progress bar on standard error that lines can be told beside; only those where it is no terminal."""

    def __init__(self, total: int) -> None:
        console = stderr_console()
        self._bar = Bar(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("measuring", total=total)

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        self._bar.update(self._task, description=what)
        yield
        self._bar.update(self._task, advance=1)

    def say(self, message: str) -> None:
        self._bar.console.print(f"truedraw: {message}", markup=False, soft_wrap=True)

    def __enter__(self) -> _Steps:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
