"""Planted faults, each one that shipped somewhere (FAULTS.md) or that the theory warns of
(ALGORITHMS.md), and the check that must catch it.

A certificate that no fault can fail proves nothing: these are its positive controls. The faults
themselves are in `planted_rules`, `planted_noise`, `planted_engine` and `planted_tensors`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from truedraw.prove import engine_check, engine_law, keys, shaping, tensors
from truedraw.prove.coupling import RACE_ROWS, RACE_TOLERANCE, Draw, certify_coupling, coupled_chain, race_error
from truedraw.prove.exact import Parts, certify
from truedraw.prove.problems import Case, cases
from truedraw.verify import Rule


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a check fails. total_variation: of the faulty law, where the check is one of laws."""

    told: str
    total_variation: float | None = None


Catch = Callable[[], Evidence | None]
"""Runs a check on a fault: the evidence, or None if the fault got through."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted fault, where it comes from, and the check that must catch it."""

    name: str
    source: str
    catch: Catch


def mutants() -> list[Mutant]:
    """Those on tensors where torch is installed."""
    from truedraw.prove.planted_engine import ENGINE
    from truedraw.prove.planted_noise import NOISE
    from truedraw.prove.planted_rules import RULES
    from truedraw.prove.planted_tensors import TENSORS

    return [*RULES, *NOISE, *ENGINE, *(TENSORS if tensors.available() else [])]


# ---------------------------------------------------------------- how they are caught


def by_certificate(parts: Parts, problems: Callable[[], tuple[Case, ...]] = cases) -> Catch:
    """Any problem on which the exact law is off."""

    def catch() -> Evidence | None:
        for problem, lengths in problems():
            done = certify(problem, parts, lengths)
            if not done.exact:
                if done.met_twice:
                    return Evidence(f"race noise met twice on {problem.name}, draft lengths {lengths}")
                reason = "the law is off"
                if done.forbidden is not None:
                    reason = f"the text {done.forbidden} is impossible"
                return Evidence(f"{reason} on {problem.name}, draft lengths {lengths}", float(done.total_variation))
        return None

    return catch


def by_text(rule: Rule) -> Catch:
    """Any noise vector that gives another text than plain decoding."""

    def catch() -> Evidence | None:
        for problem, _lengths in cases():
            done = certify_coupling(problem, rule, range(20), (coupled_chain,))
            if not done.exact:
                return Evidence(f"{done.num_different} of {done.num_tried} texts are not plain decoding's on {problem.name}")
        return None

    return catch


def by_race(draw: Draw) -> Catch:
    """Any row whose race has another law."""

    def catch() -> Evidence | None:
        for row, block in RACE_ROWS:
            off = race_error(np.array(row), block, draw=draw)
            if off > RACE_TOLERANCE:
                return Evidence(f"the race is off on {len(row)} tokens in blocks of {block}", off)
        return None

    return catch


def by_keys(owner: Any, name: str, replacement: Any) -> Catch:
    """Exchange a piece of the noise while its streams are looked at."""

    def catch() -> Evidence | None:
        with patched(owner, name, replacement):
            fault = keys.first_fault()
        return None if fault is None else Evidence(fault)

    return catch


def by_shaping(owner: Any, name: str, replacement: Any) -> Catch:
    """Exchange a piece of the shaping while it is compared with its definition."""

    def catch() -> Evidence | None:
        with patched(owner, name, replacement):
            fault = shaping.first_fault()
        return None if fault is None else Evidence(fault)

    return catch


def by_engine(owner: Any, name: str, replacement: Any, *, law: Callable[[], float] | None = None) -> Catch:
    """Exchange one function of the engine while its invariants are checked.

    law: tells by how much its law is off, which may be nothing at all.
    """

    def catch() -> Evidence | None:
        with patched(owner, name, replacement):
            fault = engine_check.first_failure()
            off = None if law is None else law()
        return None if fault is None else Evidence(fault, off)

    return catch


def by_engine_law(owner: Any, name: str, replacement: Any) -> Catch:
    """Exchange one function of the engine while its law is enumerated."""

    def catch() -> Evidence | None:
        with patched(owner, name, replacement):
            return worst_engine_law()

    return catch


def worst_engine_law() -> Evidence | None:
    for setting in engine_law.settings():
        off = engine_law.total_variation(setting)
        if off:
            return Evidence(f"the engine's law is off: {setting.name}", float(off))
    return None


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
