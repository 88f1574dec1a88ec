"""Options that commands share, and their way into the library's own types."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from truedraw.drafters.corpus import LIMIT
from truedraw.drafters.corpus_files import ENDING, Sources, gather
from truedraw.engine import Engine
from truedraw.errors import InvalidParameter, PromptError
from truedraw.registry import MODELS
from truedraw.types import SamplingParams

_CHOICE = ("suffix", "ngram", "random")
"""Drafters that requests to a server may name, besides its own."""

_LOADING, _SAMPLING, _SPECULATION = "Model", "Sampling", "Speculation"


def _option(panel: str, text: str, *names: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel)
    return option


ModelName = Annotated[str, _option(_LOADING, f"{MODELS}.", "--model", "-m")]
Context = Annotated[int | None, _option(_LOADING, "Tokens that a slot holds; default: the trained length, 4096 at most.")]
Slots = Annotated[int | None, _option(_LOADING, "Sequences at a time; default: as many as choices.")]
Threads = Annotated[int | None, _option(_LOADING, "Default: those that truedraw profile chose, else all cores.")]
Strict = Annotated[
    bool, _option(_LOADING, "Only with rows that are bit-identical for every pass; told at what price.", "--strict")
]
KvType = Annotated[str, _option(_LOADING, "KV cache: f16, bf16, f32 or q8_0.")]
Device = Annotated[str, _option(_LOADING, "Where hf: models run: cpu or cuda.")]

DraftModel = Annotated[str | None, _option(_SPECULATION, "A smaller model; of another tokenizer, it drafts shared tokens.")]
DrafterName = Annotated[
    str,
    _option(
        _SPECULATION, "auto, none, suffix, ngram, model, tree (two candidates; toy model), mtp or random; several joined by +."
    ),
]
DraftLength = Annotated[str, _option(_SPECULATION, "Tokens to draft per step, or auto.")]
CorpusPaths = Annotated[
    list[str] | None,
    _option(
        _SPECULATION,
        f"A text file or folder that suffix may copy from, or FILE{ENDING}: answers are kept there, and copied from. May be "
        "repeated.",
        "--corpus",
    ),
]
CorpusSize = Annotated[int | None, _option(_SPECULATION, f"Tokens of the corpus at most; default: {LIMIT:,}.")]
MtpModules = Annotated[
    str | None,
    _option(
        _SPECULATION,
        "Modules of truedraw train mtp, or the folder of a checkpoint that ships one; default: those of the demo model.",
        "--mtp-modules",
    ),
]
RuleName = Annotated[
    str,
    _option(
        _SPECULATION,
        "auto, block, coupled, multidraft, resample_from_target, token or traversal; with a seed, all but coupled repeat a text "
        "only at a fixed draft length. Lossy: biased_resample, lenience:L, thresholds:ACCEPT,SINGLE, typical:EPSILON,DELTA.",
    ),
]
AllowLossy = Annotated[bool, _option(_SPECULATION, "Let --rule name a lossy rule; its drift is told.", "--allow-lossy")]

Temperature = Annotated[float, _option(_SAMPLING, "0 is greedy.", "--temperature", "-t")]
TopK = Annotated[int, _option(_SAMPLING, "Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, _option(_SAMPLING, "Keep the smallest set with this much probability.")]
MinP = Annotated[float, _option(_SAMPLING, "Drop tokens below this share of the most likely one.")]
RepetitionPenalty = Annotated[float, _option(_SAMPLING, "Over prompt and output; 1 is off.")]
PresencePenalty = Annotated[float, _option(_SAMPLING, "Over the output; 0 is off.")]
FrequencyPenalty = Annotated[float, _option(_SAMPLING, "Over the output; 0 is off.")]
LogitBias = Annotated[list[str] | None, _option(_SAMPLING, "TOKEN_ID=NUMBER, may be repeated.")]
MaxTokens = Annotated[int | None, _option(_SAMPLING, "Default: as many as the context holds.")]
MinTokens = Annotated[int, _option(_SAMPLING, "No end of text before so many tokens.")]
Stop = Annotated[list[str] | None, _option(_SAMPLING, "Stop string, may be repeated.")]
StopTokenId = Annotated[list[int] | None, _option(_SAMPLING, "May be repeated.")]
IgnoreEos = Annotated[bool, _option(_SAMPLING, "Go on after the model's own end of text.", "--ignore-eos")]
Seed = Annotated[int | None, _option(_SAMPLING, "The same seed gives the same text, with and without drafts.")]
Choices = Annotated[int, _option(_SAMPLING, "How many answers; answer i is keyed by (seed, i).", "--n")]
System = Annotated[str | None, typer.Option(help="A system message.")]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling options as typed."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[str] | None
    max_tokens: int | None
    min_tokens: int
    stop: list[str] | None
    stop_token_id: list[int] | None
    ignore_eos: bool
    seed: int | None
    n: int = 1

    def params(self) -> SamplingParams:
        """Raises InvalidParameter."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(_bias(text) for text in self.logit_bias or ()),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=self.n,
        )


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise InvalidParameter("logit_bias", text, "TOKEN_ID=NUMBER, as in 42=-5") from None


def load_engine(
    model: str,
    *,
    drafter: str,
    draft_model: str | None,
    draft_length: str,
    rule: str,
    allow_lossy: bool,
    context: int | None,
    slots: int,
    threads: int | None,
    kv_type: str,
    device: str,
    strict: bool = False,
    corpus: list[str] | None = None,
    corpus_size: int | None = None,
    corpus_learning: bool = True,
    mtp_modules: str | None = None,
    owners: Sequence[str] = (),
    choice: bool = False,
) -> Engine:
    """Engine.load, with what takes seconds shown on standard error."""
    from truedraw.cli.output import Progress

    length: int | str = draft_length
    if draft_length != "auto":
        if not draft_length.isdecimal():
            raise InvalidParameter("draft_length", draft_length, "an integer >= 0, or 'auto'")
        length = int(draft_length)
    with Progress() as progress:
        return Engine.load(
            model,
            drafter=drafter,
            drafters=_CHOICE if choice else None,
            owners=owners,
            draft_model=draft_model,
            draft_length=length,
            corpus=_sources(corpus, corpus_size, corpus_learning),
            mtp_modules=mtp_modules,
            rule=rule,
            allow_lossy=allow_lossy,
            context=context,
            slots=slots,
            threads=threads,
            kv_type=kv_type,
            device=device,
            strict=strict,
            on_progress=progress.say,
        )


def _sources(paths: list[str] | None, size: int | None, learning: bool) -> Sources | None:
    """Raises UsageError."""
    if not paths:
        if size is not None:
            raise InvalidParameter("corpus_size", size, "left out where there is no --corpus")
        return None
    return gather(paths, limit=LIMIT if size is None else size, learning=learning)


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input where it is `-`. Raises PromptError."""
    if prompt == "-" and sys.stdin is None:
        raise PromptError("standard input is closed: give the prompt as an argument")
    if prompt == "-":
        data = sys.stdin.buffer.read()
        try:
            prompt = data.decode()
        except UnicodeDecodeError as error:
            raise PromptError(
                f"standard input is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})"
            ) from None
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # how Python hands on arguments that are no UTF-8
        raise PromptError(
            f"the prompt is not UTF-8: byte 0x{ord(prompt[error.start]) & 0xFF:02x} at character {error.start}"
        ) from None
    if not prompt:
        raise PromptError("the prompt is empty: at least one character is needed")
    return prompt
