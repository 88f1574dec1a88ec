"""Train MTP modules for a target, from nothing but the target: it answers, then the modules learn to foresee it."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from truedraw.drafters import mtp_modules
from truedraw.drafters.mtp_modules import MtpShape, MtpWeights
from truedraw.errors import InvalidParameter, RunError, one_line
from truedraw.protocols import TokenMatrices
from truedraw.registry import Model
from truedraw.train.answers import answers
from truedraw.train.batches import usable
from truedraw.train.learning import CHECKPOINT, Learning, LearningOptions, Progress
from truedraw.train.store import Answer, Store

if sys.platform != "win32":
    import fcntl

MODULES, CARD, PLOT, REPORT = "modules.safetensors", "README.md", "learning.png", "report.json"

_GROUP_SECONDS = 2.0  # of answers that are written at a time
_LEAST_LEARNING = 5.0
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How modules are trained.

    minutes       in all: answering, learning, judging
    seed          of prompts, answers, first weights and order
    draft_vocab   tokens that can be drafted: those that the target's rows gave most
    answer_share  of the time, for answers: of few ones a module learns much by heart
    cache_bytes   of states on the disk at most
    answer_tokens  and tokens answered at most (None: no bound of its own)
    learning      everything about the second half; its time is set from `minutes`
    """

    minutes: float = 15.0
    seed: int = 0
    draft_vocab: int = 8192
    answer_share: float = 0.5
    cache_bytes: int = 1 << 30
    answer_tokens: int | None = None
    learning: LearningOptions = field(default_factory=LearningOptions)

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise InvalidParameter("minutes", self.minutes, "a number > 0")
        if self.draft_vocab < 1:
            raise InvalidParameter("draft_vocab", self.draft_vocab, "an integer >= 1")


@dataclass(frozen=True, slots=True)
class Told:
    """How far a training is: `done` of 1, by time; learning None: the target still answers."""

    done: float
    seconds_left: float
    num_tokens: int
    learning: Progress | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out: acceptance by depth on held-out answers, the file, and all that the card tells."""

    acceptance: tuple[float, ...]
    path: Path
    report: dict[str, Any]


def train(
    model: Model,
    folder: Path,
    options: TrainOptions,
    told: Callable[[Told], None] = lambda told: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trained:
    """Train modules for `model` in `folder`, or go on with what is there; closes the model once it has answered.

    The folder then holds the modules, a card, a plot, the report, and, to go on from, the checkpoint and the answers.
    Raises RunError, InvalidParameter and what the runner raises.
    """
    started, runner = clock(), model.runner
    if "final" not in runner.hidden_layers:
        raise InvalidParameter("model", model.name, "a model whose runner hands out its final hidden states")
    matrices = runner.token_matrices()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        return _train(model, matrices, folder, options, told, clock, started)


def _train(
    model: Model,
    matrices: TokenMatrices,
    folder: Path,
    options: TrainOptions,
    told: Callable[[Told], None],
    clock: Callable[[], float],
    started: float,
) -> Trained:
    vocab, width = matrices.embedding.shape
    name = model.name
    store = Store(folder / "answers", width, vocab, options.cache_bytes, {"target": name, "seed": options.seed})
    clocked = _Clocked(folder / "answered.json")
    if not (folder / CHECKPOINT).exists():
        _answer(model, store, options, clocked, told, clock)
    model.runner.close()
    learn = usable(answer for answer in store.answers() if not answer.held_out)
    held_out = usable(answer for answer in store.answers() if answer.held_out)
    if sum(len(answer.tokens) for answer in learn) < _LEAST_TOKENS or not held_out:
        if (folder / CHECKPOINT).exists():
            raise RunError(f"the answers that {folder / CHECKPOINT} was learned from are gone: remove it to begin anew")
        raise RunError(
            f"only {store.num_tokens} tokens were answered, {store.count(held_out=True)} held out: give it more --minutes"
        )
    draft_ids = np.sort(np.argsort(-store.mass, kind="stable")[: min(options.draft_vocab, vocab)])
    seconds = max(_LEAST_LEARNING, options.minutes * 60 - clocked.seconds - (clock() - started - clocked.now))
    learning = Learning(
        shape_for(width, vocab, name), draft_ids, matrices, learn, held_out,
        replace(options.learning, seconds=seconds, seed=options.seed), folder,
    )  # fmt: skip
    total = clocked.seconds + seconds

    def tell(progress: Progress) -> None:
        done = (clocked.seconds + progress.seconds) / total
        told(Told(min(done, 1.0), max(0.0, seconds - progress.seconds), store.num_tokens, progress))

    learning.run(tell, clock)
    return _written(folder, learning, matrices, store, options, name)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The folder, held against a second training. Raises RunError."""
    with (folder / ".lock").open("w") as file:
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another training runs in {folder}: wait until it has ended, or save to another folder") from None
        yield


