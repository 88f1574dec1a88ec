"""Every position of a step drawn as plain decoding draws it, with noise of its own place in the text.

vLLM's own sampler makes the tokens: each row of a pass becomes a request of its own in the sampler's eyes, with the
parameters of its request and the output as it would be if the drafts before it had been emitted. What is drawn there is
what plain decoding would emit there, so that a draft counts while it is that token (rule `coupled`), and all parameters
that plain requests may have work behind drafts. A request with a seed draws position i from a generator of (seed, i), plain
or not, alone or in any batch; others draw from vLLM's own stream.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from truedraw.verify.torch import Batch, Uniforms, verify_block

REJECTED = -1
"""What vLLM takes out of the emitted tokens."""


class Seed:
    """Stands for the generator of a request in vLLM's batch: no state, so nothing to wind back where a prompt is read in
    pieces."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass

    def at(self, position: int, device: torch.device) -> torch.Generator:
        """The generator of one position of the text."""
        digest = hashlib.blake2b(f"{self.seed} {position}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)


def sample(
    sampler: Any,
    batch: Any,
    logits: Tensor,
    spec: Any | None,
    draft_probs: Tensor | None = None,
    as_block: Sequence[bool] = (),
) -> SamplerOutput:
    """The tokens of a step, (requests, 1 + the most drafts), REJECTED behind the first that was no draft.

    sampler  vLLM's; batch: its InputBatch; spec: SpecDecodeMetadata, None for a step without drafts
    logits   (drafts + requests, vocab): of each request the rows behind its last token and behind each draft
    draft_probs  (drafts, vocab) the rows that drafts were drawn from; None: all drafts are point masses
    as_block (requests,) whose drawn drafts are judged together (rule `block`), which accepts more of them. It may not depend
             on what was drawn, and log-probabilities are told of the coupled draw alone
    """
    metadata = batch.sampling_metadata
    for request, generator in batch.generators.items():
        if not isinstance(generator, Seed):
            batch.generators[request] = Seed(generator.initial_seed())
    counts = [0] * len(logits) if spec is None else list(spec.num_draft_tokens)
    starts = np.asarray(batch.num_tokens_no_spec[: len(counts)])
    requests = np.repeat(np.arange(len(counts)), np.asarray(counts) + 1)
    offsets = np.concatenate([np.arange(count + 1) for count in counts])
    seeded = {
        row: batch.generators[request].at(int(starts[request]) + int(offset), logits.device)
        for row, (request, offset) in enumerate(zip(requests.tolist(), offsets, strict=True))
        if request in batch.generators
    }
    if spec is None:
        return sampler(logits=logits, sampling_metadata=replace(metadata, generators=seeded))
    expanded = replace(expand(metadata, requests, offsets, logits.device), generators=seeded)
    width = max(counts) + 1
    place = async_tensor_h2d(requests * width + offsets, logits.device)
    laws = None if draft_probs is None or not any(as_block) else _laws(sampler, logits, expanded)
    out = sampler(logits=logits, sampling_metadata=expanded)
    emitted = coupled(out.sampled_token_ids[:, 0], spec.draft_token_ids, counts, place, width)
    if laws is not None and draft_probs is not None:
        judged = blocks(laws, draft_probs, spec.draft_token_ids, counts, width)
        judged_so = async_tensor_h2d(list(as_block), logits.device) & (judged[:, 0] != REJECTED)
        emitted = torch.where(judged_so[:, None], judged, emitted)
    return SamplerOutput(sampled_token_ids=emitted, logprobs_tensors=_padded(out.logprobs_tensors, place, emitted.numel()))


def coupled(drawn: Tensor, drafts: Tensor, counts: Sequence[int], place: Tensor, width: int) -> Tensor:
    """Each request's drawn tokens up to the first that its draft is not.

    drawn   (drafts + requests,): at each position of each request what plain decoding would emit
    drafts  (drafts,) of all requests, one behind the other; counts: how many each has
    place   (drafts + requests,) index of each row in (requests, width)
    """
    requests = len(counts)
    table = torch.full((requests * width,), REJECTED, dtype=torch.int32, device=drawn.device)
    table[place] = drawn.to(torch.int32)
    table = table.view(requests, width)
    wanted = torch.full_like(table, REJECTED - 1)  # no token: behind its last draft a request goes no further
    has_draft = np.arange(width)[None, :] < np.asarray(counts)[:, None]
    inside = async_tensor_h2d(np.flatnonzero(has_draft), drawn.device)
    wanted.view(-1)[inside] = drafts.to(torch.int32)
    kept = (table == wanted).to(torch.int32).cumprod(dim=1)
    before = torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], dim=1)
    return torch.where(before.bool(), table, REJECTED)


def blocks(laws: Tensor, draft_probs: Tensor, drafts: Tensor, counts: Sequence[int], width: int) -> Tensor:
    """What block verification emits of each request, (requests, width); REJECTED everywhere where a row is no law.

    laws  (drafts + requests, vocab) of the target; the others as in `sample` and `coupled`
    """
    requests, device = len(counts), laws.device
    batch = Batch(drafts.long(), async_tensor_h2d(list(counts), device), laws, draft_probs[:, : laws.shape[1]], width - 1)
    accept, residual = (torch.rand(requests, width - 1, dtype=torch.float64, device=device) for _ in range(2))
    verdicts = verify_block(batch, Uniforms(accept, residual, torch.rand(requests, dtype=torch.float64, device=device)))
    place = torch.arange(width, device=device)[None, :]
    first = torch.cumsum(batch.num_drafts, 0) - batch.num_drafts
    index = (first[:, None] + place).clamp(max=max(len(drafts) - 1, 0))
    table = torch.where(place < verdicts.num_accepted[:, None], drafts[index].long(), REJECTED)
    return torch.where(place == verdicts.num_accepted[:, None], verdicts.next_token[:, None], table).to(torch.int32)


