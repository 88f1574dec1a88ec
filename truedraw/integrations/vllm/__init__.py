"""truedraw in vLLM: docs/vllm.md. Importing this imports neither vLLM nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truedraw.integrations.vllm.proposer import Proposer

__all__ = ["Proposer"]


def __getattr__(name: str) -> object:
    """The proposer where vLLM asks for it: the plug-in's entry point is imported whether it is on or not."""
    if name == "Proposer":
        from truedraw.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
