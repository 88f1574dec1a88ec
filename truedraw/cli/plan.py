"""truedraw plan: whether speculation pays, from acceptance and costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from truedraw.cli.output import stdout_console
from truedraw.cli.picture import check_picture
from truedraw.cli.plan_inputs import Acceptance, read_acceptance, read_counters, read_pass_cost
from truedraw.cli.plan_picture import save_picture
from truedraw.economics import MAX_LENGTH, Claim, Costs, Counters, Outcome, Point, TokenCost, best, claim, curve, needed
from truedraw.errors import InvalidParameter, UsageError


def plan(
    acceptance: Annotated[
        str | None, typer.Option(help="A number; by depth, given those before, as 0.8,0.7,0.6; or a trace file.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a vLLM server, as http://localhost:8000/metrics.")
    ] = None,
    draft_cost: Annotated[float, typer.Option(help="One draft token, in plain passes of the target.")] = 0.0,
    pass_cost: Annotated[str, typer.Option(help="A further token of a pass, in plain passes; or a profile.")] = "0",
    overhead: Annotated[float, typer.Option(help="The rest of a step that drafts, in plain passes.")] = 0.0,
    max_draft: Annotated[int, typer.Option(help="The longest draft to consider.")] = 16,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="A picture: FILE.png or FILE.svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Tell whether speculation pays, and at which draft length: the expected tokens of a step over its cost."""
    if not 1 <= max_draft <= MAX_LENGTH:
        raise InvalidParameter("max_draft", max_draft, f"an integer in [1, {MAX_LENGTH}]")
    if save is not None:
        check_picture(save)
    passes, notes = read_pass_cost(pass_cost)
    costs = Costs(passes, draft_cost, overhead)
    longest = max_draft if costs.max_length is None else min(max_draft, costs.max_length)
    if longest < max_draft:
        notes += (f"passes are measured to size {longest + 1}: drafts longer than {longest} are left out",)
    server = None
    if acceptance is not None and metrics is None:
        known = read_acceptance(acceptance, longest)
    elif metrics is not None and acceptance is None:
        server = _Server.at(metrics, read_counters(metrics), costs)
        known = server.acceptance(longest)
    else:
        raise UsageError("plan needs one of --acceptance (a number, as 0.7) and --metrics URL")
    report = _Report(known, costs, curve(known.survival, costs, len(known.survival)), claim(costs, longest), server, notes)
    if save is not None:
        in_use = None if server is None else (server.counters.mean_length, server.speedup)
        save_picture(save, report.points, report.drafting, costs, in_use)
    if as_json:
        print(json.dumps({**report.as_json(), "picture": save}, ensure_ascii=False))
    else:
        report.print()
        if save is not None:
            print(f"Picture: {save}")
    return 0


@dataclass(frozen=True, slots=True)
class _Server:
    """A vLLM server as it drafts now, at the assumed costs: its mean draft length stands for all of its drafts."""

    url: str
    counters: Counters
    cost: float

    @classmethod
    def at(cls, url: str, counters: Counters, costs: Costs) -> _Server:
        """Raises UsageError where its passes are larger than the measured ones."""
        length, limit = counters.mean_length, costs.max_length
        if limit is not None and length > limit:
            measured = f"{url} drafts {length:.2f} tokens a step, and passes are measured to size {limit + 1}"
            raise UsageError(f"{measured}: give a profile with larger sizes")
        return cls(url, counters, costs.of(length))

    @property
    def speedup(self) -> float:
        return self.counters.tokens_per_step / self.cost

    def acceptance(self, max_length: int) -> Acceptance:
        counters, depth = self.counters, len(self.counters.by_depth)
        notes: list[str] = []
        if depth < max_length:
            notes.append(f"the server drafts {depth} tokens at most: longer drafts are left out")
        if counters.proposed < counters.drafts * depth:
            notes.append("drafts differ in length, and a depth that a draft lacks counts as rejected: the table is a lower bound")
        return Acceptance(counters.survival[:max_length], f"{counters.drafts} drafts of {self.url} since its start", tuple(notes))


