"""Bets against an honest server, from what it draws. Every one is fair if the server is honest, whenever one looks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from truedraw.audit.client import Answer, Token
from truedraw.audit.findings import Fired
from truedraw.audit.heads import Head
from truedraw.prove.goodness import LAMBDAS
from truedraw.types import Probs

NUM_BETS = 2 * len(LAMBDAS)
"""On one direction: sizes, and both ways."""
_VOCAB = 2.0**20  # no model has more tokens
_RARE = _VOCAB * np.exp([-20.0, -28.0])
"""Probability, at most, that any of the tokens comes which are less likely each than that: a nat is left for rounding below."""
_RARE_STAKES = LAMBDAS / 4

USUALLY = {
    "likelier tokens": "drafts accepted too easily, greedy draft positions, or a temperature that drafts do not get",
    "the likeliest token": "argmax at draft or bonus positions, or acceptance by a threshold",
    "outside the head": "top-k or top-p on one side only, or a residual drawn from the wrong row",
    "all but impossible tokens": "drafts judged, or replaced, by rows that are not the model's",
    "what a copy would be": "copied drafts accepted without being verified, or judged by the wrong row",
    "repetition": "penalties that drafts do not get",
    "repetition within a step": "penalties that do not count the drafts of their own step",
    "length": "end-of-text tokens inside accepted runs, or a budget that drafts overrun",
    "learned from the past": "the law at these very prefixes",
    "learned of tokens": "a drafter's favourites accepted too often, or a residual drawn from the target's own row",
    "learned behind the last token": "a residual drawn from the target's own row, or drafts judged by another row",
    "learned behind the last two": "a residual drawn from the target's own row, or drafts judged by another row",
}


class Evidence:
    """Bets on some directions, of several sizes and both ways, each started with 1 and multiplied by a fair factor at every
    sample. Their average, the e-value, reaches 1/alpha with probability alpha at most, ever (Ville 1939)."""

    def __init__(self, directions: Sequence[str]) -> None:
        self.directions = tuple(directions)
        self._log_wealth = np.zeros((len(directions), NUM_BETS))
        self._log_maxima = np.zeros(len(directions))
        self.samples = 0
        self.log_maximum = 0.0
        self.path: list[tuple[int, float]] = []

    def bet(self, factors: Probs) -> None:
        """factors: (directions, bets), >= 0, of mean 1 at most given the past."""
        with np.errstate(divide="ignore"):
            self._log_wealth += np.log(factors)

    def look(self, samples: int) -> None:
        """Note where the evidence stands."""
        self.samples += samples
        each = np.logaddexp.reduce(self._log_wealth, axis=1) - math.log(NUM_BETS)
        self._log_maxima = np.maximum(self._log_maxima, each)
        value = float(np.logaddexp.reduce(each)) - math.log(len(each))
        self.log_maximum = max(self.log_maximum, value)
        if not self.path or self.samples >= 1.02 * self.path[-1][0]:
            self.path.append((self.samples, max(value, -99.0) / math.log(10)))

    @property
    def e_value(self) -> float:
        """The largest so far."""
        return math.exp(min(self.log_maximum, 700.0))

    @property
    def p_value(self) -> float:
        return math.exp(-self.log_maximum)

    def rejects(self, alpha: float) -> bool:
        return self.log_maximum >= -math.log(alpha)

    def fired(self, alpha: float) -> tuple[Fired, ...]:
        """The directions that alone would reject, the strongest first."""
        strong = [
            (name, value)
            for name, value in zip(self.directions, self._log_maxima.tolist(), strict=True)
            if value >= -math.log(alpha)
        ]
        ranked = sorted(strong, key=lambda item: -item[1])
        return tuple(Fired(name, math.exp(min(value, 700.0)), USUALLY[name]) for name, value in ranked)


# ---------------------------------------------------------------- drawn tokens against their own report


class _Tilts:
    """By how much more often than reported each token came at a place, in standard units, shrunk while little was seen."""

    _SHRINKAGE = 3.0

    def __init__(self) -> None:
        self._sums: dict[object, list[float]] = {}

    def direction(self, place: object, names: Sequence[object]) -> list[float]:
        sums = self._sums
        return [r / (v + self._SHRINKAGE) for r, v in (sums.get((place, name), (0.0, 0.0)) for name in names)]

    def learn(self, place: object, names: Sequence[object], probs: Probs, drawn: int) -> None:
        for i, (name, p) in enumerate(zip(names, probs.tolist(), strict=True)):
            entry = self._sums.setdefault((place, name), [0.0, 0.0])
            entry[0] += (i == drawn) - p
            entry[1] += p * (1 - p)


class SelfConsistency(Evidence):
    """Each drawn token against the law that its report determines: a martingale over any prompts.

    Not by its place in a chunk: servers hold back halves of characters, so that the place may depend on the token.
    """

    DIRECTIONS = (
        "likelier tokens", "the likeliest token", "outside the head", "what a copy would be", "learned of tokens",
        "learned behind the last token", "learned behind the last two", "all but impossible tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__(self.DIRECTIONS)
        self.contradiction: tuple[Token, Head] | None = None
        self.rarest: tuple[float, Token] | None = None
        self.num_judged = self.num_left_out = 0
        self._tilts = _Tilts()

    def add(
        self,
        answer: Answer,
        prompt: str,
        heads: Sequence[Head | None],
        delta: float = 0.0,
        log_bounds: Sequence[float | None] = (),
    ) -> None:
        """delta: TV that the null allows besides printed digits. log_bounds: from heads.log_bound, of each token or of none."""
        history = list(_words(prompt))
        looked_at = 0
        for token, bound in zip(answer.tokens, log_bounds, strict=False):
            self._rare(token, bound)
        for token, head in zip(answer.tokens, heads, strict=True):
            if head is None:
                self.num_left_out += 1
            else:
                looked_at += 1
                self._one(token, head, history, delta)
            history.append(token.text)
        self.num_judged += looked_at
        self.look(looked_at or sum(bound is not None for bound in log_bounds))

    def _rare(self, token: Token, bound: float | None) -> None:
        """All tokens of a probability of e^t at most have vocabulary size times e^t together: bets on one of them to come."""
        if bound is not None and (self.rarest is None or bound < self.rarest[0]):
            self.rarest = (bound, token)
        factors = np.ones((len(self.directions), NUM_BETS))
        factors[-1] = rare_factors(bound)
        self.bet(factors)

    def _one(self, token: Token, head: Head, history: Sequence[str], delta: float) -> None:
        slack = min(head.tv + delta, 0.99)
        if head.contradicted and slack == 0:
            self.contradiction = self.contradiction or (token, head)
            self.log_maximum = math.inf
            return
        probs, names = head.probs, (*head.names, None)
        copied = _copied(history)
        places: tuple[object, ...] = ((), tuple(history[-1:]), tuple(history[-2:]))
        g = np.zeros((7, len(probs)))
        g[0] = np.log(np.maximum(probs, 1e-6))
        g[1] = probs >= probs[:-1].max()
        g[2, -1] = 1.0
        g[3] = [copied is not None and name == copied for name in names]
        for row, place in enumerate(places, 4):
            g[row] = self._tilts.direction(place, names)
        known = _factors(probs, g, head.drawn, slack)
        self.bet(np.concatenate([known, np.ones((1, NUM_BETS))]))
        for place in places:
            self._tilts.learn(place, names, probs, head.drawn)


def rare_factors(bound: float | None) -> Probs:
    """Of mean 1 at most wherever `bound` bounds the logarithm of the drawn token's probability: (2 x sizes,)."""
    came = np.log(_RARE / _VOCAB) >= (math.inf if bound is None else bound + 1)
    factors: Probs = 1 - _RARE_STAKES + _RARE_STAKES * (came / _RARE)[:, None]  # (sizes of tokens, stakes)
    return factors.reshape(-1)


