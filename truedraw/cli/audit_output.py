"""What the audits tell: the report on standard output, as JSON, and as a page."""

from __future__ import annotations

import json
from pathlib import Path

from truedraw.audit.as_json import as_json
from truedraw.audit.findings import Report
from truedraw.audit.html import html
from truedraw.audit.terminal import print_report
from truedraw.cli.output import stdout_console
from truedraw.cli.picture import check_saved

SUFFIXES = (".html", ".json")


def check_report(path: str | None) -> None:
    """Before any work: the kind of file and its folder. Raises UsageError."""
    if path is not None:
        check_saved(path, SUFFIXES)


def tell(report: Report, *, json_wanted: bool, save: str | None) -> None:
    """Print it, then write the file: what was found has been told, whatever becomes of that."""
    if json_wanted:
        print(json.dumps(as_json(report), ensure_ascii=False), flush=True)
    else:
        print_report(report, stdout_console())
    if save is not None:
        text = html(report) if save.lower().endswith(".html") else json.dumps(as_json(report), ensure_ascii=False) + "\n"
        Path(save).write_text(text, encoding="utf-8")
