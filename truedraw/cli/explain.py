"""truedraw explain: two rows, token by token, and what every rule makes of them."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from truedraw.cli import options as opt
from truedraw.cli.explain_inputs import Position, read_rows, rows_of_models
from truedraw.cli.explain_picture import save_picture
from truedraw.cli.output import stdout_console
from truedraw.cli.picture import check_picture
from truedraw.errors import InvalidParameter, UsageError
from truedraw.prove.explain import ROUNDING
from truedraw.types import SamplingParams

_WIDTH = 80
_LIVE = ("model", "draft_model", "temperature", "top_k", "top_p", "min_p", "raw", "context", "threads")
_NAIVE = "The naive rule, min(1, p/q) and then a draw from p,"


def explain(
    command: typer.Context,
    p: Annotated[
        str | None, typer.Option("--p", metavar="ROW", help="The target's row: 0.5,0.3,0.2 or 1/2,1/3,1/6, or a file.")
    ] = None,
    q: Annotated[str | None, typer.Option("--q", metavar="ROW", help="The draft's row, as long.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Instead: the rows of two models behind this; - reads standard input.")
    ] = None,
    model: opt.ModelName = "smollm2",
    draft_model: Annotated[
        str, typer.Option(help="A smaller model with the same vocabulary.", rich_help_panel="Model")
    ] = "smollm2:q4_0",
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it stands.")] = False,
    temperature: opt.Temperature = 1.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    context: opt.Context = None,
    threads: opt.Threads = None,
    top: Annotated[int, typer.Option(help="Tokens to show: those with the largest p or q.")] = 10,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="A picture: FILE.png or FILE.svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Explain one position: p, q, what is kept of each token, the residual, and the exact law of every rule."""
    if top < 1:
        raise InvalidParameter("top", top, "an integer >= 1")
    if save is not None:
        check_picture(save)
    if prompt is not None and p is None and q is None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        text = opt.read_prompt(prompt)
        position = rows_of_models(model, draft_model, text, params, raw=raw, context=context, threads=threads)
    elif prompt is None and p is not None and q is not None:
        _refuse_live_options(command)
        position = read_rows(p, q)
    else:
        raise UsageError("explain needs both --p and --q, as in --p 0.5,0.3,0.2 --q 0.2,0.3,0.5, or --prompt alone")
    report = _Report(position, position.explanation.top(top))
    if save is not None:
        save_picture(save, position, top, report.told())
    if as_json:
        print(json.dumps({**report.as_json(), "picture": save}, ensure_ascii=False))
    else:
        report.print()
        if save is not None:
            print(f"Picture: {save}")
    return 0


def _refuse_live_options(command: typer.Context) -> None:
    for name in _LIVE:
        source = command.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name.replace('_', '-')} goes with --prompt: the rows of --p and --q are taken as they are")


