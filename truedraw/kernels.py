"""The hot loops of shaping and drawing, each written twice: with NumPy, and as a plain loop for numba.

Both do the same float64 operations in the same order, so that they give the same bits, on every machine:
sums run in fixed lanes, exp is one polynomial, and nothing is contracted or reordered. NumPy answers
until `warm` has made the loops ready, and where numba is not installed; that costs speed alone.

What NumPy does as fast has no loop: penalties, top-p, min-p, the race itself (benchmarks/kernel_speed.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.types import Probs

logger = logging.getLogger("truedraw")

Ids: TypeAlias = npt.NDArray[np.int64]
Logits: TypeAlias = npt.NDArray[np.floating[Any]]
Int8s: TypeAlias = npt.NDArray[np.int8]
Int16s: TypeAlias = npt.NDArray[np.int16]
Int32s: TypeAlias = npt.NDArray[np.int32]

BLOCK = 64
"""Token ids summed together, in eight lanes. The race draws between the same blocks (randomness.RACE_BLOCK)."""


# ---------------------------------------------------------------- exp


_STEPS = 2048
"""exp x = 2^(n / _STEPS) exp r, with n the nearest integer and so |r| <= ln 2 / (2 _STEPS): three powers
of r leave out 3.5e-17, and the table of 2^(i / _STEPS) takes half of a first-level cache."""

_STEP_BITS = 11
_PER_STEP = _STEPS / math.log(2)
_STEP = math.log(2) / _STEPS

_SHIFT = 1.5 * 2.0**52
"""Added to a number, it leaves the nearest integer in the low bits."""

_FLOOR = -708.0
"""exp is 0 below: 3e-308, near the smallest normal number."""


def _powers() -> Probs:
    """2^(i / _STEPS), correctly rounded: integers in units of 2^-128, whatever the machine's own exp is."""
    step = 2 << 128
    for _ in range(_STEP_BITS):
        step = math.isqrt(step << 128)
    powers = [1 << 128]
    for _ in range(_STEPS - 1):
        powers.append(powers[-1] * step >> 128)
    return np.array([power / (1 << 128) for power in powers])


_POWERS = _powers()

_ROWS = 128

_CHUNK = 16384
"""Numbers that NumPy takes through all steps at a time: more leave the second-level cache."""


def soften(logits: Logits, best: float, temperature: float) -> Probs:
    """exp((logits - best) / temperature), float64: the weights of a row whose largest logit is `best`.

    logits  (n,), at most `best`; -inf weighs 0, and so does what the division leaves below -708
    The relative error of exp x is below (|x| + 2) 2^-52, about what the rounding of x costs; exp 0 is 1.
    """
    weights = np.empty(len(logits))
    if _loops is not None:
        _loops.soften(_contiguous(logits), best, temperature, weights)
        return weights
    scratch = np.empty((2, min(len(logits), _CHUNK)))
    for start in range(0, len(logits), _CHUNK):
        part = slice(start, start + _CHUNK)
        x, n = scratch[:, : len(weights[part])]
        np.subtract(logits[part], best, out=x, dtype=np.float64)
        if temperature != 1:
            with np.errstate(over="ignore"):  # a tiny temperature sends all but the maximum to -inf, as it should
                x /= temperature
        _exp(x, n, weights[part])
    return weights


def _exp(x: Probs, n: Probs, out: Probs) -> None:
    """x and n are overwritten."""
    vanishing = x < _FLOOR if x.min() < _FLOOR else None
    if vanishing is not None:
        np.maximum(x, _FLOOR, out=x)
    np.multiply(x, _PER_STEP, out=n)
    n += _SHIFT
    np.subtract(n, _SHIFT, out=out)
    out *= _STEP
    x -= out
    np.multiply(x, 1 / 6, out=out)
    for coefficient in (0.5, 1.0):
        out += coefficient
        out *= x
    out += 1.0
    steps = n.view(np.int64)
    np.bitwise_and(steps, _STEPS - 1, out=x.view(np.int64))
    out *= np.take(_POWERS, x.view(np.int64), mode="wrap")  # the mode that checks nothing
    steps >>= _STEP_BITS
    steps <<= 52
    exponents = out.view(np.int64)
    exponents += steps
    if vanishing is not None:
        out[vanishing] = 0.0


