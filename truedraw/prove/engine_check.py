"""The engine against an oracle of ten lines, on a toy model: the invariants of DESIGN.md section 7.

Made for planted faults in the engine (mutants.py): `first_failure` says what broke first, or
nothing. The oracle knows no drafts, no cache, no batch: shape a row, run a race, append.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from truedraw.drafters import ngram
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.engine import Engine
from truedraw.errors import TruedrawError
from truedraw.policy import FixedLength
from truedraw.protocols import Drafter, LengthPolicy, Mask, SequenceState
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


def oracle(ask: Ask, next_logits: NextLogits = _TARGET) -> tuple[tuple[int, ...], str, list[float]]:
    """Tokens, text and p of each token of plain decoding. Stop strings of letters, one letter a token."""
    context, params = list(ask.prompt), ask.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
    constraint = Brackets() if ask.brackets else None
    letters = LetterTokenizer(VOCAB)
    output: list[int] = []
    probs: list[float] = []
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
        probs.append(float(row[token]))
        if token in stops:
            break
        if constraint:
            constraint.advance(token)
        text = b"".join(map(letters.token_bytes, output)).decode()
        ends = [text.index(stop) for stop in params.stop if stop in text]
        if ends:
            # token 0 has no letter: the shortest prefix of the tokens with this text
            kept = next(n for n in range(len(output) + 1) if len(b"".join(map(letters.token_bytes, output[:n]))) == min(ends))
            return tuple(output[:kept]), text[: min(ends)], probs[:kept]
    return tuple(output), b"".join(letters.token_bytes(token) for token in output if token not in stops).decode(), probs


def engine(drafter: str, policy: LengthPolicy, slots: int) -> Engine:
    """A toy engine with one of the drafters ngram, random, weak (a blurred target) and self."""
    drafters: dict[str, Drafter] = {
        "ngram": NGramDrafter(min_match=1),
        "random": RandomDrafter(VOCAB),
        "weak": ModelDrafter(ToyRunner(_DRAFT, VOCAB, num_slots=slots), VOCAB),
        "self": ModelDrafter(ToyRunner(_TARGET, VOCAB, num_slots=slots), VOCAB),
    }
    model = Model("toy", ToyRunner(_TARGET, VOCAB, num_slots=slots), LetterTokenizer(VOCAB))
    return Engine(model, drafters[drafter], policy)


def first_failure() -> str | None:
    """What breaks first, or None. A fault that raises is a failure too."""
    try:
        return next(_failures(), None)
    except (TruedrawError, AssertionError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


class _Varying(FixedLength):
    """Drafts with gaps: a draft cache that lags must catch up."""

    def limits(self, batch: Sequence[SequenceState]) -> list[int]:
        return [(3, 0, 0, 3, 1)[state.num_emitted % 5] for state in batch]


def _failures() -> Iterator[str]:
    yield from _lookup_faults()
    yield from _broken_row_faults()
    questions = asks()
    expected = [oracle(ask) for ask in questions]
    policies: list[tuple[LengthPolicy, int]] = [(FixedLength(1), 1), (FixedLength(3), 4), (FixedLength(8), 1), (_Varying(3), 2)]
    for drafter in ("self", "weak", "ngram", "random"):
        for policy, slots in policies:
            with engine(drafter, policy, slots) as under_test:
                place = f"drafter {drafter}, draft length {getattr(policy, 'length', '?')}, {slots} slots"
                results: list[Result] = []
                for step in _run_all(under_test, questions, results):
                    yield from (f"{place}: {fault}" for fault in _step_faults(step))
                for ask, (tokens, text, probs), result in zip(questions, expected, results, strict=True):
                    yield from (f"{place}, {ask}: {fault}" for fault in _result_faults(ask, tokens, text, probs, result))
                    if drafter == "self" and result.stats.proposed != result.stats.accepted + _cut_drafts(result):
                        yield f"{place}, {ask}: drafting with the target itself was rejected: {result.stats}"


def _broken_row_faults() -> Iterator[str]:
    """A row of NaN ends its own request with an error, with what came before it, and nobody else's."""

    def broken(context: tuple[int, ...]) -> npt.ArrayLike:
        return np.full(VOCAB, np.nan) if context[0] == 1 and len(context) >= 6 else _TARGET(context)

    ask, neighbour = asks()[1], asks()[0]
    model = Model("toy", ToyRunner(broken, VOCAB, num_slots=2), LetterTokenizer(VOCAB))
    with Engine(model, RandomDrafter(VOCAB), FixedLength(3)) as under_test:
        ended, other = under_test.generate([list(ask.prompt), list(neighbour.prompt)], [ask.params, neighbour.params])
    if ended.finish_reason != "error" or ended.tokens != oracle(ask)[0][:5]:
        yield f"a row of NaN: {ended.finish_reason}, tokens {ended.tokens}"
    if other.tokens != oracle(neighbour)[0]:
        yield "a row of NaN in one request changed another"


def _lookup_faults() -> Iterator[str]:
    """Copies are what followed an earlier occurrence of the end."""
    histories = ([5, 6, 7, 8, 9, 10, 11, 7, 8], [1, 1, 1, 1], [3, 4, 3, 4, 3], [1, 2, 3])
    wanted = ((9, 10, 11), (1, 1), (4, 3), ())
    for history, copied in zip(histories, wanted, strict=True):
        got = ngram.lookup(np.array(history, dtype=np.int32), 3, 2, 2)
        if got[: len(copied)] != copied or (got and not copied):
            yield f"what followed {history}: {got}, not {copied}"


def _run_all(under_test: Engine, questions: list[Ask], results: list[Result]) -> Iterator[Step]:
    requests = [
        under_test.submit(list(ask.prompt), ask.params, constraint=Brackets() if ask.brackets else None, top_records=0)
        for ask in questions
    ]
    while not under_test.idle:
        yield from under_test.step()
    results += [result for request in requests for result in request.results if result is not None]


def _step_faults(step: Step) -> Iterator[str]:
    if step.finish_reason is None and step.num_emitted != step.num_accepted + 1:
        yield f"a step accepted {step.num_accepted} and emitted {step.num_emitted}"
    if step.num_accepted > step.num_proposed:
        yield f"a step accepted {step.num_accepted} of {step.num_proposed}"


def _result_faults(ask: Ask, tokens: tuple[int, ...], text: str, probs: list[float], result: Result) -> Iterator[str]:
    if result.tokens != tokens:
        yield f"tokens {result.tokens}, not {tokens}"
    if result.text != text:
        yield f"text {result.text!r}, not {text!r}"
    if len(result.tokens) != len(result.origins) or result.stats.emitted != len(result.tokens):
        yield f"{len(result.tokens)} tokens, {len(result.origins)} origins, {result.stats.emitted} counted"
    if any(abs(record.p - p) > 1e-9 for record, p in zip(result.records, probs, strict=False)):
        yield f"recorded p {[record.p for record in result.records]}, not {probs}"
    if result.stats.accepted != result.origins.count("draft") or (result.stats.acceptance_rate or 0) > 1:
        yield f"{result.origins.count('draft')} accepted, {result.stats.accepted} counted, rate {result.stats.acceptance_rate}"
    if len(result.tokens) > (ask.params.max_tokens or 0):
        yield f"{len(result.tokens)} tokens, {ask.params.max_tokens} allowed"


def _cut_drafts(result: Result) -> int:
    """Drafts of the last step that the end of the text left undecided or took back."""
    return result.stats.proposed - result.stats.accepted if result.finish_reason == "stop" else 0
