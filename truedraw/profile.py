"""What a pass costs on this machine, and with how many threads it is fastest: values, and where they are kept
between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truedraw.errors import InvalidParameter

FORMAT = 1
"""Of the stored file: another number is measured again."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Seconds of one target pass of `size` tokens, behind `cached` tokens in each of `sequences` slots."""

    size: int
    cached: int
    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A cost curve.

    points  at least pass size 1; several cached lengths and numbers of sequences where they were measured
    key     what it was measured on, by name: model file, library, threads, KV type, processor
    """

    points: tuple[CostPoint, ...]
    key: Mapping[str, str]

    def __post_init__(self) -> None:
        if not any(point.size == 1 for point in self.points):
            raise InvalidParameter("profile", [point.size for point in self.points], "pass sizes that begin with 1")
        for point in self.points:
            if not (point.size >= 1 and point.cached >= 0 and point.sequences >= 1 and 0 < point.seconds < math.inf):
                raise InvalidParameter("profile point", point, "a size >= 1 and positive, finite seconds")

    @property
    def largest(self) -> int:
        return max(point.size for point in self.points)

    def pass_seconds(self, size: int) -> float:
        """Seconds of a pass of so many tokens, behind a few hundred cached ones."""
        return float(self.curve(256).table(size)[size])

    def curve(self, cached: int = 0, sequences: int = 1) -> Curve:
        """Seconds by pass size at that cached length, interpolated between the lengths that were measured."""
        counts = sorted({point.sequences for point in self.points})
        nearest = min(counts, key=lambda count: abs(count - sequences))
        chosen = [point for point in self.points if point.sequences == nearest]
        sizes = sorted({point.size for point in chosen})
        seconds = [_at_length([point for point in chosen if point.size == size], cached) for size in sizes]
        return Curve(tuple(sizes), tuple(seconds))


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a pass by its size, linear between the sizes measured and beyond the last."""

    sizes: tuple[int, ...]
    measured: tuple[float, ...]

    def table(self, up_to: int) -> np.ndarray:
        """Seconds of passes of 0 .. up_to tokens, shape (up_to + 1,); a pass of none costs nothing."""
        wanted = np.arange(up_to + 1)
        table = np.interp(wanted, self.sizes, self.measured)
        if up_to > self.sizes[-1] and len(self.sizes) > 1:
            slope = (self.measured[-1] - self.measured[-2]) / (self.sizes[-1] - self.sizes[-2])
            beyond = wanted > self.sizes[-1]
            table[beyond] = self.measured[-1] + max(slope, 0.0) * (wanted[beyond] - self.sizes[-1])
        table[0] = 0.0
        return table


def _at_length(points: Sequence[CostPoint], cached: int) -> float:
    ordered = sorted(points, key=lambda point: point.cached)
    return float(np.interp(cached, [point.cached for point in ordered], [point.seconds for point in ordered]))


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """Seconds of a pass of `size` tokens with so many threads."""

    threads: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """With how many threads passes are fastest.

    small, large  for passes of one token, and for larger ones
    measured      what was chosen from; empty: it was not measured
    steady        False: another program ran, and all cores stayed for want of a measurement
    """

    small: int
    large: int
    measured: tuple[ThreadTime, ...] = ()
    steady: bool = True

    def __post_init__(self) -> None:
        for name in ("small", "large"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameter(f"threads, {name}", value, "an integer >= 1")


# ---------------------------------------------------------------- where they are kept


def folder() -> Path:
    """The user's cache directory for profiles."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "truedraw" / "profiles"


def load(key: Mapping[str, str]) -> tuple[Profile | None, str | None]:
    """The stored profile of this key, and one line where a stored one could not be used.

    A file that is missing is no news. Never raises.
    """
    content, problem = _read(folder() / _name(key), key)
    if content is not None:
        try:
            return Profile(tuple(CostPoint(**point) for point in content["points"]), dict(key)), None
        except (KeyError, TypeError, ValueError) as error:
            problem = f"is damaged ({type(error).__name__})"
    return None, problem and f"the stored profile {_name(key)} {problem}: measuring again"


def store(profile: Profile) -> None:
    """Keep it for the next run. A directory that cannot be written to is no error: then it is measured again."""
    _write(folder() / _name(profile.key), profile.key, {"points": [asdict(point) for point in profile.points]})


def load_threads(key: Mapping[str, str]) -> tuple[ThreadChoice | None, str | None]:
    """The stored choice of threads for this key, which names no number of threads, and one line where a stored
    one could not be used: it is then removed, so that the line comes once. Never raises.
    """
    path = folder() / f"threads-{_name(key)}"
    content, problem = _read(path, key)
    if content is not None:
        try:
            measured = tuple(ThreadTime(**time) for time in content["measured"])
            return ThreadChoice(content["small"], content["large"], measured), None
        except (KeyError, TypeError, ValueError) as error:
            problem = f"is damaged ({type(error).__name__})"
    if problem is None:
        return None, None
    with contextlib.suppress(OSError):
        path.unlink()
    return None, f"the stored choice of threads {path.name} {problem}: taking all cores (truedraw profile chooses again)"


def store_threads(choice: ThreadChoice, key: Mapping[str, str]) -> None:
    """Keep it for the next run. A directory that cannot be written to is no error."""
    _write(folder() / f"threads-{_name(key)}", key, asdict(choice))


def _read(path: Path, key: Mapping[str, str]) -> tuple[Any, str | None]:
    """The content of a file that was stored under `key`, or None and what is wrong with it."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"cannot be read ({type(error).__name__})"
    try:
        known = content["format"] == FORMAT and dict(content["key"]) == dict(key)
    except (KeyError, TypeError, ValueError) as error:
        return None, f"is damaged ({type(error).__name__})"
    return (content, None) if known else (None, "is of another version or machine")


def _write(path: Path, key: Mapping[str, str], values: Mapping[str, object]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format": FORMAT, "key": dict(key), **values}))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _name(key: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return f"{digest[:24]}.json"
