"""The faults that can be planted: what is wrong, and where it shows. Data: decoder.py acts on it, law.py computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from truedraw.audit.planted.model import PLAIN, Settings

Correction = Literal["residual", "target", "shared noise", "absolute difference"]
Shows = Literal["law", "seed", "contract", "logprobs", "choices"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the speculating path; steps without speculation never have it.

    shows             in the law of the tokens, in the text of a seed, as a breach of a parameter, in what logprobs say,
                      or between the choices of a request
    settings          under which it shows
    judged_without    the settings that the rows of draft positions leave out
    stale_penalties   the rows of a step count only what came before the step
    shifted_row       draft i > 0 is judged by row i - 1
    unchecked_first   the first draft of a step is accepted unseen
    threshold         a draft is accepted where p / q is above it, and only there
    correction        what replaces a rejected draft is drawn from this
    greedy_accepted   the most likely token stands in for an accepted draft
    greedy_bonus      and in the place of the bonus token
    late_rejection    a rejected draft stays in the text, before its replacement
    ignores_seed      noise is fresh
    draft_logprobs    log-probabilities told at draft positions are the draft model's
    late_stop         a stop string is looked for at the end of a step only
    overrun           a step may end beyond max_tokens
    same_choices      all choices are the first one
    """

    name: str
    text: str
    shows: Shows = "law"
    settings: Settings = PLAIN
    judged_without: tuple[str, ...] = ()
    stale_penalties: bool = False
    shifted_row: bool = False
    unchecked_first: bool = False
    threshold: float | None = None
    correction: Correction = "residual"
    greedy_accepted: bool = False
    greedy_bonus: bool = False
    late_rejection: bool = False
    ignores_seed: bool = False
    draft_logprobs: bool = False
    late_stop: bool = False
    overrun: bool = False
    same_choices: bool = False


_PENALTIES = Settings(presence_penalty=2.0, frequency_penalty=2.0)
_BIAS = Settings(logit_bias=((3, 2.0), (7, -2.0), (11, -100.0)))

_ALL = (
    Fault("naive resample", "after a rejection the token is drawn from p, not from the residual", correction="target"),
    Fault("greedy drafts", "the most likely token replaces an accepted draft", greedy_accepted=True),
    Fault(
        "temperature ignored", "drafts are judged by p at temperature 1", settings=Settings(0.6), judged_without=("temperature",)
    ),
    Fault("one-sided top-p", "drafts are judged by p before top-p", settings=Settings(top_p=0.8), judged_without=("top_p",)),
    Fault("one-sided top-k", "drafts are judged by p before top-k", settings=Settings(top_k=4), judged_without=("top_k",)),
    Fault("one-sided min-p", "drafts are judged by p before min-p", settings=Settings(min_p=0.1), judged_without=("min_p",)),
    Fault("bias ignored", "drafts are judged by p without logit_bias", settings=_BIAS, judged_without=("logit_bias",)),
    Fault("stale penalties", "penalties of a step count only what came before it", settings=_PENALTIES, stale_penalties=True),
    Fault("shared noise", "the residual is drawn with the number that rejected the draft", correction="shared noise"),
    Fault("absolute difference", "the residual is |p - q|, not its positive part", correction="absolute difference"),
    Fault("first unchecked", "the first draft of a step is accepted unseen", unchecked_first=True),
    Fault("greedy bonus", "the token after all drafts is the most likely one", greedy_bonus=True),
    Fault("late rejection", "a rejected draft stays in the text, before its replacement", late_rejection=True),
    Fault("off by one", "each draft but the first is judged by the row before its own", shifted_row=True),
    Fault("threshold", "a draft is accepted where p / q > 0.9, and only there", threshold=0.9),
    Fault("seed ignored", "a seed changes nothing", shows="seed", ignores_seed=True),
    Fault("draft logprobs", "log-probabilities at draft positions are the draft model's", shows="logprobs", draft_logprobs=True),
    Fault("late stop", "a stop string inside an accepted run is overlooked", shows="contract", late_stop=True),
    Fault("overrun", "accepted drafts go beyond max_tokens", shows="contract", overrun=True),
    Fault("same choices", "all choices of a request are the same", shows="choices", same_choices=True),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
