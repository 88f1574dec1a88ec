"""Files that options name, read whole, with one-line errors."""

from __future__ import annotations

from pathlib import Path

from truedraw.errors import InvalidParameter, UsageError

MAX_BYTES = 64 * 2**20


def read_bytes(option: str, path: str, allowed: str) -> bytes:
    """What a file holds. Raises UsageError."""
    if not path.strip():
        raise InvalidParameter(option, path, allowed)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidParameter(option, path, f"{allowed} (there is no such file)") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise UsageError(f"{option}: {path[:200]!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{option}: {path} is larger than {MAX_BYTES >> 20} MiB: give a shorter one")
    return data


def read_text(option: str, path: str, allowed: str) -> str:
    """The text of a file. Raises UsageError."""
    data = read_bytes(option, path, allowed)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{option}: {path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from None