def _soften_loop(logits: Logits, best: float, temperature: float, weights: Probs) -> None:
    if temperature == 1:
        for i in range(len(logits)):
            weights[i] = _exp_scalar(logits[i] - best)
    else:
        for i in range(len(logits)):
            weights[i] = _exp_scalar((logits[i] - best) / temperature)


def _exp_scalar(x: float) -> float:
    inside = x if x > _FLOOR else _FLOOR
    n = inside * _PER_STEP + _SHIFT
    r = inside - (n - _SHIFT) * _STEP
    steps = np.float64(n).view(np.int64)
    power = (((r * (1 / 6) + 0.5) * r + 1.0) * r + 1.0) * _POWERS[steps & (_STEPS - 1)]
    scaled = np.int64(np.float64(power).view(np.int64) + ((steps >> _STEP_BITS) << 52)).view(np.float64)
    return scaled if x >= _FLOOR else 0.0


# ---------------------------------------------------------------- sums


def block_sums(row: Probs, block: int = BLOCK) -> Probs:
    """The sum of each `block` token ids, the last of them filled up with zeros: shape (ceil(n / block),).

    Eight lanes, ids i, i + 8, i + 16, ... of the block one after the other, then
    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). That is how NumPy sums up to 128 neighbours
    (`pairwise_sum` in its source); tests hold the two together.
    """
    if _loops is not None and block == BLOCK:
        sums = np.empty(-(-len(row) // BLOCK))
        _loops.block_sums(_contiguous(row), sums)
        return sums
    whole = len(row) // block * block
    whole_sums: Probs = row[:whole].reshape(-1, block).sum(axis=1)
    if whole == len(row):
        return whole_sums
    rest = np.zeros(block)
    rest[: len(row) - whole] = row[whole:]
    return np.append(whole_sums, rest.sum())


def total(sums: Probs) -> float:
    """Sums of block sums, until one is left."""
    while len(sums) > 1:
        sums = block_sums(sums)
    return float(sums[0])


def _block_sums_loop(row: Probs, sums: Probs) -> None:
    whole = len(row) // BLOCK
    _sum_each(row[: whole * BLOCK].reshape(whole, 8, 8), sums)
    if len(sums) > whole:
        rest = np.zeros(BLOCK)
        for i in range(whole * BLOCK, len(row)):
            rest[i - whole * BLOCK] = row[i]
        _sum_each(rest.reshape(1, 8, 8), sums[whole:])


def _sum_each(blocks: Probs, sums: Probs) -> None:
    """Shapes (n, 8, 8) and (n,) at least. Written out, since only so the eight lanes become one vector."""
    lane = np.empty(8)
    for b in range(len(blocks)):
        for k in range(8):
            half = ((blocks[b, 0, k] + blocks[b, 1, k]) + blocks[b, 2, k]) + blocks[b, 3, k]
            lane[k] = (((half + blocks[b, 4, k]) + blocks[b, 5, k]) + blocks[b, 6, k]) + blocks[b, 7, k]
        sums[b] = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]))


def block_sums_of_few(ids: Ids, weights: Probs, vocab: int) -> Probs:
    """The same of a row that is 0 outside `ids`, which ascend: the same bits as `block_sums` of the whole row."""
    sums = np.zeros(-(-vocab // BLOCK))
    if _loops is not None:
        _loops.block_sums_of_few(ids, weights, sums)
        return sums
    blocks = ids // BLOCK
    touched = np.empty(len(ids), dtype=np.bool_)
    touched[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=touched[1:])
    entries = np.zeros((np.count_nonzero(touched), BLOCK))
    entries[np.cumsum(touched) - 1, ids % BLOCK] = weights
    sums[blocks[touched]] = entries.sum(axis=1)
    return sums


def _block_sums_of_few_loop(ids: Ids, weights: Probs, sums: Probs) -> None:
    """Each lane without the zeros in between."""
    lane = np.empty(8)
    i = 0
    while i < len(ids):
        block = ids[i] // BLOCK
        lane[:] = 0.0
        while i < len(ids) and ids[i] // BLOCK == block:
            lane[ids[i] % 8] += weights[i]
            i += 1
        sums[block] = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]))


