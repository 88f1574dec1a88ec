"""A rule under watch: the rule itself, and evidence on whether what it emits is drawn from p.

For runs of real models, where nothing can be enumerated. The verdicts are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.prove.goodness import Direction, Score, argmax_q, log_p, residual_direction
from truedraw.sampling import TargetRows
from truedraw.types import Proposal, Verdict
from truedraw.verify import Rule, children

DIRECTIONS: tuple[Direction, ...] = (residual_direction, log_p, argmax_q)


@dataclass(slots=True)
class Watch:
    """Wraps a rule with its signature.

    scores      for each direction, over every position that had a draft: given the text before it (its
                place in the block included) each emitted token is drawn from p under every exact rule
    acceptance  of chains: accepted against sum min(p, q), over the positions up to and including the
                first rejection; a martingale under the token rule alone
    """

    rule: Rule
    directions: tuple[Direction, ...] = DIRECTIONS
    scores: dict[str, Score] = field(init=False)
    acceptance: Score = field(default_factory=Score)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.scores = {direction.__name__: Score() for direction in self.directions}

    def __call__(self, proposal: Proposal, target_rows: TargetRows, noise: StepNoise) -> Verdict:
        rows = TargetRows.of(target_rows)
        verdict = self.rule(proposal, rows, noise)
        emitted = [*(proposal.tokens[i] for i in verdict.path), verdict.next_token]
        for node, token in zip((-1, *verdict.path), emitted, strict=True):
            self.num_tokens += 1
            drafts = children(proposal, node)
            if not drafts or not 0 <= proposal.tokens[drafts[0]] < len(rows[node + 1]):
                continue  # nothing was decided here, or the row behind is a place holder
            p = rows[node + 1]
            draft = proposal.tokens[drafts[0]]
            q = proposal.q.row(drafts[0], draft, len(p))
            for direction in self.directions:
                self.scores[direction.__name__].add(p, direction(p, q, draft), token)
            if proposal.is_chain:
                alpha = min(1.0, float(np.minimum(p, q).sum()))
                self.acceptance.add([alpha, 1 - alpha], [1.0, 0.0], int(drafts[0] not in verdict.path))
        return verdict

    def smallest_p_value(self) -> float:
        """Of all scores, at any sample size honest: multiply by their number for a family of tests."""
        return min(score.safe_p_value for score in self.scores.values())
