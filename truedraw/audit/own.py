"""truedraw's own rules in the convention of an audit: truedraw audit function truedraw.audit.own:block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy.typing as npt

from truedraw.prove.exact import AnnouncedRows
from truedraw.prove.explore import NUM_VALUES, Ask, ScriptedNoise
from truedraw.randomness import Purpose
from truedraw.registry import RULES
from truedraw.sampling import TargetRows, inverse_cdf
from truedraw.types import DenseRows, PointMass, Proposal
from truedraw.verify import Rule

Verifier: TypeAlias = Callable[..., tuple[int, int]]


def in_convention(rule: Rule) -> Verifier:
    """A rule with the signature (p, q, drafts, uniforms) -> (accepted, token): convention.py.

    Acceptance i and the race at position i take uniforms[i], the residual and the bonus the last one. A race enters by its
    law: one uniform, by inverse CDF.
    """

    def verify(p: npt.ArrayLike, q: npt.ArrayLike | None, drafts: Sequence[int], uniforms: Sequence[float]) -> tuple[int, int]:
        rows, k = TargetRows.of(p), len(drafts)
        if k == 0:
            return 0, inverse_cdf(rows[0], float(uniforms[0]))
        proposal = Proposal(tuple(drafts), PointMass() if q is None else DenseRows(tuple(q)))  # type: ignore[arg-type]  # rows
        values = [int(float(u) * NUM_VALUES) for u in uniforms]
        script: dict[Ask, int] = {(Purpose.BONUS, k): values[k]}
        for i in range(k + 1):
            script[Purpose.ACCEPT, i] = script[Purpose.RACE_TOKEN, i] = values[i]
            script[Purpose.RESIDUAL, i] = values[k]
        verdict = rule(proposal, AnnouncedRows(len(rows), rows.__getitem__), ScriptedNoise(script, 0))
        return verdict.num_accepted, verdict.next_token

    return verify


token = in_convention(RULES["token"])
block = in_convention(RULES["block"])
coupled = in_convention(RULES["coupled"])
multidraft = in_convention(RULES["multidraft"])
traversal = in_convention(RULES["traversal"])
resample_from_target = in_convention(RULES["resample_from_target"])
