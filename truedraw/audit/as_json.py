"""A report as plain JSON: what docs/audit-model.md documents."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from truedraw.audit.findings import Report
from truedraw.audit.words import headline, summary


def as_json(report: Report) -> dict[str, Any]:
    """Numbers, texts, lists and objects only; an infinite e-value is the text "infinite", since JSON has no such number."""
    return {
        "ok": report.ok,
        "status": report.status,
        "headline": headline(report),
        "summary": summary(report),
        "subject": report.subject,
        "command": report.command,
        "started": report.started,
        "seconds": report.seconds,
        "alpha": report.alpha,
        "detect": report.detect,
        "findings": [_plain(asdict(mode)) for mode in report.findings],
        "power": {
            mode.mode: {"samples": mode.samples, "unit": mode.unit, "detectable": mode.detectable, "floor": mode.floor}
            for mode in report.modes
        },
        "control_seen": report.control_seen,
        "control": [_plain(asdict(mode)) for mode in report.control],
        "modes": [_plain(asdict(mode)) for mode in report.modes],
        "facts": dict(report.facts),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "infinite" if value > 0 else None
    return value
