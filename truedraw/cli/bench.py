"""truedraw bench: plain against speculative decoding, paired, per workload."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from truedraw.cli import options as opt
from truedraw.cli.output import stderr_console, stdout_console
from truedraw.errors import InvalidParameter
from truedraw.types import SamplingParams

if TYPE_CHECKING:
    from truedraw.bench.measure import Workload
    from truedraw.engine import Engine


def bench(
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines {"workload", "prompt"}; default: those of the project.')
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around texts.")] = False,
    model: opt.ModelName = "smollm2",
    draft_model: opt.DraftModel = None,
    drafter: opt.DrafterName = "auto",
    draft_length: opt.DraftLength = "auto",
    corpus: opt.CorpusPaths = None,
    corpus_size: opt.CorpusSize = None,
    mtp_modules: opt.MtpModules = None,
    rule: opt.RuleName = "auto",
    allow_lossy: opt.AllowLossy = False,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 160,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = None,
    concurrency: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
    context: opt.Context = 2048,
    threads: opt.Threads = None,
    kv_type: opt.KvType = "f16",
    device: opt.Device = "cpu",
    strict: opt.Strict = False,
    repeats: Annotated[int, typer.Option(help="Rounds at most; fewer where the interval is narrow.")] = 10,
    seconds: Annotated[float, typer.Option(help="For each workload at most.")] = 60.0,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON object here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Time plain and speculative decoding of the same prompts, alternating in one process."""
    from truedraw.bench import measure, workloads

    for name, value in (("concurrency", concurrency), ("repeats", repeats), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidParameter(name, value, "an integer >= 1")
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise InvalidParameter("save", str(save), "a file in a directory that exists")
    found = workloads.read(prompts if prompts is not None else workloads.shipped(), raw=raw)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    done: dict[str, Workload] = {}
    with opt.load_engine(
        model, drafter=drafter, draft_model=draft_model, draft_length=draft_length, rule=rule, allow_lossy=allow_lossy,
        context=context, slots=concurrency, threads=threads, kv_type=kv_type, device=device, strict=strict, corpus=corpus,
        corpus_size=corpus_size, mtp_modules=mtp_modules,
        corpus_learning=False,  # else the second round would copy the answers of the first
    ) as engine:  # fmt: skip
        _warm_up(engine, next(iter(found.values()))[0], params)
        with Progress(console=stderr_console(), transient=True) as progress:
            for name, texts in found.items():
                task = progress.add_task(name, total=repeats * -(-len(texts) // concurrency))
                for told in measure.run(engine, name, texts, params, concurrency=concurrency, repeats=repeats, seconds=seconds):
                    progress.update(task, advance=1, description=f"{name} {told.ratio:.2f}x")
                    done[name] = told
        curve = _pass_seconds(engine)
        report = {
            "workloads": {name: _figures(told, curve, points=not engine.drafter.samples) for name, told in done.items()},
            "machine": _machine(model),
        }
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    if save is not None:  # last: what was measured has been told, whatever becomes of the file
        save.write_text(json.dumps(report, ensure_ascii=False) + "\n")
    return 0


def _warm_up(engine: Engine, prompt: Any, params: SamplingParams) -> None:
    for limit in (None, 0):
        request = engine.submit(prompt, replace(params, max_tokens=12), max_draft=limit)
        for _step in engine.run(request):
            pass


def _pass_seconds(engine: Engine) -> Sequence[float] | None:
    """Seconds of passes by size as the controller knows them by now."""
    from truedraw.policy import LONGEST, Controller

    if not isinstance(engine.policy, Controller):
        return None
    return [float(x) for x in engine.policy.costs.table(LONGEST + 1, 200, 1)]


def _figures(told: Workload, curve: Sequence[float] | None, *, points: bool) -> dict[str, Any]:
    low, high = told.interval()
    wall = told.spec.wall
    return {
        "plain_tps": told.plain_tps,
        "spec_tps": told.spec_tps,
        "ratio": told.ratio,
        "ratio_low": low,
        "ratio_high": high,
        "pairs": len(told.pairs),
        "tokens_per_step": told.stats.tokens_per_step,
        "acceptance_by_depth": list(told.stats.acceptance_by_depth),
        "ideal_ratio": told.ideal_ratio,
        "hindsight_ratio": told.hindsight_ratio(curve) if points and curve is not None else None,
        "loop_share": told.loop_share,
        "time": {name: getattr(told.spec, name) / wall for name in ("target", "draft", "verify", "other")},
    }


def _machine(model: str) -> dict[str, Any]:
    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("truedraw", "numpy", "llama-cpp-python", "torch", "transformers")
    return {
        "model": model,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in packages},
    }


def _print(report: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("workload", "plain", "drafted", "ratio", "95 %", "per pass", "hindsight", "loops"):
        table.add_column(column, justify="left" if column == "workload" else "right", no_wrap=True)
    for name, row in report["workloads"].items():
        hindsight = "" if row["hindsight_ratio"] is None else f"{row['hindsight_ratio']:.2f}"
        table.add_row(
            name,
            f"{row['plain_tps']:.0f}",
            f"{row['spec_tps']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            hindsight,
            f"{row['loop_share']:.0%}",
        )
    console = stdout_console()
    console.print(table)
    console.print("plain, drafted: tokens per second; per pass: tokens; hindsight: what copying could reach, had it known")
