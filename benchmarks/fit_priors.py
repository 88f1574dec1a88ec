"""Fits the priors of copying: a logistic regression of whether the next token of a copy is right on the kind
of the copy, the length of its match and how often the token followed it.

Plain decoding answers benchmarks/fitting.jsonl, prompts of their own, so that the workloads of
`truedraw bench` judge what was fitted elsewhere; every answer is replayed through the drafter, which says
what it would have proposed. Prints the weights for truedraw/drafters/evidence.py, a table of how well
they fit, and as last line JSON.

    python benchmarks/fit_priors.py [MODEL ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from common import last_line

from truedraw import Engine, SamplingParams
from truedraw.bench import workloads
from truedraw.drafters.evidence import BUCKETS, ELSEWHERE, GREEDY, KINDS, RESUMED, Evidence, History, Prior
from truedraw.drafters.suffix import Text

SEED = 11
RIDGE = 0.5
PROMPTS = Path(__file__).with_name("fitting.jsonl")


class Recorder(History):
    """A history that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(GREEDY)
        self.told: list[tuple[Evidence, bool]] = []

    def score(self, seen: Evidence, right: bool) -> None:
        self.told.append((seen, right))


def main() -> None:
    models = sys.argv[1:] or ["smollm2", "smollm2:q4_0", "smollm2:bf16"]
    told: dict[float, list[tuple[Evidence, bool]]] = {0.0: [], 1.0: []}
    for model in models:
        with Engine.load(model, drafter="none", context=2048, slots=4) as engine:
            for name, prompts in workloads.read(PROMPTS, raw=False).items():
                for temperature, evidence in told.items():
                    params = SamplingParams(max_tokens=160, temperature=temperature, seed=SEED)
                    for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
                        evidence += replay(engine.encode(prompt), result.tokens)
                print(model, name, flush=True)
    for name, evidence in zip(("GREEDY", "SAMPLED"), told.values(), strict=True):
        prior = fit(evidence)
        weights = ", ".join("(" + ", ".join(f"{w:.2f}" for w in row) + ")" for row in prior.weights[:ELSEWHERE])
        print(f"{name} = Prior(({weights}, _ELSEWHERE), {prior.substituted:.2f})")
        table(prior, evidence)
    last_line(benchmark="fit_priors", models=models, tokens={str(t): len(evidence) for t, evidence in told.items()})


def replay(prompt: list[int], output: tuple[int, ...]) -> list[tuple[Evidence, bool]]:
    """What the drafter knew of its copy at each token of an answer that it did not draft, and whether it was right."""
    recorder = Recorder()
    Text(len(prompt), recorder).follow([*prompt, *output])
    return recorder.told


def fit(told: list[tuple[Evidence, bool]]) -> Prior:
    """Newton's iteration on the penalised likelihood."""
    x = np.zeros((len(told), 3 * len(KINDS) + 1))
    for row, (seen, _) in zip(x, told, strict=True):
        row[3 * seen.kind : 3 * seen.kind + 3] = seen.features
        row[-1] = seen.length == 0
    right = np.array([right for _, right in told], dtype=np.float64)
    w = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ w))
        w += np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(len(w)), x.T @ (right - p) - RIDGE * w)
    w[3 * RESUMED + 2] = 0.0  # a copy that is taken up again counts nothing
    return Prior(tuple((float(a), float(b), float(c)) for a, b, c in w[:-1].reshape(len(KINDS), 3)), float(w[-1]))


def table(prior: Prior, told: list[tuple[Evidence, bool]]) -> None:
    """By kind and match length: tokens, the share that was right, and what the prior says."""
    groups: dict[tuple[int, int], list[tuple[float, bool]]] = {}
    for seen, right in told:
        groups.setdefault((seen.kind, seen.bucket), []).append((prior.probability(seen), right))
    for (kind, bucket), pairs in sorted(groups.items()):
        expected, seen_right = np.mean(pairs, axis=0)
        print(
            f"    {KINDS[kind]:8} from {BUCKETS[bucket]:2}: {len(pairs):5} tokens, right {seen_right:.2f}, prior {expected:.2f}"
        )


if __name__ == "__main__":
    main()
