"""Python callables as subjects of an audit: a few lines for each way to call a verifier.

    numpy         verify(p, q, drafts, uniforms=...) -> (accepted, token); arrays, as convention.py has them
    torch         the same with tensors
    hugging-face  _speculative_sampling(candidate_input_ids, candidate_logits, candidate_length, new_logits,
                  is_done_candidate) -> (valid_tokens, n_matches), as in transformers' generation/utils.py
    vllm          rejection sampler (target_probs, bonus_token_ids, draft_probs, draft_token_ids) -> output ids with -1
                  behind the last; the bonus token is drawn outside of it, here from p's last row

Randomness can be injected where the callable has a parameter `uniforms` (an array) or `rng` (a function that
returns the next uniform); where it has neither, it uses its own, and the audit is one of samples.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np

from truedraw.audit.convention import Answer, Draw, Refused, Request, Subject, WrongAnswer, one_by_one, read_answer
from truedraw.errors import InvalidParameter, UsageError
from truedraw.sampling import inverse_cdf

Injection: TypeAlias = Literal["uniforms", "rng", "none"]
Function: TypeAlias = Callable[..., Any]
Call: TypeAlias = Callable[[Request, dict[str, Any], Draw], tuple[Any, Any]]
"""(request, keywords that carry the randomness, uniforms for what the adapter draws itself) -> accepted, token."""

ADAPTERS = ("numpy", "torch", "hugging-face", "vllm")
MAX_DRAWS = 100_000
"""A step that asks its rng for more uniforms than that will not end."""


# ---------------------------------------------------------------- finding it


def load_callable(spec: str) -> Function:
    """What MODULE:CALLABLE or FILE.py:CALLABLE names; dots lead into classes and objects. Raises UsageError."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InvalidParameter("callable", spec, "MODULE:CALLABLE or FILE.py:CALLABLE")
    found: Any = _module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{where} has no {name!r}: names it has are {', '.join(_names(found)) or 'none'}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{spec} is a {type(found).__name__}: something that can be called is needed")
    return found  # type: ignore[no-any-return]  # callable


def _module(where: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            path = Path(where)
            made = importlib.util.spec_from_file_location(path.stem, path)
            assert made is not None and made.loader is not None
            module = importlib.util.module_from_spec(made)
            sys.modules[path.stem] = module
            made.loader.exec_module(module)
            return module
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where} cannot be imported: {type(error).__name__}: {error}") from None


def _names(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))][:8]


