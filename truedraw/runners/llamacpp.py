"""GGUF models through the low-level interface of llama-cpp-python.

Not its high-level Llama class: that keeps a float matrix of context x vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from truedraw.errors import ConversionError, InvalidParameter, MissingExtra, ModelFileError, RollbackUnsupported, RunnerError
from truedraw.protocols import Chunk, Rows, TokenMatrices
from truedraw.runners.machine import cores, of_file, processor, spelled_threads, thread_counts

try:
    import llama_cpp as llama
except ImportError:
    raise MissingExtra("llama-cpp-python", "llamacpp") from None

DEFAULT_CONTEXT = 4096
MAX_PASS_SIZE = 512
MAX_LOGITS_BYTES = 64 * 1000 * 1000
"""Rows of one pass times vocabulary times 4 bytes stay under this."""

_GGML_TYPE_BF16 = 30  # in ggml.h; llama-cpp-python 0.3.36 names all types but this one
_KV_TYPES = {"f16": llama.GGML_TYPE_F16, "bf16": _GGML_TYPE_BF16, "f32": llama.GGML_TYPE_F32, "q8_0": llama.GGML_TYPE_Q8_0}
_FILE_TYPES = {
    "f32": llama.LLAMA_FTYPE_ALL_F32,
    "bf16": llama.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
}

_ERROR_LEVEL = 4
_complaints: deque[str] = deque(maxlen=8)


@llama.llama_log_callback  # type: ignore[untyped-decorator]  # a ctypes function type
def _on_log(level: int, text: bytes, _user_data: object) -> None:
    """The library writes to standard error by itself: keep only its errors, to put them into ours."""
    if level == _ERROR_LEVEL:
        _complaints.append(" ".join(text.decode("utf-8", "replace").split()))


llama.llama_log_set(_on_log, None)
llama.llama_backend_init()


def _complaint() -> str:
    said = "; ".join(_complaints) or "it gave no reason"
    _complaints.clear()
    return said


def model_params() -> Any:
    """The library's own, but without its AMX kernels: GCC before 13.2, Debian 12's for one, drops their tile configuration, and
    the first pass then ends the process (ggml-org/llama.cpp issue 20824, pull request 26954). Its other repacked
    weights go with them; a library that was built without AMX, as the Makefile does it, keeps these."""
    params = llama.llama_model_default_params()
    if b"AMX_INT8 = 1" in llama.llama_print_system_info():
        params.use_extra_bufts = False
    return params


def quantise(source: Path, target: Path, file_type: str) -> None:
    """Write `target` as a copy of `source` with weights of another type: a key of _FILE_TYPES.
    Raises ConversionError."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[file_type]
    params.allow_requantize = True
    _complaints.clear()
    if llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise ConversionError(_complaint())


