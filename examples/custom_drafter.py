"""A drafter of one's own: what follows a token is what followed it most often in this text so far."""

from collections import Counter
from itertools import pairwise

from truedraw import Drafter, Engine, Proposal, SamplingParams


class MostFrequentNext(Drafter):
    def propose(self, requests):
        return [Proposal(self.guess(request.context.tolist(), request.max_draft)) for request in requests]

    def guess(self, context, count):
        following = Counter(pairwise(context))
        tokens = [context[-1]]
        while len(tokens) <= count:
            seen = [(n, after) for (before, after), n in following.items() if before == tokens[-1]]
            if not seen:
                break
            tokens.append(max(seen)[1])
        return tuple(tokens[1:])


if __name__ == "__main__":
    with Engine.load("toy", drafter=MostFrequentNext()) as engine:
        result = engine.generate(["the cat sat on the mat and the"], SamplingParams(max_tokens=60, seed=1))[0]
        print(result.text)
        print(f"{result.stats.tokens_per_step:.2f} tokens per step")
