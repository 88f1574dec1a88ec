"""KV caches of transformers that any number of tokens can be cut from.

A layer that attends to everything, or to a sliding window, is held by `PrefixLayer`, which keeps every token; what a
window hides is hidden by the mask that the model makes. Other kinds of layers are left as transformers made them.
"""

from __future__ import annotations

import inspect
from typing import Any

from truedraw.errors import MissingExtra

try:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
except ImportError:
    raise MissingExtra("torch or transformers", "transformers") from None

_FIRST_TOKENS = 256


def argument(model: Any) -> str:
    """What a model's forward calls its cache; empty: it takes none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in accepted), "")


class PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer, in buffers that grow by doubling.

    Its length is one number, set when both are written: a forward that was stopped anywhere leaves what can be cut.
    max_length: tokens that the buffers will ever hold.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length
        self._length = 0
        self._key_buffer: Any = None
        self._value_buffer: Any = None

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append (texts, heads, n, width) states. Returns all that are held, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[-2]
        if self._value_buffer is None or end > self._value_buffer.shape[-2]:
            room = min(max(2 * end, _FIRST_TOKENS), max(self._max_length, end))
            self._key_buffer = _grown(self._key_buffer, key_states, self._length, room)
            self._value_buffer = _grown(self._value_buffer, value_states, self._length, room)
        self._key_buffer[..., self._length : end, :] = key_states
        self._value_buffer[..., self._length : end, :] = value_states
        self._show(end)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = self._key_buffer[..., :length, :], self._value_buffer[..., :length, :]

    def get_seq_length(self) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens: like newer transformers, this takes a count <= 0."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove: {tokens_to_remove} was given")
        if tokens_to_remove:
            self._show(max(self._length + tokens_to_remove, 0))

    def shift(self, columns: int) -> None:
        """Put empty columns before the first one, or take away the first -columns."""
        keys, values = self.keys, self.values
        self._length, self._key_buffer, self._value_buffer = 0, None, None
        if columns > 0:
            empty = keys.new_zeros((*keys.shape[:-2], columns, keys.shape[-1]))
            self.update(empty, values.new_zeros((*values.shape[:-2], columns, values.shape[-1])))
        self.update(keys[..., max(-columns, 0) :, :], values[..., max(-columns, 0) :, :])

    def take(self, other: PrefixLayer, length: int) -> None:
        """Hold the first `length` tokens of another layer, and nothing else."""
        self._length = 0
        if other.is_initialized and length:
            self.update(other._key_buffer[..., :length, :], other._value_buffer[..., :length, :])


def _grown(buffer: Any, states: Any, length: int, room: int) -> Any:
    """A buffer for `room` tokens like `states`, with the first `length` of the old one."""
    grown = states.new_empty((*states.shape[:-2], room, states.shape[-1]))
    if length:
        grown[..., :length, :] = buffer[..., :length, :]
    return grown


def new_cache(config: Any, max_length: int) -> Any:
    """An empty cache for a model of this configuration, of one sequence."""
    cache = DynamicCache(config=config)
    if getattr(cache, "layer_class_to_replicate", None) is not None:  # layers are made as they are met
        cache.layer_class_to_replicate = lambda: PrefixLayer(max_length)
    cache.layers = [
        PrefixLayer(max_length) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer for layer in cache.layers
    ]
    return cache


def can_crop(cache: Any) -> bool:
    """Whether each layer of a cache that has seen a forward can be cut to any length.

    A layer of transformers' own must say that it can be cropped. One that may record its past can't: that serves a
    single cut after a forward, and here any number may follow one another.
    """
    return all(
        isinstance(layer, PrefixLayer)
        or (
            getattr(layer, "is_croppable", False)
            and not getattr(layer, "is_sliding", False)
            and not hasattr(layer, "record_past")
        )
        for layer in cache.layers
    )


def can_copy(cache: Any) -> bool:
    """Whether `copy_prefix` can take over what the cache holds."""
    return all(isinstance(layer, PrefixLayer) for layer in cache.layers)


def crop(cache: Any, length: int) -> None:
    """Cut each layer to `length` tokens at most, however many it holds: after a forward that failed they differ."""
    for layer in cache.layers:
        held = getattr(layer, "get_seq_length", lambda: 0)()
        if held > length:
            layer.crop(length - held)


def copy_prefix(source: Any, target: Any, length: int) -> None:
    """Make `target`, of the same model, hold the first `length` tokens of `source`, and nothing else."""
    while len(target.layers) < len(source.layers):
        target.layers.append(target.layer_class_to_replicate())
    for layer, other in zip(target.layers, source.layers, strict=True):
        layer.take(other, length)


def held(cache: Any) -> int:
    """The most tokens that a layer of the cache holds."""
    return max((layer.get_seq_length() for layer in cache.layers if isinstance(layer, PrefixLayer)), default=0)


# ---------------------------------------------------------------- caches of many texts (transformers_batch.py)


@torch.inference_mode()  # type: ignore[untyped-decorator]  # buffers made in a forward are written to
def widen(cache: Any, fresh: Any, num_texts: int) -> None:
    """Make an empty cache hold as many columns as `fresh` for each of `num_texts`: zeros."""
    while len(cache.layers) < len(fresh.layers):
        cache.layers.append(cache.layer_class_to_replicate())
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        empty = [held.new_zeros((num_texts, *held.shape[1:])) for held in (other.keys, other.values)]
        layer.update(*empty)


@torch.inference_mode()  # type: ignore[untyped-decorator]  # buffers made in a forward are written to
def put_row(cache: Any, place: int, other: Any, row: int, columns: int) -> None:
    """Let text `place` be text `row` of another cache, ending in the last of `columns`."""
    for layer, taken in zip(cache.layers, other.layers, strict=True):
        start = columns - taken.keys.shape[-2]
        layer.keys[place, :, start:columns], layer.values[place, :, start:columns] = taken.keys[row], taken.values[row]


@torch.inference_mode()  # type: ignore[untyped-decorator]  # buffers made in a forward are written to
def shift(cache: Any, columns: int) -> None:
    """Put empty columns at the left of every layer, or take -columns away there."""
    for layer in cache.layers:
        layer.shift(columns)


def held_bytes(cache: Any) -> int:
    """Of all keys and values that the cache holds."""
    return sum(held.nbytes for layer in cache.layers for held in (layer.keys, layer.values))
