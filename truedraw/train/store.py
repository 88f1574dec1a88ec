"""Answers of a target with its hidden states, on disk: bounded, appended to, and sound after a kill at any instant."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import InvalidParameter, RunError, one_line
from truedraw.types import TokenArray

Halves: TypeAlias = npt.NDArray[np.float16]
Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer of the target.

    prompt  the index of its prompt
    states  (n, width): states[i] is the state that tokens[i] was drawn behind
    tokens  (n,)
    norms   (n,): the log of the sum of exp of the whole row that states[i] gives
    """

    prompt: int
    kind: str
    held_out: bool
    states: Halves
    tokens: TokenArray
    norms: Floats


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the index."""

    prompt: int
    kind: str
    held_out: bool
    start: int
    length: int


class Store:
    """A folder of four files: the arrays of all answers one behind the other, and an index, written last, which says where
    each begins. What was appended without its line in the index is overwritten. A fifth has what each token was worth.

    width      of the states; max_bytes: of the states at most
    vocab_size  of the target
    made_by    what else the answers depend on, as names of target and seed; None: whatever made them is read
    Raises InvalidParameter for a folder that holds other answers, RunError for one that is damaged.
    """

    def __init__(
        self, folder: Path, width: int, vocab_size: int, max_bytes: int, made_by: Mapping[str, Any] | None = None
    ) -> None:
        self._folder, self._width, self._max_bytes = folder, width, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._index = folder / "index.jsonl"
        self._mass = folder / "mass.npy"
        header = {"width": width, "vocab_size": vocab_size, **(made_by or {})}
        self.mass = np.zeros(vocab_size)
        """What the target's rows gave each token in all: what a trimmed vocabulary is chosen by."""
        if not self._index.exists() or not self._index.stat().st_size:
            self._begin(header)
        try:
            text = self._index.read_bytes()
            whole = text.rfind(b"\n") + 1  # what follows is a line that was being written
            found, *entries = (json.loads(line) for line in text[:whole].splitlines())
            self._entries = [_Entry(**entry) for entry in entries]
            if self._mass.exists():
                self.mass = np.load(self._mass)
            short = [name for name, size in self._sizes(self.num_tokens) if size and (folder / name).stat().st_size < size]
        except (OSError, ValueError, TypeError, EOFError) as error:
            raise RunError(f"the answers in {folder} are damaged ({one_line(error)}): remove the folder to begin anew") from error
        if {name: found.get(name) for name in header} != header:
            raise InvalidParameter("save", str(folder), f"a folder whose answers are of {header}: it holds those of {found}")
        if short:
            raise RunError(f"the answers in {folder} are damaged ({short[0]} is cut short): remove the folder to begin anew")
        if whole < len(text):
            os.truncate(self._index, whole)

    def _begin(self, header: Mapping[str, Any]) -> None:
        aside = self._index.with_suffix(".part")
        try:
            aside.write_text(json.dumps(header) + "\n")
            aside.replace(self._index)
        except OSError as error:
            raise self._unwritten(error) from error

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.length for entry in self._entries)

    def count(self, *, held_out: bool) -> int:
        """Tokens that are, or are not, held out."""
        return sum(entry.length for entry in self._entries if entry.held_out == held_out)

    @property
    def next_prompt(self) -> int:
        """The first prompt behind all those that are answered here."""
        return 1 + max((entry.prompt for entry in self._entries), default=-1)

    def full(self, more: int = 0) -> bool:
        """Whether so many more tokens use up what may be kept."""
        return (self.num_tokens + more) * self._width * 2 >= self._max_bytes

    def add(self, answers: Sequence[Answer]) -> None:
        """Append; on the disk once this returns."""
        start = self.num_tokens
        added = []
        for answer in answers:
            added.append(_Entry(answer.prompt, answer.kind, answer.held_out, start, len(answer.tokens)))
            start += len(answer.tokens)
        try:
            for name, column, dtype in self._columns:
                with open(self._folder / name, "r+b" if (self._folder / name).exists() else "w+b") as file:
                    file.seek(self.num_tokens * column * np.dtype(dtype).itemsize)
                    for answer in answers:
                        file.write(np.ascontiguousarray(getattr(answer, name.partition(".")[0]), dtype).tobytes())
                    file.truncate()
                    _sync(file)
            aside = self._mass.with_suffix(".part")
            with aside.open("wb") as file:
                np.save(file, self.mass)
                _sync(file)
            aside.replace(self._mass)
            with self._index.open("a") as file:
                file.writelines(json.dumps(asdict(entry)) + "\n" for entry in added)
                _sync(file)
        except OSError as error:
            raise self._unwritten(error) from error
        self._entries += added

    def _unwritten(self, error: OSError) -> RunError:
        return RunError(f"answers cannot be written to {self._folder} ({one_line(error)}): make room, or take --cache-mb down")

    def _sizes(self, tokens: int) -> list[tuple[str, int]]:
        """Each file of arrays with its bytes for so many tokens."""
        return [(name, tokens * column * np.dtype(dtype).itemsize) for name, column, dtype in self._columns]

    @property
    def _columns(self) -> tuple[tuple[str, int, Any], ...]:
        return ("states.f16", self._width, np.float16), ("tokens.i32", 1, np.int32), ("norms.f32", 1, np.float32)

    def answers(self) -> Iterator[Answer]:
        """All answers in the order in which they were added: views of the files."""
        total = self.num_tokens
        if not total:
            return
        states, tokens, norms = (
            np.memmap(self._folder / name, dtype, "r", shape=(total, column)) for name, column, dtype in self._columns
        )
        for entry in self._entries:
            part = slice(entry.start, entry.start + entry.length)
            yield Answer(entry.prompt, entry.kind, entry.held_out, states[part], tokens[part, 0], norms[part, 0])


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
