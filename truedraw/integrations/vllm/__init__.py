"""truedraw in vLLM: docs/vllm.md. Importing this imports neither vLLM nor torch."""

from truedraw.integrations.vllm.proposer import Proposer

__all__ = ["Proposer"]
