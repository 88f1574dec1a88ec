"""The positive control of an endpoint's audit: a server that is wrong by as much as is to be found."""

from __future__ import annotations

from dataclasses import replace

from truedraw.audit.client import Arm
from truedraw.audit.endpoint import Progress, audit
from truedraw.audit.findings import ModeReport
from truedraw.audit.plan import SETTINGS, Plan
from truedraw.audit.planted import FAULTS, PlantedServer, strength_for

FAULT = "greedy drafts"


async def control(plan: Plan, on_progress: Progress) -> list[ModeReport]:
    """The same audit of a local server with a planted fault of the size asked for, temperature 1 only."""
    planting = strength_for(FAULTS[FAULT], plan.reach)
    with PlantedServer(FAULT, planting.strength) as server:
        planted = replace(plan, on=Arm(server.url, ""), off=None, headers={}, reference=None, concurrency=4)
        reports, _facts = await audit(planted, on_progress, settings=SETTINGS[:1], laws_only=True)
    told = f"planted: the likeliest token at draft positions, a shift of TV {planting.shift.mean:.3f}"
    if not planting.reached:
        told += ", which is all that this fault can be"
    tested = [report for report in reports if report.verdict != "not testable"]
    fired = [report for report in tested if report.verdict == "fault found"]  # the run ends as soon as one has
    return [replace(report, mode=f"control, {report.mode}", notes=(told, *report.notes)) for report in fired or tested]
