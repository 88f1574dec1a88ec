"""Conformance vectors: what a verifier may answer, as a file that any language can read.

    python -m truedraw.audit.vectors > vectors.jsonl

One JSON object a line, "kind" first:

    about   format, version, and the conventions below in words
    answer  p, q, drafts, uniforms, and "right": the answers [accepted, token] that the token rule may give
    edge    the same, with "error" (required, wanted, allowed, noted or wrong: what an error means), "at_most" drafts that may
            be accepted, and "tokens": for each number of accepted drafts the tokens that may come; under every rule
    law     rule, p, q, drafts, and "law": [accepted, token, probability] for each answer, the probability a fraction

In `answer` vectors the uniforms are used in order: uniforms[i] keeps draft i if uniforms[i] q(x) < p(x); the last one draws
the token behind: the first whose cumulated weight exceeds u times the total. Where a uniform lies on the edge itself, both
answers are right. Rows are laws up to rounding. Strings stand for what JSON lacks: "NaN", "Infinity".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.resources import files
from typing import Any

import numpy as np

from truedraw.audit.causes import excess, first_above
from truedraw.audit.convention import Answer, Request, Subject, given
from truedraw.audit.edge_cases import EdgeCase, edge_cases
from truedraw.audit.process import decode_row, encode
from truedraw.prove.exact import verdicts
from truedraw.registry import RULES
from truedraw.types import DenseRows, PointMass, Proposal

VERSION = 1
NUM_RANDOM = 120
NEAR_EDGE = 1e-9
LAW_RULES = ("token", "block", "resample_from_target", "coupled")


def generate() -> Iterator[dict[str, Any]]:
    """All vectors, the same at every call."""
    yield {"kind": "about", "format": "truedraw verifier vectors", "version": VERSION, "conventions": (__doc__ or "").strip()}
    for request, uniforms in (*_by_hand(), *_random()):
        yield {"kind": "answer", **_fields(request, uniforms), "right": right_answers(request, uniforms)}
    for case in edge_cases():
        yield {
            "kind": "edge",
            "name": case.name,
            **_fields(case.request, case.uniforms),
            "error": case.errors,
            "at_most": len(case.request.drafts) if case.at_most is None else case.at_most,
            "tokens": _allowed(case),
        }
    for rule in LAW_RULES:
        for request in _law_requests():
            yield {"kind": "law", "rule": rule, **_fields(request), "law": law(rule, request)}


def _fields(request: Request, uniforms: Sequence[float] | None = None) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(encode(0, request, uniforms or ()))
    del told["id"]
    if uniforms is None:
        del told["uniforms"]
    return told


# ---------------------------------------------------------------- single answers


def right_answers(request: Request, uniforms: Sequence[float]) -> list[list[int]]:
    """What the token rule may answer: more than one where a uniform lies on an edge, up to rounding."""
    k = len(request.drafts)
    answers: list[list[int]] = []
    for i, x in enumerate(request.drafts):
        p = request.p[i]
        q = np.eye(len(p))[x] if request.q is None else request.q[i]
        margin = uniforms[i] * q[x] - p[x]
        if margin > -NEAR_EDGE and p[x] < 1:  # rejected, or on the edge
            answers += [[i, token] for token in _drawn(excess(p, q, x), uniforms[k])]
        if p[x] == 0 or margin > NEAR_EDGE:
            return answers
    return answers + [[k, token] for token in _drawn(request.p[k], uniforms[k])]


def _drawn(weights: Any, u: float) -> list[int]:
    """The tokens that u may draw: two where it lies on the edge between them."""
    around = {first_above(weights, min(max(u + step, 0.0), 1 - 2.0**-53)) for step in (-NEAR_EDGE, 0.0, NEAR_EDGE)}
    return sorted(around)


def _by_hand() -> list[tuple[Request, tuple[float, ...]]]:
    """The example of the papers, walked along its edges."""
    p, q = np.array([[0.5, 0.3, 0.2]] * 3), np.array([[0.2, 0.3, 0.5]] * 2)
    chosen = [(0.0, 0.5), (0.25, 0.75), (0.399, 0.1), (0.4, 0.1), (0.401, 0.1), (0.999, 0.999)]
    one = [(Request(p[:2], q[:1], (x,)), uniforms) for x in range(3) for uniforms in chosen]
    two = [(Request(p, q, (2, x)), (0.1, u, v)) for x in range(3) for u in (0.1, 0.9) for v in (0.2, 0.8)]
    points = [(Request(p, None, (0, 2)), (u, v, 0.6)) for u in (0.4, 0.6) for v in (0.1, 0.3)]
    plain = [(Request(p[:1], None, ()), (u,)) for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.999)]
    return [*one, *two, *points, *plain]


def _random() -> Iterator[tuple[Request, tuple[float, ...]]]:
    """Rows of 2 to 16 tokens with zeros, in multiples of 2**-10, up to 5 drafts; drafts drawn from q, or point masses."""
    generator = np.random.default_rng(7)
    for number in range(NUM_RANDOM):
        k, vocab = int(generator.integers(0, 6)), int(generator.integers(2, 17))
        p, q = _dyadic(generator, k + 1, vocab), _dyadic(generator, k, vocab)
        drafts = tuple(first_above(row, float(generator.random())) for row in q)
        uniforms = tuple(float(np.round(u, 4)) for u in generator.random(k + 1))
        yield Request(p, None if number % 4 == 3 else q, drafts), uniforms


def _dyadic(generator: np.random.Generator, count: int, vocab: int) -> Any:
    weights = generator.gamma(0.6, size=(count, vocab))
    rows = np.floor(weights / weights.sum(axis=1, keepdims=True) * 1024)
    if count:
        rows[np.arange(count), rows.argmax(axis=1)] += 1024 - rows.sum(axis=1)
    return rows / 1024


def _allowed(case: EdgeCase) -> list[list[int]]:
    """For each number of accepted drafts the tokens that the target can give behind them; none where a draft cannot come."""
    request, allowed = case.request, []
    possible = True
    for accepted in range(len(request.drafts) + 1):
        row = request.p[accepted]
        fine = possible and case.errors != "required" and (case.at_most is None or accepted <= case.at_most)
        allowed.append(np.flatnonzero(row > 0).tolist() if fine else [])
        if accepted < len(request.drafts):
            x = request.drafts[accepted]
            possible = possible and 0 <= x < len(row) and bool(row[x] > 0)
    return allowed


# ---------------------------------------------------------------- laws


def _law_requests() -> list[Request]:
    p = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])
    q = np.array([[0.2, 0.3, 0.5], [0.5, 0.2, 0.3]])
    quarter = np.array([[0.25, 0.75], [0.75, 0.25], [0.5, 0.5]])
    return [
        Request(p[:1], np.zeros((0, 3)), ()),
        *(Request(p[:2], q[:1], (x,)) for x in range(3)),
        *(Request(p, q, (x, y)) for x in range(3) for y in range(3)),
        *(Request(p, None, drafts) for drafts in ((0, 1), (2, 2))),
        *(Request(quarter, quarter[::-1][:2], (x, y)) for x in range(2) for y in range(2)),
    ]


def law(rule: str, request: Request) -> list[list[Any]]:
    """The law of a rule's answer to one request, drafts given: [accepted, token, fraction]."""
    q = PointMass() if request.q is None else DenseRows(tuple(request.q))
    masses: dict[tuple[int, int], Fraction] = {}
    for leaf in verdicts(list(request.p), Proposal(request.drafts, q), RULES[rule], 0):
        answer = (len(leaf.outcome) - 1, leaf.outcome[-1])
        masses[answer] = masses.get(answer, Fraction(0)) + leaf.mass
    return [[*answer, str(mass.limit_denominator(10**6))] for answer, mass in sorted(masses.items()) if mass]


