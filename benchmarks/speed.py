"""Speculative against plain decoding on a few workloads: paired, alternating in one process.

The figure is the median over pairs of (plain seconds per token / speculative seconds per token).
Prints the README's table; last line: JSON.

    python benchmarks/speed.py [PAIRS] [DRAFT_LENGTH ...]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from common import last_line

from truedraw import Engine, FixedLength, SamplingParams

RIVER = (
    "The river Thames flows through southern England, including London. At 215 miles, it is the longest river entirely in "
    "England. It rises near Kemble in Gloucestershire and flows into the North Sea near Tilbury in Essex. Along its course it "
    "passes Oxford, Reading, Henley and Windsor."
)
CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


WORKLOADS = {
    "copy a text": ask(f"Copy this text exactly:\n\n{RIVER}"),
    "correct a text": ask((Path(__file__).parent.parent / "examples" / "demo_prompt.txt").read_text()),
    "go on with code": CODE + "\n\nclass SavingsAccount:\n    def __init__(self, owner, balance):\n",
    "go on with a list": "1. apples, 3 kg\n2. pears, 2 kg\n3. plums, 5 kg\n4. grapes, 1 kg\n5.",
    "open question": ask("What is gravity?"),
}
SETTINGS = (
    ("smollm2 (q8_0)", "smollm2", "ngram", None, tuple(WORKLOADS)),
    # the only draft model at hand is the target itself in fewer bits: far too slow for a drafter
    ("smollm2:f32", "smollm2:f32", "model", "smollm2:q4_0", ("go on with a list", "open question")),
)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    lengths: list[int | None] = [int(length) for length in sys.argv[2:]] or [None]
    figures = []
    print("| target | drafter | workload | temperature | plain tok/s | speculative tok/s | speed-up | tokens per step |")
    print("|---|---|---|---|---|---|---|---|")
    for shown, target, drafter, draft, workloads in SETTINGS:
        with Engine.load(target, drafter=drafter, draft_model=draft) as engine:
            for workload in workloads:
                prompt = WORKLOADS[workload]
                for temperature in (0.0, 0.7):
                    for length in lengths:
                        if length is not None:
                            engine.policy = FixedLength(length)
                        row = measure(engine, prompt, temperature, pairs)
                        label = drafter if draft is None else f"{drafter}, {draft}"
                        label += "" if length is None else f", {length}"
                        figures.append(
                            {"target": target, "drafter": label, "workload": workload, "temperature": temperature, **row}
                        )
                        print(
                            f"| {shown} | {label} | {workload} | {temperature} | {row['plain']:.0f} | {row['speculative']:.0f} "
                            f"| {row['speedup']:.2f} | {row['tokens_per_step']:.1f} |",
                            flush=True,
                        )
    last_line(benchmark="speed", pairs=pairs, rows=figures)


def measure(engine: Engine, prompt: object, temperature: float, pairs: int) -> dict[str, float]:
    """Medians over pairs; each pair has a seed of its own, and both sides of it the same."""
    ratios, speeds, steps = [], ([], []), []
    for seed in range(pairs + 1):
        params = SamplingParams(max_tokens=160, temperature=temperature, seed=seed)
        rates = [0.0, 0.0]
        for side in (0, 1) if seed % 2 else (1, 0):
            result = engine.generate([prompt], params, max_draft=0 if side == 0 else None)[0]
            rates[side] = result.stats.tokens_per_second or 0.0
            if side == 1:
                steps.append(result.stats.tokens_per_step or 0.0)
        if seed:  # the first pair warms up
            ratios.append(rates[1] / rates[0])
            speeds[0].append(rates[0])
            speeds[1].append(rates[1])
    median = statistics.median
    return {
        "plain": median(speeds[0]),
        "speculative": median(speeds[1]),
        "speedup": median(ratios),
        "tokens_per_step": median(steps[1:]),
    }


main()
