"""truedraw prove: run the shipped rules through all of their randomness, then plant faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.progress import Progress

from truedraw.cli.output import stderr_console


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the report."""

    what: str
    on: str
    passed: bool
    evidence: str


def prove(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False) -> int:
    """Certify the shipped rules exactly, and show that planted faults are caught."""
    from truedraw.prove.mutants import mutants
    from truedraw.prove.problems import cases

    checks: list[Check] = []
    total = 2 * len(cases()) + len(mutants()) + 2
    with Progress(console=stderr_console(), transient=True) as progress:
        task = progress.add_task("proving", total=total)
        for check in _checks():
            checks.append(check)
            progress.update(task, advance=1, description=check.what)
    failed = [check for check in checks if not check.passed]
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        _print(checks, len(failed))
    return 1 if failed else 0


def _checks() -> Iterator[Check]:
    import numpy as np

    from truedraw.prove.coupling import certify_coupling, race_law
    from truedraw.prove.engine_check import first_failure
    from truedraw.prove.exact import Parts, certify
    from truedraw.prove.mutants import RACE_ROWS, RACE_TOLERANCE, mutants
    from truedraw.prove.problems import cases
    from truedraw.verify import coupled, token

    for problem, lengths in cases():
        law = certify(problem, Parts(token.verify), lengths)
        yield Check("token", f"{problem.name}, draft lengths {lengths}", law.exact, f"TV {law.worst} over {law.num_paths} paths")
    for problem, _lengths in cases():
        text = certify_coupling(problem, coupled.verify, range(25))
        evidence = f"{text.num_different} of {text.num_tried} noise vectors give another text than plain"
        yield Check("coupled", problem.name, text.exact, evidence)
    worst = max(float(np.abs(race_law(np.array(row), block) - row).sum() / 2) for row, block in RACE_ROWS)
    evidence = f"TV {worst:.1e}, tolerance {RACE_TOLERANCE:.0e}"
    yield Check("race", f"{len(RACE_ROWS)} rows, by quadrature", worst < RACE_TOLERANCE, evidence)
    failure = first_failure()
    yield Check("engine", "toy model, four drafters", failure is None, failure or "same tokens, text and counts as the oracle")
    for mutant in mutants():
        caught = mutant.catch()
        told = "NOT CAUGHT" if caught is None else f"caught: {caught}"
        yield Check("planted fault", f"{mutant.name} ({mutant.source})", caught is not None, told)


def _print(checks: list[Check], num_failed: int) -> None:
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.what:13} {check.on}: {check.evidence}")
    print(f"{len(checks) - num_failed} checks passed, {num_failed} failed")
    print("Exact on these finite problems; no proof for every vocabulary, nor for floating point.")
