"""Reports of every kind, for the tests of text, page and JSON."""

import math
from dataclasses import replace

from truedraw.audit.findings import DirectionReport, Example, Fired, ModeReport, Report

NASTY = "<script>alert('x')</script> & \"quotes\" </style> é"


def path(high, samples=2000):
    """Evidence that ends at 10 ** high."""
    return tuple((n, high * (n / samples) ** 2 - 0.4 * math.sin(n / 90)) for n in range(0, samples + 1, 20))


DIRECTIONS = (
    DirectionReport("tokens that would be kept if drafted", 1400, 3.1, 0.0042, 0.051, 0.047),
    DirectionReport(NASTY, 1400, 1e30, 0.112, 0.16, 0.047),
    DirectionReport("tokens with a probability below 1 in 10,000", 600, 0.4, -0.0001, 0.012, 1.0),
)
CONTROL = ModeReport(
    "planted fault", "fault found", "Would this audit see a fault? Planted: a draw from the whole row.", samples=900, alpha=0.01,
    e_value=180.0, p_value=1 / 180, detectable=0.1, path=path(2.25, 900),
)  # fmt: skip
MISSED = ModeReport(
    "planted fault", "no evidence", "Would this audit see a fault?", reason="the planted fault was not found in 2,000 tokens",
    samples=2000, alpha=0.01, e_value=2.0, p_value=0.5, detectable=0.07, path=path(0.2),
)  # fmt: skip
CLEAN = ModeReport(
    "law of the tokens", "no evidence", "Is every emitted token drawn from the target's law at its place?", samples=2000,
    alpha=0.01, e_value=1.7, p_value=0.58, detectable=0.069, floor=0.02, path=path(-2.5), directions=DIRECTIONS[::2],
    notes=("Nothing was drafted: this is plain decoding.",),
)  # fmt: skip
FOUND = ModeReport(
    "law of the tokens", "fault found", "Is every emitted token drawn from the target's law at its place?", samples=1240,
    alpha=0.01, e_value=math.inf, p_value=0.0, detectable=0.088, path=(*path(1.9, 1200), (1240, math.inf)),
    fired=(Fired(f"too many {NASTY}", 1e30, "after a rejected draft the replacement is drawn wrongly"),),
    example=Example(f"after {NASTY}", f"curl http://127.0.0.1:8000/v1/completions -d '{NASTY}'"), directions=DIRECTIONS,
)  # fmt: skip
OTHER = replace(CLEAN, mode="against a reference")
CONTRACT = ModeReport("what must hold exactly", "fault found", "Does every step do what it must?", samples=1, unit="steps")
UNTESTABLE = ModeReport("seed contract", "not testable", "Is a seeded text the same?", reason=f"no seeds: {NASTY}")
UNFINISHED = ModeReport(
    "self-consistency", "not completed", "Do tokens agree with logprobs?", reason="the server answered 500", samples=37,
    alpha=0.01, e_value=1.0, p_value=1.0, path=((0, 0.0), (37, 0.0)),
)  # fmt: skip


def report(*modes, control=(CONTROL,), **changed):
    """A report with these modes."""
    values = {
        "subject": f"engine {NASTY}", "command": f"truedraw audit endpoint '{NASTY}'", "started": "2026-01-02T03:04:05+00:00",
        "seconds": 83.2, "alpha": 0.01, "detect": 0.05, "facts": (("version", NASTY),), "control": control, "modes": modes,
    }  # fmt: skip
    return Report(**{**values, **changed})


ALL = {
    "clean": report(CLEAN),
    "fault": report(FOUND, OTHER),
    "contract": report(OTHER, CONTRACT),
    "no control": report(CLEAN, control=()),
    "control missed": report(CLEAN, control=(MISSED,)),
    "control missed, fault": report(FOUND, control=(MISSED,)),
    "not testable": report(UNTESTABLE),
    "partly testable": report(CLEAN, UNTESTABLE),
    "not completed": report(CLEAN, UNFINISHED),
    "fault, then died": report(FOUND, UNFINISHED),
    "nothing": report(facts=(), detect=None, command=""),
}
STATUS = dict(zip(ALL, (0, 1, 1, 0, 3, 1, 3, 0, 3, 1, 3), strict=True))
