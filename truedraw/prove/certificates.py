"""Every exact rule that ships, with the ways to draft that its certificate runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from truedraw.protocols import StepNoise
from truedraw.prove.coupling import RACE_ROWS, RACE_TOLERANCE, certify_coupling, race_error
from truedraw.prove.drafts import chain, tree, watchful
from truedraw.prove.exact import (
    Certificate,
    Context,
    Draft,
    Law,
    Parts,
    Problem,
    certify,
    extended,
    target_law,
    target_rows,
    total_variation,
    verdict_on,
)
from truedraw.prove.explore import ScriptedNoise, explore
from truedraw.prove.problems import cases
from truedraw.registry import RULES, find_rule
from truedraw.sampling import TargetRows
from truedraw.types import Drift, Probs, Proposal, Verdict
from truedraw.verify import Rule
from truedraw.verify.family import family, for_replacement


def _scaled(p: Probs, q: Probs) -> Probs:
    """Two thirds of the largest acceptance."""
    return np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0)) * 2 / 3


def _powered(p: Probs, q: Probs) -> Probs:
    """An irrational acceptance below the largest."""
    return np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0)) ** 1.5


def _between(p: Probs, q: Probs) -> Probs:
    """A replacement law half way between the residual and p."""
    excess = np.maximum(p - q, 0.0)
    return (excess / excess.sum() + p) / 2 if excess.any() else p


FAMILY: Mapping[str, Rule] = {
    "family: two thirds of min(1, p/q)": family(_scaled),
    "family: min(1, p/q) ** 1.5": family(_powered),
    "for_replacement: half residual, half p": for_replacement(_between),
}

CHAINS: tuple[Draft, ...] = (chain, watchful)
TREES: tuple[Draft, ...] = (chain, tree("without-replacement", 2), tree("without-replacement", 3, depth=1), tree("greedy", 2))


@dataclass(frozen=True, slots=True)
class RuleReport:
    """A rule over all its problems."""

    name: str
    problems: int
    max_tv: Fraction
    exact: bool
    worst: str


def enumerated_rules() -> dict[str, tuple[Rule, tuple[Draft, ...]]]:
    """The p/q rules and how their drafts are made; coupled has a certificate of its own kind."""
    trees = {"multidraft", "traversal"}
    shipped = {name: rule for name, rule in RULES.items() if name != "coupled"}
    drafted = {name: (rule, TREES if name in trees else CHAINS) for name, rule in shipped.items()}
    return {**drafted, **{name: (rule, (chain,)) for name, rule in FAMILY.items()}}


def certificates(rule: Rule, drafts: tuple[Draft, ...]) -> Iterator[Certificate]:
    """One for each problem and way to draft. Greedy drafts and trees need q to be drawn from; other
    members of the family, of which there is no end, are run with two drafts at most."""
    for draft in drafts:
        for problem, lengths in cases():
            longest = max(max(k) if isinstance(k, tuple) else k for k in lengths)
            if (draft is chain or not problem.point) and (longest < 3 or rule not in FAMILY.values()):
                yield certify(problem, Parts(rule, draft), lengths)


def report(name: str, rule: Rule, drafts: tuple[Draft, ...]) -> RuleReport:
    done = list(certificates(rule, drafts))
    worst = max(done, key=lambda certificate: (not certificate.exact, certificate.total_variation))
    return RuleReport(
        name,
        len(done),
        max(c.total_variation for c in done),
        all(c.exact for c in done),
        f"{worst.problem}, {worst.draft_lengths}",
    )


@dataclass(frozen=True, slots=True)
class DriftReport:
    """A lossy rule over all its problems: how far its law is off, and whether it says so.

    largest_tv  of one step; largest_error: between what a step of one draft reports and what it is
    """

    name: str
    problems: int
    largest_tv: float
    largest_error: float
    honest: bool


LOSSY: Mapping[str, Rule] = {
    name: find_rule(name, allow_lossy=True)
    for name in ("biased_resample", "lenience:0.5", "thresholds:0.7,0.4", "typical:0.3,0.09")
}


def drift_report(name: str, rule: Rule) -> DriftReport:
    """Steps of one draft: the reported TV and KL are those of the enumerated law, to 1e-12 (thresholds
    takes every draft for a point mass: with drawn drafts it reports a bound). Steps of two drafts:
    the enumerated TV is at most the expected report."""
    largest, error, honest, problems = 0.0, 0.0, True, {problem: None for problem, _ in cases()}
    for problem in problems:
        for k in (1, 2):
            law, reported, divergence = _lossy_step(problem, rule, k)
            expected = target_law(problem, k + 1)
            off = float(total_variation(extended(problem, law, k + 1), expected))
            largest = max(largest, off)
            if k == 1:
                first = extended(problem, law, 1)
                target = target_law(problem, 1)
                kl = sum(
                    float(mass) * math.log(mass / target[text]) if text in target else math.inf
                    for text, mass in first.items()
                    if mass
                )
                bound_only = name.startswith("thresholds") and not problem.point
                gaps = [reported - float(total_variation(first, target)), divergence - kl if kl < math.inf else 0.0]
                error = max(error, 0.0 if bound_only else max(map(abs, gaps)))
                honest &= min(gaps) > -1e-12 and (kl < math.inf or divergence == math.inf)
            honest &= off <= reported + 1e-12
    return DriftReport(name, len(problems), largest, error, honest and error <= 1e-12)


def _lossy_step(problem: Problem, rule: Rule, k: int) -> tuple[Law, float, float]:
    """The law of one step from the start, and the expected TV and KL that it reports."""
    law: Law = {}
    reported = divergence = 0.0

    def step(noise: ScriptedNoise) -> tuple[Context, float, float]:
        proposal = chain(problem, (), k, noise)
        drifts: list[Drift] = []

        def noted(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
            verdict = rule(proposal, rows, noise)
            assert verdict.drift is not None
            drifts.append(verdict.drift)
            return verdict

        emitted = verdict_on(target_rows(problem, (), proposal), proposal, noted, noise)
        return emitted, drifts[0].total_variation, drifts[0].kl_divergence

    for leaf in explore(step, 0):
        emitted, tv, kl = leaf.outcome
        if leaf.mass:
            law[emitted] = law.get(emitted, Fraction(0)) + leaf.mass
            reported += float(leaf.mass) * tv
            divergence += float(leaf.mass) * kl
    return law, reported, divergence


def coupled_report() -> RuleReport:
    """Coupled has the law of plain decoding because it gives its text for every noise vector, and plain
    decoding has the target's because the race has the law of its row."""
    done = [certify_coupling(problem, RULES["coupled"]) for problem in {problem: None for problem, _ in cases()}]
    off = max(race_error(np.array(row), block) for row, block in RACE_ROWS)
    different = sum(certificate.num_different for certificate in done)
    return RuleReport(
        "coupled",
        len(done) + len(RACE_ROWS),
        Fraction(off),
        different == 0 and off < RACE_TOLERANCE,
        f"{different} of {sum(c.num_tried for c in done)} texts differ; race within {RACE_TOLERANCE:.0e}",
    )