class LlamaCppRunner:
    """One model, one context, `num_slots` sequences in it.

    context        tokens per slot; None: the trained length, 4096 at most. More than was trained
                   is refused, or with clip_context cut to that
    threads_small  threads for passes of one token, None: as for all others; threads: for those, None: all cores
    kv_unified     True: all slots share one cache, and a ragged batch is one pass. False: a stream
                   for each slot, which keeps a slot's own cells in order whatever the others do
    flash_attention  False: without the fused kernel, which rounds f32 KV to f16 first
    Sliding-window models get full-size caches, so that they can roll back. Recurrent and hybrid
    ones cannot: they forget everything or nothing. Raises ModelFileError, InvalidParameter.
    """

    can_score_trees = False
    hidden_layers: tuple[str, ...] = ("final",)

    def __init__(
        self,
        path: Path,
        *,
        context: int | None = None,
        num_slots: int = 1,
        threads: int | None = None,
        threads_small: int | None = None,
        kv_type: str = "f16",
        kv_unified: bool = True,
        clip_context: bool = False,
        flash_attention: bool = True,
    ) -> None:
        self.thread_counts = thread_counts(*cores())
        large = threads or self.thread_counts[-1]
        small = threads_small or large
        self.identity: Mapping[str, str] = {
            **machine(path),
            "threads": spelled_threads(small, large),
            "kv": f"{kv_type} {'unified' if kv_unified else 'streams'} {num_slots}",
            "flash_attention": "auto" if flash_attention else "off",
        }
        self._path = path
        self._model: Any = None
        self._context: Any = None
        self._on_close: list[Callable[[], None]] = []
        _complaints.clear()
        self._model = llama.llama_model_load_from_file(str(path).encode(), model_params())
        if not self._model:
            raise ModelFileError(f"{path} cannot be loaded as a model: {_complaint()}")
        if not llama.llama_model_has_decoder(self._model) or llama.llama_model_has_encoder(self._model):
            self.close()
            raise ModelFileError(f"{path} is an encoder model: a causal language model is needed")
        vocab = llama.llama_model_get_vocab(self._model)
        if llama.llama_vocab_type(vocab) == llama.LLAMA_VOCAB_TYPE_NONE:
            self.close()
            raise ModelFileError(f"{path} holds no vocabulary: a model with its tokenizer is needed")
        trained = llama.llama_model_n_ctx_train(self._model)
        if context is not None and clip_context:
            context = min(context, trained)
        if context is not None and context > trained:
            self.close()
            raise InvalidParameter("context", context, f"at most the {trained} tokens that {path.name} was trained for")
        self.max_length = context or min(trained, DEFAULT_CONTEXT)
        self.num_slots = num_slots
        self.can_rollback = self.can_copy = not (
            llama.llama_model_is_recurrent(self._model) or llama.llama_model_is_hybrid(self._model)
        )
        self.tokenizer = LlamaTokenizer(vocab, self._model)
        self._on_close.append(self.tokenizer.close)
        self.vocab_size = self.tokenizer.vocab_size
        self.max_rows = max(1, min(MAX_PASS_SIZE, MAX_LOGITS_BYTES // (4 * self.vocab_size)))
        self.max_pass_size = MAX_PASS_SIZE
        self.num_parameters: int = llama.llama_model_n_params(self._model)
        self.has_f32_weights = llama.llama_model_ftype(self._model) & ~llama.LLAMA_FTYPE_GUESSED == llama.LLAMA_FTYPE_ALL_F32
        self._context = llama.llama_init_from_model(
            self._model, self._context_params(small, large, _KV_TYPES[kv_type], kv_unified, flash_attention)
        )
        if not self._context:
            self.close()
            raise ModelFileError(f"{path} gives no context of {num_slots} x {self.max_length} tokens: {_complaint()}")
        self._one_stream = kv_unified
        self._memory = llama.llama_get_memory(self._context)
        self._lengths = [0] * num_slots
        self._batch = _Batch(self.max_pass_size)
        self._with_hidden = False
        self._width = llama.llama_model_n_embd(self._model)

    def _context_params(self, small: int, large: int, kv_type: int, kv_unified: bool, flash_attention: bool) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx = self.max_length * self.num_slots
        params.n_batch = params.n_ubatch = MAX_PASS_SIZE
        params.n_outputs_max = self.max_rows
        params.n_seq_max = self.num_slots
        params.n_threads_batch = large
        params.n_threads = small
        params.type_k = params.type_v = kv_type
        params.kv_unified = kv_unified
        if not flash_attention:
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.swa_full = True
        params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
        params.no_perf = True
        return params

    def forward(self, chunks: Sequence[Chunk]) -> list[Rows]:
        """See ModelRunner. Logits and hidden states are read where the library left them, without a copy."""
        self._refuse_if_closed()
        size = sum(len(chunk.tokens) for chunk in chunks)
        hidden = any(chunk.hidden for chunk in chunks)
        num_rows = size if hidden else sum(chunk.rows_to_keep for chunk in chunks)
        if size > self.max_pass_size or num_rows > self.max_rows:
            raise RunnerError(f"a pass of {size} tokens with {num_rows} rows: {self.max_pass_size} and {self.max_rows} fit")
        for chunk in chunks:
            if chunk.parents is not None:
                raise RunnerError("this runner scores chains only")
            if self._lengths[chunk.slot] + len(chunk.tokens) > self.max_length:
                raise RunnerError(f"slot {chunk.slot} would hold more than {self.max_length} tokens")
        if hidden != self._with_hidden:
            llama.llama_set_embeddings(self._context, hidden)
            self._with_hidden = hidden
        self._batch.fill(chunks, self._lengths, every_row=hidden)
        _complaints.clear()
        code = llama.llama_decode(self._context, self._batch.struct)
        if code != 0:
            raise RunnerError(f"llama.cpp could not compute a pass of {size} tokens (code {code}): {_complaint()}")
        for chunk in chunks:
            self._lengths[chunk.slot] += len(chunk.tokens)
        if not num_rows:
            empty = np.empty((0, self.vocab_size), dtype=np.float32)
            return [Rows(empty) for _ in chunks]
        logits = _view(llama.llama_get_logits(self._context), num_rows, self.vocab_size)
        states = _view(llama.llama_get_embeddings(self._context), num_rows, self._width) if hidden else None
        answers, end = [], 0
        for chunk in chunks:
            end += len(chunk.tokens) if hidden else chunk.rows_to_keep
            kept = slice(end - chunk.rows_to_keep, end)
            answers.append(Rows(logits[kept], {layer: states[kept] for layer in chunk.hidden} if states is not None else {}))
        return answers

    def rollback(self, slot: int, length: int) -> None:
        self._refuse_if_closed()
        # asked of the library even where nothing should be left: after a failed pass it knows more than we do
        if length > self._lengths[slot]:
            raise RunnerError(f"rollback of slot {slot} to {length} tokens: it holds {self._lengths[slot]}")
        if not llama.llama_memory_seq_rm(self._memory, slot, length, -1):
            raise RollbackUnsupported(f"slot {slot} cannot be cut to {length} tokens: this model forgets everything or nothing")
        self._lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        """See ModelRunner. In a unified cache both slots then share the cells; a stream is copied as it stands."""
        self._refuse_if_closed()
        if length > self._lengths[source]:
            raise RunnerError(f"a copy of {length} tokens of slot {source}: it holds {self._lengths[source]}")
        if not self.can_copy:
            raise RollbackUnsupported(f"slot {target} cannot take over what slot {source} holds: this model keeps a state")
        self.rollback(target, 0)
        llama.llama_memory_seq_cp(self._memory, source, target, 0, length if self._one_stream else -1)
        self._lengths[target] = length if self._one_stream else self._lengths[source]
        self.rollback(target, length)

    def set_threads(self, small: int, large: int) -> None:
        """See Threaded. What the cache holds stays."""
        self._refuse_if_closed()
        llama.llama_set_n_threads(self._context, small, large)
        self.identity = {**self.identity, "threads": spelled_threads(small, large)}

    def token_matrices(self) -> TokenMatrices:
        """See ModelRunner: read from the file, dequantised. Raises RunnerError, MissingExtra."""
        from truedraw.runners.gguf_matrices import read

        return read(self._path)

    def _refuse_if_closed(self) -> None:
        if self._context is None:
            raise RunnerError("the model has been closed: load it again")

    def close(self) -> None:
        for forget in self._on_close:
            forget()
        if self._context:
            llama.llama_free(self._context)
        if self._model:
            llama.llama_model_free(self._model)
        self._context = self._model = None


def machine(path: Path) -> dict[str, str]:
    """The file, the library and the processor, by name: what the best number of threads depends on, and a part of
    what the cost of a pass does."""
    return {"file": of_file(path), "library": f"llama-cpp-python {llama.__version__}", "processor": processor()}


def _view(pointer: Any, rows: int, columns: int) -> Any:
    """Floats of the library's as an array (rows, columns), without a copy. Not np.ctypeslib.as_array:
    that makes a new type for each call, which took as long as all bookkeeping of a step."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    return np.frombuffer(_floats(rows * columns).from_address(address), dtype=np.float32).reshape(rows, columns)


@functools.lru_cache(maxsize=64)
def _floats(count: int) -> Any:
    return ctypes.c_float * count


class _Batch:
    """A llama_batch over NumPy arrays, filled anew for each pass."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, dtype=np.int32)
        self._positions = np.zeros(size, dtype=np.int32)
        self._num_slots = np.ones(size, dtype=np.int32)
        self._slots = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        width = self._slots.itemsize
        self._slot_pointers = np.arange(size, dtype=np.uintp) * width + self._slots.ctypes.data
        self.struct = llama.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._num_slots),
            ("seq_id", self._slot_pointers),
            ("logits", self._wanted),
        ):
            pointer_type = dict(llama.llama_batch._fields_)[name]
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, pointer_type))

    def fill(self, chunks: Sequence[Chunk], lengths: Sequence[int], *, every_row: bool) -> None:
        start = 0
        for chunk in chunks:
            count = len(chunk.tokens)
            end = start + count
            self._tokens[start:end] = chunk.tokens
            self._positions[start:end] = np.arange(lengths[chunk.slot], lengths[chunk.slot] + count)
            self._slots[start:end] = chunk.slot
            self._wanted[start:end] = every_row
            self._wanted[end - chunk.rows_to_keep : end] = 1
            start = end
        self.struct.n_tokens = start


