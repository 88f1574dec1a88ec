"""truedraw audit model: does the engine really sample from the target, on this very pair."""

from __future__ import annotations

import math
import platform
import secrets
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from truedraw.cli import options as opt
from truedraw.cli.audit_output import check_report, tell
from truedraw.cli.output import stderr_console
from truedraw.errors import InvalidParameter

if TYPE_CHECKING:
    from truedraw.audit.model import ModelAudit
    from truedraw.engine import Engine
    from truedraw.text.prompt import Prompt


def audit_model(
    alpha: Annotated[float, typer.Option(help="Probability that an engine without fault is accused, at most.")] = 0.01,
    detect: Annotated[
        float, typer.Option(help="Smallest total variation to find (the share of tokens that differ); the tokens follow.")
    ] = 0.05,
    max_tokens_total: Annotated[
        int | None, typer.Option(help="Tokens at most, in control and audit each; default: as many as --detect needs.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help='A text, one prompt a line; or FILE.jsonl with {"prompt"} or {"messages"}. Default: those of the project.',
            metavar="FILE",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompts as they stand.")] = False,
    save: Annotated[str | None, typer.Option(help="The report as a page, FILE.html; or FILE.json.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    model: opt.ModelName = "smollm2",
    draft_model: opt.DraftModel = None,
    drafter: opt.DrafterName = "auto",
    draft_length: opt.DraftLength = "auto",
    corpus: opt.CorpusPaths = None,
    corpus_size: opt.CorpusSize = None,
    mtp_modules: opt.MtpModules = None,
    rule: opt.RuleName = "auto",
    allow_lossy: opt.AllowLossy = False,
    temperature: opt.Temperature = 1.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 128,
    ignore_eos: opt.IgnoreEos = False,
    seed: Annotated[int | None, typer.Option(help="Repeats an audit; default: drawn and told.")] = None,
    context: opt.Context = 2048,
    slots: Annotated[int, typer.Option(help="Sequences at a time.")] = 4,
    threads: opt.Threads = None,
    kv_type: opt.KvType = "f16",
    device: opt.Device = "cpu",
    strict: opt.Strict = False,
) -> int:
    """Prove it on your pair: every token that the engine emits against the row it was drawn from."""
    from truedraw.audit.model import ModelAudit
    from truedraw.audit.model import audit_model as run

    check_report(save)
    if seed is not None and not 0 <= seed < 2**32:
        raise InvalidParameter("seed", seed, "an integer in [0, 2**32 - 1]")
    seed_used = secrets.randbits(32) if seed is None else seed
    params = opt.Sampling(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
        None, 0, None, None, ignore_eos, None,
    ).params()  # fmt: skip
    asked = ModelAudit(params, alpha, detect, max_tokens_total, max_tokens, seed_used)
    with opt.load_engine(
        model, drafter=drafter, draft_model=draft_model, draft_length=draft_length, corpus=corpus, corpus_size=corpus_size,
        mtp_modules=mtp_modules,
        corpus_learning=False, rule=rule, allow_lossy=allow_lossy, context=context, slots=slots, threads=threads, kv_type=kv_type,
        device=device, strict=strict,
    ) as engine:  # fmt: skip
        texts = _prompts(engine, prompts, raw=raw)
        _announce(asked)
        with _Bar(asked) as bar:
            report = run(
                engine, texts, asked, command=_command(seed, seed_used), on_progress=bar.show,
                facts=_facts(model, draft_model, drafter, params),
            )  # fmt: skip
    tell(report, json_wanted=as_json, save=save)
    if any(mode.reason == "interrupted" for mode in report.modes):
        raise KeyboardInterrupt
    return report.status


def _prompts(engine: Engine, path: str | None, *, raw: bool) -> Sequence[Prompt]:
    from truedraw.cli import load_inputs

    if raw or engine.model.tokenizer.chat_template is None:
        return load_inputs.prompts(path, raw=True)
    found = load_inputs.prompts(path, raw=False)
    return [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in found]


def _announce(asked: ModelAudit) -> None:
    """What it will take, before it starts."""
    told = f"a shift of TV {asked.detect:g} takes {asked.needed:,} tokens (alpha {asked.alpha:g}, power 95 %)"
    if asked.limit < asked.needed:
        told += f"; {asked.limit:,} are allowed, which may not see it"
    print(f"truedraw: {told}; as many at most for a planted fault first", file=sys.stderr)


class _Bar:
    """How far it is, and the evidence so far; nothing where standard error is no terminal."""

    def __init__(self, asked: ModelAudit) -> None:
        console = stderr_console()
        self._limit = asked.limit
        self._goal = 1 / asked.alpha
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} tokens"),
            TextColumn("evidence {task.fields[evidence]}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task: Any = None
        self._what = ""

    def show(self, what: str, count: int, log_e: float) -> None:
        if self._task is None:
            self._task = self._progress.add_task(what, total=self._limit, evidence="1")
        if what != self._what:
            self._what = what
            self._progress.reset(self._task, description=what)
        evidence = f"{math.exp(min(log_e, 300)):.3g} (a fault from {self._goal:,.0f} on)"
        self._progress.update(self._task, completed=min(count, self._limit), evidence=evidence)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()


def _command(seed: int | None, used: int) -> str:
    """This command, as it can be run again."""
    seeded = [] if seed is not None else ["--seed", str(used)]
    return shlex.join(["truedraw", *sys.argv[1:], *seeded])


def _facts(model: str, draft_model: str | None, drafter: str, params: Any) -> list[tuple[str, str]]:
    set_to = {
        name: getattr(params, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    neutral = {"temperature": None, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    shown = [f"{name} {value:g}" for name, value in set_to.items() if value != neutral.get(name, 0)]
    if params.logit_bias:
        shown.append(f"logit_bias of {len(params.logit_bias)} tokens")
    versions = ", ".join(f"{name} {told}" for name in ("truedraw", "numpy", "llama-cpp-python") if (told := _version(name)))
    return [
        ("target", model),
        ("draft model", draft_model or "none"),
        ("drafter", drafter),
        ("sampling", ", ".join(shown)),
        ("versions", f"{versions}, Python {platform.python_version()}"),
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
