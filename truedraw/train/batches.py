"""Stored answers as the batches that a network learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from truedraw.protocols import TokenMatrices
from truedraw.train.store import Answer


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Answers side by side, filled up behind their ends.

    states      (texts, n, width) of the target; embeddings: likewise, of the tokens drawn behind them
    norms       (texts, n): logs of the sums of exp of the whole rows
    lengths     (texts,)
    """

    states: Tensor
    embeddings: Tensor
    norms: Tensor
    lengths: Tensor

    def rows(self, depth: int) -> Tensor:
        """(texts, n), True where depth `depth` (1 is the first) has a chain behind it and a row of the target ahead."""
        places = torch.arange(self.states.shape[1])
        return (places >= depth - 1) & (places + 1 < self.lengths[:, None])


def order(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[npt.NDArray[np.int64]]:
    """The answers of each batch of one epoch: about `tokens` in each, of like lengths, in an order of their own."""
    generator = np.random.default_rng((seed, epoch))
    mixed = np.array(lengths) + generator.uniform(0, 24, len(lengths))  # another company in each epoch
    ranked = np.argsort(mixed)
    batches: list[list[int]] = [[]]
    for i in ranked.tolist():
        if batches[-1] and (len(batches[-1]) + 1) * lengths[i] > tokens:
            batches.append([])
        batches[-1].append(i)
    return [np.array(batches[i]) for i in generator.permutation(len(batches))]


def collate(answers: Sequence[Answer], embedding: Tensor) -> Batch:
    """embedding: (vocab, width)."""
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    longest, width = int(lengths.max()), embedding.shape[1]
    states = torch.zeros(len(answers), longest, width)
    embeddings = torch.zeros(len(answers), longest, width)
    norms = torch.zeros(len(answers), longest)
    for i, answer in enumerate(answers):
        n = len(answer.tokens)
        states[i, :n] = torch.from_numpy(np.asarray(answer.states, np.float32))
        embeddings[i, :n] = embedding[torch.from_numpy(np.asarray(answer.tokens, np.int64))]
        norms[i, :n] = torch.from_numpy(np.array(answer.norms))
    return Batch(states, embeddings, norms, lengths)


def usable(answers: Iterator[Answer]) -> list[Answer]:
    """Those that hold anything to learn: a pair of tokens."""
    return [answer for answer in answers if len(answer.tokens) > 1]


def teacher(batch: Batch, read_out: Tensor) -> Tensor:
    """(texts, n, trimmed vocab): what the target's own row behind each state gives the tokens of the trimmed vocabulary;
    the rest of the mass is left out. read_out: (trimmed vocab, width)."""
    return (batch.states @ read_out.T - batch.norms[..., None]).exp_()


def tensors(matrices: TokenMatrices, draft_ids: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The embeddings of all tokens, and the rows of the output matrix that read out the trimmed vocabulary."""
    embedding = np.array(matrices.embedding, np.float32)  # a copy: torch wants arrays that may be written to
    return torch.from_numpy(embedding), torch.from_numpy(np.ascontiguousarray(matrices.output[draft_ids]))
