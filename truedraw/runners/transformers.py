"""Causal language models of Hugging Face transformers, on CPU or CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from truedraw.errors import InvalidParameter, MissingExtra, ModelFileError, RollbackUnsupported, RunnerError, one_line
from truedraw.protocols import Chunk, Rows, TokenMatrices
from truedraw.runners import transformers_cache as caches
from truedraw.runners.machine import cores, processor, spelled_threads, thread_counts
from truedraw.runners.transformers_batch import TextBatch, texts_at_a_time

try:
    import torch
    import transformers
except ImportError:
    raise MissingExtra("torch or transformers", "transformers") from None

DEFAULT_CONTEXT = 4096
MAX_PASS_SIZE = 512
MAX_LOGITS_BYTES = 64 * 1000 * 1000
"""Rows of one pass times vocabulary times 4 bytes stay under this."""

_TRIED, _BEGUN = 8, 5
"""Tokens that a model is tried out with at load, and how many of them are cached before the others are fed."""
_ROUNDING, _TOLERANCE = 0.01, 0.1
"""Rows of the same context, fed in other pieces, may differ by this share of their spread: by the first without a
question, by the second if that is how much single tokens do. A cache that is not read makes 0.3 and more."""


class TransformersRunner:
    """A loaded model with a KV cache of its own for each slot.

    model          a causal language model of transformers, on the device where it is to run; its weights stay as they are
    context        tokens per slot; None: the trained length, 4096 at most. More than was trained, or than longrope's first
                   rotations are for, is refused, or with clip_context cut to that
    threads_small  threads for passes of one token, None: as for all others; threads: for those, None: all cores
    identity       the file, where it has one

    A pass computes one slot after the other, since caches of transformers are not ragged. Rows are float32 NumPy arrays,
    whatever the model computes in; on CUDA the rows that are kept are copied to the host. Sliding windows hold every token
    and roll back; what cannot (recurrent states) is found by looking at the cache after a first forward, and forgets
    everything or nothing. Raises InvalidParameter, or ModelFileError if the model has no output matrix, or if its rows
    behind cached tokens are not those of the whole text.
    """

    can_score_trees = False
    hidden_layers: tuple[str, ...] = ("final",)

    def __init__(
        self,
        model: Any,
        *,
        context: int | None = None,
        num_slots: int = 1,
        threads: int | None = None,
        threads_small: int | None = None,
        clip_context: bool = False,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self._model: Any = model.eval()
        self._device = model.device
        on_cpu = self._device.type == "cpu"
        self.thread_counts = thread_counts(*cores()) if on_cpu else cores()[1:]
        self._large = threads or self.thread_counts[-1]
        self._small = threads_small or self._large
        self._config = model.config.get_text_config()
        trained = _longest(self._config)
        if context is not None and clip_context:
            context = min(context, trained)
        if context is not None and context > trained:
            raise InvalidParameter("context", context, f"at most the {trained} tokens whose rows depend on their text alone")
        self.max_length: int = context or min(trained, DEFAULT_CONTEXT)
        self.num_slots = num_slots
        self.max_pass_size = MAX_PASS_SIZE
        self.num_parameters: int = model.num_parameters()
        self.identity: Mapping[str, str] = {
            **(identity or {"file": f"{type(model).__name__} {self.num_parameters}"}),
            **machine(self._device),
            "weights": str(model.dtype).removeprefix("torch."),
            "slots": str(num_slots),
            "threads": spelled_threads(self._small, self._large),
        }
        self._cache_argument = caches.argument(model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        head = model.get_output_embeddings()
        if head is None or not self._cache_argument:
            raise ModelFileError(f"{type(model).__name__} is no causal language model with a cache: another model is needed")
        self._kept = 0
        self._final: Any = None
        self._hook = head.register_forward_pre_hook(self._read_state)
        self._caches: list[Any] = [self.new_cache() for _ in range(num_slots)]
        self._lengths = [0] * num_slots
        self._unsure: set[int] = set()
        """Slots whose caches may hold more than their lengths say: a pass did not come to its end."""
        self.vocab_size = self.max_rows = 1
        try:
            self._try_out()
        except BaseException:
            self.close()
            raise

    def new_cache(self) -> Any:
        """An empty cache of one text, or of texts side by side."""
        return caches.new_cache(self._model.config, self.max_length)

    def _read_state(self, _head: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the output matrix is applied: let it have the kept rows only, and remember what they are."""
        states = args[0][:, args[0].shape[1] - self._kept :]
        self._final = states
        return (states, *args[1:])

    # ------------------------------------------------------------ at load

    def _try_out(self) -> None:
        """Find out with a few tokens what the model and its cache can do. Raises ModelFileError."""
        name = type(self._model).__name__
        if self.max_length < _TRIED:
            raise InvalidParameter("context", self.max_length, f"at least {_TRIED} tokens")
        self._use_threads(_TRIED)
        text = (np.arange(_TRIED) * 7919 + 101) % len(self._model.get_input_embeddings().weight)
        try:
            whole = self._computed(text)
        except Exception as error:  # a model's own code: whatever it raises says that it is not for us
            raise ModelFileError(f"{name} could not compute a first pass ({one_line(error)}): another model is needed") from error
        if self._final is None or whole.ndim != 2 or len(whole) != _TRIED:
            raise ModelFileError(f"{name} has no output matrix that makes its rows: another model is needed")
        other = self._computed(np.concatenate([text[:_BEGUN], text[:_BEGUN][: _TRIED - _BEGUN]]))
        singles = _distance(self._computed(text, single=True), whole)
        if not (_distance(other[:_BEGUN], whole[:_BEGUN]) <= _TOLERANCE and singles <= _TOLERANCE):  # nor NaN
            raise ModelFileError(
                f"{name} is no causal language model whose cache can be continued: its rows depend on tokens behind them, or "
                "not on cached ones"
            )
        cache = self.new_cache()
        self.compute(cache, text[:_BEGUN], 0)
        pieces = self.compute(cache, text[_BEGUN:], _TRIED - _BEGUN)[0]
        self._rounding = max(_ROUNDING, 4 * singles)
        self._continues = _distance(pieces, whole[_BEGUN:]) <= self._rounding
        self.can_rollback = caches.can_crop(cache)
        if self.can_rollback:
            caches.crop(cache, _BEGUN)
            again = self.compute(cache, text[_BEGUN:], _TRIED - _BEGUN)[0]
            self.can_rollback = _distance(again, pieces) <= _ROUNDING
        self.can_copy = self.can_rollback and caches.can_copy(cache)
        self.vocab_size = whole.shape[1]
        self.max_rows = max(self.num_slots, min(MAX_PASS_SIZE, MAX_LOGITS_BYTES // (4 * self.vocab_size)))

    def _computed(self, text: Any, *, single: bool = False) -> Any:
        """All rows of a text, in one pass, or behind its beginning one token at a time."""
        cache = self.new_cache()
        parts = [text[:_BEGUN], *text[_BEGUN:, np.newaxis]] if single else [text]
        return torch.cat([self.compute(cache, part, len(part))[0] for part in parts])

    # ------------------------------------------------------------ passes

    def compute(self, cache: Any, tokens: Any, rows_to_keep: int) -> tuple[Any, Any]:
        """Append tokens to a cache: (rows_to_keep, vocab) logits and (rows_to_keep, width) final states, as tensors."""
        self._kept, self._final = rows_to_keep, None
        ids = torch.from_numpy(np.array(tokens, dtype=np.int64)).to(self._device)
        options: dict[str, Any] = {self._cache_argument: cache, "use_cache": True, "return_dict": True}
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = max(rows_to_keep, 1)  # 0 would mean all
        with torch.inference_mode():
            logits = self._model(input_ids=ids[None], **options).logits[0]
        return logits, self._final[0] if self._final is not None else None

    def compute_texts(self, cache: Any, tokens: Any, seen: Any) -> tuple[Any, Any]:
        """Append as many tokens to each of several texts. tokens: (n, m); seen: (n, columns), False before the texts begin.
        Returns the last rows, (n, vocab) logits and (n, width) final states, on the host. Raises RunnerError."""
        self._refuse_if_closed()
        self._kept, self._final = 1, None
        self._use_threads(tokens.size)
        positions = np.maximum(seen.cumsum(axis=1) - 1, 0)[:, -tokens.shape[1] :]
        given = {"input_ids": tokens, "position_ids": positions, "attention_mask": seen.astype(np.int64)}
        options: dict[str, Any] = {name: torch.from_numpy(array).to(self._device) for name, array in given.items()}
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = 1
        try:
            with torch.inference_mode():
                logits = self._model(**options, **{self._cache_argument: cache}, use_cache=True, return_dict=True).logits
                return _on_host(logits[:, -1]), _on_host(self._final[:, -1])
        except (RuntimeError, IndexError, ValueError) as error:
            raise RunnerError(f"transformers could not compute {len(tokens)} texts at once ({one_line(error)})") from error

    def side_by_side(self) -> TextBatch | None:
        """See SideBySide. None: there is one slot, or texts computed side by side are not what they are alone."""
        if not {"position_ids", "attention_mask"} <= set(inspect.signature(self._model.forward).parameters) or not self.can_copy:
            return None
        if self.num_slots == 1:
            return None
        text = ((np.arange(_TRIED) * 7919 + 101) % self.vocab_size).astype(np.int32)
        alone = self.new_cache()
        whole = self.compute(alone, text, _TRIED)[0].float().cpu()
        tried = TextBatch(self, 3)
        tried.begin([1], [text[2:_BEGUN]])
        tried.begin([0, 2], [text[:_BEGUN], text[2:_BEGUN]])
        rows = torch.from_numpy(np.stack([tried.step([0, 1, 2], text[[i, i, i]]).logits for i in range(_BEGUN, _TRIED)]))
        other = self.compute(self.new_cache(), text[2:], _TRIED - 2)[0].float().cpu()
        apart = [_distance(rows[:, 0], whole[_BEGUN:]), *(_distance(rows[:, i], other[_BEGUN - 2 :]) for i in (1, 2))]
        alike = all(distance <= self._rounding for distance in apart)
        return TextBatch(self, min(self.num_slots, texts_at_a_time(alone, _TRIED))) if alike else None

    def _append(self, chunk: Chunk) -> tuple[Any, Any]:
        """As `compute`, for a slot: one token at a time where the model continues its cache in no other way."""
        cache, keep = self._caches[chunk.slot], chunk.rows_to_keep
        if self._continues or not self._lengths[chunk.slot]:
            return self.compute(cache, chunk.tokens, keep)
        first = len(chunk.tokens) - keep
        parts = [self.compute(cache, chunk.tokens[i : i + 1], int(i >= first)) for i in range(len(chunk.tokens))]
        return torch.cat([logits for logits, _ in parts]), torch.cat([final for _, final in parts])

    def forward(self, chunks: Sequence[Chunk]) -> list[Rows]:
        """See ModelRunner. One forward of the model for each chunk."""
        self._refuse_if_closed()
        self._check(chunks)
        self._use_threads(sum(len(chunk.tokens) for chunk in chunks))
        answers = []
        for chunk in chunks:
            if chunk.slot in self._unsure:
                self.rollback(chunk.slot, self._lengths[chunk.slot])
            self._unsure.add(chunk.slot)
            try:
                logits, final = self._append(chunk)
                rows = Rows(_on_host(logits), {layer: _on_host(final) for layer in chunk.hidden})
            except (RuntimeError, IndexError, ValueError) as error:  # torch.OutOfMemoryError is a RuntimeError
                raise RunnerError(f"transformers could not compute {len(chunk.tokens)} tokens ({one_line(error)})") from error
            self._lengths[chunk.slot] += len(chunk.tokens)
            self._unsure.discard(chunk.slot)
            answers.append(rows)
        return answers

    def _check(self, chunks: Sequence[Chunk]) -> None:
        size = sum(len(chunk.tokens) for chunk in chunks)
        num_rows = sum(chunk.rows_to_keep for chunk in chunks)
        if size > self.max_pass_size or num_rows > self.max_rows:
            raise RunnerError(f"a pass of {size} tokens with {num_rows} rows: {self.max_pass_size} and {self.max_rows} fit")
        if len({chunk.slot for chunk in chunks}) != len(chunks):
            raise RunnerError("two chunks for one slot in a pass")
        for chunk in chunks:
            if chunk.parents is not None:
                raise RunnerError("this runner scores chains only")
            if not len(chunk.tokens) or not 0 <= chunk.rows_to_keep <= len(chunk.tokens):
                raise RunnerError(f"a chunk of {len(chunk.tokens)} tokens that keeps {chunk.rows_to_keep} rows")
            if self._lengths[chunk.slot] + len(chunk.tokens) > self.max_length:
                raise RunnerError(f"slot {chunk.slot} would hold more than {self.max_length} tokens")
            for token in (int(np.min(chunk.tokens)), int(np.max(chunk.tokens))):
                if not 0 <= token < self.vocab_size:  # on CUDA it would end the process's use of the device
                    raise RunnerError(f"token {token} was fed: the vocabulary has {self.vocab_size}")

    def rollback(self, slot: int, length: int) -> None:
        """See ModelRunner. Layers are cut even where nothing should be left: a failed pass may have reached some of them."""
        self._refuse_if_closed()
        if length > self._lengths[slot] or length < 0:
            raise RunnerError(f"rollback of slot {slot} to {length} tokens: it holds {self._lengths[slot]}")
        if length == 0:
            self._caches[slot] = self.new_cache()
        elif self.can_rollback:
            caches.crop(self._caches[slot], length)
        elif length < self._lengths[slot] or slot in self._unsure:
            raise RollbackUnsupported(f"slot {slot} cannot be cut to {length} tokens: this model forgets everything or nothing")
        self._lengths[slot] = length
        self._unsure.discard(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """See ModelRunner. Keys and values are copied."""
        self._refuse_if_closed()
        if length > self._lengths[source] or length < 0:
            raise RunnerError(f"a copy of {length} tokens of slot {source}: it holds {self._lengths[source]}")
        if not self.can_copy:
            raise RollbackUnsupported(f"slot {target} cannot take over what slot {source} holds: this model keeps a state")
        self.rollback(target, 0)
        with torch.inference_mode():
            caches.copy_prefix(self._caches[source], self._caches[target], length)
        self._lengths[target] = length

    # ------------------------------------------------------------ what else it can tell

    def token_matrices(self) -> TokenMatrices:
        """See ModelRunner. Told only if they are the whole way in and out, which a few tokens show: no scale, no cap, no
        bias, no positions added to the embeddings."""
        self._refuse_if_closed()
        name = type(self._model).__name__
        embedding, output = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        ids = torch.arange(_TRIED, device=self._device)
        logits, final = self.compute(self.new_cache(), ids.cpu().numpy(), _TRIED)
        with torch.inference_mode():
            if not torch.equal(torch.nn.functional.linear(final[None], output.weight)[0].float(), logits.float()):
                raise RunnerError(f"{name} does not read tokens out by a matrix alone: it scales, caps or shifts logits")
            given = self._model(input_ids=ids[None], output_hidden_states=True, return_dict=True, use_cache=False).hidden_states
            if given is None or not torch.equal(given[0][0], embedding.weight[:_TRIED].to(given[0].dtype)):
                raise RunnerError(f"{name} does not give its layers the bare embeddings of tokens: it scales or shifts them")
        matrix = _on_host(embedding.weight.detach()[: len(output.weight)])  # some have rows for what is no text
        tied = embedding.weight.data_ptr() == output.weight.data_ptr()
        return TokenMatrices(matrix, matrix if tied else _on_host(output.weight.detach()))

    def set_threads(self, small: int, large: int) -> None:
        """See Threaded."""
        self._small, self._large = small, large
        self.identity = {**self.identity, "threads": spelled_threads(small, large)}

    def _use_threads(self, size: int) -> None:
        """PyTorch's number of threads is the process's: it is set anew before each pass, where it is another one."""
        wanted = self._small if size == 1 else self._large
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def _refuse_if_closed(self) -> None:
        if self._model is None:
            raise RunnerError("the model has been closed: load it again")

    def close(self) -> None:
        if self._model is not None:
            self._hook.remove()
        self._model = self._final = None
        self._caches = []


def machine(device: Any) -> dict[str, str]:
    """The libraries and the processor, by name."""
    on_cuda = torch.device(device).type == "cuda"
    return {
        "library": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "processor": torch.cuda.get_device_name(device) if on_cuda else processor(),
    }


def _on_host(tensor: Any) -> Any:
    """float32 as a NumPy array: a view where it is that already, on the CPU."""
    return tensor.to(device="cpu", dtype=torch.float32).numpy()


def _longest(config: Any) -> int:
    """Tokens up to which a row depends on its text alone. With two sets of rotations (longrope, as Phi-3 has) all positions
    turn otherwise once a text is longer than the first is for, those that are cached did not."""
    trained = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given, *given.values()]:
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            first = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            trained = min(trained, first or trained)
    return int(trained)


def _distance(left: Any, right: Any) -> float:
    """How far rows are apart, as a share of the spread of the right ones."""
    left, right = left.float(), right.float()
    spread = (right - right.mean(dim=-1, keepdim=True)).norm()
    return float((left - right).norm() / spread) if spread > 0 else float((left - right).norm())
