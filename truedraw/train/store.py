"""Answers of a target with its hidden states, on disk: bounded, appended to, and sound after a kill at any instant."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import InvalidParameter, RunError
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
    Raises InvalidParameter for a folder that holds another target's answers.
    """

    def __init__(self, folder: Path, width: int, vocab_size: int, max_bytes: int) -> None:
        self._folder, self._width, self._max_bytes = folder, width, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._index = folder / "index.jsonl"
        self._mass = folder / "mass.npy"
        header = {"width": width, "vocab_size": vocab_size}
        lines = self._index.read_text().split("\n")[:-1] if self._index.exists() else []  # the last may be torn
        if lines and json.loads(lines[0]) != header:
            raise InvalidParameter("save", str(folder), f"a folder whose answers are {header}: it holds those of {lines[0]}")
        if not lines:
            self._index.write_text(json.dumps(header) + "\n")
        else:
            self._index.write_text("".join(f"{line}\n" for line in lines))
        self._entries = [_Entry(**json.loads(line)) for line in lines[1:]]
        self.mass = np.zeros(vocab_size)
        """What the target's rows gave each token in all: what a trimmed vocabulary is chosen by."""
        if self._mass.exists():
            self.mass = np.load(self._mass)

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

    @property
    def full(self) -> bool:
        return self.num_tokens * self._width * 2 >= self._max_bytes

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
            aside = self._mass.with_suffix(".part")
            with aside.open("wb") as file:
                np.save(file, self.mass)
            aside.replace(self._mass)
            with self._index.open("a") as file:
                file.writelines(json.dumps(asdict(entry)) + "\n" for entry in added)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"answers cannot be written to {self._folder} ({error.strerror}): make room, or take --cache-mb down"
            ) from error
        self._entries += added

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
