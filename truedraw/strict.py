"""A configuration in which rows are bit-identical whatever the pass: checked before it is trusted, priced
before it is used (DESIGN.md 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from truedraw import calibrate
from truedraw.errors import IncompatibleModels, InvalidParameter
from truedraw.registry import LoadOptions, Model, load_model

SIZES = (1, 2, 3, 4, 6, 8, 16, 32)
CACHED = 1100
"""Tokens behind which rows are compared, where the context has room for them."""


def load(spec: str, options: LoadOptions, say: Callable[[str], None]) -> Model:
    """Load `spec` with a bf16 KV cache and a stream for each slot, and keep it only if its rows are the same
    for every pass size and prompt chunk tried.

    `say` is told the price: plain passes against the fastest configuration. Raises IncompatibleModels,
    with the measured TV, where rows differ.
    """
    if options.kv_type not in ("f16", "bf16"):
        raise InvalidParameter("kv_type", options.kv_type, "bf16, which --strict takes by itself: leave it out")
    model = load_model(spec, replace(options, kv_type="bf16", kv_unified=False), say)
    runner = model.runner
    if not runner.identity:
        return model  # a toy: its rows are what its function says
    try:
        cached = min(CACHED, runner.max_length - 64)
        if cached < 1:
            raise InvalidParameter("context", runner.max_length, "at least 65 tokens, to check that rows are bit-identical")
        say(f"strict: comparing rows behind {cached} tokens")
        text = calibrate.real_text(model.tokenizer, cached + 40)
        told = calibrate.size_classes(runner, text, cached, SIZES)
        told += calibrate.size_classes(runner, text, cached, (1, 1, 8), chunk=64)[1:]
        worst = max(told, key=lambda one: one.max_tv)
        if any(one.name != "a" for one in told):
            raise IncompatibleModels(
                f"no configuration of {spec} has bit-identical rows here: passes of {worst.size} tokens differ from single ones "
                f"by a TV of {worst.mean_tv:.2%}, at most {worst.max_tv:.2%}: take q8_0 or q4_0 weights, or no --strict"
            )
        say(_price(spec, options, model, cached, say))
    except BaseException:
        runner.close()
        raise
    return model


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
