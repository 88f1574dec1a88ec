"""Names and options to what an engine is made of: target, drafter, policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from truedraw import calibrate, profile
from truedraw.drafters.choice import ChoiceDrafter
from truedraw.drafters.corpus import Corpus
from truedraw.drafters.corpus_files import Sources
from truedraw.drafters.none import NoDrafter
from truedraw.errors import InvalidParameter
from truedraw.policy import Controller, FixedLength
from truedraw.protocols import Drafter, LengthPolicy
from truedraw.registry import LoadOptions, Made, Model, check_takes_corpus, check_takes_modules, load_model, make_drafter
from truedraw.strict import load as strict_load

Say = Callable[[str], None]


class Parts(NamedTuple):
    """What Engine is made of. policy None: the engine's own default."""

    target: Model
    drafter: Drafter
    policy: LengthPolicy | None


def assemble(
    model: str,
    options: LoadOptions,
    say: Say,
    *,
    drafter: str | Drafter,
    others: Sequence[str] | None,
    draft_model: str | None,
    draft_length: int | None,
    corpus: Corpus | Sources | None,
    owners: Sequence[str],
    strict: bool,
    mtp_modules: Path | None = None,
) -> Parts:
    """Load models and put a drafter and a policy together: see Engine.load, which has checked what can be checked
    before. draft_length None: as many as pay; others: further drafters that a request may name, None: no choice."""
    policy: LengthPolicy | None = None if draft_length is None else FixedLength(draft_length)
    target = strict_load(model, options, say) if strict else load_model(model, options, say)
    draft: Model | None = None
    try:
        if draft_model is not None:
            window = replace(options, context=target.runner.max_length, clip_context=True)
            draft = load_model(draft_model, window, say)
        if isinstance(drafter, str):
            default = _default(target, draft) if drafter == "auto" else drafter
            if draft is not None and not {"model", "tree"} & set(default.split("+")):
                raise InvalidParameter("drafter", default, "auto, model or tree when a draft model is given")
            if corpus is not None:
                check_takes_corpus(default)
            if mtp_modules is not None:
                check_takes_modules(default)
            known, kept = _open(corpus, owners, target, say)
            timed = draft if policy is None and draft is not None and draft.runner.identity else None
            measure = None if timed is None else lambda: measured_profile(timed, say).pass_seconds
            made = Made(target, draft, measure, known, kept, mtp_modules, say)
            drafter = make_drafter(default, made)
            if others is not None and not isinstance(drafter, NoDrafter):
                names = dict.fromkeys([default, *others, *(["model"] if "model" in default.split("+") else [])])
                drafter = ChoiceDrafter({name: make_drafter(name, made) for name in names}, default)
        drafts = target.runner.can_rollback and not isinstance(drafter, NoDrafter)
        if policy is None and target.runner.identity and drafts:
            policy = Controller(measured_profile(target, say), blind=_blind(drafter))
        return Parts(target, drafter, policy)
    except BaseException:
        target.runner.close()
        if draft is not None:
            draft.runner.close()
        raise


def _open(
    corpus: Corpus | Sources | None, owners: Sequence[str], target: Model, say: Say
) -> tuple[Corpus | None, dict[str, Corpus]]:
    """What all may copy from, and what each owner may besides. Raises CorpusError."""
    owners = [owner for owner in owners if owner]
    if not isinstance(corpus, Sources):
        return corpus, {}
    if corpus.kept is None or not owners:
        return corpus.open(target.tokenizer, say), {}
    texts = replace(corpus, kept=None, learning=False).open(target.tokenizer, say) if corpus.texts else None
    return texts, {owner: corpus.of_owner(owner).open(target.tokenizer, say) for owner in owners}


def _default(target: Model, draft: Model | None) -> str:
    return "none" if not target.runner.can_rollback else "suffix" if draft is None else "suffix+model"


def _blind(drafter: Drafter) -> list[str]:
    """The names of the drafters that draw without telling what they expect."""
    members = {name: drafter.named(name) for name in drafter.drafters} if isinstance(drafter, ChoiceDrafter) else {"": drafter}
    return [name for name, member in members.items() if member.samples and not member.forecasts]


def measured_profile(target: Model, say: Say) -> profile.Profile:
    """The stored profile, or a new one, measured in about three seconds."""
    known, notice = profile.load(target.runner.identity)
    if known is not None:
        return known
    say(notice or f"measuring what passes of {target.name} cost here, once")
    known = calibrate.quick(target.runner)
    profile.store(known)
    return known
