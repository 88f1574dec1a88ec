"""Faults in the rules on tensors: the indices of a packed batch, its padding, its noise, its arithmetic."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from truedraw.prove.mutants import Catch, Evidence, Mutant, patched
from truedraw.prove.tensors import Question, Verify, first_difference, on_tensors

if TYPE_CHECKING:
    from truedraw.verify.torch import Verdicts


@cache
def _module(name: str) -> Any:
    return importlib.import_module(f"truedraw.verify.{name}")


def _caught(rule: str, verify: Verify) -> Evidence | None:
    told = first_difference(rule, verify)
    return None if told is None else Evidence(told)


def _exchanged(rule: str, module: str, name: str, replacement: Callable[[Any], Any]) -> Catch:
    """Exchange one function; `replacement` makes it from the shipped one."""

    def catch() -> Evidence | None:
        with patched(_module(module), name, replacement(getattr(_module(module), name))):
            return _caught(rule, on_tensors)

    return catch


def _rules(name: str, source: str, fault: Callable[[str], Catch], rules: Sequence[str] = ("token",)) -> list[Mutant]:
    return [Mutant(f"{name}, {rule} on tensors", source, fault(rule)) for rule in rules]


def _row_shifted(shipped: Any) -> Any:
    return lambda layout, depths: shipped(layout, depths + 1)


def _neighbours_forgotten(shipped: Any) -> Any:
    """Places target rows as if they were packed like drafts, one for each."""
    return lambda layout, depths: shipped(replace(layout, sequence=layout.sequence * 0), depths)


def _draft_row_shifted(shipped: Any) -> Any:
    return lambda first, depths, total: shipped(first - 1, depths, total).clamp(min=0)


def _padding_counts(shipped: Any) -> Any:
    return lambda k, depths: shipped(k, depths) | True


def _residual_from_p(shipped: Any) -> Any:
    return lambda batch, layout, depth, worth: shipped(batch, layout, depth, worth) * 0


def _block_residual_of_token(shipped: Any) -> Any:
    return lambda batch, layout, accepted, worth, noise: shipped(batch, layout, accepted, worth * 0 + 1, noise)


def _uncapped(shipped: Any) -> Any:
    def worths(batch: Any, layout: Any) -> Any:
        table = shipped(batch, layout)
        ratios = _module("torch")._target_probs(batch, layout) / _module("torch")._draft_probs(batch, layout)
        table[:, 1:] = ratios.cumprod(1)
        return table

    return worths


def _shared_noise(rule: str) -> Catch:
    """Every sequence of a batch meets the noise of its first."""

    def verify(rule: str, asked: Sequence[Question]) -> Verdicts:
        return on_tensors(rule, [replace(question, noise=asked[0].noise) for question in asked])

    return lambda: _caught(rule, verify)


def _step_with(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """The inverse CDF with its first answer moved: change(weights, place)."""

    def replacement(shipped: Any) -> Any:
        def step(weights: Any, u: Any) -> Any:
            place, left = shipped(weights, u)
            return change(weights, place), left

        return step

    return replacement


def _fresh_left(shipped: Any) -> Any:
    """The draw inside a block reuses the uniform of the block instead of what is left of it."""
    return lambda weights, u: (shipped(weights, u)[0], u)


def _one_block_further(shipped: Any) -> Any:
    """The noise inside a block is that of the next."""
    return lambda rows, noise: shipped(rows, replace(noise, tokens=noise.tokens.roll(64, 1)))


def _rules_module(name: str, source: str, function: str, replacement: Any, rules: Sequence[str] = ("token",)) -> list[Mutant]:
    return _rules(name, source, lambda rule: _exchanged(rule, "torch", function, replacement), rules)


TENSORS = [
    *_rules_module("target rows one too far", "FAULTS B18", "_target_row", _row_shifted, ("token", "block", "coupled")),
    *_rules_module("neighbours' bonus rows forgotten", "FAULTS B18", "_target_row", _neighbours_forgotten, ("token", "coupled")),
    *_rules_module("draft rows of the neighbour", "FAULTS B18", "_draft_row", _draft_row_shifted, ("token", "block")),
    *_rules_module("padding accepted", "FAULTS B17", "_inside", _padding_counts, ("token", "coupled")),
    *_rules_module("u <= p/q", "ALGORITHMS 1.2", "_keeps", lambda shipped: lambda u, q, p: u * q <= p),
    *_rules_module("resample from p after a rejection", "ALGORITHMS 1.5", "_excess", _residual_from_p),
    *_rules_module("the token rule's residual", "ALGORITHMS 3.2", "_own_token", _block_residual_of_token, ("block",)),
    *_rules_module("uncapped joint ratios", "ALGORITHMS 3.4", "_prefix_worths", _uncapped, ("block",)),
    *_rules("one noise for the whole batch", "FAULTS B20", _shared_noise, ("token", "coupled")),
    *_rules(
        "inverse CDF from the next token on",
        "FAULTS B01",
        lambda rule: _exchanged(
            rule, "torch_sampling", "_step", _step_with(lambda weights, place: (place + 1).clamp(max=weights.shape[1] - 1))
        ),
    ),
    *_rules(
        "inside a block with the block's uniform",
        "FAULTS B20",
        lambda rule: _exchanged(rule, "torch_sampling", "_step", _fresh_left),
    ),
    *_rules_module("race noise of the next block", "DESIGN 4", "race_draw", _one_block_further, ("coupled",)),
]
