"""The engine against an oracle of ten lines, on a toy model: the invariants of DESIGN.md section 7.

Made for planted faults in the engine (mutants.py): `first_failure` says what broke first, or
nothing. The oracle knows no drafts, no cache, no batch: shape a row, run a race, append.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.engine import Engine
from truedraw.errors import TruedrawError
from truedraw.policy import FixedLength
from truedraw.protocols import Drafter, Mask
from truedraw.randomness import Noise
from truedraw.registry import Model
from truedraw.runners.toy import LetterTokenizer, NextLogits, ToyRunner, hashed
from truedraw.sampling import race, shape
from truedraw.types import Result, SamplingParams, Step

VOCAB = 9
_TARGET = hashed(VOCAB, seed=1, order=2)
_DRAFT = hashed(VOCAB, seed=1, order=2, blend=0.7)
_PROMPTS = ([3, 5, 3, 5, 3], [1], [2, 2, 7, 1, 2, 2, 7, 1, 2, 2, 7])


class Brackets:
    """A constraint with a state: token 1 opens, token 2 closes, never more closed than open, at
    most two open; the text may end (token 0) only when all are closed."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def mask(self) -> Mask:
        allowed = np.ones(VOCAB, dtype=bool)
        allowed[1], allowed[2], allowed[0] = self.depth < 2, self.depth > 0, self.depth == 0
        return allowed

    def fork(self) -> Brackets:
        return Brackets(self.depth)

    def advance(self, token: int) -> None:
        assert self.mask()[token], f"token {token} at depth {self.depth}"
        self.depth += {1: 1, 2: -1}.get(token, 0)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the check."""

    prompt: tuple[int, ...]
    params: SamplingParams
    brackets: bool = False


def asks() -> list[Ask]:
    base = SamplingParams(max_tokens=24, ignore_eos=True)
    settings = [
        base,
        replace(base, temperature=0.0),
        replace(base, temperature=0.6, top_k=4, top_p=0.9, min_p=0.05),
        replace(base, repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.9, temperature=0.5),
        replace(base, logit_bias={3: -100.0, 4: 1.5}, temperature=0.0, frequency_penalty=0.4),
        replace(base, ignore_eos=False, logit_bias={0: 1.0}),
        replace(base, ignore_eos=False, min_tokens=5, logit_bias={0: 3.0}, temperature=0.0),
        replace(base, stop=("bd", "cab", "g"), stop_token_ids=(8,)),
        replace(base, max_tokens=2, temperature=0.0),
        replace(base, max_tokens=1),
    ]
    asked = [
        Ask(tuple(prompt), replace(params, seed=7 * i + j))
        for j, params in enumerate(settings)
        for i, prompt in enumerate(_PROMPTS)
    ]
    bracketed = replace(base, ignore_eos=False, logit_bias={1: 1.0, 2: 1.0})
    return asked + [Ask((3,), replace(bracketed, seed=i), brackets=True) for i in range(3)]


def oracle(ask: Ask, next_logits: NextLogits = _TARGET) -> tuple[tuple[int, ...], str]:
    """Tokens and text of plain decoding. Stop strings of letters, one letter a token."""
    context, params = list(ask.prompt), ask.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
    constraint = Brackets() if ask.brackets else None
    letters = LetterTokenizer(VOCAB)
    output: list[int] = []
    while len(output) < (params.max_tokens or 0):
        row = shape(
            next_logits(tuple(context)),
            params,
            np.array(context, dtype=np.int32),
            len(ask.prompt),
            stop_ids=stops,
            allowed=constraint.mask() if constraint else None,
        )
        token = race(row, Noise(params.seed or 0).at(len(context)).race(len(context)))
        context.append(token)
        output.append(token)
        if token in stops:
            break
        if constraint:
            constraint.advance(token)
        text = b"".join(map(letters.token_bytes, output)).decode()
        ends = [text.index(stop) for stop in params.stop if stop in text]
        if ends:
            # token 0 has no letter: the shortest prefix of the tokens with this text
            kept = next(n for n in range(len(output) + 1) if len(b"".join(map(letters.token_bytes, output[:n]))) == min(ends))
            return tuple(output[:kept]), text[: min(ends)]
    return tuple(output), b"".join(letters.token_bytes(token) for token in output if token not in stops).decode()


def engine(drafter: str, draft_length: int, slots: int) -> Engine:
    """A toy engine with one of the drafters ngram, random, weak (a blurred target) and self."""
    drafters: dict[str, Drafter] = {
        "ngram": NGramDrafter(min_match=1),
        "random": RandomDrafter(VOCAB),
        "weak": ModelDrafter(ToyRunner(_DRAFT, VOCAB, num_slots=slots), VOCAB),
        "self": ModelDrafter(ToyRunner(_TARGET, VOCAB, num_slots=slots), VOCAB),
    }
    model = Model("toy", ToyRunner(_TARGET, VOCAB, num_slots=slots), LetterTokenizer(VOCAB))
    return Engine(model, drafters[drafter], FixedLength(draft_length))


def first_failure() -> str | None:
    """What breaks first, or None. A fault that raises is a failure too."""
    try:
        return next(_failures(), None)
    except (TruedrawError, AssertionError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _failures() -> Iterator[str]:
    questions = asks()
    expected = [oracle(ask) for ask in questions]
    for drafter in ("self", "weak", "ngram", "random"):
        for draft_length, slots in ((1, 1), (3, 4), (8, 1)):
            with engine(drafter, draft_length, slots) as under_test:
                place = f"drafter {drafter}, draft length {draft_length}, {slots} slots"
                results: list[Result] = []
                for step in _run_all(under_test, questions, results):
                    yield from (f"{place}: {fault}" for fault in _step_faults(step))
                for ask, (tokens, text), result in zip(questions, expected, results, strict=True):
                    yield from (f"{place}, {ask}: {fault}" for fault in _result_faults(ask, tokens, text, result))
                    if drafter == "self" and result.stats.proposed != result.stats.accepted + _cut_drafts(result):
                        yield f"{place}, {ask}: drafting with the target itself was rejected: {result.stats}"


def _run_all(under_test: Engine, questions: list[Ask], results: list[Result]) -> Iterator[Step]:
    requests = [
        under_test.submit(list(ask.prompt), ask.params, constraint=Brackets() if ask.brackets else None) for ask in questions
    ]
    while not under_test.idle:
        yield from under_test.step()
    results += [result for request in requests for result in request.results if result is not None]


def _step_faults(step: Step) -> Iterator[str]:
    if step.finish_reason is None and step.num_emitted != step.num_accepted + 1:
        yield f"a step accepted {step.num_accepted} and emitted {step.num_emitted}"
    if step.num_accepted > step.num_proposed:
        yield f"a step accepted {step.num_accepted} of {step.num_proposed}"


def _result_faults(ask: Ask, tokens: tuple[int, ...], text: str, result: Result) -> Iterator[str]:
    if result.tokens != tokens:
        yield f"tokens {result.tokens}, not {tokens}"
    if result.text != text:
        yield f"text {result.text!r}, not {text!r}"
    if len(result.tokens) != len(result.origins) or result.stats.emitted != len(result.tokens):
        yield f"{len(result.tokens)} tokens, {len(result.origins)} origins, {result.stats.emitted} counted"
    if len(result.tokens) > (ask.params.max_tokens or 0):
        yield f"{len(result.tokens)} tokens, {ask.params.max_tokens} allowed"


def _cut_drafts(result: Result) -> int:
    """Drafts of the last step that the end of the text left undecided or took back."""
    return result.stats.proposed - result.stats.accepted if result.finish_reason == "stop" else 0
