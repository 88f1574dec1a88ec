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
    hits, tries = np.zeros((2, len(BUCKETS), 2)), np.zeros((2, len(BUCKETS), 2))
    for model in models:
        with Engine.load(model, drafter="none", context=2048, slots=4) as engine:
            for name, prompts in workloads.read(workloads.shipped(), raw=False).items():
                for i, temperature in enumerate((0.0, 1.0)):
                    params = SamplingParams(max_tokens=160, temperature=temperature, seed=11)
                    for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
                        score(engine.encode(prompt), result.tokens, hits[i], tries[i])
                print(model, name, flush=True)
    for i, name in enumerate(("GREEDY", "SAMPLED")):
        print(name)
        for start, right, count in zip(BUCKETS, hits[i], tries[i], strict=True):
            share = (right + 1) / (count + 2)  # a uniform prior worth two tokens
            print(f"    ({share[0]:.2f}, {share[1]:.2f}),  # from {start}: {count[0]:.0f} and {count[1]:.0f} tokens")
    last_line(benchmark="fit_priors", models=models, hits=hits.tolist(), tokens=tries.tolist())


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
