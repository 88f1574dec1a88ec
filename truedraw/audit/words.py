"""The sentences of a report, shared by terminal and page. Numbers as a person says them."""

from __future__ import annotations

import math

from truedraw.audit.findings import ModeReport, Report

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("total variation (TV)", "the share of tokens that would come out differently: 0.05 is 5 in 100."),
    (
        "evidence (e-value)",
        "what a fair bet against the engine has grown to, from a stake of 1. If the engine is right it reaches 1/alpha with "
        "probability alpha at most, however often one looks.",
    ),
    ("alpha", "the probability that an engine without fault is accused all the same, at most."),
    ("smallest shift seen", "the smallest change of the tokens' law that this many samples find 95 times in 100."),
    ("floor", "a difference that is allowed for, because arithmetic or printed digits alone can make it."),
    ("direction", "a kind of token whose frequency is compared with what the target's law says."),
)

CONTROL_MISSED = "The control failed: the fault that was planted on purpose was not found."


def headline(report: Report) -> str:
    """One or two words for the whole."""
    return {0: "No evidence of a fault", 1: "Fault found"}.get(report.status, "Not completed")


def summary(report: Report) -> list[str]:
    """Sentences, the most important first."""
    said = []
    if not report.control_seen:
        rest = "So this run cannot tell: where it finds nothing, that means nothing."
        if report.findings:
            rest = "What was found below stands; where nothing was found, that means nothing."
        said.append(f"{CONTROL_MISSED} {rest}")
    if report.findings:
        names = _joined([mode.mode for mode in report.findings])
        said.append(f"Found in: {names}. {_false_alarm(report)}")
        strongest = max(
            (fired for mode in report.findings for fired in mode.fired), key=lambda fired: fired.e_value, default=None
        )
        if strongest is not None:
            said.append(f"The strongest sign: {strongest.name}. Usual cause: {strongest.usually}.")
    elif report.status == 0:
        said.append(f"Nothing was found that contradicts the target's law. {pass_means(report)}")
    unfinished = [mode for mode in report.modes if mode.verdict == "not completed"]
    if unfinished:
        reasons = _joined([f"{mode.mode} ({mode.reason or 'no reason was told'})" for mode in unfinished])
        said.append(f"Not completed: {reasons}.")
    if report.status == 3:
        if report.control_seen and not unfinished:
            said.append("Nothing could be tested.")
        said.append("There is no verdict (exit status 3): neither that there is a fault nor that none was seen.")
    skipped = [mode for mode in report.modes if mode.verdict == "not testable"]
    if skipped:
        said.append(
            f"Not testable here: {_joined([f'{mode.mode} ({mode.reason})' if mode.reason else mode.mode for mode in skipped])}."
        )
    if not report.control:
        said.append("No control was run: whether a fault of this kind would have been seen was not tried out.")
    return said


def pass_means(report: Report) -> str:
    """What nothing found means at this size."""
    sizes = [mode.detectable for mode in report.modes if mode.verdict == "no evidence" and mode.detectable is not None]
    if not sizes:
        return "What was checked is exact: no rate of error, and nothing said about anything else."
    return (
        f"Shifts smaller than a total variation (TV, the share of tokens that would differ) of {shift(max(sizes))}, in a "
        "direction that was looked at, would not have been seen reliably; shifts in other directions may not have "
        "been seen at all."
    )


def _false_alarm(report: Report) -> str:
    if all(mode.e_value is None and mode.p_value is None for mode in report.findings):
        return "What was broken holds without exception in an engine that is right."
    return f"Such a test accuses an engine without fault in {odds(report.alpha)} runs at most."


def control_line(report: Report) -> str:
    if not report.control:
        return "no control"
    seen = [mode for mode in report.control if mode.verdict == "fault found"]
    return f"seen ({samples(seen[0])})" if seen else "NOT SEEN"


def samples(mode: ModeReport) -> str:
    unit = mode.unit[:-1] if mode.samples == 1 and mode.unit.endswith("s") else mode.unit
    return f"{mode.samples:,} {unit}"


def evidence(mode: ModeReport) -> str:
    """The e-value or p-value in words; empty for contracts."""
    if mode.e_value is not None:
        return f"{number(mode.e_value)}"
    return "" if mode.p_value is None else f"p = {mode.p_value:.2g}"


def evidence_means(mode: ModeReport) -> str:
    """With what it is compared; empty for contracts."""
    if mode.alpha is None:
        return ""
    if mode.e_value is not None:
        return f"a fault is told from {number(1 / mode.alpha)} on"
    return f"a fault is told below {mode.alpha:g}" if mode.p_value is not None else ""


def power(mode: ModeReport) -> float | None:
    """The smallest shift seen, where that is worth telling: a fault that was found ends a run early."""
    return None if mode.verdict == "fault found" else mode.detectable


def shift(value: float | None) -> str:
    return "-" if value is None else "none" if value >= 1 else f"{value:.2g}"


def number(value: float) -> str:
    """Large ones as powers of ten."""
    if math.isinf(value):
        return "infinite"
    if value >= 1e6:
        return f"10^{math.log10(value):.0f}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def odds(alpha: float) -> str:
    return f"1 in {number(1 / alpha)}"


def seconds(value: float) -> str:
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes else f"{value:.1f} s"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
