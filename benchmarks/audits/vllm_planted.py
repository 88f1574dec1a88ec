"""vLLM's server with the truedraw plug-in and a fault planted in it, which an audit has to find: requests that have drafts in a
step are drawn at six tenths of their temperature there.

Takes the options of vllm.entrypoints.openai.api_server; TRUEDRAW_VLLM=1 has to be set.
"""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np
import torch

from truedraw.integrations.vllm import sampling

_expand = sampling.expand


def expand(metadata: Any, requests: np.ndarray, offsets: np.ndarray, device: torch.device) -> Any:
    made = _expand(metadata, requests, offsets, device)
    drafted = np.isin(requests, requests[offsets > 0])
    made.temperature[torch.from_numpy(drafted)] *= 0.6
    return made


sampling.expand = expand  # at import: the engine's processes are spawned, and import this file again

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