@dataclass(frozen=True, slots=True)
class _Report:
    """What is told of a position, as text and as JSON. tokens: the ids that get a line each."""

    position: Position
    tokens: list[int]

    def print(self) -> None:
        console = stdout_console()
        console.width = max(console.width, _WIDTH)  # what a narrow terminal breaks is still whole in a file
        print(f"{_wrapped(self.position.source)}\n")
        console.print(self._by_token())
        print(f"\n{_wrapped(self._legend())}\n")
        print("\n".join(self._scalars()), end="\n\n")
        console.print(self._by_rule())
        print(f"\n{_wrapped(self.told())}")
        for note in self.position.notes:
            print(_wrapped(f"Note: {note}."))

    def _by_token(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 0, 0, 1))
        table.add_column("token", max_width=15, no_wrap=True, overflow="ellipsis")
        for heading in ("p", "q", "kept", "residual", "naive", "bias", "lenient", "typical"):
            table.add_column(heading, justify="right", no_wrap=True, min_width=7)
        explained, laws = self.position.explanation, self._lossy_laws()
        keep, residual, bias = explained.keep, explained.residual, explained.bias
        for token in self.tokens:
            p, q = float(explained.p[token]), float(explained.q[token])
            naive, *others = (float(law[token]) for law in laws.values())
            table.add_row(
                Text(self.position.name(token)),
                _share(p),
                _share(q),
                _share(float(keep[token])) if q else "-",
                "-" if residual is None else _share(float(residual[token])),
                _law(naive),
                _signed(float(bias[token])),
                *map(_law, others),
            )
        rest = self._rest()
        if rest:
            p, q = float(explained.p[rest].sum()), float(explained.q[rest].sum())
            naive, *others = (float(law[rest].sum()) for law in laws.values())
            table.add_row(
                f"{len(rest)} others",
                _share(p),
                _share(q),
                _share(float(np.minimum(explained.p, explained.q)[rest].sum()) / q) if q else "-",
                "-" if residual is None else _share(float(residual[rest].sum())),
                _law(naive),
                _signed(float(bias[rest].sum())),
                *map(_law, others),
            )
        return table

    def _lossy_laws(self) -> dict[str, Any]:
        return {rule.name: rule.law for rule in self.position.explanation.rules if not rule.exact}

    def _rest(self) -> list[int]:
        shown = set(self.tokens)
        return [token for token in range(len(self.position.explanation.p)) if token not in shown]

    def _legend(self) -> str:
        names = ", ".join(self._lossy_laws())
        legend = f"kept: min(1, p/q), of a drafted token. The last columns are what comes out under {names}; "
        legend += "under every exact rule it is p."
        if self.position.explanation.residual is None:
            legend += " p = q: nothing is ever rejected, and no residual is needed."
        return legend

    def _scalars(self) -> list[str]:
        explained = self.position.explanation
        lines = (
            ("alpha", explained.alpha, "sum of min(p, q): the most an exact rule keeps of one draft"),
            ("TV(p, q)", explained.total_variation, "1 - alpha"),
            ("A*", explained.a_star, "least q/p where p > 0: kept if a rejection redraws from p"),
            ("two drafts", explained.two_draft_bound, "the most an exact rule keeps of two independent ones"),
        )
        return [f"{name:<10} {_share(value):>7} {meaning}" for name, value, meaning in lines]

    def _by_rule(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("rule", no_wrap=True)
        for heading in ("drafts", "accepts", "TV to p", "KL to p"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("law", no_wrap=True)
        for rule in self.position.explanation.rules:
            law = "exact" if rule.exact else "lossy" if rule.drift.total_variation > ROUNDING else "exact here"
            drift = (_law(rule.drift.total_variation), _law(rule.drift.kl_divergence))
            table.add_row(rule.name, str(rule.num_candidates), _share(rule.acceptance), *drift, law)
        return table

    def told(self) -> str:
        """One sentence about the naive rule."""
        explained, name = self.position.explanation, self.position.name
        match explained.why_unbiased:
            case "equal":
                return f"{_NAIVE} is exact here: p = q, so nothing is ever rejected."
            case "disjoint":
                return f"{_NAIVE} is exact here: p and q share no token, so every draft is rejected and the residual is p."
            case "multiple":
                reason = f"q = {_share(explained.alpha)} p wherever p > 0, so the residual is p"
                return f"{_NAIVE} is exact here, though p and q differ: {reason}."
        law, bias = explained.naive.law, explained.bias
        off = [
            f"{name(token)} comes at {_law(float(law[token]))} instead of {_share(float(explained.p[token]))}"
            for token in (int(bias.argmax()), int(bias.argmin()))
        ]
        return (
            f"{_NAIVE} is biased here, by a TV of {_share(explained.naive.drift.total_variation)}: token {', token '.join(off)}."
        )

    def as_json(self) -> dict[str, Any]:
        explained = self.position.explanation
        keep, residual, rest = explained.keep, explained.residual, self._rest()
        return {
            "source": self.position.source,
            "vocab": len(explained.p),
            "tokens": [
                {
                    "id": token,
                    "name": self.position.name(token),
                    "p": float(explained.p[token]),
                    "q": float(explained.q[token]),
                    "kept": float(keep[token]) if explained.q[token] else None,
                    "residual": None if residual is None else float(residual[token]),
                    "bias": float(explained.bias[token]),
                }
                for token in self.tokens
            ],
            "others": {"tokens": len(rest), "p": float(explained.p[rest].sum()), "q": float(explained.q[rest].sum())},
            "alpha": explained.alpha,
            "total_variation": explained.total_variation,
            "a_star": explained.a_star,
            "two_draft_bound": explained.two_draft_bound,
            "rules": [
                {
                    "name": rule.name,
                    "exact": rule.exact,
                    "drafts": rule.num_candidates,
                    "acceptance": rule.acceptance,
                    "total_variation": rule.drift.total_variation,
                    "kl_divergence": rule.drift.kl_divergence,
                    "law": [float(rule.law[token]) for token in self.tokens],
                }
                for rule in explained.rules
            ],
            "naive": {"unbiased": explained.why_unbiased, "told": self.told()},
            "notes": self.position.notes,
        }


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _share(value: float) -> str:
    """A probability; 0 and 1 where they are meant, and the first digit of what is too small for four decimals."""
    if value in (0, 1):
        return f"{value:.0f}"
    return f"{value:.4f}" if value >= 1e-4 else f"{value:.0e}"


def _law(value: float) -> str:
    """A probability that was summed up: without what rounding leaves."""
    return _share(0.0 if value <= ROUNDING else value)


def _signed(value: float) -> str:
    if abs(value) <= ROUNDING:
        return "0"
    return f"{value:+.4f}" if abs(value) >= 1e-4 else f"{value:+.0e}"