# ---------------------------------------------------------------- top-k


def top_k(logits: Logits, k: int) -> Ids:
    """The ids of the k largest, ascending; at the boundary the smaller ids. 0 < k < n.

    Among the maxima of more than k groups, the k-th largest bounds the k-th largest entry from below:
    only the few entries that reach it are looked at closely.
    """
    candidates = _candidates(logits, k)
    if len(candidates) == k:
        return candidates
    values = logits[candidates]
    return at_least(candidates, values, np.partition(values, len(values) - k)[len(values) - k], k)


def at_least(candidates: Ids, values: Logits, threshold: float, count: int) -> Ids:
    """`count` of the candidates: those whose value is above the threshold, and on it the first."""
    kept = values > threshold
    ties = np.flatnonzero(values == threshold)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    chosen: Ids = candidates[kept]
    return chosen


def _candidates(logits: Logits, k: int) -> Ids:
    """The ids, ascending, of few entries: the k largest and all their ties are among them.

    A group is ids that lie `groups` apart, and the rest behind them one more: NumPy took four times
    as long for maxima of neighbours.
    """
    groups = len(logits) // BLOCK
    if groups <= k:
        return np.arange(len(logits))
    if _loops is None:
        maxima = logits[: groups * BLOCK].reshape(BLOCK, groups).max(axis=0)
        return np.flatnonzero(logits >= np.partition(maxima, groups - k)[groups - k])
    logits = _contiguous(logits)
    maxima, found = np.empty(groups, logits.dtype), np.empty(16 * k + BLOCK, np.int64)
    _loops.group_maxima(logits, maxima)
    floor = np.partition(maxima, groups - k)[groups - k]
    count = _loops.reaching(logits, maxima, floor, found)
    return np.sort(found[:count]) if count <= len(found) else np.flatnonzero(logits >= floor)  # many ties


def _group_maxima_loop(logits: Logits, maxima: Logits) -> None:
    groups = len(maxima)
    rows = logits[: groups * BLOCK].reshape(BLOCK, groups)
    maxima[:] = rows[0]
    for i in range(1, BLOCK):
        for j in range(groups):
            maxima[j] = max(maxima[j], rows[i, j])


def _reaching_loop(logits: Logits, maxima: Logits, floor: float, found: Ids) -> int:
    """How many reach `floor`; their ids, in any order, as far as `found` has room."""
    groups, count = len(maxima), 0
    for j in range(groups):
        if maxima[j] >= floor:
            for i in range(j, groups * BLOCK, groups):
                if logits[i] >= floor:
                    if count < len(found):
                        found[count] = i
                    count += 1
    for i in range(groups * BLOCK, len(logits)):
        if logits[i] >= floor:
            if count < len(found):
                found[count] = i
            count += 1
    return count


# ---------------------------------------------------------------- residual


