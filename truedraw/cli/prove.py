"""truedraw prove: run the shipped rules through all of their randomness, then plant faults."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from truedraw.cli.output import stderr_console, stdout_console

if TYPE_CHECKING:
    from truedraw.prove.certificates import DriftReport, RuleReport
    from truedraw.prove.tensors import TensorReport

PROVES = (
    "Exact on these finite problems, through the shipped code and keys, given ideal uniforms: no proof for every vocabulary, "
    "nor for floating point."
)


@dataclass(frozen=True, slots=True)
class Check:
    """A certificate that is not a rule's: of the noise, of shaping, of the engine."""

    name: str
    passed: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Planted:
    """A planted fault: by how much the law was off, where the check that caught it is one of laws."""

    name: str
    tv: float | None
    caught: bool
    source: str
    evidence: str


@dataclass(slots=True)
class _Findings:
    rules: list[RuleReport]
    lossy: list[DriftReport]
    tensors: list[TensorReport]
    checks: list[Check]
    mutants: list[Planted]
    not_run: list[str]

    @property
    def ok(self) -> bool:
        return (
            all(rule.exact for rule in self.rules)
            and all(rule.exact for rule in self.tensors)
            and all(rule.honest for rule in self.lossy)
            and all(check.passed for check in self.checks)
            and all(mutant.caught for mutant in self.mutants)
        )


def prove(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False) -> int:
    """Certify the shipped rules exactly, and show that planted faults are caught."""
    logging.getLogger("truedraw").setLevel(logging.ERROR)  # rounding events are visited on purpose
    found = _Findings([], [], [], [], [], [])
    with Progress(console=stderr_console(), transient=True) as progress:
        task = progress.add_task("proving", total=_num_steps())
        for told in _work(found):
            progress.update(task, advance=1, description=told[:40].ljust(40))
    if as_json:
        print(json.dumps(_json(found), ensure_ascii=False))
    else:
        _print(found)
    return 0 if found.ok else 1


def _num_steps() -> int:
    from truedraw.prove.certificates import LOSSY, enumerated_rules
    from truedraw.prove.mutants import mutants
    from truedraw.prove.tensors import RULES

    return len(enumerated_rules()) + 1 + len(LOSSY) + len(RULES) + 4 + len(mutants())


def _work(found: _Findings) -> Iterator[str]:
    """Fills `found`, and names what has been done."""
    from truedraw.prove import engine_check, engine_law, keys, shaping, tensors
    from truedraw.prove.certificates import LOSSY, coupled_report, drift_report, enumerated_rules, report
    from truedraw.prove.mutants import mutants, worst_engine_law

    found.rules.append(coupled_report())
    yield "coupled"
    for name, (rule, drafts) in enumerated_rules().items():
        found.rules.append(report(name, rule, drafts))
        yield name
    found.rules.sort(key=lambda rule: rule.name)
    for name, rule in LOSSY.items():
        found.lossy.append(drift_report(name, rule))
        yield name
    if not tensors.available():
        found.not_run.append("rules on tensors: torch is not installed")
    for name in tensors.RULES:
        if tensors.available():
            found.tensors.append(tensors.report(name))
        yield f"{name} on tensors"
    law = worst_engine_law()
    passed = f"TV 0 in {len(engine_law.settings())} settings, batches and a watchful policy included"
    found.checks.append(Check("engine law", law is None, passed if law is None else law.told))
    yield "engine law"
    for what, fault, evidence in (
        ("engine invariants", engine_check.first_failure, "tokens, text, records and counts of the oracle, four drafters"),
        ("noise and keys", keys.first_fault, "exponentials to the last bit, every stream of its own"),
        ("shaping", shaping.first_fault, "logits to p as defined, 12 settings"),
    ):
        told = fault()
        found.checks.append(Check(what, told is None, told or evidence))
        yield what
    for mutant in mutants():
        caught = mutant.catch()
        tv = None if caught is None else caught.total_variation
        found.mutants.append(Planted(mutant.name, tv, caught is not None, mutant.source, "" if caught is None else caught.told))
        yield mutant.name


def _json(found: _Findings) -> dict[str, object]:
    return {
        "rules": [
            {"name": rule.name, "problems": rule.problems, "max_tv": float(rule.max_tv), "exact": rule.exact}
            for rule in found.rules
        ],
        "lossy": [asdict(rule) for rule in found.lossy],
        "tensors": [
            {
                "name": rule.name,
                "problems": rule.problems,
                "questions": rule.questions,
                "max_tv": None if rule.max_tv is None else float(rule.max_tv),
                "exact": rule.exact,
            }
            for rule in found.tensors
        ],
        "not_run": found.not_run,
        "checks": [asdict(check) for check in found.checks],
        "mutants": [asdict(mutant) for mutant in found.mutants],
        "ok": found.ok,
    }


def _print(found: _Findings) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule", no_wrap=True)
    for column in ("problems", "worst TV"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True, min_width=10)
    for rule in found.rules:
        verdict = "exact" if rule.exact else f"[red]NOT EXACT[/] {escape(rule.worst)}"
        table.add_row(rule.name, str(rule.problems), _tv(rule.max_tv), verdict)
    for lossy in found.lossy:
        verdict = "lossy, and says so" if lossy.honest else f"[red]REPORTS WRONGLY[/] by {lossy.largest_error:.2g}"
        table.add_row(lossy.name, str(lossy.problems), f"{lossy.largest_tv:.3g}", verdict)
    for tensors in found.tensors:
        verdict = "exact" if tensors.exact else f"[red]NOT EXACT[/] {escape(tensors.worst)}"
        tv = "" if tensors.max_tv is None else _tv(tensors.max_tv)
        table.add_row(f"{tensors.name}, on tensors", str(tensors.problems), tv, verdict)
    for group in found.not_run:
        name, _, reason = group.partition(": ")
        table.add_row(name, "", "", f"not run: {reason}")
    for check in found.checks:
        table.add_row(check.name, "", "", "passed" if check.passed else f"[red]FAILED[/] {escape(check.evidence)}")
    table.add_row()
    table.add_row("[bold]planted fault[/]", "", "[bold]TV[/]", "")
    for mutant in found.mutants:
        tv = "" if mutant.tv is None else _tv(Fraction(mutant.tv))
        table.add_row(mutant.name, "", tv, "caught" if mutant.caught else "[red]NOT CAUGHT[/]")
    stdout_console().print(table)
    caught = sum(mutant.caught for mutant in found.mutants)
    exact = [*(rule.exact for rule in found.rules), *(rule.exact for rule in found.tensors)]
    verdict = "ok" if found.ok else "FAILED"
    print(f"{verdict}: {sum(exact)} of {len(exact)} rules exact, {caught} of {len(found.mutants)} planted faults caught")
    print(PROVES)


def _tv(value: Fraction) -> str:
    return "0" if value == 0 else f"{float(value):.3g}"
