"""A report on a terminal: what was found first, in sentences that can be read aloud."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from truedraw.audit import words
from truedraw.audit.findings import ModeReport, Report

_STYLES = {"no evidence": "green", "fault found": "bold red", "not testable": "yellow", "not completed": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """Everything but the paths and the table of directions, which JSON and page have."""
    _line(console, f"Audit of {report.subject}", "bold")
    console.print()
    _line(console, words.headline(report), {0: "bold green", 1: "bold red"}.get(report.status, "bold yellow"))
    for sentence in words.summary(report):
        _line(console, sentence)
    for mode in report.control:
        _mode(console, mode, "control: ", planted=True)
    for mode in report.modes:
        _mode(console, mode)
    if report.facts:
        console.print()
        table = Table.grid(padding=(0, 2))
        for name, value in report.facts:
            table.add_row(Text(name, style="dim"), Text(value))
        console.print(table)
    detect = "" if report.detect is None else f", to see a TV of {report.detect:g}"
    console.print()
    _line(console, f"{words.seconds(report.seconds)}, alpha {report.alpha:g}{detect}, exit status {report.status}", "dim")


def _mode(console: Console, mode: ModeReport, before: str = "", *, planted: bool = False) -> None:
    console.print()
    head, good = Text(f"{before}{mode.mode}: "), mode.verdict == "fault found"
    verdict, style = mode.verdict, _STYLES[mode.verdict]
    if planted:
        verdict, style = ("seen, as it should be", "green") if good else ("NOT SEEN", "bold red")
    head.append(verdict, style=style)
    console.print(head)
    told = [mode.asked]
    if mode.reason:
        told.append(f"Why: {mode.reason}.".replace("..", "."))
    figures = [f"Looked at {words.samples(mode)}."]
    if words.evidence(mode):
        figures.append(f"Evidence {words.evidence(mode)} ({words.evidence_means(mode)}).")
    if mode.detectable is not None:
        figures.append(f"Smallest shift seen 95 times in 100: TV {words.shift(mode.detectable)}.")
    if mode.floor is not None:
        figures.append(f"Allowed for: TV {mode.floor:.2g}.")
    told.append(" ".join(figures))
    told += mode.notes
    for line in told:
        console.print(Padding(Text(line), (0, 0, 0, 2)), soft_wrap=False)
    for fired in mode.fired[:3] if not planted else ():
        console.print(Padding(Text(f"- {fired.name} (evidence {words.number(fired.e_value)})"), (0, 0, 0, 2)))
        console.print(Padding(Text(f"Usual cause: {fired.usually}."), (0, 0, 0, 4)))
    if mode.example is not None:
        console.print(Padding(Text(f"First seen: {mode.example.text}"), (0, 0, 0, 2)))
        if mode.example.command:
            console.print(Padding(Text("To see it again:"), (0, 0, 0, 2)))
            _line(console, f"    {mode.example.command}")  # not broken into lines: it is copied


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
