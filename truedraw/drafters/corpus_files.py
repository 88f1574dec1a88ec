"""Corpora from files: texts and folders of texts to read, and one file that answers are kept in.

A kept corpus is a line of JSON (format, tokenizer, numbers of tokens, checksum) and the token ids, 4 bytes each, little
endian, with a border before and behind each text. It is written beside its place and then moved there, so that it is
always whole, and nobody but its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from truedraw.drafters.corpus import LIMIT, Corpus, check_limit
from truedraw.errors import CorpusError
from truedraw.protocols import Tokenizer
from truedraw.types import TokenArray

FORMAT = 1
ENDING = ".corpus"
BYTES_PER_TOKEN = 16
"""Text for each token of the limit that is read at all: four times what real text has."""

Paths: TypeAlias = str | Path | Sequence[str | Path]

_MAX_HEADER = 1024
_PEEK = 8192  # bytes that tell whether a file in a folder is binary


@dataclass(frozen=True, slots=True)
class Sources:
    """What paths name, checked and read, before a tokenizer is there. See `gather`."""

    names: tuple[str, ...]
    texts: tuple[tuple[str, str], ...]
    kept: Path | None
    limit: int
    learning: bool
    notes: tuple[str, ...]

    def open(self, tokenizer: Tokenizer, say: Callable[[str], None] | None = None) -> Corpus:
        """The corpus of that tokenizer; `say` is told the notes. Raises CorpusError."""
        if say is not None:
            for note in self.notes:
                say(note)
        added: list[TokenArray] = []
        store: CorpusFile | None = None
        if self.kept is not None:
            store = CorpusFile(self.kept, fingerprint(tokenizer), tokenizer.vocab_size, self.limit)
            added = store.read()
        texts = [np.array(tokenizer.encode(text, add_special=False), dtype=np.int32) for _, text in self.texts]
        for (name, _), tokens in zip(self.texts, texts, strict=True):
            if not len(tokens):
                raise CorpusError(f"corpus {name!r} holds no token")
        size = sum(len(text) + 1 for text in (*texts, *added))
        if size > self.limit:
            raise CorpusError(
                f"corpus {', '.join(map(repr, self.names))} holds {size} tokens, and {self.limit} fit: take a larger "
                "--corpus-size or fewer files"
            )
        return Corpus(texts, added=added, limit=self.limit, learning=self.learning and store is not None, store=store)

    def of_owner(self, owner: str) -> Sources:
        """The owner's own kept answers alone: FILE-OWNER.corpus beside FILE.corpus. Raises CorpusError."""
        assert self.kept is not None
        path = self.kept.with_name(f"{self.kept.stem}-{owner}{ENDING}")
        return Sources((str(path),), (), path, self.limit, self.learning, tuple(_check_kept(path, self.learning)))


def gather(paths: Paths, *, limit: int = LIMIT, learning: bool = True) -> Sources:
    """Read what the paths name: UTF-8 texts, folders of them, and at most one file that ends in ENDING.

    limit     tokens at most, all paths together
    learning  finished answers are to be added to the file that ends in ENDING, and it may be a new one
    In folders, files that are hidden, binary or not readable are passed over, and counted in `notes`; a path of which
    nothing is left is refused. Raises CorpusError, InvalidParameter.
    """
    check_limit(limit)
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    kept = [Path(path) for path in paths if _is_kept(path)]
    if len(kept) > 1:
        raise CorpusError(f"corpus {str(kept[1])!r}: answers are kept in one file, and {str(kept[0])!r} is one already")
    reader = _Reader(limit * BYTES_PER_TOKEN)
    notes: list[str] = []
    for path in paths:
        notes += _check_kept(Path(path), learning) if _is_kept(path) else reader.read(str(path))
    names = tuple(str(path) for path in paths)
    return Sources(names, tuple(reader.texts), kept[0] if kept else None, limit, learning, tuple(notes))


def from_files(paths: Paths, tokenizer: Tokenizer, limit: int = LIMIT) -> Corpus:
    """A corpus that learns if one of the paths ends in ENDING. See `gather`."""
    return gather(paths, limit=limit).open(tokenizer)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Of all token texts, and so of their number."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        digest.update(len(text).to_bytes(4, "big") + text)
    return digest.hexdigest()


