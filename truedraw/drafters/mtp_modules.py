"""An MTP module as numbers: what it is made of, how a file holds it, and one step of it.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): the state at a position and the embedding of the token behind it are
normalised, joined by a projection, passed through one transformer block, and read out by the target's own output matrix.
Deeper drafts go through the same module again, with its own state in place of the target's, as in EAGLE (arXiv 2401.15077).

Weights are held as integers of 8 bits with a scale for each row, and vectors are rounded to integers too, so that the
products are exact: the same drafts with and without numba, in a quarter of the memory traffic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw import kernels
from truedraw.errors import IncompatibleModels, MissingExtra, ModelFileError, ModelNotFound, RunError, one_line
from truedraw.protocols import TokenMatrices

Floats: TypeAlias = npt.NDArray[np.float32]

FORMAT = "truedraw-mtp-1"
MATRICES = ("join", "query_key_value", "attention_out", "gate_up", "down")
NORMS = ("norm_state", "norm_embedding", "norm_attention", "norm_mlp", "norm_out")

SHIPPED = Path(__file__).parent / "shipped" / "smollm2-135m-mtp.safetensors"
"""For the demo model, with its card beside it."""

PROBES = 64
"""Tokens whose embeddings tell one model from another."""

_LEAST_LIKENESS = 0.9
_ADVICE = "train some for it with truedraw train mtp, and name them with --mtp-modules"
_FINEST = 4095  # a vector's largest entry in steps: rows of up to 4,096 numbers then add up below 2^31


@dataclass(frozen=True, slots=True)
class MtpShape:
    """What a module is, besides its weights.

    width, vocab_size  of the target
    heads, kv_heads    attention heads, and those that keys and values have
    inner              of the gated MLP (SwiGLU)
    window             entries, the newest, that attention looks at
    rope_theta, epsilon  of the rotations, of the norms
    target             the model that it was trained for, by name
    """

    width: int
    vocab_size: int
    heads: int
    kv_heads: int
    inner: int
    window: int = 256
    rope_theta: float = 10000.0
    epsilon: float = 1e-5
    target: str = ""

    def check(self) -> None:
        """Raises ValueError for what is no shape."""
        counts = {name: getattr(self, name) for name in ("width", "vocab_size", "heads", "kv_heads", "inner", "window")}
        if not all(type(count) is int and count >= 1 for count in counts.values()):
            raise ValueError(f"its shape is {counts}: integers >= 1 are needed")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(f"a width of {self.width} has no {self.heads} heads of an even size, {self.kv_heads} for keys")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight."""
        keys = self.kv_heads * self.head_size
        queries = self.heads * self.head_size
        return {
            "join": (self.width, 2 * self.width),
            "query_key_value": (queries + 2 * keys, self.width),
            "attention_out": (self.width, queries),
            "gate_up": (2 * self.inner, self.width),
            "down": (self.width, self.inner),
            **{name: (self.width,) for name in NORMS},
        }


@dataclass(frozen=True, slots=True, eq=False)
class MtpWeights:
    """A trained module as it is stored.

    arrays       by the names of `MtpShape.shapes`, float32
    draft_ids    (trimmed vocab,) the token ids that it can draft, ascending
    fingerprint  (PROBES,) of the embeddings that it was trained with
    """

    shape: MtpShape
    arrays: Mapping[str, Floats]
    draft_ids: kernels.Ids
    fingerprint: Floats


def fingerprint(embedding: Floats) -> Floats:
    """(PROBES,) the alternating sums of the embeddings of as many tokens, spread over the vocabulary. embedding:
    (vocab, width). Rounding of the weights hardly moves it; another model has another one."""
    places = np.linspace(0, len(embedding) - 1, PROBES).astype(np.int64)
    signs = np.where(np.arange(embedding.shape[1]) % 2, -1.0, 1.0)
    sums: Floats = (embedding[places] @ signs).astype(np.float32)
    return sums


