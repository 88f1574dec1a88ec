"""What truedraw explain reads: two rows typed or in files, or those of two models behind a prompt."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from truedraw.cache import CachedModel
from truedraw.cli.files import read_bytes, read_text
from truedraw.cli.output import Progress
from truedraw.drafters.model import check_same_vocabulary
from truedraw.engine import Engine
from truedraw.errors import PromptError, RowError, UsageError
from truedraw.protocols import Tokenizer
from truedraw.prove.explain import Explanation, explain
from truedraw.registry import LoadOptions, Model, load_model
from truedraw.sampling import shape
from truedraw.text.prompt import Prompt
from truedraw.types import Probs, SamplingParams, TokenArray

_ROW = "numbers as in 0.5,0.3,0.2 or 1/2,1/3,1/6, or the path of a .json, .npy or text file with them"


@dataclass(frozen=True, slots=True)
class Position:
    """Two rows explained, where they come from, how tokens are called, and what a reader should know."""

    explanation: Explanation
    source: str
    name: Callable[[int], str] = str
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------- numbers


def read_rows(p: str, q: str) -> Position:
    """Rows as typed, or from files. Raises UsageError."""
    rows = {name: _read_row(name, text) for name, text in (("p", p), ("q", q))}
    try:
        explanation = explain(rows["p"], rows["q"])
    except RowError as error:
        raise UsageError(str(error)) from None
    sums = {name: float(np.asarray(row, dtype=np.float64).sum()) for name, row in rows.items()}
    notes = tuple(f"{name} sums to {total:.6g} and was divided by it" for name, total in sums.items() if abs(total - 1) > 1e-9)
    return Position(explanation, f"Rows as given, vocabulary {len(explanation.p)}.", notes=notes)


def _read_row(name: str, text: str) -> npt.ArrayLike:
    try:
        return [_number(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):  # no numbers, so a path
        pass
    if text.endswith(".npy"):
        return _array(name, text)
    content = read_text(name, text, _ROW).strip()
    if not content:
        raise UsageError(f"{name}: {text} is empty: needed are numbers, one for each token")
    return _json_list(name, content, text) if content[0] in "[{" else _listed(name, content, text)


def _number(text: str) -> float:
    """A decimal number or a fraction. Raises ValueError or ZeroDivisionError."""
    numerator, slash, denominator = text.partition("/")
    return float(numerator) / float(denominator) if slash else float(numerator)


def _array(name: str, path: str) -> npt.ArrayLike:
    try:
        array = np.load(io.BytesIO(read_bytes(name, path, _ROW)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{name}: {path} is no NumPy array: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise UsageError(f"{name}: {path} holds {getattr(array, 'dtype', 'several arrays')}: one array of numbers is needed")
    return array


def _json_list(name: str, content: str, path: str) -> npt.ArrayLike:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: {path} is no JSON: {error}") from None
    if not isinstance(values, list):
        raise UsageError(f"{name}: {path} holds no list: needed are numbers, one for each token")
    for token, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{name}: {path} has {json.dumps(value)[:80]} for token {token}: a number is needed")
    try:
        return [float(value) for value in values]
    except OverflowError:
        raise UsageError(f"{name}: {path} has an integer that no float can hold: probabilities are needed") from None


def _listed(name: str, content: str, path: str) -> npt.ArrayLike:
    """Numbers parted by commas, spaces or line ends."""
    row: list[float] = []
    for part in content.replace(",", " ").split():
        try:
            row.append(_number(part))
        except (ValueError, ZeroDivisionError):
            raise UsageError(f"{name}: {path} has {part[:80]!r} for token {len(row)}: a number is needed") from None
    return row


# ---------------------------------------------------------------- two models


def rows_of_models(
    model: str, draft_model: str, prompt: str, params: SamplingParams, *, raw: bool, context: int | None, threads: int | None
) -> Position:
    """The rows that a step would have behind the prompt: the target's and the draft model's, shaped alike."""
    with Progress() as progress:
        target = load_model(model, LoadOptions(context=context, threads=threads), progress.say)
        with Engine(target) as engine:
            window = LoadOptions(context=target.runner.max_length, threads=threads, clip_context=True)
            draft = load_model(draft_model, window, progress.say)
            with closing(draft.runner):
                check_same_vocabulary(target.tokenizer, draft.tokenizer)
                template = target.tokenizer.chat_template is not None
                text: Prompt = [{"role": "user", "content": prompt}] if template and not raw else prompt
                tokens = np.asarray(engine.encode(text), dtype=np.int32)
                vocab = target.runner.vocab_size
                p = _row(target, tokens, params, vocab, "target")
                q = _row(draft, tokens, params, vocab, "draft model")
                shown = [_shown(target.tokenizer, token) for token in range(vocab)]
    notes = () if template or raw else (f"{model} has no chat template: the prompt is continued as it stands",)
    source = f"Rows of {model} (p) and {draft_model} (q) behind {len(tokens)} prompt tokens."
    return Position(explain(p, q), source, shown.__getitem__, notes)


def _row(model: Model, tokens: TokenArray, params: SamplingParams, vocab: int, name: str) -> Probs:
    """The law of the next token over the target's `vocab` ids: draft logits behind it are dropped, missing ones are -inf."""
    if len(tokens) > model.runner.max_length:
        limit = f"the {name} holds {model.runner.max_length}"
        raise PromptError(f"the prompt has {len(tokens)} tokens and {limit}: take a larger --context or a shorter prompt")
    logits = CachedModel(model.runner).logits([(0, tokens)], [1])[0].logits[0]
    fitted = np.full(vocab, -np.inf)
    fitted[: len(logits)] = logits[:vocab]
    return shape(fitted, params, tokens, len(tokens), model=name)


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """A token's text in quotes, with escapes for what cannot be seen; a control token's name without."""
    data = tokenizer.token_bytes(token)
    text = (data or tokenizer.token_text(token)).decode("utf-8", "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return f'"{visible}"' if data else visible or f"token {token}"