def excess(p: Probs, q: Probs, worth: float = 1.0) -> tuple[Probs, Probs]:
    """max(worth p - q, 0), and its block sums. Shapes (vocab,)."""
    if _loops is None:
        left = p * worth
        left -= q
        np.maximum(left, 0.0, out=left)
        return left, block_sums(left)
    left, sums = np.empty(len(p)), np.empty(-(-len(p) // BLOCK))
    _loops.excess(_contiguous(p), _contiguous(q), worth, left, sums)
    return left, sums


def _excess_loop(p: Probs, q: Probs, worth: float, left: Probs, sums: Probs) -> None:
    for i in range(len(p)):
        over = p[i] * worth - q[i]
        left[i] = over if over > 0.0 else 0.0
    _block_sums_loop(left, sums)


# ---------------------------------------------------------------- products of integers


def products(weights: Int8s, vectors: Int16s) -> Int32s:
    """The integer matrix product, shape (b, n): of weights (n, m) and vectors (b, m).

    Exact, and so the same bits whatever the order, while m x 127 x max |vectors| < 2^31. NumPy has no fast product of
    integers: it takes float64, in which these are exact too, a hundred rows at a time.
    """
    sums = np.empty((len(vectors), len(weights)), np.int32)
    if _loops is not None:
        _loops.products(weights, vectors, sums)
        return sums
    floats = vectors.astype(np.float64)
    for start in range(0, len(weights), _ROWS):
        part = slice(start, start + _ROWS)
        sums[:, part] = floats @ weights[part].T.astype(np.float64)
    return sums


def _products_loop(weights: Int8s, vectors: Int16s, sums: Int32s) -> None:
    for i in range(weights.shape[0]):
        row = weights[i]
        for b in range(vectors.shape[0]):
            vector = vectors[b]
            sum_ = np.int32(0)
            for j in range(row.shape[0]):
                sum_ = np.int32(sum_ + np.int32(np.int32(row[j]) * np.int32(vector[j])))
            sums[b, i] = sum_


# ---------------------------------------------------------------- making the loops ready


class _Loops(NamedTuple):
    excess: Any
    block_sums: Any
    block_sums_of_few: Any
    group_maxima: Any
    reaching: Any
    soften: Any
    products: Any


_ready: _Loops | None = None
_loops: _Loops | None = None
"""In use; None: NumPy."""


def _contiguous(row: Logits) -> Logits:
    """As the loops are compiled for: one after the other, float32 or float64."""
    return np.ascontiguousarray(row, dtype=None if row.dtype in (np.float32, np.float64) else np.float64)


def warm(say: Callable[[str], None] = lambda message: None) -> bool:
    """Load the loops, or compile them where that was never done on this machine: True if they are in use.

    Compiled code is kept beside this file, or where that cannot be written in numba's own folder of
    the user. Where neither can be, compiling would hold up every start, and NumPy stays. Idempotent.
    """
    global _loops, _ready
    if _ready is None and importlib.util.find_spec("numba") is not None:
        try:
            _ready = _compiled(say)
        except Exception as error:  # no place to keep code, or a numba that does not fit this Python or NumPy
            logger.debug("numba is not used: %s", error)
    _loops = _ready
    return _loops is not None


@contextlib.contextmanager
def warming(say: Callable[[str], None]) -> Iterator[None]:
    """`warm` beside the body, which loads a model. Both are over at the end: a thread beside a pass makes
    all the others of the pass wait."""
    thread = threading.Thread(target=warm, args=(say,), name="truedraw-kernels")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def cool() -> None:
    """Back to NumPy alone until the next `warm`, for tests and benchmarks."""
    global _loops
    _loops = None


def _compiled(say: Callable[[str], None]) -> _Loops:
    import numba
    from numba import types

    for helper in (_exp_scalar, _sum_each, _block_sums_loop):
        numba.extending.register_jitable(helper)

    def row(dtype: Any) -> Any:
        return types.Array(dtype, 1, "C", readonly=True)

    def table(dtype: Any) -> Any:
        return types.Array(dtype, 2, "C", readonly=True)

    reals = (types.float32, types.float64)
    probs, ids, number, out = row(types.float64), row(types.int64), types.float64, types.float64[::1]
    signatures = _Loops(
        excess=(_excess_loop, [(probs, probs, number, out, out)]),  # the quickest first: it tells whether they are kept
        block_sums=(_block_sums_loop, [(probs, out)]),
        block_sums_of_few=(_block_sums_of_few_loop, [(ids, probs, out)]),
        group_maxima=(_group_maxima_loop, [(row(real), real[::1]) for real in reals]),
        reaching=(_reaching_loop, [(row(real), row(real), real, types.int64[::1]) for real in reals]),
        soften=(_soften_loop, [(row(real), number, number, out) for real in reals]),
        products=(_products_loop, [(table(types.int8), table(types.int16), types.int32[:, ::1])]),
    )
    loops, told = [], False
    for loop, each in signatures:
        compiled = numba.njit(cache=True)(loop)
        for signature in each:
            compiled.compile(signature)
            if compiled.stats.cache_misses and not told:
                say("compiling kernels, once")
                told = True
        compiled.disable_compile()
        loops.append(compiled)
    return _Loops(*loops)
