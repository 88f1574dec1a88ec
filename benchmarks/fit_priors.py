"""Fits the priors of copying: how often the continuation of a match is the next token, by match length
and by whether another continuation was ever seen.

Plain decoding answers the workloads; every answer is replayed through the suffix automaton. Prints the
table for truedraw/drafters/suffix.py; last line: JSON.

    python benchmarks/fit_priors.py [MODEL ...]
"""

from __future__ import annotations

import sys

import numpy as np
from common import last_line

from truedraw import Engine, SamplingParams
from truedraw.bench import workloads
from truedraw.drafters.suffix import BUCKETS, SuffixAutomaton, bucket


def main() -> None:
    models = sys.argv[1:] or ["smollm2", "smollm2:q4_0", "smollm2:bf16"]
    hits, tries = np.zeros((len(BUCKETS), 2)), np.zeros((len(BUCKETS), 2))
    for model in models:
        with Engine.load(model, drafter="none", context=2048) as engine:
            for name, prompts in workloads.read(workloads.shipped(), raw=False).items():
                for temperature in (0.0, 0.8):
                    params = SamplingParams(max_tokens=160, temperature=temperature, seed=5)
                    for prompt in prompts:
                        output = engine.generate([prompt], params)[0].tokens
                        score(engine.encode(prompt), output, hits, tries)
                print(model, name, flush=True)
    # a uniform prior worth two tokens; longer matches are never worse, and one continuation never worse than several
    table = np.maximum.accumulate((hits + 1) / (tries + 2), axis=0)
    table[:, 1] = table.max(axis=1)
    for start, row, count in zip(BUCKETS, table, tries, strict=True):
        print(f"    ({row[0]:.2f}, {row[1]:.2f}),  # from {start}: {count[0]:.0f} and {count[1]:.0f} tokens")
    last_line(benchmark="fit_priors", models=models, priors=table.round(3).tolist(), tokens=tries.sum())


def score(prompt: list[int], output: tuple[int, ...], hits: np.ndarray, tries: np.ndarray) -> None:
    automaton = SuffixAutomaton()
    for token in prompt:
        automaton.extend(token)
    for token in output:
        predicted = automaton.predicted()
        if predicted is not None:
            place = bucket(automaton.match_length), int(automaton.unanimous)
            tries[place] += 1
            hits[place] += predicted == token
        automaton.extend(token)


if __name__ == "__main__":
    main()
