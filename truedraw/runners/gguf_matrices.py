"""The embeddings and the output matrix of a GGUF file, dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from truedraw.errors import MissingExtra, RunnerError
from truedraw.protocols import TokenMatrices

SCALED = ("embedding_scale", "logit_scale", "final_logit_softcapping", "residual_scale")
"""Keys, after the name of the architecture, of numbers that stand between the matrices and what the model computes."""

SCALED_ARCHITECTURES = ("gemma", "minicpm", "granite", "grok", "command-r", "cohere2")
"""Beginnings of the names of those that scale embeddings or logits, whether a key says so or not."""


def read(path: Path) -> TokenMatrices:
    """Raises RunnerError where the file holds none, or where the model scales embeddings or logits; MissingExtra."""
    try:
        import gguf
    except ImportError:
        raise MissingExtra("gguf", "llamacpp") from None
    try:
        reader = gguf.GGUFReader(str(path))
    except (OSError, ValueError) as error:
        raise RunnerError(f"{path.name} cannot be read for its matrices ({error}): an undamaged file is needed") from error
    architecture = reader.fields["general.architecture"].contents()
    if architecture.startswith(SCALED_ARCHITECTURES):
        raise RunnerError(f"{path.name} is a {architecture} model: these scale embeddings or logits, which no matrix tells")
    for key in SCALED:
        field = reader.fields.get(f"{architecture}.{key}")
        if field is not None and field.contents() not in (0, 1):
            raise RunnerError(
                f"{path.name} has {key} = {field.contents():g}: only models without such a factor tell their matrices"
            )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise RunnerError(f"{path.name} holds no token_embd.weight: only models with an embedding matrix tell theirs")
    embedding = _dequantised(gguf, tensors["token_embd.weight"])
    output = _dequantised(gguf, tensors["output.weight"]) if "output.weight" in tensors else embedding
    return TokenMatrices(embedding, output)


def _dequantised(gguf: Any, tensor: Any) -> npt.NDArray[np.float32]:
    try:
        matrix = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise RunnerError(
            f"{tensor.name} is of type {tensor.tensor_type.name}, which cannot be read: take a q8_0 or bf16 file"
        ) from None
    floats: npt.NDArray[np.float32] = np.ascontiguousarray(matrix, dtype=np.float32)
    floats.flags.writeable = False
    return floats
