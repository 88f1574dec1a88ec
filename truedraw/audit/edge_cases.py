"""What breaks verifiers at the edges: zeros, ends of the unit interval, ties, rows that are no laws, ids that are no tokens.

No law is measured here. Each case says what is wrong under EVERY rule: to emit what p cannot give, to accept it, or to
answer at all where a row is no law. What is legal, and costs speed or is careless, is noted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from truedraw.audit.convention import Answer, Lost, Outcome, Refused, Request, Subject, given, impossible
from truedraw.audit.findings import Example, Fired, ModeReport

Errors: TypeAlias = Literal["required", "wanted", "allowed", "noted", "wrong"]
"""What an error of the verifier means: right and anything else a fault; right and an answer noted; right; noted; a fault."""

REPEATS = 40
"""Calls of each case where the verifier draws its own uniforms."""

LAST = 1 - 2.0**-53
LAST32 = 1 - 2.0**-24
TINY = 5e-324


@dataclass(frozen=True, slots=True, eq=False)
class EdgeCase:
    """One request and what may be answered.

    errors     what an error means
    at_most    more drafts accepted are a fault
    should     fewer accepted are noted: the law may be right, and drafts are lost
    usually    what most often causes a wrong answer
    """

    name: str
    request: Request
    uniforms: tuple[float, ...]
    usually: str
    errors: Errors = "wrong"
    at_most: int | None = None
    should: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """fault, note: what is wrong or worth knowing; both empty where all is well."""

    fault: str = ""
    note: str = ""


def judge(case: EdgeCase, outcome: Outcome, strict: bool = False) -> Judged:
    """strict: drafts that can always be accepted have to be."""
    if isinstance(outcome, Answer):
        judged = _judge_answer(case, outcome)
        few = case.should is not None and outcome.accepted < case.should
        return Judged(fault=judged.note) if strict and few and not judged.fault else judged
    if not isinstance(outcome, Refused):
        return Judged(fault=str(outcome))
    told = f"answered by an error: {outcome}"
    if case.errors == "wrong":
        return Judged(fault=told)
    return Judged(note=told if case.errors == "noted" else "")


def _judge_answer(case: EdgeCase, answer: Answer) -> Judged:
    told = f"accepted {answer.accepted}, then token {answer.token}"
    if case.errors == "required":
        return Judged(fault=f"answered ({told}) where only an error is right")
    if case.at_most is not None and answer.accepted > case.at_most:
        return Judged(fault=f"{told}: at most {case.at_most} may be accepted")
    wrong = impossible(case.request, answer)
    if wrong is not None:
        return Judged(fault=wrong)
    if case.errors == "wanted":
        return Judged(note=f"{told}, where an error would be clearer")
    if case.should is not None and answer.accepted < case.should:
        return Judged(note=f"{told}: {case.should} can always be accepted here; fewer cost speed")
    return Judged()


# ---------------------------------------------------------------- the report


def edge_mode(subject: Subject, cases: Sequence[EdgeCase] | None = None, *, strict: bool = False) -> ModeReport:
    """Every case, or those given; strict: drafts that can always be accepted have to be."""
    picked = [case for case in (edge_cases() if cases is None else cases) if len(case.request.drafts) >= subject.min_drafts]
    found = _Found()
    reason = ""
    for case in picked:
        try:
            _try(subject, case, strict, found)
        except Lost as lost:
            reason = f"{case.name}: {lost}"
            break
        found.tried += 1
    how = (
        "each once" if subject.injected else f"each {REPEATS} times with uniforms of its own, so that u = 0 itself was not tried"
    )
    return ModeReport(
        mode="edge cases",
        verdict="fault found" if found.fired else "not completed" if reason else "no evidence",
        asked="zeros, ends of the unit interval, ties, rows that are no laws, ids that are no tokens: is any answer impossible?",
        reason=reason,
        samples=found.tried,
        unit="cases",
        fired=_grouped(found.fired),
        example=found.example,
        notes=(*found.notes, f"{found.tried} of {len(picked)} cases, {how}"),
    )


def _grouped(fired: Sequence[Fired]) -> tuple[Fired, ...]:
    """One for each usual cause, with the first case's name."""
    by_cause: dict[str, list[str]] = {}
    for one in fired:
        by_cause.setdefault(one.usually, []).append(one.name)
    more = [f" and {len(names) - 1} more" if len(names) > 1 else "" for names in by_cause.values()]
    groups = zip(by_cause.items(), more, strict=True)
    return tuple(Fired(names[0] + behind, math.inf, usually) for (usually, names), behind in groups)


