"""llama.cpp's rows by weights, KV type and size of the pass, against those of the same weights in f32 arithmetic.

    pip install -e '.[demo]'
    python benchmarks/audits/size_classes.py

Prints the table of docs/audits/llama_cpp.md. About ten minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator

from truedraw import agreement, calibrate
from truedraw.registry import LoadOptions, f32_twin, load_model
from truedraw.types import Probs, TokenArray

WEIGHTS = ("f32", "bf16", "q8_0", "q4_0")
KV_TYPES = ("f16", "bf16", "q8_0")  # f32 is cast to f16 by flash attention: the same rows
LENGTHS = (32, 256, 1100)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def exact_laws(weights: str, text: TokenArray) -> dict[int, Probs]:
    """By cached length."""
    options = LoadOptions(context=LENGTHS[-1] + 100)
    loaded = load_model(f"smollm2:{weights}", options)
    told = {}
    with f32_twin(loaded, options, lambda message: None) as twin:
        for length in LENGTHS:
            twin.runner.rollback(0, 0)
            calibrate.fill(twin.runner, 0, text[:length])
            told[length] = agreement.laws(agreement.decode(twin.runner, text, length)[0])
    loaded.runner.close()
    return told


def classes(weights: str, kv_type: str, text: TokenArray, exact: dict[int, Probs]) -> Iterator[str]:
    """Lines of the table: the classes of bit-identical rows at each cached length."""
    loaded = load_model(f"smollm2:{weights}", LoadOptions(context=LENGTHS[-1] + 100, kv_type=kv_type))
    for length in LENGTHS:
        loaded.runner.rollback(0, 0)
        calibrate.fill(loaded.runner, 0, text[:length])
        known = agreement.Comparison(agreement.decode(loaded.runner, text, length)[0], exact[length])
        sizes: dict[agreement.Agreement, list[int]] = {}
        for size, told in zip(SIZES, agreement.size_classes(loaded.runner, text, length, SIZES, known=known), strict=True):
            sizes.setdefault(told, []).append(size)
        nearest = min(told.mean_tv_f32 or 0.0 for told in sizes)
        for told, members in sizes.items():
            mark = " *" if len(sizes) > 1 and told.mean_tv_f32 == nearest else ""
            far = " | ".join(f"{tv:.5f}" for tv in (told.mean_tv, told.max_tv, told.mean_tv_f32, told.max_tv_f32))
            yield f"| {weights} | {kv_type} | {length} | {', '.join(map(str, members))}{mark} | {far} |"
    loaded.runner.close()


def main() -> None:
    tokenizer = load_model("smollm2:q8_0", LoadOptions(context=512)).tokenizer
    text = agreement.real_text(tokenizer, LENGTHS[-1] + agreement.MARGIN)
    print("| weights | KV | cached | pass sizes | mean TV to size 1 | max | mean TV to f32 | max |")
    print("|---|---|---|---|---|---|---|---|")
    for weights in WEIGHTS:
        exact = exact_laws(weights, text)
        for kv_type in KV_TYPES:
            for line in classes(weights, kv_type, text, exact):
                print(line, flush=True)


if __name__ == "__main__":
    main()
