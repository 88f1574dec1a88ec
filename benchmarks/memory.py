"""Peak resident memory of truedraw and of a bare loop, each in a process of its own, at a context of
4,096 and after 2,000 tokens. Last line: JSON.

    python benchmarks/memory.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import llama_cpp as llama
from common import BareLoop, bare_model, last_line

from truedraw.runners.llamacpp import LlamaTokenizer

TOKENS, CONTEXT = 2000, 4096
PROMPT = "Once upon a time there was a small village by the sea. " * 20


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bare() -> dict[str, float]:
    model = bare_model()
    loop = BareLoop(model, CONTEXT)
    loop.start(LlamaTokenizer(llama.llama_model_get_vocab(model), model).encode(PROMPT))
    loop.run(10, sampled=True)
    early = peak()
    loop.run(TOKENS - 10, sampled=True)
    return {"early": early, "late": peak()}


def ours(drafter: str) -> dict[str, float]:
    from truedraw import Engine, SamplingParams

    with Engine.load("smollm2", drafter=drafter, context=CONTEXT) as engine:
        request = engine.submit(PROMPT, SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1))
        steps = engine.run(request)
        emitted = early = 0.0
        for step in steps:
            emitted += step.num_emitted
            early = early or (peak() if emitted >= 10 else 0.0)
        return {"early": early, "late": peak()}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(bare() if sys.argv[1] == "bare" else ours(sys.argv[1])))
        return
    figures = {}
    for which in ("bare", "none", "ngram", "random"):
        out = subprocess.run([sys.executable, __file__, which], capture_output=True, text=True, check=True).stdout
        figures[which] = json.loads(out.splitlines()[-1])
        more = figures[which]["late"] - figures["bare"]["late"]
        early, late = figures[which]["early"], figures[which]["late"]
        print(
            f"{which:7} peak {early:6.0f} MB after 10 tokens, {late:6.0f} MB after {TOKENS}: {more:+5.0f} MB over the bare loop"
        )
    last_line(benchmark="memory", tokens=TOKENS, context=CONTEXT, megabytes=figures)


main()