class LlamaTokenizer:
    """The vocabulary of a GGUF model."""

    def __init__(self, vocab: Any, model: Any) -> None:
        self._vocab = vocab
        self.vocab_size: int = llama.llama_vocab_n_tokens(vocab)
        self.eos_ids = frozenset(i for i in range(self.vocab_size) if llama.llama_vocab_is_eog(vocab, i))
        template = llama.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        self.bos_text = self._special_text(llama.llama_vocab_bos(vocab))
        self.eos_text = self._special_text(llama.llama_vocab_eos(vocab))
        self._bytes: dict[int, bytes] = {}

    def _special_text(self, token: int) -> str:
        return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def close(self) -> None:
        """The model is gone, and its vocabulary with it."""
        self._vocab = None

    def _known(self) -> Any:
        if self._vocab is None:
            raise RunnerError("the model has been closed: load it again")
        return self._vocab

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (llama.llama_token * room)()
            count = llama.llama_tokenize(self._known(), data, len(data), tokens, room, add_special, True)
            if count >= 0:
                return list(tokens[:count])
            room = -count

    def token_bytes(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._piece(token, special=False) if 0 <= token < self.vocab_size else b""
        return self._bytes[token]

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = llama.llama_token_to_piece(self._known(), token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def token_text(self, token: int) -> bytes:
        return bytes(llama.llama_vocab_get_text(self._known(), token))