class _Clocked:
    """Seconds of answering, over all runs; now: of this one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0
        self.now = 0.0

    @property
    def seconds(self) -> float:
        return self._before + self.now

    def keep(self) -> None:
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps({"seconds": self.seconds}))
        aside.replace(self._path)


def _answer(
    model: Model, store: Store, options: TrainOptions, clocked: _Clocked, told: Callable[[Told], None], clock: Callable[[], float]
) -> None:
    """Let the target answer until its share of the time, the disk or the wanted tokens are used up."""
    limit = options.minutes * 60 * options.answer_share
    wanted = math.inf if options.answer_tokens is None else options.answer_tokens
    started = kept = clock()
    before = clocked.now
    group: list[Answer] = []

    def over() -> bool:
        more = sum(len(answer.tokens) for answer in group)
        return clocked.seconds >= limit or store.full(more) or store.num_tokens + more >= wanted

    if over():
        return
    for answer in answers(model, options.seed, store.next_prompt, store.mass):
        group.append(answer)
        clocked.now = before + clock() - started
        ending = over()
        if ending or clock() - kept >= _GROUP_SECONDS:
            store.add(group)
            clocked.keep()
            kept, group = clock(), []
        told(Told(clocked.seconds / (options.minutes * 60), options.minutes * 60 - clocked.seconds, store.num_tokens))
        if ending:
            return


def shape_for(width: int, vocab_size: int, target: str) -> MtpShape:
    """One transformer block of the target's own width: heads of 64, a third of them for keys and values where that is a
    whole number, a gated MLP of 8/3 the width."""
    head_size = max(size for size in (64, 32, 16, 8, 4, 2) if width % size == 0)
    heads = width // head_size
    kv_heads = next(heads // share for share in (3, 4, 2, 1) if heads % share == 0)
    return MtpShape(width, vocab_size, heads, kv_heads, -(-width * 8 // 3 // 32) * 32, target=target)


def _written(
    folder: Path, learning: Learning, matrices: TokenMatrices, store: Store, options: TrainOptions, name: str
) -> Trained:
    """The best weights, what they are worth, and how that came about."""
    from truedraw.train import report

    learning.take_best()
    acceptance = learning.evaluate()
    arrays = {weight: tensor.numpy().astype(np.float32) for weight, tensor in learning.best.items()}
    weights = MtpWeights(learning.shape, arrays, learning.draft_ids, mtp_modules.fingerprint(matrices.embedding))
    facts = report.facts(name, options, learning, store, acceptance)
    aside = folder / f"{MODULES}.part"
    mtp_modules.save(aside, weights, {"facts": json.dumps(facts)})
    aside.replace(folder / MODULES)
    try:
        (folder / REPORT).write_text(json.dumps({**facts, "history": learning.progress.history}, indent=1) + "\n")
        (folder / CARD).write_text(report.card(facts))
        report.plot(learning.progress.history, folder / PLOT)
    except OSError as error:
        raise RunError(
            f"card, report and plot cannot be written to {folder} ({one_line(error)}): the modules are there; make room and "
            "give the same command again"
        ) from error
    return Trained(tuple(acceptance), folder / MODULES, facts)
