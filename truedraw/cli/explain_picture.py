"""The picture of truedraw explain: what is kept of each token, what comes out, and how often each rule accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from truedraw.cli.explain_inputs import Position
from truedraw.cli.picture import write_picture
from truedraw.prove.explain import ROUNDING, Explanation
from truedraw.types import Probs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_TOKENS = 12
_LONGEST_NAME = 18
_KEPT, _RESIDUAL, _REJECTED, _EXACT, _LOSSY = "#9aa5b4", "#2e7d4f", "#d9a28f", "#4c6a92", "#b3402f"


def save_picture(path: str, position: Position, top: int, told: str) -> None:
    """Write it, with `top` tokens, a dozen at most; `told` is the sentence above all."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    explained = position.explanation
    tokens = explained.top(min(top, _MOST_TOKENS))
    names = [_printable(position.name(token)) for token in tokens]
    num_others = len(explained.p) - len(tokens)
    if num_others:
        names.append(f"{num_others} others")
    height = 2.6 + 0.36 * max(len(names), len(explained.rules))
    figure = Figure(figsize=(15, height), layout=ConstrainedLayoutEngine(w_pad=0.12, wspace=0.03))
    rows, laws, rules = figure.subplots(1, 3, width_ratios=(1.1, 1.1, 1))
    _rows(rows, explained, tokens)
    _laws(laws, explained, tokens)
    for axes in (rows, laws):
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.04 * max(rows.dataLim.x1, laws.dataLim.x1))
    _acceptances(rules, explained)
    for axes in (rows, laws, rules):
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.7 / height), frameon=False, fontsize=9)
    figure.suptitle(_printable(told, longest=240), fontsize=10, parse_math=False, wrap=True)
    write_picture(path, figure)


def _with_others(values: Probs, tokens: list[int]) -> Probs:
    """Of each token, and summed over the others if there are any."""
    shown = values[tokens]
    if len(tokens) == len(values):
        return shown
    others = np.ones(len(values), dtype=np.bool_)
    others[tokens] = False
    return np.append(shown, values[others].sum())


def _rows(axes: Axes, explained: Explanation, tokens: list[int]) -> None:
    """p above q for each token: what they share, and what each has alone."""
    p, q = explained.p, explained.q
    shared = _with_others(np.minimum(p, q), tokens)
    places = np.arange(len(shared))
    label: str | None = f"min(p, q): drafted and kept, {explained.alpha:.3f}"
    for shift, more, less, color, alone in (
        (-0.2, p, q, _RESIDUAL, "p above q: the residual"),
        (0.2, q, p, _REJECTED, "q above p: drafted and rejected"),
    ):
        axes.barh(places + shift, shared, height=0.36, color=_KEPT, label=label)
        excess = _with_others(np.maximum(more - less, 0.0), tokens)
        alone += f", {explained.total_variation:.3f}"
        axes.barh(places + shift, excess, left=shared, height=0.36, color=color, label=alone)
        label = None
    axes.set(title="Target p (upper bars) and draft q (lower bars)", xlabel="probability")


def _laws(axes: Axes, explained: Explanation, tokens: list[int]) -> None:
    """What comes out under the token rule and under the naive one, and p as a mark."""
    for shift, name, color in ((-0.2, "token", _EXACT), (0.2, explained.naive.name, _LOSSY)):
        law = _with_others(explained.rule(name).law, tokens)
        axes.barh(np.arange(len(law)) + shift, law, height=0.36, color=color, label=f"law of {name}")
    p = _with_others(explained.p, tokens)
    axes.vlines(p, np.arange(len(p)) - 0.45, np.arange(len(p)) + 0.45, color="black", linewidth=1.5, label="p")
    axes.set(title="What comes out", xlabel="probability")


def _acceptances(axes: Axes, explained: Explanation) -> None:
    """A bar for each rule, the numbers beside it, and the limits."""
    labelled = {_EXACT: "the law is p", _LOSSY: "the law is not p"}
    for place, rule in enumerate(explained.rules):
        distance = rule.drift.total_variation
        color = _LOSSY if distance > ROUNDING else _EXACT
        axes.barh(place, rule.acceptance, height=0.7, color=color, label=labelled.pop(color, None))
        told = f"{rule.acceptance:.3f}" + (f", TV {distance:.3f}" if color == _LOSSY else "")
        axes.text(1.02, place, told, va="center", fontsize=9)
    alpha, bound = explained.alpha, explained.two_draft_bound
    axes.axvline(alpha, color="black", linestyle="--", linewidth=1, label=f"alpha, the most of one draft at law p: {alpha:.3f}")
    axes.axvline(
        bound, color="black", linestyle=":", linewidth=1, label=f"the most of two independent drafts at law p: {bound:.3f}"
    )
    axes.set_yticks(range(len(explained.rules)), [rule.name for rule in explained.rules])
    axes.set_ylim(len(explained.rules) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set(title="How often a draft is accepted", xlabel="probability")


def _printable(text: str, longest: int = _LONGEST_NAME) -> str:
    """Without letters that the font lacks, and not too long."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties())).get_charmap()
    shown = "".join(letter if ord(letter) in known else ascii(letter)[1:-1] for letter in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
