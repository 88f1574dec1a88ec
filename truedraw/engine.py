"""Engine: requests in, steps out. Admission, cancellation, statistics, records.

Nothing here knows how a token is decided; nothing below knows that there are requests.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from truedraw import decode
from truedraw.admission import Slots, Turns
from truedraw.assemble import assemble
from truedraw.cache import CachedModel, TokenBuffer
from truedraw.drafters.corpus import Corpus
from truedraw.drafters.corpus_files import Paths, Sources, gather
from truedraw.drafters.none import NoDrafter
from truedraw.errors import IncompatibleModels, InvalidParameter, PromptError
from truedraw.policy import FixedLength
from truedraw.protocols import Constraint, Drafter, LengthPolicy, Outcome, StepTiming
from truedraw.randomness import Noise, Source, philox
from truedraw.registry import TREE_RULES, LoadOptions, Model, check_takes_corpus, check_takes_modules, find_rule
from truedraw.sequence import ActiveSequence
from truedraw.text.prompt import Prompt, encode_prompt
from truedraw.text.stream import TextStream
from truedraw.types import FinishReason, Proposal, Result, SamplingParams, Stats, Step, StopRule
from truedraw.verify import Rule

DEFAULT_DRAFT_LENGTH = 7
"""Fixed until a controller chooses: a pass of 8 tokens, the size that CPU kernels like."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request may ask for besides its sampling.

    top_records  keep a record of each emitted token, with so many most likely alternatives
    top_logprobs  and in it the token's log-probability under the target's own row, with so many alternatives
    prompt_logprobs  judge the prompt tokens likewise: the prompt is then read anew, whatever caches hold
    max_draft    bound on the draft length; 0 is plain decoding
    drafter      a name that the engine's drafter knows (drafters/choice.py); None: its default
    owner        whose request it is: caches, and what drafters learn, serve nobody else
    """

    top_records: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    max_draft: int | None = None
    drafter: str | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        for name in ("top_records", "top_logprobs", "max_draft"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InvalidParameter(name, value, "an integer >= 0, or None")


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request. `results[i]` is choice i once it has finished."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    rule_name: str
    seed: int
    constraint: Constraint | None
    options: RequestOptions
    results: list[Result | None]
    steps: deque[Step] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        return all(result is not None for result in self.results)


class Engine:
    """A target, a drafter and a policy, and the requests that they serve.

    rule     auto, or a name from the registry, for requests that do not name one
    allow_lossy  rules that change the law may be named
    clock    seconds; entropy: fresh 128-bit seeds for requests without one; source: of all uniforms
    Use as a context manager, or call close().
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None = None,
        policy: LengthPolicy | None = None,
        *,
        rule: str = "auto",
        allow_lossy: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        entropy: Callable[[], int] = lambda: secrets.randbits(128),
        source: Source = philox,
    ) -> None:
        self.model = model
        self.drafter = drafter if drafter is not None else NoDrafter()
        drafts = not isinstance(self.drafter, NoDrafter)
        self.policy = policy if policy is not None else FixedLength(DEFAULT_DRAFT_LENGTH if drafts else 0)
        if self.drafter.trees and not model.runner.can_score_trees:
            raise IncompatibleModels(
                f"the drafter proposes trees, and the runner of {model.name} scores chains only: take another"
            )
        if drafts and not model.runner.can_rollback:
            raise IncompatibleModels(
                f"{model.name} is a recurrent or hybrid model: its state cannot forget rejected drafts, so it runs plainly only "
                "(drafter 'none')"
            )
        unknown = set(self.drafter.hidden) - set(model.runner.hidden_layers)
        if unknown:
            raise IncompatibleModels(
                f"the drafter asks for the hidden layers {sorted(unknown)}: {model.name} has {sorted(model.runner.hidden_layers)}"
            )
        self._allow_lossy = allow_lossy
        if rule != "auto":
            find_rule(rule, allow_lossy=allow_lossy)
        self._rule = rule
        self._source = source
        self._clock = clock
        self._entropy = entropy
        self._target = CachedModel(model.runner)
        self._waiting: deque[tuple[Request, int]] = deque()
        self._running: dict[int, ActiveSequence] = {}
        self._requests: dict[int, Request] = {}
        self._num_requests = 0
        self._num_sequences = 0
        self._slots, self._turns = Slots(self._target), Turns()
        self.stats = Stats()
        """Pooled over all finished choices."""
        self.wrap_rule: Callable[[Rule], Rule] | None = None
        """Put around the rule of each choice that starts, for those who look on (audit/model.py)."""
        self.last_timing: StepTiming | None = None
        """Of the last step's pass, where it verified anything."""

    @classmethod
    def load(
        cls,
        model: str = "smollm2",
        *,
        drafter: str | Drafter = "auto",
        drafters: Sequence[str] | None = None,
        owners: Sequence[str] = (),
        draft_model: str | None = None,
        draft_length: int | str = "auto",
        corpus: Corpus | Sources | Paths | None = None,
        mtp_modules: str | Path | None = None,
        rule: str = "auto",
        allow_lossy: bool = False,
        context: int | None = None,
        slots: int = 1,
        threads: int | None = None,
        threads_small: int | None = None,
        kv_type: str = "f16",
        kv_unified: bool = True,
        device: str = "cpu",
        strict: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ) -> Engine:
        """Load models by name and put an engine together.

        model, draft_model  see registry.MODELS
        drafter       auto (suffix and the draft model if there is one, whichever is worth more at each step;
                      none where the target cannot roll back), a name from registry.DRAFTERS, names joined
                      by +, or a Drafter
        drafters      further names that a request may choose from; None: no choice
        draft_length  how many tokens to draft, or auto: as many as pay, by the profile of this machine,
                      which is measured on first use
        corpus        what suffix copies from besides prompt and output: a Corpus, or paths of texts, folders and at
                      most one .corpus file, to which answers are added and which `close` writes; corpus_files.gather
                      has more options
        mtp_modules   the file that the drafter mtp reads; None: the one shipped for the demo model
        owners        those whose answers are kept apart, each in a .corpus file of its own; none: one for all
        strict        only where rows are bit-identical whatever the pass (strict.py): checked, and priced
        The other options are those of registry.LoadOptions. Raises UsageError.
        """
        if draft_length != "auto" and (isinstance(draft_length, bool) or not isinstance(draft_length, int)):
            raise InvalidParameter("draft_length", draft_length, "an integer >= 0, or 'auto'")
        if not isinstance(draft_length, str):
            FixedLength(draft_length)  # refuses a negative one, before anything is loaded
        if drafter == "none" and draft_length not in ("auto", 0):
            raise InvalidParameter("draft_length", draft_length, "auto or 0 with the drafter none")
        if draft_model is not None and not isinstance(drafter, str):
            raise InvalidParameter("draft_model", draft_model, "None together with a Drafter of one's own")
        if rule != "auto":
            find_rule(rule, allow_lossy=allow_lossy)
        if corpus is not None:
            if not isinstance(drafter, str):
                raise InvalidParameter("corpus", corpus, "None together with a Drafter of one's own, which may take one itself")
            if draft_length == 0:
                raise InvalidParameter("draft_length", draft_length, "auto or at least 1 with a corpus")
            check_takes_corpus(drafter if drafter != "auto" else "suffix")
            corpus = corpus if isinstance(corpus, Corpus | Sources) else gather(corpus)
        if mtp_modules is not None:
            if not isinstance(drafter, str):
                raise InvalidParameter("mtp_modules", str(mtp_modules), "None together with a Drafter of one's own")
            check_takes_modules(drafter)
        parts = assemble(
            model,
            LoadOptions(context, slots, threads, threads_small, kv_type, kv_unified, device=device),
            on_progress or (lambda message: None),
            drafter=drafter,
            others=drafters,
            draft_model=draft_model,
            draft_length=None if isinstance(draft_length, str) else draft_length,
            corpus=corpus,
            owners=owners,
            strict=strict,
            mtp_modules=None if mtp_modules is None else Path(mtp_modules),
        )
        return cls(parts.target, parts.drafter, parts.policy, rule=rule, allow_lossy=allow_lossy)

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        rule: str | None = None,
        constraint: Constraint | None = None,
        **options: Any,
    ) -> Request:
        """Queue a request; `step`, `run` or `stream` make it go.

        rule         overrides the engine's
        constraint   forked for each choice
        options      those of RequestOptions
        Raises InvalidParameter or PromptError, naming the field and what is allowed.
        """
        params = params if params is not None else SamplingParams()
        self._check(params)
        chosen = RequestOptions(**options)
        drafter = self.drafter if chosen.drafter is None else self.drafter.named(chosen.drafter)
        tokens = self.encode(prompt)
        room = self._target.runner.max_length
        if len(tokens) >= room:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and the context {room}: at most {room - 1} fit, so that one can "
                "follow; take a larger context or a shorter prompt"
            )
        if params.min_tokens > room - len(tokens):
            raise InvalidParameter(
                "min_tokens", params.min_tokens, f"at most the {room - len(tokens)} that the context has room for"
            )
        request = Request(
            id=self._num_requests,
            prompt=tuple(tokens),
            params=params,
            rule_name=self._choose_rule(self._rule if rule is None else rule, params, drafter),
            seed=self._entropy() if params.seed is None else params.seed,
            constraint=constraint,
            options=chosen,
            results=[None] * params.n,
        )
        self._num_requests += 1
        self._requests[request.id] = request
        self._waiting.extend((request, choice) for choice in range(params.n))
        return request

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises PromptError if it is empty or holds an unknown id."""
        return encode_prompt(self.model.tokenizer, prompt, self._target.runner.vocab_size)

    def _check(self, params: SamplingParams) -> None:
        vocab = self._target.runner.vocab_size
        for name, ids in (("logit_bias token", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= vocab:
                    raise InvalidParameter(name, token, f"a token id in [0, {vocab - 1}]")

    def _choose_rule(self, name: str, params: SamplingParams, drafter: Drafter) -> str:
        """Coupled wherever it loses nothing or a seed asks for one text; else block verification, or
        for trees the rule of several candidates."""
        if name != "auto":
            find_rule(name, allow_lossy=self._allow_lossy)
            if drafter.trees and name not in TREE_RULES:
                raise InvalidParameter("rule", name, f"auto, {', '.join(sorted(TREE_RULES))} with a drafter that proposes trees")
            return name
        if drafter is self.drafter and drafter.default:
            drafter = drafter.named(drafter.default)
        if params.seed is not None or not drafter.samples or params.temperature == 0:
            return "coupled"
        return "multidraft" if drafter.trees else "block"

    def cancel(self, request: Request) -> None:
        """End what is unfinished of a request. Its slots are free at once; caches stay consistent,
        since what they hold is compared with what is asked. Idempotent."""
        self._waiting = deque(item for item in self._waiting if item[0] is not request)
        gone: list[Outcome] = []
        for sequence in [s for s in self._running.values() if s.request == request.id]:
            sequence.finish("cancelled")
            self._retire(sequence)
            gone.append(Outcome(sequence.id, sequence.slot, (), Proposal(), None, {}, True))
        for choice, result in enumerate(request.results):
            if result is None:
                self._file(request, _unstarted(request, choice, "cancelled"))
        request.steps.clear()
        if gone:
            self.drafter.observe(gone)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def num_waiting(self) -> int:
        """Choices that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Choices that have one."""
        return len(self._running)

    def has_begun(self, request: Request) -> bool:
        """Whether any of its choices has had a slot, or has ended."""
        return sum(item[0] is request for item in self._waiting) < request.params.n

    # ------------------------------------------------------------ going on

    def step(self) -> list[Step]:
        """Admit what fits, run one target pass for all, and say what came out of it.

        Raises what runner and drafter raise. The requests then stand as before the step; if it was
        the drafter's `observe`, as after it, and their next step tells what this one could not.
        """
        steps = self._admit()
        try:
            if self._running:
                batch = list(self._running.values())
                reports, self.last_timing = decode.step(batch, self._target, self.drafter, self.policy, self._clock)
                for report in reports:
                    step = self._publish(report)
                    steps.append(step)
                    self._requests[step.request].steps.append(step)
        finally:
            for sequence in [s for s in self._running.values() if s.finish_reason is not None]:
                self._retire(sequence)
        return steps

    def _admit(self) -> list[Step]:
        """Give free slots to the waiting, as admission.py says. Choices that may emit nothing finish here."""
        steps = []
        while self._waiting and self._slots.num_free:
            queue = [(request.options.owner, request.id) for request, _ in self._waiting]
            place = self._turns.next(queue, self._running.values())
            request, choice = self._waiting[place]
            del self._waiting[place]
            judged = request.options.prompt_logprobs and len(request.prompt) > 1
            if request.params.max_tokens == 0 and not judged:
                steps.append(self._never_started(request, choice, "length"))
                continue
            slot = self._take_slot(request)
            try:
                sequence = self._start(request, choice, slot)
            except Exception as error:  # a constraint is the user's code and may raise anything
                self._slots.free(slot)
                steps.append(self._never_started(request, choice, "error", error))
                continue
            self._running[sequence.id] = sequence
        return steps

    def _take_slot(self, request: Request) -> int:
        slot = self._slots.take(np.asarray(request.prompt, dtype=np.int32), request.options.owner)
        if request.options.prompt_logprobs:
            self._target.forget(slot)
        return slot

    def _never_started(self, request: Request, choice: int, reason: FinishReason, error: Exception | None = None) -> Step:
        self._file(request, replace(_unstarted(request, choice, reason), error=error))
        step = Step(request.id, choice, (), (), "", 0, 0, 0, 0.0, finish_reason=reason)
        request.steps.append(step)
        return step

    def _file(self, request: Request, result: Result) -> None:
        request.results[result.choice] = result
        if request.finished:
            self._requests.pop(request.id, None)

    def _start(self, request: Request, choice: int, slot: int) -> ActiveSequence:
        params, tokenizer, options = request.params, self.model.tokenizer, request.options
        room = self._target.runner.max_length - len(request.prompt)
        rule = find_rule(request.rule_name, allow_lossy=self._allow_lossy)
        self._num_sequences += 1
        return ActiveSequence(
            id=self._num_sequences,
            request=request.id,
            choice=choice,
            slot=slot,
            context=TokenBuffer(request.prompt),
            prompt_length=len(request.prompt),
            params=params,
            rule_name=request.rule_name,
            rule=rule if self.wrap_rule is None else self.wrap_rule(rule),
            noise=Noise(request.seed, choice, self._source),
            stop=StopRule(
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids),
                strings=params.stop,
            ),
            stream=TextStream(tokenizer.token_bytes, params.stop, params.min_tokens),
            constraint=None if request.constraint is None else request.constraint.fork(),
            top_records=options.top_records,
            top_logprobs=options.top_logprobs,
            prompt_logprobs=[] if options.prompt_logprobs else None,
            max_draft=options.max_draft,
            drafter=options.drafter or self.drafter.default,
            owner=options.owner,
            num_found=min(self._target.num_cached(slot, np.asarray(request.prompt, np.int32)), len(request.prompt) - 1),
            admitted_at=self._clock(),
        )

    def _publish(self, report: decode.StepReport) -> Step:
        """What the step released: tokens and text that no stop string can take back any more."""
        sequence = report.sequence
        judged = sequence.prompt_logprobs or ()
        released = slice(sequence.num_reported, sequence.num_released)
        output = sequence.context.array[sequence.prompt_length :]
        step = Step(
            request=sequence.request,
            choice=sequence.choice,
            tokens=tuple(int(token) for token in output[released]),
            origins=tuple(sequence.origins[released]),
            text=sequence.stream.take(),
            num_proposed=report.num_proposed,
            num_accepted=report.num_accepted,
            num_emitted=report.num_emitted,
            seconds=report.seconds,
            records=tuple(sequence.records[released]),
            finish_reason=sequence.finish_reason,
            plain_seconds=report.plain_seconds,
            prompt_logprobs=tuple(judged) if sequence.num_steps < 2 else (),
        )
        sequence.num_reported = sequence.num_released
        sequence.text.append(step.text)
        return step

    def _retire(self, sequence: ActiveSequence) -> None:
        """Free the slot and file the result."""
        del self._running[sequence.id]
        self._slots.free(sequence.slot)
        self.stats += sequence.stats
        request = self._requests[sequence.request]
        assert sequence.finish_reason is not None
        result = Result(
            request=request.id,
            choice=sequence.choice,
            text="".join(sequence.text) + sequence.stream.take(),
            tokens=tuple(int(token) for token in sequence.context.array[sequence.prompt_length :]),
            origins=tuple(sequence.origins),
            finish_reason=sequence.finish_reason,
            prompt_tokens=len(request.prompt),
            rule=sequence.rule_name,
            stats=sequence.stats,
            records=tuple(sequence.records),
            error=sequence.error,
            prompt_logprobs=tuple(sequence.prompt_logprobs or ()),
        )
        self._file(request, result)

    def run(self, request: Request) -> Iterator[Step]:
        """The steps of one request as they are made; other requests go on beside it.

        Closing the iterator early cancels the request.
        """
        try:
            while True:
                while request.steps:
                    yield request.steps.popleft()
                if request.finished:
                    return
                self.step()
        finally:
            if not request.finished:
                self.cancel(request)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Step]:
        """Submit and run. Options are those of `submit`. Raises the error that ended a choice, after
        everything made before it has been handed out."""
        request = self.submit(prompt, params, **options)
        yield from self.run(request)
        for result in request.results:
            if result is not None and result.error is not None:
                raise result.error

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
    ) -> list[Result]:
        """Many prompts in one batch: choice 0 of each, then choice 1 and so on, in the order given.

        params: one for all, or one each. A choice that failed has finish_reason "error" and its
        `error`; it does not stop the others.
        """
        if isinstance(prompts, str):
            raise InvalidParameter("prompts", prompts, "a list of prompts: use stream for a single one, or put it in a list")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidParameter("params", f"{len(each)} values", f"one value, or one for each of the {len(prompts)} prompts")
        requests: list[Request] = []
        try:
            for prompt, param in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, param, **options))
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                if not request.finished:
                    self.cancel(request)
        choices = max((request.params.n for request in requests), default=0)
        results = (request.results[i] for i in range(choices) for request in requests if i < request.params.n)
        return [result for result in results if result is not None]

    def close(self) -> None:
        """Free models and caches. Idempotent."""
        try:
            self.drafter.close()
        finally:
            self._target.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _unstarted(request: Request, choice: int, reason: FinishReason) -> Result:
    return Result(request.id, choice, "", (), (), reason, len(request.prompt), request.rule_name, Stats())
