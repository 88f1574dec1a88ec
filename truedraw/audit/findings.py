"""What an audit has to say. Frozen values; what can be derived is derived here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["no evidence", "fault found", "not testable", "not completed"]


@dataclass(frozen=True, slots=True)
class Fired:
    """A direction in which the evidence grew beyond its bound.

    name      of the direction, as "too many likely tokens"
    e_value   of this direction alone
    usually   what most often causes it
    """

    name: str
    e_value: float
    usually: str


@dataclass(frozen=True, slots=True)
class Example:
    """The first thing that was wrong, and how to see it again.

    command  a curl command, where the audit speaks HTTP; otherwise what to run
    """

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class DirectionReport:
    """What is known of one direction g, whether it fired or not.

    shift       the mean of g(token) - E_p g, over the range of g: no smaller total variation can cause it
    bound       on the size of that shift, at 95 % confidence for all directions together, whenever one stops
    detectable  the smallest shift that this run would have seen with 95 % power; 1: none
    """

    name: str
    samples: int
    e_value: float
    shift: float
    bound: float
    detectable: float


@dataclass(frozen=True, slots=True)
class ModeReport:
    """One question that was asked of the engine, and what came out.

    verdict    "not testable" and "not completed" come with a reason
    samples    what was looked at, in `unit`s
    e_value    the largest so far; p_value: 1 / that, or of a fixed-sample test; both None for contracts, which need none
    detectable the smallest total variation that so many samples see with 95 % power; None where that has no meaning
    floor      total variation that the null allows (kernels, printed digits)
    path       (samples, log10 of the evidence) as it grew, for the plot
    directions where rows are known
    """

    mode: str
    verdict: Verdict
    asked: str
    reason: str = ""
    samples: int = 0
    unit: str = "tokens"
    alpha: float | None = None
    e_value: float | None = None
    p_value: float | None = None
    detectable: float | None = None
    floor: float | None = None
    fired: tuple[Fired, ...] = ()
    example: Example | None = None
    path: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()
    directions: tuple[DirectionReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A whole audit.

    subject  what was audited: URL and model, module and callable, command line
    facts    (name, value) pairs worth keeping: versions, settings, what the server can do
    control  of the planted fault; empty where there was none
    """

    subject: str
    command: str
    started: str
    seconds: float
    alpha: float
    detect: float | None
    facts: tuple[tuple[str, str], ...]
    control: tuple[ModeReport, ...]
    modes: tuple[ModeReport, ...]

    @property
    def findings(self) -> tuple[ModeReport, ...]:
        return tuple(mode for mode in self.modes if mode.verdict == "fault found")

    @property
    def control_seen(self) -> bool:
        """Whether the planted fault was found, where one was planted."""
        return not self.control or any(mode.verdict == "fault found" for mode in self.control)

    @property
    def status(self) -> int:
        """0 no evidence, 1 fault found, 3 could not be completed: also where the control was not seen, or nothing testable."""
        if self.findings:
            return 1
        tested = any(mode.verdict == "no evidence" for mode in self.modes)
        complete = not any(mode.verdict == "not completed" for mode in self.modes)
        return 0 if tested and complete and self.control_seen else 3

    @property
    def ok(self) -> bool:
        return self.status == 0