def _laws(sampler: Any, logits: Tensor, metadata: Any) -> Tensor:
    """(rows, vocab) what the sampler draws from, as its own steps make it; rows of greedy requests are not to be used."""
    rows = sampler.apply_logits_processors(logits.to(torch.float32, copy=True), metadata, False)
    rows = sampler.apply_temperature(rows, metadata.temperature, metadata.all_random)
    for processor in metadata.logitsprocs.argmax_invariant:
        rows = processor.apply(rows)
    return apply_top_k_top_p(rows, metadata.top_k, metadata.top_p).softmax(dim=-1, dtype=torch.float32)


def _padded(rows: LogprobsTensors | None, place: Tensor, size: int) -> LogprobsTensors | None:
    """Log-probabilities as vLLM lays them out beside the emitted tokens; what stands at rejected places is not read."""
    if rows is None:
        return None

    def laid_out(tensor: Tensor) -> Tensor:
        table = tensor.new_zeros((size, *tensor.shape[1:]))
        table[place] = tensor
        return table

    return LogprobsTensors(laid_out(rows.logprob_token_ids), laid_out(rows.logprobs), laid_out(rows.selected_token_ranks))


# ---------------------------------------------------------------- a request for each row


def expand(metadata: Any, requests: np.ndarray, offsets: np.ndarray, device: torch.device) -> Any:
    """SamplingMetadata with a request for each row of a pass.

    requests, offsets  (rows,): the request of each row, and how many of its drafts stand before it
    """
    index = async_tensor_h2d(requests, device)

    def each(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[: requests[-1] + 1][index]

    drafts = metadata.spec_token_ids or [[]] * len(metadata.output_token_ids)
    rows = list(enumerate(zip(requests.tolist(), offsets.tolist(), strict=True)))
    outputs = [
        [*metadata.output_token_ids[request], *drafts[request][:offset]] if metadata.output_token_ids else []
        for _, (request, offset) in rows
    ]
    penalised = not metadata.no_penalties
    return replace(
        metadata,
        temperature=each(metadata.temperature),
        top_p=each(metadata.top_p),
        top_k=each(metadata.top_k),
        prompt_token_ids=each(metadata.prompt_token_ids) if penalised else metadata.prompt_token_ids,
        frequency_penalties=each(metadata.frequency_penalties) if penalised else metadata.frequency_penalties,
        presence_penalties=each(metadata.presence_penalties) if penalised else metadata.presence_penalties,
        repetition_penalties=each(metadata.repetition_penalties) if penalised else metadata.repetition_penalties,
        output_token_ids=outputs,
        allowed_token_ids_mask=each(metadata.allowed_token_ids_mask),
        bad_words_token_ids=_by_row(metadata.bad_words_token_ids, rows),
        logprob_token_ids=_by_row(metadata.logprob_token_ids, rows),
        logitsprocs=LogitsProcessors(_processor(processor, rows, index) for processor in metadata.logitsprocs.all),
        spec_token_ids=None,
    )


Rows = list[tuple[int, tuple[int, int]]]
"""Row, (request, offset)."""


def _by_row(of_requests: Any, rows: Rows) -> Any:
    if not of_requests:
        return of_requests
    return {row: of_requests[request] for row, (request, _) in rows if request in of_requests}


def _processor(processor: Any, rows: Rows, index: Tensor) -> Any:
    """One of vLLM's processors that keep parameters by request, with these by row. Others see a row as it is."""
    made = copy.copy(processor)
    if isinstance(processor, MinPLogitsProcessor):
        if processor.min_p_count:
            made.min_p = processor.min_p[index]
    elif isinstance(processor, LogitBiasLogitsProcessor):
        made.biases = _by_row(processor.biases, rows)
        places = [(row, token, value) for row, bias in made.biases.items() for token, value in bias.items()]
        made.logits_slice, values = _slice(made, [(row, token) for row, token, _ in places]), [value for *_, value in places]
        made.bias_tensor = made._device_tensor(values, torch.float32)
    elif isinstance(processor, MinTokensLogitsProcessor):
        made.min_toks = {
            row: processor.min_toks[request]
            for row, (request, offset) in rows
            if request in processor.min_toks and len(processor.min_toks[request][1]) + offset < processor.min_toks[request][0]
        }
        made.logits_slice = _slice(made, [(row, stop) for row, kept in made.min_toks.items() for stop in kept[2]])
        made.restore_logits_slice = _slice(
            made, [(row, stop) for row, kept in made.min_toks.items() if kept[3] for stop in kept[2]]
        )
    return made


def _slice(processor: Any, places: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    rows, tokens = ([place[side] for place in places] for side in (0, 1))
    return processor._device_tensor(rows, torch.int32), processor._device_tensor(tokens, torch.int32)