# ---------------------------------------------------------------- texts


class _Reader:
    """Texts of files, `room` bytes at most."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.left = room
        self.texts: list[tuple[str, str]] = []

    def read(self, name: str) -> list[str]:
        """A file or a folder; returns what is to be said of it. Raises CorpusError."""
        try:
            kind = os.stat(name).st_mode
            if stat.S_ISDIR(kind):
                return self._folder(name)
            if not stat.S_ISREG(kind):
                raise CorpusError(f"corpus {name!r} is neither a file nor a folder")
            with open(name, "rb") as stream:
                data = self._bytes(name, stream)
        except (FileNotFoundError, NotADirectoryError):
            raise CorpusError(f"corpus {name!r}: there is no such file or folder") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise _unreadable(name, error) from None
        if not data:
            raise CorpusError(f"corpus {name!r} is empty")
        if b"\0" in data:
            raise CorpusError(f"corpus {name!r} is binary: a null byte at offset {data.index(0)}, and UTF-8 text is needed")
        try:
            self.texts.append((name, data.decode()))
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"corpus {name!r} is binary or not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
            ) from None
        return []

    def _folder(self, name: str) -> list[str]:
        hidden = binary = unreadable = 0
        before = len(self.texts)
        for path in _walk(name):
            if path is None:
                hidden += 1
                continue
            try:
                if not stat.S_ISREG(os.stat(path).st_mode):
                    unreadable += 1
                    continue
                with open(path, "rb") as stream:
                    if b"\0" in stream.read(_PEEK):  # told without counting its size
                        binary += 1
                        continue
                    stream.seek(0)
                    data = self._bytes(path, stream)
            except OSError:
                unreadable += 1
                continue
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                binary += 1
                self.left += len(data)
            elif text.strip():
                self.texts.append((path, text))
        counts = ((hidden, "hidden"), (binary, "binary"), (unreadable, "not readable"))
        passed = ", ".join(f"{number} {kind}" for number, kind in counts if number)
        if len(self.texts) == before:
            raise CorpusError(f"corpus {name!r} is a folder without a text file{f' (passed over: {passed})' if passed else ''}")
        return [f"corpus {name}: {len(self.texts) - before} text files; passed over: {passed}"] if passed else []

    def _bytes(self, name: str, stream: BinaryIO) -> bytes:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(self.left + 1) if size <= self.left else b""
        if size > self.left or len(data) > self.left:
            raise CorpusError(
                f"corpus {name!r} is too large: it has {max(size, len(data))} bytes, and {self.left} are left of the "
                f"{self.room} that a corpus of this size reads: take a larger --corpus-size or fewer files"
            )
        self.left -= len(data)
        return data


def _walk(folder: str) -> Iterator[str | None]:
    """The files of a folder and of those in it, in the order of their names; None for each that is hidden, and for a
    hidden folder once."""
    for base, folders, files in os.walk(folder):
        yield from (None for name in folders if name.startswith("."))
        yield from (None if name.startswith(".") else os.path.join(base, name) for name in sorted(files))
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _unreadable(name: str, error: Exception) -> CorpusError:
    return CorpusError(f"corpus {name[:200]!r} cannot be read: {getattr(error, 'strerror', None) or error}")


# ---------------------------------------------------------------- the kept file


def _is_kept(path: str | Path) -> bool:
    return str(path).endswith(ENDING) and not os.path.isdir(path)


def _check_kept(path: Path, learning: bool) -> list[str]:
    """Whether it can be read, and where answers are to be kept, written. Raises CorpusError."""
    try:
        kind: int | None = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        kind = None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise _unreadable(str(path), error) from None
    if kind is None and not learning:
        raise CorpusError(f"corpus {str(path)!r}: there is no such file, and nothing is added here that could make one")
    if kind is not None and not stat.S_ISREG(kind):
        raise CorpusError(f"corpus {str(path)!r} is neither a file nor a folder")
    folder = path.resolve().parent
    if learning and not folder.is_dir():
        raise CorpusError(f"corpus {str(path)!r}: there is no folder for it")
    if learning and not os.access(folder, os.W_OK):
        raise CorpusError(f"corpus {str(path)!r} cannot be written: its folder is read-only")
    return [f"corpus {path} is new: finished answers are kept in it"] if kind is None else []


class CorpusFile:
    """Where added texts are kept. Call it with a corpus to write them."""

    def __init__(self, path: Path, tokenizer: str, vocab_size: int, limit: int) -> None:
        self.path, self._tokenizer, self._vocab_size, self._limit = path, tokenizer, vocab_size, limit
        self._seen: object = None

    def read(self) -> list[TokenArray]:
        """The texts, oldest first; none if the file is missing. Its size is checked before it is read.

        Raises CorpusError: damaged, of another tokenizer, or larger than the limit.
        """
        self._seen = self._state()
        try:
            with self.path.open("rb") as stream:
                header = self._header(stream.readline(_MAX_HEADER))
                size = os.fstat(stream.fileno()).st_size - stream.tell()
                if header["tokenizer"] != self._tokenizer:
                    raise self._refused("is of another tokenizer: take another file for this model")
                if header["tokens"] - 1 > self._limit:
                    raise self._refused(
                        f"holds {header['tokens'] - 1} tokens and {self._limit} fit: take a larger --corpus-size or another file"
                    )
                if size != 4 * header["tokens"]:
                    raise self._refused(f"is damaged: {size} bytes of tokens where {4 * header['tokens']} are announced")
                data = stream.read(size)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(str(self.path), error) from None
        tokens = np.frombuffer(data, dtype="<i4").astype(np.int32)
        borders = np.flatnonzero(tokens == -1)
        sound = zlib.crc32(data) == header["checksum"] and len(borders) and borders[0] == 0 and borders[-1] == len(tokens) - 1
        if not sound or int(tokens.min()) < -1 or int(tokens.max()) >= self._vocab_size:
            raise self._refused("is damaged: its tokens are not those that were written")
        return [tokens[start + 1 : end] for start, end in pairwise(borders.tolist())]

    def _header(self, line: bytes) -> dict[str, Any]:
        try:
            header: dict[str, Any] = json.loads(line)
            known = {"truedraw_corpus": int, "tokenizer": str, "limit": int, "tokens": int, "checksum": int}
            valid = isinstance(header, dict) and all(type(header.get(name)) is kind for name, kind in known.items())
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            raise self._refused("is damaged or no corpus: it does not begin as one")
        if header["truedraw_corpus"] != FORMAT:
            raise self._refused(f"is of format {header['truedraw_corpus']}, and this version reads {FORMAT}: take another file")
        return header

    def __call__(self, corpus: Corpus) -> None:
        """Write the added texts: at most 4 bytes for each token of the limit, a border and a header of _MAX_HEADER bytes.

        What somebody else wrote since this file was read stays, as older. Raises CorpusError, and OSError where it
        cannot be written; the file is then as it was.
        """
        if self._state() != self._seen:
            corpus = _merged(Corpus(added=self.read(), limit=corpus.limit), corpus.added(only_new=True))
        border = np.array([-1], dtype=np.int32)
        parts = [border, *(part for text in corpus.added() for part in (text, border))]
        data = np.concatenate(parts).astype("<i4").tobytes()
        header = {
            "truedraw_corpus": FORMAT,
            "tokenizer": self._tokenizer,
            "limit": self._limit,
            "tokens": len(data) // 4,
            "checksum": zlib.crc32(data),
        }
        self._replace(json.dumps(header).encode() + b"\n" + data)
        self._seen = self._state()

    def _replace(self, content: bytes) -> None:
        import tempfile  # takes milliseconds, and few ever write

        path = self.path.resolve()  # a link stays one
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise OSError(error.errno, f"the corpus could not be written: {error.strerror}", str(self.path)) from None

    def _state(self) -> object:
        try:
            known = os.stat(self.path)
        except OSError:
            return None
        return known.st_ino, known.st_mtime_ns, known.st_size

    def _refused(self, why: str) -> CorpusError:
        return CorpusError(f"corpus {str(self.path)!r} {why}")


def _merged(corpus: Corpus, texts: Sequence[TokenArray]) -> Corpus:
    for text in texts:
        corpus.add(text)
    return corpus