@dataclass(slots=True)
class _Found:
    """What has come out so far."""

    tried: int = 0
    fired: list[Fired] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    example: Example | None = None


def _try(subject: Subject, case: EdgeCase, strict: bool, found: _Found) -> None:
    """One case; raises Lost."""
    repeats = np.random.default_rng(0).random((REPEATS, case.request.num_uniforms)).tolist()
    noted: set[str] = set()
    for uniforms in [case.uniforms] if subject.injected else repeats:
        judged = judge(case, ask(subject, case.request, uniforms), strict)
        if judged.fault:
            found.fired.append(Fired(case.name, math.inf, case.usually))
            found.notes.append(f"FAULT {case.name}: {judged.fault}")
            found.example = found.example or Example(f"{case.name}: {judged.fault}", subject.reproduce(case.request, uniforms))
            return
        if judged.note and judged.note not in noted:
            noted.add(judged.note)
            found.notes.append(f"{case.name}: {judged.note}")


def ask(subject: Subject, request: Request, uniforms: Sequence[float]) -> Outcome:
    """Raises Lost."""
    return subject.ask_many([(request, subject.draw_from(given(uniforms)))])[0]


# ---------------------------------------------------------------- the cases

_STRICT = "the comparison is u <= p/q, or the ratio is 0/0: it has to be u q < p, which is false at p = 0"
_DRAW = "the inverse CDF takes a token without mass: it has to be the first whose cumulated mass exceeds u times the total"
_PAST = "the cumulated sum stays below 1 by rounding, and the index runs past the last token with mass"
_NAN = "a comparison with NaN is false, which lets the draft pass or ends in token 0: check the rows first"
_INDEX = "an id is used as an index unchecked: -1 reads the last token, a larger one another row"
_EQUAL = "0/0 in the residual of equal rows"
_SUM = "the cumulated mass ends below u: scale u by the row's total"
_PAD = "rows of different width are compared: cut or pad q to the target's vocabulary"


def _case(
    name: str,
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]] | None,
    drafts: tuple[int, ...],
    uniforms: tuple[float, ...],
    usually: str,
    errors: Errors = "wrong",
    at_most: int | None = None,
    should: int | None = None,
) -> EdgeCase:
    rows = np.array(p, dtype=np.float64)
    drafted = None if q is None else np.array(q, dtype=np.float64).reshape(len(drafts), -1 if len(drafts) else rows.shape[1])
    return EdgeCase(name, Request(rows, drafted, drafts), uniforms, usually, errors, at_most, should)


def edge_cases() -> list[EdgeCase]:
    return [*_zeros(), *_ends(), *_equal_rows(), *_ids_and_widths(), *_rows_that_are_no_laws()]


