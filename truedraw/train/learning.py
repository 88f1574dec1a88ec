"""The loop that a module learns in: bounded by time or steps, resumed exactly where its last checkpoint was."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from truedraw.drafters.mtp_modules import MATRICES, MtpShape
from truedraw.errors import RunError, one_line
from truedraw.protocols import TokenMatrices
from truedraw.train.batches import Batch, collate, order, teacher, tensors
from truedraw.train.network import first_weights, match, unrolled
from truedraw.train.store import Answer

CHECKPOINT = "checkpoint.pt"
EVALUATION_SHARE = 0.06
PATIENCE_SHARE = 0.5
MOST_JUDGED = 4096
"""Tokens of held-out answers that evaluations on the way look at; the last one looks at all."""


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """How a module learns.

    seconds        of learning at most; steps: optimiser steps at most (None: no bound of its own)
    seed           of first weights and of the order of batches
    depths         drafts in a row that are trained and told about
    shallow_share  of the steps that train the first draft alone; the others go evenly to every larger number of depths:
                   a depth costs as much as the first, and the first counts most
    depth_weight   what a draft weighs in the loss, against the one before it
    batch_tokens   in a step
    matrix_rate, vector_rate  learning rates of the matrices (Muon) and of the norms (AdamW)
    matrix_decay   decoupled weight decay of the matrices: answers are few, and are seen many times
    kl, tv         weights of the two parts of the loss, see network.match
    patience       evaluations without a better one that end it, if they also took PATIENCE_SHARE of the time: a run that goes on
                   for longer than was planned learns fast again, and is worse for a while
    evaluate_every, checkpoint_every  seconds of learning; evaluations take EVALUATION_SHARE of the time at most
    """

    seconds: float = math.inf
    steps: int | None = None
    seed: int = 0
    depths: int = 3
    shallow_share: float = 0.5
    depth_weight: float = 0.7
    batch_tokens: int = 1024
    matrix_rate: float = 0.02
    vector_rate: float = 0.005
    matrix_decay: float = 0.3
    kl: float = 1.0
    tv: float = 0.0
    patience: int = 12
    evaluate_every: float = 30.0
    checkpoint_every: float = 120.0


@dataclass(slots=True)
class Progress:
    """Where learning is: kept in checkpoints.

    history  of each evaluation: seconds, step, loss since the one before, acceptance by depth on held-out answers
    best     the expected number of accepted drafts, when it was largest; since: evaluations since then
    """

    step: int = 0
    epoch: int = 0
    place: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: float = -1.0
    since: int = 0


class Learning:
    """One module while it learns.

    folder  where checkpoint.pt is kept; an existing one is taken up if it is of the same options and data
    scale   of the target's states, see network.Network
    Raises RunError for a checkpoint of something else.
    """

    def __init__(
        self,
        shape: MtpShape,
        draft_ids: npt.NDArray[np.int64],
        matrices: TokenMatrices,
        learn: Sequence[Answer],
        held_out: Sequence[Answer],
        options: LearningOptions,
        folder: Path,
    ) -> None:
        self.shape, self.options, self.draft_ids = shape, options, draft_ids
        self._learn, self._held_out = learn, held_out
        self._embedding, self._read_out = tensors(matrices, draft_ids)
        self._path = folder / CHECKPOINT
        some = np.concatenate([np.asarray(answer.states, np.float32) for answer in learn[:64]])
        spread = torch.from_numpy(np.sqrt(np.square(some).mean(axis=0) + 1e-6))
        self.weights = first_weights(shape, spread, options.seed)
        vectors = [weight for name, weight in self.weights.items() if name not in MATRICES]
        self._optimisers: dict[str, Any] = {
            "muon": torch.optim.Muon(
                [self.weights[name] for name in MATRICES], lr=options.matrix_rate, weight_decay=options.matrix_decay
            ),
            "adam": torch.optim.AdamW(vectors, lr=options.vector_rate, weight_decay=0.0, betas=(0.9, 0.99)),
        }
        self.progress = Progress()
        self.best = self._copied()
        self._losses: list[float] = []
        if self._path.exists():
            self._take_up()

    # ------------------------------------------------------------ going on

    def run(
        self, told: Callable[[Progress], None] = lambda progress: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Learn until time, steps or patience are used up. told is called after each step."""
        options, progress = self.options, self.progress
        judged = saved = progress.seconds
        took = 0.0
        if not progress.history:
            took = self._timed(self._judge, clock)
        while not self._over():
            self._timed(self._step, clock)
            if progress.seconds - judged >= max(options.evaluate_every, took / EVALUATION_SHARE):
                took = self._timed(self._judge, clock)
                judged = progress.seconds
            if progress.seconds - saved >= options.checkpoint_every:
                self._timed(self.checkpoint, clock)
                saved = progress.seconds
            told(progress)
        if progress.history[-1]["step"] < progress.step:
            self._judge()
        self.checkpoint()

    def _timed(self, work: Callable[[], None], clock: Callable[[], float]) -> float:
        started = clock()
        work()
        took = clock() - started
        self.progress.seconds += took
        return took

    def _over(self) -> bool:
        options, progress = self.options, self.progress
        out_of_steps = options.steps is not None and progress.step >= options.steps
        return out_of_steps or progress.seconds >= options.seconds or self._out_of_patience()

    def _out_of_patience(self) -> bool:
        options, progress = self.options, self.progress
        if progress.since < options.patience:
            return False
        took = progress.seconds - progress.history[-1 - progress.since]["seconds"]
        return math.isinf(options.seconds) or took >= PATIENCE_SHARE * options.seconds

    @property
    def share_done(self) -> float:
        """Of the time or the steps, whichever is closer to its end."""
        options, progress = self.options, self.progress
        return min(1.0, max(progress.seconds / options.seconds, progress.step / options.steps if options.steps else 0.0))

    def _step(self) -> None:
        batch = self._next()
        rate = _rate(self.share_done)
        self._optimisers["muon"].param_groups[0]["lr"] = self.options.matrix_rate * rate
        self._optimisers["adam"].param_groups[0]["lr"] = self.options.vector_rate * rate
        self._losses.append(self._match(batch, self._depths(), learn=True)[0])
        if not math.isfinite(self._losses[-1]):
            raise RunError(f"the loss is {self._losses[-1]} at step {self.progress.step}: take a smaller learning rate")
        for optimiser in self._optimisers.values():
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.progress.step += 1

    def _depths(self) -> int:
        """How many this step trains: by its number, so that a resumed run draws the same."""
        options = self.options
        generator = np.random.default_rng((options.seed, self.progress.step, 1))
        shallow = options.depths == 1 or generator.random() < options.shallow_share
        return 1 if shallow else int(generator.integers(2, options.depths + 1))

    def _next(self) -> Batch:
        progress, options = self.progress, self.options
        batches = order([len(answer.tokens) for answer in self._learn], options.batch_tokens, options.seed, progress.epoch)
        chosen = batches[progress.place]
        progress.place += 1
        if progress.place == len(batches):
            progress.epoch, progress.place = progress.epoch + 1, 0
        return collate([self._learn[i] for i in chosen.tolist()], self._embedding)

    def _match(self, batch: Batch, depths: int, *, learn: bool) -> tuple[float, list[tuple[float, int]]]:
        """The loss of a batch, and by depth the sum of the acceptance and the number of its rows. learn: leave gradients."""
        with torch.no_grad():
            p = teacher(batch, self._read_out)
        weights = [self.options.depth_weight**depth for depth in range(depths)]
        loss, told = 0.0, []
        outputs, gradients = [], []
        made = unrolled(self.shape, self.weights, batch.states, batch.embeddings, depths)
        for depth, (states, weight) in enumerate(zip(made, weights, strict=True), 1):
            rows = batch.rows(depth)
            ahead = torch.nn.functional.pad(rows[:, :-1], (1, 0))  # the row of the target one place ahead
            logits = states[rows] @ self._read_out.T
            losses, alpha, gradient = match(logits, p[ahead], self.options.kl, self.options.tv)
            told.append((float(alpha.sum()), len(alpha)))
            if len(alpha):
                share = weight / sum(weights)
                loss += share * float(losses.mean())
                outputs.append(logits)
                gradients.append(gradient * (share / len(alpha)))
        if learn:
            torch.autograd.backward(outputs, gradients)
        return loss, told

    # ------------------------------------------------------------ how good it is

    @torch.no_grad()  # type: ignore[untyped-decorator]  # of a module that is not followed
    def evaluate(self, most: float = math.inf) -> list[float]:
        """By depth the mean of the sum of min(p, q) over the positions of held-out answers, the first `most` tokens of them."""
        sums = np.zeros((self.options.depths, 2))
        ends = np.cumsum([len(answer.tokens) for answer in self._held_out])
        judged = self._held_out[: max(1, int((ends <= most).sum()))]
        for chosen in order([len(answer.tokens) for answer in judged], self.options.batch_tokens, 0, 0):
            batch = collate([judged[i] for i in chosen.tolist()], self._embedding)
            sums += np.array(self._match(batch, self.options.depths, learn=False)[1])
        return [float(total / count) if count else 0.0 for total, count in sums]

    def _judge(self) -> None:
        progress = self.progress
        alphas = self.evaluate(MOST_JUDGED)
        accepted = float(np.cumprod(alphas).sum())
        loss = float(np.mean(self._losses)) if self._losses else None
        self._losses.clear()
        progress.history.append(
            {"seconds": progress.seconds, "step": progress.step, "epoch": progress.epoch, "loss": loss, "acceptance": alphas}
        )
        progress.since += 1
        if accepted > progress.best:
            progress.best, progress.since = accepted, 0
            self.best = self._copied()

    def take_best(self) -> None:
        """Go back to the weights that were best on held-out answers."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.best[name])

    def _copied(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    # ------------------------------------------------------------ checkpoints

    def checkpoint(self) -> None:
        """Write all that is needed to go on as if nothing had happened: aside first, then renamed."""
        aside = self._path.with_suffix(".part")
        kept = {
            "key": self._key(),
            "weights": self._copied(),
            "best": self.best,
            **{name: optimiser.state_dict() for name, optimiser in self._optimisers.items()},
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
            "losses": list(self._losses),
        }
        try:
            torch.save(kept, aside)
            aside.replace(self._path)
        except (OSError, RuntimeError) as error:  # torch's own writer tells a full disk as a RuntimeError
            aside.unlink(missing_ok=True)
            kept_at = "the one before it is sound" if self._path.exists() else "there is none before it"
            raise RunError(
                f"step {self.progress.step} cannot be written to {self._path}: make room ({one_line(error)}); {kept_at}"
            ) from error

    def _take_up(self) -> None:
        try:
            kept = torch.load(self._path, weights_only=True)
        except Exception as error:  # torch has no one class for a damaged file
            raise RunError(f"{self._path} cannot be read ({error}): remove it to begin anew") from error
        if kept["key"] != self._key():
            raise RunError(f"{self._path} is of other options or answers ({kept['key']}): remove it, or give the same ones")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(kept["weights"][name])
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(kept[name])
        self.best = kept["best"]
        self.progress = Progress(**kept["progress"])
        self._losses = kept["losses"]

    def _key(self) -> str:
        """What a checkpoint belongs to. Time and steps may grow between two runs."""
        o, tokens = self.options, sum(len(answer.tokens) for answer in self._learn)
        loss = f"loss {o.kl} {o.tv} {o.depth_weight} over {o.depths}, {o.shallow_share} of one"
        drafted = f"{len(self.draft_ids)} drafted ({zlib.crc32(self.draft_ids.tobytes()):08x})"
        return f"{self.shape} seed {o.seed}, batches of {o.batch_tokens}, {loss}, {drafted}, of {tokens} tokens"


def _rate(done: float) -> float:
    """A short rise, then a straight line to nothing."""
    return min(done / 0.02 + 0.05, 1.0) * (1 - 0.97 * done)
