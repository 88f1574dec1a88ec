"""A report on a terminal: what was found first, in sentences that can be read aloud."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from truedraw.audit import words
from truedraw.audit.findings import ModeReport, Report

_MOST_FIRED = 3
_STYLES = {"no evidence": "green", "fault found": "bold red", "not testable": "yellow", "not completed": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """Everything but the paths and the table of directions, which JSON and page have."""
    _line(console, f"Audit of {report.subject}", "bold")
    console.print()
    _line(console, words.headline(report), {0: "bold green", 1: "bold red"}.get(report.status, "bold yellow"))
    for sentence in words.summary(report):
        _wrapped(console, sentence, 0)
    for mode in report.control:
        _mode(console, mode, "control: ", planted=True)
    for mode in report.modes:
        _mode(console, mode)
    if report.facts:
        console.print()
        widest = max(len(name) for name, _value in report.facts)
        for name, value in report.facts:
            _line(console, f"{name.ljust(widest)}  {value}", "dim")
    detect = "" if report.detect is None else f", to see a TV of {report.detect:g}"
    console.print()
    _line(console, f"{words.seconds(report.seconds)}, alpha {report.alpha:g}{detect}, exit status {report.status}", "dim")


def _mode(console: Console, mode: ModeReport, before: str = "", *, planted: bool = False) -> None:
    console.print()
    head, good = Text(f"{before}{mode.mode}: "), mode.verdict == "fault found"
    verdict: str = mode.verdict
    style = _STYLES[mode.verdict]
    if planted:
        verdict, style = ("seen, as it should be", "green") if good else ("NOT SEEN", "bold red")
    head.append(verdict, style=style)
    console.print(head)
    _wrapped(console, mode.asked, 2)
    if mode.reason:
        _wrapped(console, f"Why: {mode.reason.rstrip('.')}.", 2)
    _wrapped(console, " ".join(_figures(mode)), 2)
    for note in mode.notes:
        _wrapped(console, note, 2)
    for fired in mode.fired[:_MOST_FIRED] if not planted else ():
        _wrapped(console, f"- {fired.name} (evidence {words.number(fired.e_value)})", 2)
        _wrapped(console, f"Usual cause: {fired.usually}.", 4)
    if len(mode.fired) > _MOST_FIRED and not planted:
        _wrapped(console, f"- and {len(mode.fired) - _MOST_FIRED} more, weaker ones", 2)
    if mode.example is not None:
        _wrapped(console, f"First seen: {mode.example.text.rstrip('.')}.", 2)
        if mode.example.command:
            _wrapped(console, "To see it again:", 2)
            _line(console, f"    {mode.example.command}")  # not broken into lines: it is copied


def _figures(mode: ModeReport) -> list[str]:
    told = [f"Looked at {words.samples(mode)}."]
    if words.evidence(mode):
        told.append(f"Evidence {words.evidence(mode)} ({words.evidence_means(mode)}).")
    if words.power(mode) is not None:
        told.append(f"Smallest shift seen 95 times in 100: TV {words.shift(words.power(mode))}.")
    if mode.floor is not None:
        told.append(f"Allowed for: TV {mode.floor:.2g}.")
    return told


def _wrapped(console: Console, text: str, indent: int) -> None:
    """Lines that fit, none of them filled with spaces."""
    space = " " * indent
    for line in textwrap.wrap(text, max(console.width, 40), initial_indent=space, subsequent_indent=space):
        _line(console, line)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