# ---------------------------------------------------------------- reading, and comparing


def load() -> list[dict[str, Any]]:
    """The vectors that come with the package."""
    return [json.loads(line) for line in (files("truedraw.audit") / "vectors.jsonl").read_text().splitlines()]


def request_of(vector: dict[str, Any]) -> Request:
    p = np.array([decode_row(row) for row in vector["p"]])
    q = None if vector["q"] is None else np.array([decode_row(row) for row in vector["q"]])
    return Request(p, q if q is None or q.size else q.reshape(0, p.shape[1]), tuple(vector["drafts"]))


def disagreements(subject: Subject) -> tuple[int, list[str]]:
    """How many `answer` vectors there are, and those that a verifier with injected uniforms answers otherwise. Raises Lost."""
    picked = [v for v in load() if v["kind"] == "answer" and len(v["drafts"]) >= subject.min_drafts]
    outcomes = subject.ask_many([(request_of(v), given(v["uniforms"])) for v in picked])
    wrong = []
    for vector, outcome in zip(picked, outcomes, strict=True):
        if not isinstance(outcome, Answer) or [outcome.accepted, outcome.token] not in vector["right"]:
            told = f"[{outcome.accepted}, {outcome.token}]" if isinstance(outcome, Answer) else str(outcome)
            wrong.append(f"drafts {vector['drafts']}, uniforms {vector['uniforms']}: {told}, right is {vector['right']}")
    return len(picked), wrong


def text() -> str:
    return "".join(json.dumps(vector, separators=(",", ":")) + "\n" for vector in generate())


if __name__ == "__main__":
    sys.stdout.write(text())
