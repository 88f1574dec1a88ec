"""What the benchmarks share: the bare loop over llama.cpp's low-level interface, and the last line."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from typing import Any

import llama_cpp as llama
import numpy as np

from truedraw.runners import gguf, llamacpp  # importing it silences the library's own log


def bare_model() -> Any:
    path = gguf.locate("smollm2", llamacpp.quantise, print)
    return llama.llama_model_load_from_file(str(path).encode(), llamacpp.model_params())


class BareLoop:
    """The least that decoding takes: llama_decode of one token and a draw from its logits."""

    def __init__(self, model: Any, context: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.no_perf = True
        self._context = llama.llama_init_from_model(model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._memory = llama.llama_get_memory(self._context)
        self._generator = np.random.default_rng(0)

    def start(self, prompt: list[int]) -> None:
        llama.llama_memory_clear(self._memory, True)
        tokens = (llama.llama_token * (len(prompt) - 1))(*prompt[:-1])
        assert llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(tokens))) == 0
        self._pending = prompt[-1]

    def run(self, count: int, *, sampled: bool) -> float:
        """Decode `count` tokens; seconds."""
        started = time.perf_counter()
        for _ in range(count):
            one = (llama.llama_token * 1)(self._pending)
            assert llama.llama_decode(self._context, llama.llama_batch_get_one(one, 1)) == 0
            logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), shape=(self._vocab,))
            if sampled:
                weights = np.exp(logits - logits.max(), dtype=np.float64)
                cumulative = np.cumsum(weights)
                self._pending = int(np.searchsorted(cumulative, self._generator.random() * cumulative[-1]))
            else:
                self._pending = int(logits.argmax())
        return time.perf_counter() - started

    def close(self) -> None:
        llama.llama_free(self._context)


def last_line(**figures: Any) -> None:
    """One JSON object, with what it was measured on."""
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    versions = {name: version(name) for name in ("truedraw", "numpy", "llama-cpp-python")}
    print(json.dumps({**figures, "machine": machine, "versions": versions}))
