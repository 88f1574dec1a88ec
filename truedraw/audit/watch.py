"""The engine's rule under watch: the rule itself, and evidence on whether what it emits is drawn from p."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from truedraw.audit.evidence import Evidence
from truedraw.audit.planted_model import Place, Sizes
from truedraw.protocols import StepNoise
from truedraw.sampling import TargetRows
from truedraw.types import Proposal, Verdict
from truedraw.verify import Rule, children

_SAME = 1e-12  # rows that differ by no more are one row


@dataclass(slots=True)
class Watch:
    """Stands around a rule and looks at what it emits; the verdicts are not touched.

    coupled    whether drafts may share noise with what comes out: then those that were cut for what they are tell of it, and
               of such proposals only p is looked at
    sizes      is told every token, while faults are sized
    same       steps whose drafts came from rows equal to the target's; refused: those of them that did not keep all
    forbidden  of the first token with p = 0
    """

    evidence: Evidence
    stop_ids: frozenset[int]
    coupled: bool
    sizes: Sizes | None = None
    steps: int = 0
    same: int = 0
    refused: int = 0
    forbidden: str = ""

    def around(self, rule: Rule) -> Rule:
        def verify(proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
            rows = TargetRows.of(target_rows)
            verdict = rule(proposal, rows, noise)
            self._look(proposal, rows, verdict, noise.start)
            return verdict

        return verify

    def _look(self, proposal: Proposal, rows: TargetRows, verdict: Verdict, start: int) -> None:
        self.steps += 1
        emitted = [*(proposal.tokens[i] for i in verdict.path), verdict.next_token]
        same = proposal.q.sampled and proposal.is_chain
        blind = self.coupled and proposal.q.sampled and proposal.survival is not None
        for place, (node, token) in enumerate(zip((-1, *verdict.path), emitted, strict=True)):
            p = rows[node + 1]
            drafts = children(proposal, node)
            known = not blind and bool(drafts) and 0 <= proposal.tokens[drafts[0]] < len(p)
            q = proposal.q.row(drafts[0], proposal.tokens[drafts[0]], len(p)) if known else None
            if not 0 <= token < len(p) or p[token] <= 0:
                self.forbidden = self.forbidden or f"token {token} at position {start + place}: its row gives it no probability"
            self.evidence.add(p, q, token)
            if self.sizes is not None:
                self.sizes.add(Place(p, q, proposal.is_chain, place == 0))
            same = same and (not drafts or (q is not None and bool(np.abs(p - q).max() <= _SAME)))
            if token in self.stop_ids:
                return  # what a rule answers behind the end is not emitted
        if same and len(proposal):
            self.same += 1
            self.refused += len(verdict.path) < len(proposal)