def _factors(probs: Probs, g: Probs, drawn: int, delta: float) -> Probs:
    """As goodness.bets, of several directions and one token: (directions, 2 x sizes), of mean 1 at most for every law
    within a total variation of delta of probs."""
    centred = g - (g @ probs)[:, None]
    gains = np.stack([centred, -centred], axis=1) - delta * np.ptp(g, axis=1)[:, None, None]  # (directions, 2, tokens)
    with np.errstate(divide="ignore"):
        stakes = np.minimum(LAMBDAS, 1 / np.abs(gains.min(axis=2))[:, :, None])
    factors: Probs = np.maximum(1 + stakes * gains[:, :, drawn, None], 0.0).reshape(len(g), -1)
    return factors


def _words(text: str) -> list[str]:
    return text.split(" ")


def _copied(history: Sequence[str]) -> str | None:
    """What followed the latest earlier occurrence of the last two tokens, or of the last one."""
    for length in (2, 1):
        end = tuple(history[-length:])
        if len(end) < length:
            continue
        for start in range(len(history) - length - 1, -1, -1):
            if tuple(history[start : start + length]) == end:
                return history[start + length]
    return None


# ---------------------------------------------------------------- on against off

Summary = Callable[[Answer, str], float]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def likelihood(answer: Answer, prompt: str) -> float:
    return sum(max(token.logprob, -12.0) for token in answer.tokens if token.logprob is not None)


