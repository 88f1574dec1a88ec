"""The models that engines are audited with, made of the demo model: run with a truedraw that has its extras demo and dev."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np

from truedraw.runners import llamacpp
from truedraw.runners.gguf import locate

NORM_SCALE = 0.8
"""Of the draft model's final norm: its laws are flatter than the target's, so that drafts are refused often enough for a wrong
refusal to show."""


def make(folder: Path, name: str) -> Path:
    """q8_0.gguf, f32.gguf, bf16.gguf or q4_0.gguf: the demo model; draft.gguf: q4_0 with its final norm scaled."""
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    kind = "q4_0" if name == "draft.gguf" else name.removesuffix(".gguf")
    partial = path.with_suffix(".partial")
    shutil.copyfile(locate(f"smollm2:{kind}", llamacpp.quantise, print), partial)
    if name == "draft.gguf":
        _scale_norm(partial)
    return partial.rename(path)


def _scale_norm(path: Path) -> None:
    reader = gguf.GGUFReader(path, "r+")
    norm = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    norm.data[:] = norm.data * np.float32(NORM_SCALE)
    reader.data.flush()