def _zeros() -> list[EdgeCase]:
    half, even = [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]
    return [
        _case("p = 0 at the draft, u = 0", [half, even], [even], (2,), (0.0, 0.5), _STRICT, at_most=0),
        _case("p = 0 at the draft, u in the middle", [half, even], [even], (2,), (0.5, 0.5), _STRICT, at_most=0),
        _case("p = 0 at the second draft, u = 0", [even, half, even], [even, even], (0, 2), (0.0, 0.0, 0.5), _STRICT, at_most=1),
        _case("p = q = 0 at the draft, u = 0", [half, even], [half], (2,), (0.0, 0.5), _STRICT, "allowed", at_most=0),
        _case("q = 0 at the draft, p > 0", [even, even], [half], (2,), (0.5, 0.5), "p/q with q = 0", "allowed"),
        _case("p = 0 at the draft, q subnormal", [half, even], [[0.5, 0.5, TINY]], (2,), (0.0, 0.5), _STRICT, at_most=0),
        _case("p and q subnormal at the draft", [[0.5, 0.5, TINY], even], [[0.5, 0.5, TINY]], (2,), (0.0, 0.5), "p/q underflows"),
        _case("one-hot p, another draft", [[0, 1, 0], even], [even], (0,), (0.0, 0.5), _STRICT, at_most=0),
        _case("one-hot p, its own draft", [[0, 1, 0], [0, 0, 1]], [even], (1,), (LAST32, 0.5), "p/q > 1", should=1),
        _case("one-hot p and q, the same", [[0, 1, 0], [0, 0, 1]], [[0, 1, 0]], (1,), (LAST32, 0.0), _EQUAL, should=1),
        _case("one-hot p and q, different", [[0, 1, 0], even], [[1, 0, 0]], (0,), (0.0, 0.0), _STRICT, at_most=0),
        _case("point mass draft with p = 0", [half, even], None, (2,), (0.0, 0.5), _STRICT, at_most=0),
        _case("point mass draft, rejected", [even, even], None, (1,), (0.9, 0.5), "the residual of a point mass is p without it"),
        _case(
            "supports without overlap", [[0.5, 0.5, 0, 0], [0.25] * 4], [[0, 0, 0.5, 0.5]], (3,), (0.0, 0.9), _STRICT, at_most=0
        ),
    ]


def _ends() -> list[EdgeCase]:
    even, gap, front = [1 / 3, 1 / 3, 1 / 3], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]
    short = [1 / 22] * 22 + [0.0, 0.0]  # cumulated one by one it ends three units below 1
    wide = [1 / 24] * 24
    many = [*[1 / 1003] * 1003, 0.0]
    return [
        _case("no draft", [even], [], (), (0.5,), "an empty draft"),
        _case("no draft, u = 0, the first token has p = 0", [front], [], (), (0.0,), _DRAW),
        _case("no draft, u just below 1, the last tokens have p = 0", [short], [], (), (LAST,), _PAST),
        _case("no draft, point masses", [even], None, (), (0.5,), "an empty draft"),
        _case("bonus at u = 0, the first token has p = 0", [even, front], [even], (1,), (0.0, 0.0), _DRAW, should=1),
        _case("bonus at u just below 1, the last tokens have p = 0", [wide, short], [wide], (1,), (0.0, LAST), _PAST, should=1),
        _case("bonus exactly where a token with p = 0 begins", [even, gap], [even], (1,), (0.0, 0.5), _DRAW, should=1),
        _case("residual at u = 0, its first token has no mass", [[0, 0.5, 0.5], even], [[0.5, 0.5, 0]], (0,), (0.5, 0.0), _DRAW),
        _case("residual at u just below 1", [short, wide], [[0.0] * 23 + [1.0]], (23,), (0.5, LAST), _PAST, at_most=0),
        _case("residual where a token without mass begins", [gap, even], [[0, 1, 0]], (1,), (0.5, 0.5), _DRAW, at_most=0),
        _case("u = 0 throughout", [even, even, even], [even, even], (0, 1), (0.0, 0.0, 0.0), "u = 0", should=2),
        _case("u just below 1 throughout", [front, front], [even], (1,), (LAST, LAST), _PAST),
        _case("1,003 equal tokens and one with p = 0, u just below 1", [many], [], (), (LAST,), _PAST),
    ]


def _equal_rows() -> list[EdgeCase]:
    row, quarter = [0.2, 0.3, 0.5], [0.25] * 4
    near = [0.2 + 3e-17, 0.3, 0.5]
    loose = [0.2995, 0.3, 0.4]
    return [
        _case("p = q, u just below 1", [row, row], [row], (0,), (LAST32, 0.5), _EQUAL, should=1),
        _case("p = q at three drafts, u just below 1", [row] * 4, [row] * 3, (0, 1, 2), (LAST32,) * 4, _EQUAL, should=3),
        _case("p = q up to the last bit, u the largest number below 1", [row, row], [near], (0,), (LAST, 0.5), _EQUAL),
        _case("ties everywhere", [quarter, quarter], [quarter], (3,), (0.5, 0.25), "ties", should=1),
        _case("ties in the residual", [quarter, quarter], [[1, 0, 0, 0]], (0,), (0.5, 1 / 3), "ties"),
        _case("p sums to 0.9995, u just below 1", [loose, loose], [[0, 0, 1]], (2,), (LAST, LAST), _SUM, "noted"),
        _case("p sums to 1.0005, u just below 1", [[0.2005, 0.3, 0.5]], [], (), (LAST,), _SUM, "noted"),
        _case("q sums to 0.9995", [row, row], [loose], (1,), (0.5, 0.5), _SUM, "noted"),
    ]