def injection(function: Function) -> Injection:
    """How its randomness can be injected, from the names of its parameters."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "none"
    return "uniforms" if "uniforms" in names else "rng" if "rng" in names else "none"


# ---------------------------------------------------------------- calling it


def subject(function: Function, name: str, *, adapter: str = "numpy", dtype: str = "float64") -> Subject:
    """A callable as a subject. Raises UsageError where torch is needed and not installed."""
    if adapter not in ADAPTERS:
        raise InvalidParameter("adapter", adapter, ", ".join(ADAPTERS))
    if dtype not in ("float32", "float64"):
        raise InvalidParameter("dtype", dtype, "float32 or float64")
    way = injection(function)
    array = _torch_array(dtype) if adapter in ("torch", "hugging-face") else lambda values: np.array(values, dtype=dtype)
    call = calls(function, adapter, array)

    def ask(request: Request, draw: Draw) -> Answer:
        stream = _Stream(draw)
        noise: dict[str, Any] = {}
        if way == "uniforms":
            noise["uniforms"] = array([draw(i) for i in range(request.num_uniforms)])
        elif way == "rng":
            noise["rng"] = stream
        try:
            with np.errstate(all="ignore"):
                accepted, token = call(request, noise, draw)
            answer = read_answer(accepted, token, request)
        except WrongAnswer:
            stream.check()
            raise
        except (Exception, SystemExit) as error:
            stream.check()
            raise Refused(f"{type(error).__name__}: {error}"[:300]) from None
        stream.check()
        return answer

    return Subject(
        name=name,
        ask=ask,
        ask_many=one_by_one(ask),
        injected=way != "none" and adapter != "hugging-face",
        reproduce=lambda request, uniforms: _command(name, adapter, way, request, uniforms),
        float32=dtype == "float32",
        min_drafts=1 if adapter == "hugging-face" else 0,
    )


class _Stream:
    """The uniforms as a function without arguments. Whatever stops the exploration is kept from the callable,
    which might swallow it, and raised when the callable is done."""

    def __init__(self, draw: Draw) -> None:
        self._draw, self._count = draw, 0
        self._stopped: Exception | None = None

    def __call__(self) -> float:
        self._count += 1
        if self._count > MAX_DRAWS:
            raise RuntimeError(f"more than {MAX_DRAWS:,} uniforms were asked for in one step")
        if self._stopped is None:
            try:
                return self._draw(self._count - 1)
            except Exception as stopped:
                self._stopped = stopped
        return 0.5

    def check(self) -> None:
        if self._stopped is not None:
            raise self._stopped


def calls(function: Function, adapter: str, array: Callable[[Any], Any]) -> Call:
    """The adapter of that name; `array` makes an array of the callable's own kind from a nested list or array."""

    def convention(request: Request, noise: dict[str, Any], draw: Draw) -> tuple[Any, Any]:
        q = None if request.q is None else array(request.q)
        return _pair(function(array(request.p), q, list(request.drafts), **noise))

    def hugging_face(request: Request, noise: dict[str, Any], draw: Draw) -> tuple[Any, Any]:
        k, vocab = len(request.drafts), request.p.shape[1]
        q = point_rows(request, vocab) if request.q is None else request.q
        with np.errstate(divide="ignore", invalid="ignore"):
            logits, drafted = np.log(request.p)[None], np.log(q)[None]
        ids = np.array([[0, *request.drafts]])
        tokens, accepted = _pair(function(_ids(array, ids), array(drafted), k, array(logits), False, **noise))
        return accepted, np.asarray(tokens).reshape(-1)[-1]

    def vllm(request: Request, noise: dict[str, Any], draw: Draw) -> tuple[Any, Any]:
        k = len(request.drafts)
        bonus = inverse_cdf(request.p[k], draw(k)) if np.isfinite(request.p[k]).all() else 0
        told = function(
            target_probs=array(request.p[None, :k]),
            bonus_token_ids=np.array([[bonus]]),
            draft_probs=None if request.q is None else array(request.q[None]),
            draft_token_ids=np.array([request.drafts], dtype=np.int64).reshape(1, k),
            **noise,
        )
        row = [int(token) for token in np.asarray(told).reshape(-1)]
        kept = row[: row.index(-1)] if -1 in row else row
        if not kept or len(kept) > k + 1 or tuple(kept[:-1]) != request.drafts[: len(kept) - 1]:
            raise WrongAnswer(f"answered the ids {row}: accepted drafts of {list(request.drafts)}, one token, then -1 are needed")
        return len(kept) - 1, kept[-1]

    return {"hugging-face": hugging_face, "vllm": vllm}.get(adapter, convention)


def point_rows(request: Request, vocab: int) -> Any:
    """Point masses as rows, shape (k, vocab)."""
    rows = np.zeros((len(request.drafts), vocab))
    for i, x in enumerate(request.drafts):
        if 0 <= x < vocab:
            rows[i, x] = 1.0
    return rows


def _pair(answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise WrongAnswer(f"answered {answer!r}"[:200] + ": a pair is needed")
    return answer[0], answer[1]


def _torch_array(dtype: str) -> Callable[[Any], Any]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise UsageError("torch is not installed: pip install torch, or take --adapter numpy") from None
    return lambda values: torch.tensor(np.asarray(values), dtype=getattr(torch, dtype))


def _ids(array: Callable[[Any], Any], ids: Any) -> Any:
    """Token ids in the callable's own kind of array."""
    made = array(ids)
    return made.astype(np.int64) if isinstance(made, np.ndarray) else made.long()


def _command(name: str, adapter: str, way: Injection, request: Request, uniforms: Sequence[float]) -> str:
    """A line of shell that repeats one request; for the adapters with a signature of their own, what it is in words."""
    q = "None" if request.q is None else f"np.array({request.q.tolist()})"
    noise = {"uniforms": f", uniforms=np.array({list(uniforms)})", "rng": f", rng=iter({list(uniforms)}).__next__", "none": ""}[
        way
    ]
    module, _, attribute = name.rpartition(":")
    values = f"np.array({request.p.tolist()}), {q}, {list(request.drafts)}{noise}"
    if adapter != "numpy" or module.endswith(".py"):
        return f"{name} through the {adapter} adapter, with p, q, drafts{', uniforms' if noise else ''} = {values}"
    return (
        f'python -c "import numpy as np; from numpy import nan, inf; from {module} import {attribute.split(".")[0]}; '
        f'print({attribute}({values}))"'
    )