def save(path: Path, weights: MtpWeights, notes: Mapping[str, str]) -> None:
    """Write a safetensors file, halves of the size of float32. notes: kept beside the shape, as text. Raises RunError."""
    numpy = _safetensors()
    from safetensors import SafetensorError

    arrays: dict[str, Any] = {name: weights.arrays[name].astype(np.float16) for name in weights.shape.shapes()}
    arrays |= {"draft_ids": weights.draft_ids.astype(np.int32), "fingerprint": weights.fingerprint}
    metadata = {**notes, "format": FORMAT, "shape": json.dumps(asdict(weights.shape))}
    try:
        numpy.save_file(arrays, str(path), metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise RunError(f"modules cannot be written to {path} ({one_line(error)}): make room and try again") from error


def load(path: Path) -> MtpWeights:
    """Raises ModelNotFound, ModelFileError or MissingExtra."""
    numpy = _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ModelFileError(
                f"{path} holds no MTP modules ({metadata.get('format')!r}): a file of truedraw train mtp is needed"
            )
        shape = MtpShape(**json.loads(metadata["shape"]))
        shape.check()
        arrays = numpy.load_file(str(path))
    except FileNotFoundError:
        raise ModelNotFound(f"no modules at {str(path)!r}: a file of truedraw train mtp is needed") from None
    except (SafetensorError, OSError, TypeError, ValueError, KeyError) as error:
        raise ModelFileError(f"{path} cannot be read as MTP modules ({error})") from error
    for name, expected in {**shape.shapes(), "fingerprint": (PROBES,)}.items():
        found = arrays[name].shape if name in arrays else None
        if found != expected:
            raise ModelFileError(f"{path} has {name} of shape {found}, and its own description says {expected}")
    ids = arrays.pop("draft_ids", np.empty(0)).astype(np.int64)
    if not len(ids) or ids[0] < 0 or ids[-1] >= shape.vocab_size or (np.diff(ids) <= 0).any():
        raise ModelFileError(f"{path} has draft_ids that are no ascending token ids below {shape.vocab_size}")
    floats = {name: array.astype(np.float32) for name, array in arrays.items()}
    if not all(np.isfinite(array).all() for array in floats.values()):
        raise ModelFileError(f"{path} holds weights that are no finite numbers")
    return MtpWeights(shape, floats, ids, floats.pop("fingerprint"))


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise MissingExtra("safetensors", "llamacpp") from None
    return safetensors.numpy


def check_fits(weights: MtpWeights, matrices: TokenMatrices, name: str) -> None:
    """Raises IncompatibleModels unless the modules were trained for this target, called `name`."""
    shape, (vocab, width) = weights.shape, matrices.embedding.shape
    if (width, vocab) != (shape.width, shape.vocab_size):
        raise IncompatibleModels(
            f"the MTP modules are for {shape.target} ({shape.width} wide, {shape.vocab_size} tokens), and {name} is "
            f"{width} wide and has {vocab}: {_ADVICE}"
        )
    _check_likeness(matrices, weights.fingerprint, shape.target, name)


def check_trained_with(embedding: Floats, matrices: TokenMatrices, whose: str, name: str) -> None:
    """Raises IncompatibleModels unless the embeddings that modules of a model `whose` were trained with, (tokens, width), are
    those of the target, called `name`. A checkpoint may have rows behind the target's."""
    vocab, width = matrices.embedding.shape
    if embedding.shape[1] != width or len(embedding) < vocab:
        raise IncompatibleModels(
            f"the MTP modules are for a {whose} model ({embedding.shape[1]} wide, {len(embedding)} tokens), and {name} is "
            f"{width} wide and has {vocab}: {_ADVICE}"
        )
    _check_likeness(matrices, fingerprint(embedding[:vocab]), whose, name)


def _check_likeness(matrices: TokenMatrices, trained: Floats, whose: str, name: str) -> None:
    own = fingerprint(matrices.embedding)
    likeness = float(own @ trained) / max(float(np.linalg.norm(own) * np.linalg.norm(trained)), 1e-30)
    if not likeness >= _LEAST_LIKENESS:
        raise IncompatibleModels(
            f"the MTP modules are for {whose}, and the embeddings of {name} are others (likeness {likeness:.2f}): {_ADVICE}"
        )


# ---------------------------------------------------------------- what drafts


class Entries(Protocol):
    """What a module keeps of one text."""

    @property
    def position(self) -> int:
        """Of the next entry."""
        ...

    def truncate(self, position: int) -> None:
        """Forget the entries from `position` on."""
        ...


class DraftModule(Protocol):
    """A module of a target, ready to draft. An entry is a state of the target, or the module's own, and the token behind it.

    vocab_size  of the target
    draft_ids   (trimmed vocab,) the token ids that it can draft, ascending
    """

    vocab_size: int
    draft_ids: kernels.Ids

    def new_cache(self) -> Any:
        """An empty cache for one text: `Entries`, of the module's own kind."""
        ...

    def remember(self, states: Floats, tokens: kernels.Ids, cache: Any) -> None:
        """Put entries into the cache that nothing is drafted behind. states: (n, width); tokens: (n,)."""
        ...

    def step(self, states: Floats, tokens: kernels.Ids, caches: Sequence[Any]) -> Floats:
        """One entry of each text: (n, width) states and (n,) the tokens behind them -> the module's own states, (n, width),
        which `logits` reads out. The entries go into the caches."""
        ...

    def logits(self, states: Floats) -> Floats:
        """(n, width) -> (n, trimmed vocab), of `draft_ids`."""
        ...


# ---------------------------------------------------------------- arithmetic


class Matrix:
    """Float weights (n, m) as integers of 8 bits, with a scale for each row."""

    def __init__(self, weights: Floats) -> None:
        scales = np.abs(weights).max(axis=1) / np.float32(127)
        scales[scales == 0] = 1.0
        self._integers = np.rint(weights / scales[:, None]).astype(np.int8)
        self._scales = scales.astype(np.float32)
        self._finest = min(_FINEST, (2**31 - 1) // (127 * weights.shape[1]))

    def __call__(self, vectors: Floats, rows: slice = slice(None)) -> Floats:
        """vectors (b, m), rounded to `_finest` steps of their largest entry -> (b, n), or of these rows only."""
        largest = np.abs(vectors).max(axis=1, keepdims=True)
        steps = np.where(largest > 0, largest, 1.0).astype(np.float32) / np.float32(self._finest)
        integers = np.rint(vectors / steps).astype(np.int16)
        product: Floats = kernels.products(self._integers[rows], integers).astype(np.float32)
        product *= steps * self._scales[rows]
        return product


class EntryCache:
    """Keys and values of the newest entries of one text, by position; twice the window, so that old ones are seldom moved."""

    def __init__(self, shape: MtpShape) -> None:
        self._window = shape.window
        self._keys = np.empty((shape.kv_heads, 2 * shape.window, shape.head_size), np.float32)
        self._values = np.empty_like(self._keys)
        self._first = self._count = 0

    @property
    def position(self) -> int:
        """Of the next entry."""
        return self._first + self._count

    def append(self, keys: Floats, values: Floats) -> None:
        """Shapes (n, kv_heads, head_size)."""
        if len(keys) > self._window:
            self.append(keys[: -self._window], values[: -self._window])
            keys, values = keys[-self._window :], values[-self._window :]
        n, room = len(keys), self._keys.shape[1]
        if self._count + n > room:
            kept = self._window
            for held in (self._keys, self._values):
                held[:, :kept] = held[:, self._count - kept : self._count].copy()
            self._first, self._count = self.position - kept, kept
        self._keys[:, self._count : self._count + n] = keys.swapaxes(0, 1)
        self._values[:, self._count : self._count + n] = values.swapaxes(0, 1)
        self._count += n

    def truncate(self, position: int) -> None:
        """Forget the entries from `position` on."""
        self._count = min(self._count, max(0, position - self._first))

    def newest(self) -> tuple[Floats, Floats]:
        """Keys and values, (kv_heads, up to window, head_size): views."""
        seen = slice(max(0, self._count - self._window), self._count)
        return self._keys[:, seen], self._values[:, seen]


class MtpModule:
    """A trained module as a DraftModule. matrices: of the target, held as 8 bits (those that are read out) and 16."""

    def __init__(self, weights: MtpWeights, matrices: TokenMatrices) -> None:
        self.shape, self.draft_ids = weights.shape, weights.draft_ids
        self.vocab_size = weights.shape.vocab_size
        self._norms = {name: weights.arrays[name] for name in NORMS}
        self._matrices = {name: Matrix(weights.arrays[name]) for name in MATRICES}
        self._read_out = Matrix(matrices.output[weights.draft_ids])
        self._embedding = matrices.embedding.astype(np.float16)
        half = self.shape.head_size // 2
        self._frequencies = self.shape.rope_theta ** (-np.arange(half, dtype=np.float64) / half)

    def new_cache(self) -> EntryCache:
        return EntryCache(self.shape)

    def remember(self, states: Floats, tokens: kernels.Ids, cache: EntryCache) -> None:
        """See DraftModule."""
        normed = self._norm("norm_attention", self._join(states, tokens))
        rows = self._matrices["query_key_value"](normed, slice(self.shape.heads * self.shape.head_size, None)).reshape(
            len(tokens), 2, self.shape.kv_heads, -1
        )
        cache.append(self._rotated(rows[:, 0], cache.position + np.arange(len(tokens))), rows[:, 1])

    def step(self, states: Floats, tokens: kernels.Ids, caches: Sequence[EntryCache]) -> Floats:
        """See DraftModule."""
        shape = self.shape
        x = self._join(states, tokens)
        rows = self._matrices["query_key_value"](self._norm("norm_attention", x))
        heads = rows.reshape(len(tokens), -1, shape.head_size)
        turned = self._rotated(heads[:, : -shape.kv_heads], np.array([cache.position for cache in caches]))
        queries, keys, values = turned[:, : shape.heads], turned[:, shape.heads :], heads[:, -shape.kv_heads :]
        mixed = np.empty((len(tokens), shape.heads * shape.head_size), np.float32)
        for i, cache in enumerate(caches):
            cache.append(keys[i : i + 1], values[i : i + 1])
            mixed[i] = _attention(queries[i], *cache.newest()).ravel()
        x = x + self._matrices["attention_out"](mixed)
        both = self._matrices["gate_up"](self._norm("norm_mlp", x))
        gate, up = both[:, : shape.inner], both[:, shape.inner :]
        x = x + self._matrices["down"](gate / (1 + np.exp(-np.maximum(gate, -60.0))) * up)
        return self._norm("norm_out", x)

    def logits(self, states: Floats) -> Floats:
        """See DraftModule."""
        return self._read_out(states)

    def _join(self, states: Floats, tokens: kernels.Ids) -> Floats:
        embeddings = self._embedding[tokens].astype(np.float32)
        both = [self._norm("norm_state", states), self._norm("norm_embedding", embeddings)]
        return self._matrices["join"](np.concatenate(both, axis=1))

    def _norm(self, name: str, x: Floats) -> Floats:
        """RMSNorm (Zhang and Sennrich 2019). x: (n, width)."""
        squares = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(self.shape.width)
        normed: Floats = x / np.sqrt(squares + np.float32(self.shape.epsilon)) * self._norms[name]
        return normed

    def _rotated(self, x: Floats, positions: npt.NDArray[Any]) -> Floats:
        """Rotary positions (Su et al. 2021), the two halves of a head as pairs. x: (n, heads, head_size); positions: (n,)."""
        angles = positions[:, None] * self._frequencies
        cosines, sines = (turn(angles).astype(np.float32)[:, None] for turn in (np.cos, np.sin))
        half = self.shape.head_size // 2
        left, right = x[..., :half], x[..., half:]
        return np.concatenate([left * cosines - right * sines, right * cosines + left * sines], axis=-1)


def _attention(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """One query of each head over all entries: (heads, head_size), (kv_heads, n, head_size) twice -> (heads, head_size)."""
    kv_heads, _, size = keys.shape
    grouped = queries.reshape(kv_heads, -1, size)
    scores = grouped @ keys.swapaxes(1, 2) * np.float32(size**-0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Floats = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    return mixed.reshape(queries.shape)
