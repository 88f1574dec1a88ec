"""Plain decoding through truedraw against a bare loop over the same low-level interface.

Both alternate in one process, 100 tokens at a time at the same cached lengths; the figure is the
median over pairs of (bare seconds / truedraw seconds): 1 is no overhead. Last line: JSON.

    python benchmarks/plain_overhead.py [PAIRS]
"""

from __future__ import annotations

import statistics
import sys

from common import BareLoop, bare_model, last_line

from truedraw import Engine, SamplingParams

TOKENS = 100


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    bare = BareLoop(bare_model(), 4096)
    figures = {}
    with Engine.load("smollm2", drafter="none") as engine:
        prompt = engine.encode("Once upon a time there was a small village by the sea. " * 3)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            ratios = []
            for seed in range(pairs + 1):
                order = (0, 1) if seed % 2 else (1, 0)
                seconds = [0.0, 0.0]
                for which in order:
                    if which == 0:
                        bare.start(prompt)
                        seconds[0] = bare.run(TOKENS, sampled=temperature > 0)
                    else:
                        params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
                        seconds[1] = engine.generate([prompt], params)[0].stats.seconds
                if seed:  # the first pair warms up
                    ratios.append(seconds[0] / seconds[1])
            figures[name] = statistics.median(ratios)
            spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
            print(f"{name:8} truedraw plain reaches {figures[name]:.3f} of the bare loop (pairs: {spread}, n = {pairs})")
    bare.close()
    last_line(benchmark="plain_overhead", pairs=pairs, tokens=TOKENS, ratio=figures)


main()
