"""The verify step alone: k + 1 rows of float32 logits to a verdict, every draft accepted, the dearest case.

Columns: with the loops; with NumPy alone, which gives the same bits; the quickest NumPy formulation that only
has to have the law (its own exp and sums, argpartition for top-k); torch's softmax and multinomial, where torch is
installed; and reading the rows once (their maxima). All alternate in one process, three runs of each in a row of
which the quickest counts (the first finds the caches as the column before left them: 0.1 ms more for top-k); medians
over the rounds, in microseconds.

    python benchmarks/kernel_speed.py [REPEATS]

The second table is the kernels one by one. What was tried as a loop and dropped, at a vocabulary of 49k: the
maxima of neighbouring ids for top-k (37 us, NumPy's of strided groups 25 us; the loop that stayed takes those too).
Never tried: penalties, which touch a few tokens only, and top-p, most of which is NumPy's own partition and sort.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import last_line

from truedraw import kernels
from truedraw.randomness import Noise
from truedraw.sampling import TargetRows, law
from truedraw.types import DenseRows, Proposal, SamplingParams
from truedraw.verify import block, coupled

VOCABS = (32_000, 49_152, 128_256, 151_936)
LENGTHS = range(1, 9)
MODES = {
    "greedy": SamplingParams(temperature=0),
    "top-k 50": SamplingParams(temperature=1, top_k=50),
    "top-k 100": SamplingParams(temperature=1, top_k=100),
    "all": SamplingParams(temperature=1),
}
FLOORS = {"greedy": 500, "top-k 50": 500, "top-k 100": 500, "all": 2000}
"""Microseconds, at a vocabulary of 49k and k = 7."""

CONTEXT = np.arange(40, dtype=np.int32)
NOISE = Noise(5).at(len(CONTEXT))


def logits(length: int, vocab: int) -> Any:
    return (np.random.default_rng(vocab).normal(size=(length + 1, vocab)) * 3).astype(np.float32)


def target(rows: Any, params: SamplingParams) -> TargetRows:
    """As the engine makes them: shaped when the rule looks."""
    return TargetRows(len(rows), lambda index: law(rows[index], params, CONTEXT, 4))


def ours(rows: Any, params: SamplingParams, rule: str) -> Callable[[], int]:
    """One verdict with every draft accepted; its number of accepted drafts."""
    length = len(rows) - 1
    shaped = target(rows, params)
    if rule == "block":  # drafts drawn from the target's own rows
        proposal = Proposal(
            tuple(int(shaped[i].argmax()) for i in range(length)), DenseRows(tuple(shaped[i] for i in range(length)))
        )
        return lambda: len(block.verify(proposal, target(rows, params), NOISE).path)
    proposal = Proposal(tuple(shaped.race(i, NOISE.race(NOISE.start + i)) for i in range(length)))
    return lambda: len(coupled.verify(proposal, target(rows, params), NOISE).path)


def quickest_numpy(rows: Any, params: SamplingParams) -> Callable[[], int]:
    """Each row drawn from by a race in one level over the candidates, or in two over the vocabulary."""

    def draw(row: Any, position: int) -> int:
        if params.temperature == 0:
            return int(row.argmax())
        noise = NOISE.race(position)
        if params.top_k:
            few = np.argpartition(row, len(row) - params.top_k)[len(row) - params.top_k :]
            weights = np.exp(row[few].astype(np.float64) - row.max())
            return int(few[np.argmin(noise.tokens(0, len(few)) / weights)])
        weights = np.exp(np.subtract(row, row.max(), dtype=np.float64))
        masses = np.add.reduceat(weights, np.arange(0, len(row), 64))
        first = 64 * int(np.argmin(noise.blocks(len(masses)) / masses))
        inside = weights[first : first + 64]
        return first + int(np.argmin(noise.tokens(first, len(inside)) / inside))

    def run() -> int:
        with np.errstate(divide="ignore", over="ignore"):
            return len([draw(row, NOISE.start + i) for i, row in enumerate(rows)])

    return run


def torchs(rows: Any, params: SamplingParams) -> Callable[[], int]:
    import torch

    tensor = torch.from_numpy(rows)

    def run() -> int:
        if params.temperature == 0:
            return len(tensor.argmax(dim=1).tolist())
        if params.top_k:
            values, ids = tensor.topk(params.top_k, dim=1)
            return len(ids.gather(1, values.softmax(dim=1).multinomial(1)).tolist())
        return len(tensor.softmax(dim=1, dtype=torch.float64).multinomial(1).tolist())

    return run


def timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Microseconds. The order turns, so that none always runs behind the same other."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name == "loops":
                kernels.warm()
            took = min(timed(runs[name]) for _ in range(3))
            if name == "loops":
                kernels.cool()
            if turn >= 2:  # the first warm up
                seconds[name].append(took)
    return {name: statistics.median(values) * 1e6 for name, values in seconds.items()}


def verify_table(repeats: int) -> list[dict[str, Any]]:
    torch = importlib.util.find_spec("torch") is not None
    if not torch:
        print("torch is not installed: its column is left out")
    table = []
    columns = ("loops", "numpy", "quickest", "torch", "read")
    print(f"{'vocab':>7} {'k':>2} {'mode':10} {'rule':8}", *(f"{name:>7}"[-8:] for name in columns), "  us")
    for vocab in VOCABS:
        for mode, params in MODES.items():
            for length in LENGTHS:
                rows = logits(length, vocab)
                for rule in ("coupled",) if mode == "greedy" else ("coupled", "block"):
                    run = ours(rows, params, rule)
                    assert run() == length
                    runs = {"loops": run, "numpy": run, "quickest": quickest_numpy(rows, params)}
                    runs["read"] = lambda rows=rows: [row.max() for row in rows]
                    if torch:
                        runs["torch"] = torchs(rows, params)
                    took = medians(runs, repeats)
                    table.append(
                        {"vocab": vocab, "k": length, "mode": mode, "rule": rule, **{n: round(t, 1) for n, t in took.items()}}
                    )
                    shown = [f"{took[name]:7.0f}" if name in took else "      -" for name in columns]
                    print(f"{vocab:7} {length:2} {mode:10} {rule:8}", *shown)
    return table


def kernel_table(repeats: int) -> list[dict[str, Any]]:
    """Each kernel with its loop and with NumPy, at a vocabulary of 49k."""
    row = logits(0, 49_152)[0]
    best = float(row.max())
    weights = kernels.soften(row, best, 1.0)
    ids = kernels.top_k(row, 50)
    few, p = weights[ids], weights / weights.sum()
    q = np.random.default_rng(0).permutation(p)
    runs: dict[str, Callable[[], Any]] = {
        "soften": lambda: kernels.soften(row, best, 1.0),
        "soften 50": lambda: kernels.soften(row[ids], best, 1.0),
        "block_sums": lambda: kernels.block_sums(weights),
        "block_sums 50": lambda: kernels.block_sums_of_few(ids, few, len(row)),
        "top_k 50": lambda: kernels.top_k(row, 50),
        "excess": lambda: kernels.excess(p, q, 0.9),
    }
    table = []
    for name, run in runs.items():
        took = medians({"loops": run, "numpy": run}, repeats)
        table.append({"kernel": name, **{n: round(t, 1) for n, t in took.items()}})
        print(f"{name:17} loop {took['loops']:6.1f} us, numpy {took['numpy']:6.1f} us: {took['numpy'] / took['loops']:.1f} times")
    return table


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    started = time.perf_counter()
    if not kernels.warm(print):
        sys.exit("numba is not installed or keeps no code here: there is nothing to compare")
    print(f"the loops were ready after {time.perf_counter() - started:.2f} s")
    table = verify_table(repeats)
    one_by_one = kernel_table(10 * repeats)
    for line in table:
        if (line["vocab"], line["k"]) == (49_152, 7):
            kept = "holds" if line["loops"] < FLOORS[line["mode"]] else "MISSED"
            print(
                f"{line['mode']} by {line['rule']}: {line['loops'] / 1000:.2f} ms, under {FLOORS[line['mode']] / 1000} ms: {kept}"
            )
    last_line(benchmark="kernels", repeats=repeats, microseconds=table, kernels=one_by_one)


main()
