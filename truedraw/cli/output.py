"""What commands print: the text as it is made, statistics, comparison, JSON."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.style import Style
from rich.table import Table

from truedraw.protocols import Tokenizer
from truedraw.types import Drift, Result, Step

DRAFT_STYLE = "bold green"


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    return Console(highlight=False, soft_wrap=True)


class Progress:
    """A spinner on standard error that appears with the first message; plain lines where it is no terminal."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._status: Status | None = None

    def say(self, message: str) -> None:
        if not self._console.is_terminal:
            print(f"truedraw: {message}", file=sys.stderr)
        elif self._status is None:
            self._status = self._console.status(message)
            self._status.start()
        else:
            self._status.update(message)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()


class TextWriter:
    """Writes steps to standard output as they come; colours accepted draft tokens if asked and able to.

    The characters go out as they are: no layout, no markup.
    """

    def __init__(self, tokenizer: Tokenizer, *, coloured: bool) -> None:
        self._colours = stdout_console()._color_system if coloured else None
        self._style = Style.parse(DRAFT_STYLE)
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_written = 0
        self._ends_line = True

    def write(self, step: Step) -> None:
        if step.text and self._colours is not None:
            for text, drafted in self._segments(step):
                self._put(text, self._style.render(text, color_system=self._colours) if drafted else text)
        elif step.text:
            self._put(step.text, step.text)

    def finish(self, text: str) -> None:
        """Write what of the whole `text` is still missing (held for a stop string that did not come),
        and end the line."""
        rest = text[self._num_written :]
        if rest:
            self._put(rest, rest)
        if not self._ends_line:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _put(self, text: str, shown: str) -> None:
        self._num_written += len(text)
        self._ends_line = text.endswith("\n")
        sys.stdout.write(shown)
        sys.stdout.flush()

    def _segments(self, step: Step) -> Iterator[tuple[str, bool]]:
        """The step's text by token. A character belongs to the token that completes it."""
        left = step.text
        for token, origin in zip(step.tokens, step.origins, strict=True):
            piece = self._decoder.decode(self._tokenizer.token_bytes(token))
            shown = left[: len(piece)]
            left = left[len(piece) :]
            if shown:
                yield shown, origin == "draft"
        if left:
            yield left, False


def summary(result: Result) -> str:
    """One line of statistics."""
    stats = result.stats
    parts = [f"{len(result.tokens)} tokens in {stats.seconds:.2f} s"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.tokens_per_step is not None:
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
    if stats.proposed:
        parts.append(f"{stats.accepted} of {stats.proposed} drafts accepted")
    parts.append(f"prompt {result.prompt_tokens} tokens in {stats.prompt_seconds:.2f} s")
    if stats.drift is not None:
        parts.append(drift(stats.drift))
    parts += [f"rule {result.rule}", f"ended by {result.finish_reason}"]
    return ", ".join(parts)


def drift(told: Drift) -> str:
    """What a lossy rule did to the law, over the run."""
    return f"law changed by a TV of {told.bound:.3g} at most (KL {told.kl_divergence:.3g} nats)"


def as_json(result: Result, seed: int | None) -> dict[str, Any]:
    """The fields of one choice."""
    stats = result.stats
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "origins": list(result.origins),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.tokens),
        "prompt_seconds": stats.prompt_seconds,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens_per_second,
        "steps": stats.steps,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_by_depth": list(stats.acceptance_by_depth),
        "tokens_per_step": stats.tokens_per_step,
        "rule": result.rule,
        "drift": None if stats.drift is None else {**asdict(stats.drift), "bound": stats.drift.bound},
        "seed": seed,
    }


def speedup(result: Result, plain: Result) -> float | None:
    """Tokens per second over plain's, from the same run; None where either took no time."""
    ours, theirs = result.stats.tokens_per_second, plain.stats.tokens_per_second
    return ours / theirs if ours and theirs else None


def first_difference(result: Result, plain: Result) -> int | None:
    """The index of the first token that differs; None if all agree."""
    if result.tokens == plain.tokens:
        return None
    pairs = zip(result.tokens, plain.tokens, strict=False)
    shared = min(len(result.tokens), len(plain.tokens))
    return next((i for i, (left, right) in enumerate(pairs) if left != right), shared)


def comparison(result: Result, plain: Result) -> Table:
    """Plain and speculative side by side."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in ("tokens", "seconds", "tokens/s", "tokens per step", "accepted"):
        table.add_column(heading, justify="right")
    for name, run in (("plain", plain), ("speculative", result)):
        stats = run.stats
        table.add_row(
            name,
            str(len(run.tokens)),
            f"{stats.seconds:.2f}",
            _shown(stats.tokens_per_second, "{:.1f}"),
            _shown(stats.tokens_per_step, "{:.2f}"),
            f"{stats.accepted}/{stats.proposed}" if stats.proposed else "-",
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
