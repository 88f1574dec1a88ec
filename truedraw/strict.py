"""A configuration in which rows are bit-identical whatever the pass: checked before it is trusted, priced
before it is used (DESIGN.md 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from truedraw import calibrate
from truedraw.agreement import MARGIN, Agreement, Comparison, decode, real_text, size_classes
from truedraw.errors import IncompatibleModels, InvalidParameter
from truedraw.protocols import ModelRunner
from truedraw.registry import TRANSFORMERS, LoadOptions, Model, load_model
from truedraw.types import TokenArray

SIZES = (1, 2, 3, 4, 6, 8, 16, 32)
CACHED = 1100
"""Tokens behind which rows are compared, where the context has room for them."""


def load(spec: str, options: LoadOptions, say: Callable[[str], None]) -> Model:
    """Load `spec` with a bf16 KV cache and a stream for each slot (as it is where transformers runs it), and keep it
    only if its rows are the same for every pass size and prompt chunk tried.

    `say` is told the price: plain passes against the fastest configuration. Raises IncompatibleModels,
    with the measured TV, where rows differ.
    """
    if options.kv_type not in ("f16", "bf16"):
        raise InvalidParameter("kv_type", options.kv_type, "bf16, which --strict takes by itself: leave it out")
    has_choice = not spec.startswith(TRANSFORMERS)
    model = load_model(spec, replace(options, kv_type="bf16", kv_unified=False) if has_choice else options, say)
    runner = model.runner
    if not runner.identity:
        return model  # a toy: its rows are what its function says
    try:
        cached = min(CACHED, runner.max_length - MARGIN)
        if cached < 1:
            raise InvalidParameter(
                "context", runner.max_length, f"at least {MARGIN + 1} tokens, to check that rows are bit-identical"
            )
        say(f"strict: comparing rows behind {cached} tokens")
        told = _compare(runner, real_text(model.tokenizer, cached + MARGIN), cached)
        size, worst = max(told, key=lambda one: one[1].max_tv)
        if not all(agreement.identical for _, agreement in told):
            instead = "q8_0 or q4_0 weights" if has_choice else "a GGUF file with q8_0 or q4_0 weights, without hf:"
            raise IncompatibleModels(
                f"no configuration of {spec} has bit-identical rows here: passes of {size} tokens differ from single ones "
                f"by a TV of {worst.mean_tv:.2%}, at most {worst.max_tv:.2%}: take {instead}, or no --strict"
            )
        say(_price(spec, options, model, cached, say))
    except BaseException:
        runner.close()
        raise
    return model


def _compare(runner: ModelRunner, text: TokenArray, cached: int) -> list[tuple[int, Agreement]]:
    """Pass sizes and how their rows agree with those of single tokens, behind a prompt in chunks of 256 tokens and one
    in chunks of 64. Slot 0 is empty afterwards."""
    calibrate.fill(runner, 0, text[:cached])
    known = Comparison(decode(runner, text, cached)[0])
    told = list(zip(SIZES, size_classes(runner, text, cached, SIZES, known=known), strict=True))
    runner.rollback(0, 0)
    calibrate.fill(runner, 0, text[:cached], 64)
    told += zip((1, 8), size_classes(runner, text, cached, (1, 8), known=known), strict=True)
    runner.rollback(0, 0)
    return told


def _price(spec: str, options: LoadOptions, model: Model, cached: int, say: Callable[[str], None]) -> str:
    (ours,) = calibrate.measure(model.runner, (1,), cached, 1, seconds=0.5)
    fastest = load_model(spec, replace(options, slots=1, kv_type="f16", kv_unified=True), say)
    try:
        (theirs,) = calibrate.measure(fastest.runner, (1,), cached, 1, seconds=0.5)
    finally:
        fastest.runner.close()
    ratio = ours.seconds / theirs.seconds
    return (
        f"strict: rows are bit-identical for passes of {SIZES[0]} to {SIZES[-1]} tokens; a plain pass behind {cached} tokens "
        f"takes {1000 * ours.seconds:.1f} ms, {ratio:.2f} times the fastest ({1000 * theirs.seconds:.1f} ms)"
    )
