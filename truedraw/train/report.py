"""What a training tells: the facts, a card beside the weights, a plot of loss and acceptance."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import truedraw

if TYPE_CHECKING:
    from truedraw.train.learning import Learning
    from truedraw.train.mtp import TrainOptions
    from truedraw.train.store import Store


def facts(name: str, options: TrainOptions, learning: Learning, store: Store, acceptance: Sequence[float]) -> dict[str, Any]:
    """Everything that the card says, by name."""
    progress = learning.progress
    return {
        "target": name,
        "command": f"truedraw train mtp --model {name} --minutes {options.minutes:g} --seed {options.seed} "
        f"--draft-vocab {options.draft_vocab} --depths {learning.options.depths} --cache-mb {options.cache_bytes // 1_000_000}",
        "seed": options.seed,
        "acceptance": [round(float(alpha), 4) for alpha in acceptance],
        "covered": round(float(store.mass[learning.draft_ids].sum() / store.mass.sum()), 4),
        "draft_vocab": len(learning.draft_ids),
        "num_parameters": sum(int(np.prod(size)) for size in learning.shape.shapes().values()),
        "tokens": store.count(held_out=False),
        "held_out_tokens": store.count(held_out=True),
        "learning_seconds": round(progress.seconds),
        "steps": progress.step,
        "epochs": progress.epoch,
        "loss": {"kl": learning.options.kl, "tv": learning.options.tv, "depths": learning.options.depths},
        "versions": {"truedraw": truedraw.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "processor": platform.machine(),
    }


def card(told: Mapping[str, Any]) -> str:
    """The model card, Markdown."""
    depths = "\n".join(f"| {depth} | {alpha:.3f} |" for depth, alpha in enumerate(told["acceptance"], 1))
    return f"""# MTP modules for {told["target"]}

Drafts for speculative decoding with truedraw (`--drafter mtp`): one transformer block that reads the target's final hidden
states, and draws from the {told["draft_vocab"]} tokens that the target gives most (they hold {told["covered"]:.1%} of its
probability). Embeddings and output matrix are the target's, and are not in the file. They change how fast an answer comes,
never its law.

| draft | acceptance (mean of the sum of min(p, q)) |
|---|---|
{depths}

At temperature 1, on {told["held_out_tokens"]} tokens of answers to held-out prompts, which share neither template nor
subject with the {told["tokens"]} tokens that were learned from; deeper drafts given that those before were accepted.

Made by `{told["command"]}`: {told["learning_seconds"]} s of learning, {told["steps"]} steps, {told["epochs"]} epochs, \
{told["num_parameters"]:,} parameters,
loss {told["loss"]["kl"]:g} x KL + {told["loss"]["tv"]:g} x TV over {told["loss"]["depths"]} depths; truedraw \
{told["versions"]["truedraw"]}, torch {told["versions"]["torch"]}.

Data: the target's own answers to English prompts made from templates that are shipped with truedraw (chat, stories, lists, code,
structured output, quoting, several turns, plain text); nothing else. Limits: other languages and kinds of text are drafted worse,
and so are answers at high temperature. Licence: that of the target.
"""


def plot(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss and acceptance by depth against the minutes of learning, as a PNG; nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7.5, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    minutes = [row["seconds"] / 60 for row in history]
    for depth in range(len(history[0]["acceptance"])):
        upper.plot(minutes, [row["acceptance"][depth] for row in history], label=f"draft {depth + 1}")
    upper.set_ylabel("held-out acceptance")
    upper.set_ylim(0, 1)
    upper.legend()
    seen = [(minute, row["loss"]) for minute, row in zip(minutes, history, strict=True) if row["loss"] is not None]
    lower.plot([minute for minute, _ in seen], [loss for _, loss in seen], color="black")
    lower.set_ylabel("loss")
    lower.set_xlabel("minutes of learning")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    aside = path.with_suffix(".part")
    figure.savefig(aside, format="png", dpi=120)
    aside.replace(path)
