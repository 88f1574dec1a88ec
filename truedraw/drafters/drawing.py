"""What drafters that draw have in common."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from truedraw import kernels
from truedraw.protocols import Constraint, DraftRequest, Mask, RowStatistics, StepNoise
from truedraw.randomness import Purpose
from truedraw.sampling import Law, adjust, inverse_cdf, law
from truedraw.types import Probs, SamplingParams, TokenArray

logger = logging.getLogger("truedraw")


def advanced(constraint: Constraint | None, token: int) -> Constraint | None:
    """The constraint behind a draft token; the one given stays as it is."""
    if constraint is None:
        return None
    ahead = constraint.fork()
    ahead.advance(token)
    return ahead


@contextlib.contextmanager
def drafting_stops_early() -> Iterator[None]:
    """A row that is no law, or a constraint that fails (it is the user's code): nothing is drafted
    there, and the verification that meets the same failure ends its own request with it."""
    try:
        yield
    except Exception as error:
        logger.warning("drafting stops early: %s", error)


def row_statistics(row: Probs, depth: int) -> RowStatistics:
    """What a policy may see of a q row, shape (vocab,), before a token is drawn from it."""
    place = int(row.argmax())
    top = float(row[place])
    second = max(row[:place].max(initial=0.0), row[place + 1 :].max(initial=0.0))
    logs = np.log(row, out=np.zeros(len(row)), where=row > 0)
    return RowStatistics(depth, max(0.0, float(-(row @ logs))), top, top - float(second))


# ---------------------------------------------------------------- a trimmed vocabulary


def only_shaping(params: SamplingParams) -> SamplingParams:
    """The part of the parameters that needs no more than the row: temperature and truncation."""
    return SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p)


def trimmed_law(
    logits: npt.NDArray[np.float32],
    ids: kernels.Ids,
    vocab: int,
    request: DraftRequest,
    params: SamplingParams,
    context: TokenArray,
    allowed: Mask | None,
) -> Law:
    """`sampling.law` of a row that is -inf outside `ids`, without touching the rest where nothing asks for it.

    logits   (n,) of `ids`, which ascend
    params   as the row is to be shaped; context: the tokens before it, drafts included
    allowed  (vocab,) mask of a constraint
    Raises what `sampling.law` raises.
    """
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    if penalised or params.logit_bias or params.min_tokens or allowed is not None:
        whole = np.full(vocab, -np.inf)
        whole[ids] = logits
        logits = adjust(whole, params, context, request.prompt_length, request.stop_ids, allowed, "draft model")[ids]
    few = law(logits, only_shaping(params), context, request.prompt_length, model="draft model")
    places = few.ids
    tokens = ids if places is None else ids[places]
    masses = kernels.block_sums_of_few(tokens, few.weights, vocab)
    return Law(few.weights, tokens, masses, 1.0 / kernels.total(masses), vocab)


def draw_trimmed(row: Law, probs: Probs, noise: StepNoise, index: int, *, coupled: bool) -> int:
    """Draft token `index` of a step: as sampling.draw_draft draws from the whole row. probs: of row.ids."""
    if coupled:
        return row.race(noise.race(noise.start + index))
    assert row.ids is not None
    return int(row.ids[inverse_cdf(probs, noise.uniform(Purpose.DRAFT, index))])