def likeliest(answer: Answer, prompt: str) -> float:
    return float(sum(bool(token.top) and token.text == max(token.top, key=lambda item: item[1])[0] for token in answer.tokens))


def copies(answer: Answer, prompt: str) -> float:
    history, count = _words(prompt), 0
    for token in answer.tokens:
        count += token.text == _copied(history)
        history.append(token.text)
    return float(count)


def repetition(answer: Answer, prompt: str) -> float:
    return float(len(answer.tokens) - len({token.key for token in answer.tokens}))


def close_repetition(answer: Answer, prompt: str) -> float:
    """Tokens that came among the four before them: as far back as a step reaches."""
    keys = [token.key for token in answer.tokens]
    return float(sum(key in keys[max(i - 4, 0) : i] for i, key in enumerate(keys)))


def length(answer: Answer, prompt: str) -> float:
    return float(len(answer.tokens))


@dataclass(slots=True)
class _Learned:
    """How much more often each token came with speculation than without, by the place it came at: prompt and the tokens
    before it, two of them at most."""

    counts: dict[tuple[object, ...], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def places(self, answer: Answer, prompt: str) -> list[tuple[object, ...]]:
        keys = [token.key for token in answer.tokens]
        return [(prompt if i < 3 else "", *keys[max(i - 2, 0) : i], "->", key) for i, key in enumerate(keys)]

    def value(self, answer: Answer, prompt: str) -> float:
        total = 0.0
        for place in self.places(answer, prompt):
            on, off = self.counts.get(place, (0, 0))
            total += (on - off) / (on + off + 4)
        return total

    def learn(self, answer: Answer, prompt: str, arm: int) -> None:
        for place in self.places(answer, prompt):
            self.counts[place][arm] += 1


class OnAgainstOff(Evidence):
    """Pairs of answers to one prompt, with speculation and without. If both have one law, the difference of any summary is
    as likely to be positive as negative: cut symmetrically, its mean is 0 (a predictive two-sample test, Podkopaev and
    Ramdas 2023). The summaries, and what they are divided by, are fixed before a pair is seen."""

    _SUMMARIES: tuple[tuple[str, Summary], ...] = (
        ("likelier tokens", likelihood),
        ("the likeliest token", likeliest),
        ("what a copy would be", copies),
        ("repetition", repetition),
        ("repetition within a step", close_repetition),
        ("length", length),
    )

    def __init__(self) -> None:
        super().__init__((*(name for name, _ in self._SUMMARIES), "learned from the past"))
        self._squares, self._count = np.zeros(len(self._SUMMARIES) + 1), 0
        self._learned = _Learned()

    def add(self, on: Answer, off: Answer, prompt: str) -> None:
        differences = np.array(
            [summary(on, prompt) - summary(off, prompt) for _, summary in self._SUMMARIES]
            + [self._learned.value(on, prompt) - self._learned.value(off, prompt)]
        )
        if self._count >= 8:
            scale = 3 * np.sqrt(np.maximum(self._squares / self._count, 1e-12))
            z = np.clip(differences / scale, -1.0, 1.0)[:, None]
            self.bet(np.concatenate([1 + LAMBDAS * z, 1 - LAMBDAS * z], axis=1))
        self._squares += differences**2
        self._count += 1
        self._learned.learn(on, prompt, 0)
        self._learned.learn(off, prompt, 1)
        self.look(len(on.tokens) + len(off.tokens))
