"""Faults in keys, noise and race."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from truedraw import randomness
from truedraw.protocols import StepNoise
from truedraw.prove.coupling import coupled_chain
from truedraw.prove.drafts import chain
from truedraw.prove.exact import NoiseFactory, Parts
from truedraw.prove.mutants import Mutant, by_certificate, by_keys, by_race, by_text
from truedraw.prove.planted_rules import drawn_cases
from truedraw.randomness import Key, Noise, Purpose, RaceNoise, Source
from truedraw.sampling import TargetRows, inverse_cdf
from truedraw.types import Probs, Proposal, Verdict
from truedraw.verify import Rule, block, coupled, token

# ---------------------------------------------------------------- the keys and the noise


def _rekeyed(change: Callable[[Key], Key]) -> NoiseFactory:
    def factory(seed: int, choice: int, source: Source) -> Noise:
        return Noise(seed, choice, lambda key, first, count: source(change(key), first, count))

    return factory


def _keyed(name: str, source: str, change: Callable[[Key], Key], rule: Rule = token.verify) -> Mutant:
    return Mutant(name, source, by_certificate(Parts(rule, chain, _rekeyed(change))))


def _by_position(key: Key) -> Key:
    """p/q noise keyed by the absolute position of the token that it decides."""
    return (
        key
        if key.purpose in (Purpose.RACE_TOKEN, Purpose.RACE_BLOCK)
        else replace(key, position=key.position + key.index, index=0)
    )


def _like_drafts(purpose: Purpose) -> Callable[[Key], Key]:
    return lambda key: replace(key, purpose=Purpose.DRAFT) if key.purpose == purpose else key


def _stays_coupled_if_a(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
    """Chooses the rule after seeing a draft that shared noise made."""
    chosen: Rule = coupled.verify if proposal.tokens[:1] == (0,) else token.verify
    return chosen(proposal, rows, noise)


def _race_of_the_step(self: Any, position: int) -> RaceNoise:
    return RaceNoise(Key(self.seed, self.choice, Purpose.RACE_TOKEN, self.start), self.source)


def _blocks_like_tokens(self: RaceNoise, count: int) -> Any:
    return randomness._exponentials(self.source(self.key, 0, count))


_KEYS = [
    _keyed("the same noise at every step", "FAULTS B50", lambda key: replace(key, position=0)),
    _keyed("the same noise at every index of a block", "FAULTS B20", lambda key: replace(key, index=0)),
    _keyed("block keyed by position", "DESIGN 4, ALGORITHMS 1.3 d", _by_position, block.verify),
    _keyed("acceptance shares the draft's noise", "ALGORITHMS 8.6", _like_drafts(Purpose.ACCEPT)),
    _keyed("residual shares the draft's noise", "ALGORITHMS 8.6", _like_drafts(Purpose.RESIDUAL)),
    _keyed(
        "bonus noise is the next step's draft noise",
        "ALGORITHMS 1.3 d",
        lambda key: (
            Key(key.seed, key.choice, Purpose.DRAFT, key.position + key.index + 1) if key.purpose == Purpose.BONUS else key
        ),
    ),
    Mutant(
        "drafts of shared noise under a p/q rule", "DESIGN 4", by_certificate(Parts(token.verify, coupled_chain), drawn_cases)
    ),
    Mutant(
        "a rule chosen by a draft of shared noise",
        "DESIGN 4",
        by_certificate(Parts(_stays_coupled_if_a, coupled_chain), drawn_cases),
    ),
    Mutant(
        "exponentials that are uniforms",
        "ALGORITHMS 8.5",
        by_keys(randomness, "_exponentials", lambda uniforms: uniforms + 2.0**-54),
    ),
    Mutant("race noise of every position alike", "FAULTS B50", by_keys(randomness.StepNoise, "race", _race_of_the_step)),
    Mutant("blocks and tokens race with the same noise", "DESIGN 4", by_keys(RaceNoise, "blocks", _blocks_like_tokens)),
    Mutant(
        "choices share their noise",
        "FAULTS B51",
        by_keys(randomness.Noise, "at", lambda self, start: randomness.StepNoise(self.seed, 0, start, self.source)),
    ),
]


# ---------------------------------------------------------------- the coupled rule and its race


def _fresh_draw_after_mismatch(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
    verdict = coupled.verify(proposal, rows, noise)
    if verdict.origin != "residual":
        return verdict
    return replace(verdict, next_token=inverse_cdf(rows[verdict.num_accepted], noise.uniform(Purpose.RESIDUAL, 0)))


def _race_keyed_by_step(proposal: Proposal, rows: TargetRows, noise: StepNoise) -> Verdict:
    return coupled.verify(proposal, rows, _StepKeyed(noise))


@dataclass(frozen=True, slots=True)
class _StepKeyed:
    """Race noise that depends on where the step began."""

    noise: StepNoise

    @property
    def start(self) -> int:
        return self.noise.start

    def uniform(self, purpose: Any, index: int) -> float:
        return self.noise.uniform(purpose, index)

    def race(self, position: int) -> Any:
        return self.noise.race(self.noise.start * 1000 + position)


def _race_won_by_the_large_end(row: Probs, noise: Any, block_size: int) -> int:
    with np.errstate(divide="ignore", invalid="ignore"):
        return int(np.argmax(np.where(row > 0, noise.tokens(0, len(row)) * row, -1.0)))


def _race_of_block_maxima(row: Probs, noise: Any, block_size: int) -> int:
    starts = np.arange(0, len(row), block_size)
    with np.errstate(divide="ignore", invalid="ignore"):
        winner = int(np.argmin(noise.blocks(len(starts)) / np.maximum.reduceat(row, starts)))
        inside = row[winner * block_size : (winner + 1) * block_size]
        return winner * block_size + int(np.argmin(noise.tokens(winner * block_size, len(inside)) / inside))


_COUPLED = [
    Mutant("a fresh draw after a mismatch", "FAULTS N3", by_text(_fresh_draw_after_mismatch)),
    Mutant("race noise keyed by the step", "FAULTS B53, DESIGN 4", by_text(_race_keyed_by_step)),
    Mutant("the race won by the large end", "ALGORITHMS 8.5", by_race(_race_won_by_the_large_end)),
    Mutant("blocks raced by their largest entry", "DESIGN 4", by_race(_race_of_block_maxima)),
]

NOISE = [*_KEYS, *_COUPLED]
