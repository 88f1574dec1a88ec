"""truedraw on a model of transformers against transformers' own generate: plain, prompt lookup and assisted generation.

    pip install 'torch==2.13.0' && pip install -e '.[demo,transformers]'
    python benchmarks/transformers_own.py [--temperature T] [--rounds N] [--assistant FOLDER] [--modules FILE]

The demo model in bfloat16, one process, the shipped workloads; every way answers every prompt in each round, in turns. Figures
are tokens per second over all rounds and ratios to `generate` without drafts. The assistant is a model with the same
tokenizer; the demo model has no smaller relative, and without one the first half of its own layers assists. Last line: JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from common import last_line

from truedraw import Engine, SamplingParams
from truedraw.bench import workloads
from truedraw.runners import transformers_files

TOKENS = 160
MODEL = "hf:smollm2"

Way = Callable[[list[int], int], int]
"""Answers a prompt's tokens with a seed, and tells how many tokens it made."""


def ours(engine: Engine, temperature: float, max_draft: int | None) -> Way:
    def answer(prompt: list[int], seed: int) -> int:
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed)
        return len(engine.generate([prompt], params, max_draft=max_draft)[0].tokens)

    return answer


def theirs(model: transformers.PreTrainedModel, temperature: float, **options: object) -> Way:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}

    def answer(prompt: list[int], seed: int) -> int:
        torch.manual_seed(seed)
        given = torch.tensor([prompt])
        made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, **sampling, **options)
        return made.shape[1] - len(prompt)

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--assistant", type=Path)
    parser.add_argument("--modules", type=Path)
    parser.add_argument("--workload", help="one of the workloads; default: all")
    given = parser.parse_args()
    _, model, _ = transformers_files.load("smollm2", None, "cpu", print)
    model.eval()
    temperature = given.temperature
    ways = {"generate": theirs(model, temperature), "prompt lookup": theirs(model, temperature, prompt_lookup_num_tokens=10)}
    if given.assistant is not None:
        assistant = transformers.AutoModelForCausalLM.from_pretrained(given.assistant, dtype=model.dtype).eval()
        ways["assisted"] = theirs(model, temperature, assistant_model=assistant)
    else:
        ways["assisted"] = theirs(model, temperature, assistant_early_exit=model.config.num_hidden_layers // 2)
    with (
        Engine.load(MODEL, drafter="mtp", mtp_modules=given.modules, context=2048) as mtp,
        Engine.load(MODEL, drafter="suffix+mtp", mtp_modules=given.modules, context=2048) as both,
    ):
        ways |= {
            "truedraw, plain": ours(mtp, temperature, 0),
            "truedraw, mtp": ours(mtp, temperature, None),
            "truedraw, suffix+mtp": ours(both, temperature, None),
        }
        figures = {}
        for name, texts in workloads.read(workloads.shipped(), raw=False).items():
            if given.workload not in (None, name):
                continue
            prompts = [mtp.encode(text) for text in texts]
            made, took = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
            for way in ways.values():
                way(prompts[0][-8:], 0)
            for seed in range(given.rounds):
                for prompt in prompts:
                    for way in list(ways)[seed % len(ways) :] + list(ways)[: seed % len(ways)]:
                        started = time.perf_counter()
                        made[way] += ways[way](prompt, seed)
                        took[way] += time.perf_counter() - started
            speeds = {way: made[way] / took[way] for way in ways}
            figures[name] = {way: {"tps": speeds[way], "ratio": speeds[way] / speeds["generate"]} for way in ways}
            print(f"{name:14} " + "   ".join(f"{way} {speeds[way]:.1f} ({speeds[way] / speeds['generate']:.2f})" for way in ways))
    last_line(benchmark="transformers_own", temperature=temperature, rounds=given.rounds, figures=figures)


main()