@dataclass(frozen=True, slots=True)
class _Report:
    """What is told, as text and as JSON. The claim is held against every draft length that has a price."""

    acceptance: Acceptance
    costs: Costs
    points: tuple[Point, ...]
    claim: Claim
    server: _Server | None
    input_notes: tuple[str, ...]

    @property
    def best(self) -> Point:
        return best(self.points)

    @property
    def drafting(self) -> Point:
        """The best length that drafts at all."""
        return best(self.points[1:])

    def print(self) -> None:
        table = Table(show_edge=False, pad_edge=False, box=SIMPLE_HEAD)
        for heading in ("draft length", "tokens per step", "cost", "speed-up", "break-even acceptance", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        top = self.best
        for point in self.points:
            table.add_row(
                str(point.length),
                f"{point.tokens_per_step:.2f}",
                f"{point.cost:.2f}",
                f"{point.speedup:.2f}x",
                "-" if point.length == 0 else "none" if point.break_even is None else f"{point.break_even:.2f}",
                "best" if point is top else "",
            )
        console = stdout_console()
        console.width = max(console.width, 80)  # what a narrow terminal breaks is still whole in a file
        console.print(table)
        print(f"\n{self.answer()}")
        print("The rule of thumb 'a step with more than two accepted tokens cannot lose', at these costs:")
        for line in (*self._one_step(), *self._on_average()):
            print(f"- {line}")
        print(f"Acceptance: {self.acceptance.source}. In plain passes: {self._prices()}.")
        for note in self.notes:
            print(f"Note: {note}.")

    def as_json(self) -> dict[str, Any]:
        server = self.server
        return {
            "answer": self.answer(),
            "acceptance": {"source": self.acceptance.source, "survival": self.acceptance.survival},
            "costs": {"draft": self.costs.draft, "overhead": self.costs.overhead, "pass": asdict(self.costs.passes)},
            "lengths": [{**asdict(point), "speedup": point.speedup} for point in self.points],
            "best": {**asdict(self.best), "speedup": self.best.speedup},
            "claim": {
                "one_accepted_wins": _range(self.claim.wins),
                "three_accepted_lose": _range(self.claim.losses),
            },
            "server": None
            if server is None
            else {
                "url": server.url,
                **asdict(server.counters),
                "mean_length": server.counters.mean_length,
                "tokens_per_step": server.counters.tokens_per_step,
                "cost": server.cost,
                "speedup": server.speedup,
            },
            "notes": self.notes,
        }

    def answer(self) -> str:
        top, server = self.best, self.server
        if server is not None and top.length == server.counters.mean_length:
            choice = "no other draft length considered is better"
        elif top.length == 0:
            closest = f"length {self.drafting.length} comes closest with {self.drafting.speedup:.2f}x"
            choice = f"no draft length up to {self.points[-1].length} is faster than plain decoding; {closest}"
        else:
            choice = f"the best draft length is {top.length}, {_bargain(top.tokens_per_step, top.cost)}"
        if server is None:
            return f"At these costs speculation {'pays' if top.length else 'does not pay'}: {choice}."
        counters = server.counters
        now = f"{counters.mean_length:.2f} draft tokens a step give {_bargain(counters.tokens_per_step, server.cost)}"
        verdict = "pays" if server.speedup > 1 else "does not pay"
        return f"At these costs speculation {verdict} on {server.url}: {now}; {choice}."

    def _one_step(self) -> list[str]:
        wins, losses, longest = self.claim.wins, self.claim.losses, self.claim.max_length
        lines: list[str] = []
        if wins:
            lines.append(f"one accepted token is enough at {_lengths(wins)}: length {wins[0].length} gives {_step(wins[0])}")
        else:
            lines.append(f"one accepted token is enough at no draft length up to {longest}")
        if losses:
            last = losses[-1]
            fewest = needed(self.costs, last.length)
            more = "not even all would win" if fewest is None else f"{fewest} would win"
            lines.append(f"three are too few at {_lengths(losses)}: length {last.length} gives {_step(last)}, {more}")
        elif longest >= 3:
            lines.append(f"three are too few at no draft length up to {longest}: that far the rule holds")
        return lines

    def _on_average(self) -> list[str]:
        top = self.best
        lines: list[str] = []
        if top.length and top.tokens_per_step < 3:
            mean = f"{top.tokens_per_step - 1:.2f} accepted tokens"
            lines.append(f"on average, the best length has {mean} a step, fewer than two, and wins, {top.speedup:.2f}x")
        losing = [point for point in self.points if point.tokens_per_step > 3 and point.speedup < 1]
        if losing:
            worst = min(losing, key=lambda point: point.speedup)
            mean = f"{worst.tokens_per_step - 1:.2f} accepted tokens"
            lines.append(f"on average, length {worst.length} has {mean} a step, more than two, and loses, {worst.speedup:.2f}x")
        return lines

    def _prices(self) -> str:
        passes = self.costs.passes
        if isinstance(passes, TokenCost):
            further = f"a further token of a pass {passes.each:g}"
        else:
            further = f"passes as measured at sizes {', '.join(map(str, passes.sizes))}, linear between"
        return f"a draft token {self.costs.draft:g}, {further}, overhead {self.costs.overhead:g}"

    @property
    def notes(self) -> list[str]:
        notes = [*self.input_notes, *self.acceptance.notes]
        if self.costs == Costs():
            notes.append("all costs are 0, so every accepted token is free: give --draft-cost and --pass-cost of a real machine")
        if self.best.length == self.points[-1].length:
            notes.append("the longest draft considered is the best: a longer one may be better still")
        return notes


def _bargain(tokens: float, cost: float) -> str:
    return f"{tokens:.2f} tokens for the price of {cost:.2f} plain passes, {tokens / cost:.2f}x"


def _step(step: Outcome) -> str:
    return f"{step.tokens} tokens for {step.cost:.2f} plain passes, {step.speedup:.2f}x"


def _lengths(steps: tuple[Outcome, ...]) -> str:
    """Costs rise with the length, so the lengths of a claim are a range."""
    first, last = steps[0].length, steps[-1].length
    return f"draft length {first}" if first == last else f"draft lengths {first} to {last}"


def _range(steps: tuple[Outcome, ...]) -> dict[str, Any] | None:
    """The shortest and the longest of them; None where there are none."""
    if not steps:
        return None
    first, last = ({**asdict(step), "tokens": step.tokens, "speedup": step.speedup} for step in (steps[0], steps[-1]))
    return {"shortest": first, "longest": last}
