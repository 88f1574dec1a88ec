"""Training of what drafts: modules that learn from the target itself."""

from __future__ import annotations

from truedraw.errors import MissingExtra

try:
    import torch
except ImportError:
    raise MissingExtra("torch", "train") from None


def use_threads(count: int) -> None:
    """Of the processor, for all that is trained in this process."""
    torch.set_num_threads(count)