def _ids_and_widths() -> list[EdgeCase]:
    row, even = [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]
    padded = [0.2, 0.2, 0.2, 0.2, 0.2]
    return [
        _case("draft -1 as a place holder, point mass", [row, row], None, (-1,), (0.0, 0.5), _INDEX, "allowed", at_most=0),
        _case("draft -1 as a place holder, q rows", [row, row], [even], (-1,), (0.0, 0.5), _INDEX, "allowed", at_most=0),
        _case("a draft, then -1", [row] * 3, None, (2, -1), (0.0, 0.0, 0.5), _INDEX, "allowed", at_most=1),
        _case("draft = vocabulary size, point mass", [row, row], None, (3,), (0.0, 0.5), _INDEX, "allowed", at_most=0),
        _case("draft far outside the vocabulary", [row, row], [even], (10**6,), (0.0, 0.5), _INDEX, "allowed", at_most=0),
        _case("q wider than p, draft in the padding", [row, row], [padded], (4,), (0.0, 0.5), _PAD, "allowed", at_most=0),
        _case("q wider than p, draft inside", [row, row], [padded], (0,), (0.9, 0.5), _PAD, "noted"),
        _case("q narrower than p, rejected", [row, row], [[0.5, 0.5]], (0,), (0.9, 0.99), _PAD, "noted"),
    ]


def _rows_that_are_no_laws() -> list[EdgeCase]:
    nan, inf = math.nan, math.inf
    even, unlikely = [1 / 3, 1 / 3, 1 / 3], [0.1, 0.4, 0.5]
    sums = "rows are not checked: finite, >= 0, sum 1 within 1e-3"
    return [
        _case("p is NaN throughout", [[nan] * 3, even], [even], (0,), (0.5, 0.5), _NAN, "required"),
        _case("p is NaN at the draft", [[nan, 0.5, 0.5], even], [even], (0,), (0.5, 0.5), _NAN, "required"),
        _case("p is NaN beside the draft", [[0.5, nan, 0.5], even], [[0.9, 0.05, 0.05]], (0,), (0.9, 0.5), _NAN, "required"),
        _case("p is infinite at the draft", [[inf, 0, 0], even], [even], (0,), (0.5, 0.5), _NAN, "required"),
        _case("bonus row is NaN, the draft accepted", [[1, 0, 0], [nan] * 3], [even], (0,), (0.0, 0.5), _NAN, "required"),
        _case("no draft, p is NaN", [[nan] * 3], [], (), (0.5,), _NAN, "required"),
        _case("p is 0 throughout, no draft", [[0.0] * 3], [], (), (0.5,), "0/0 in the draw", "required"),
        _case("q is NaN throughout", [unlikely, even], [[nan] * 3], (0,), (0.5, 0.5), _NAN, "wanted", at_most=0),
        _case("q is NaN at the draft", [unlikely, even], [[nan, 0.5, 0.5]], (0,), (0.5, 0.5), _NAN, "wanted", at_most=0),
        _case("q is infinite at the draft", [unlikely, even], [[inf, 0, 0]], (0,), (0.5, 0.5), _NAN, "wanted", at_most=0),
        _case("logits instead of probabilities", [[2.0, 1.0, -1.0], even], [even], (0,), (0.5, 0.5), sums, "wanted"),
        _case("p negative at one token", [[0.8, 0.7, -0.5], even], [even], (0,), (0.5, 0.5), sums, "wanted"),
    ]
