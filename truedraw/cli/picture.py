"""What the pictures of commands share: the check before any work, and the file."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from truedraw.errors import InvalidParameter, MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")


def check_picture(path: str) -> None:
    """Before any work: the kind of file, its folder, and matplotlib. Raises UsageError."""
    check_saved(path, _SUFFIXES)
    try:
        import matplotlib.figure  # noqa: F401  # only whether it can be imported
    except ImportError:
        raise MissingExtra("matplotlib", "audit") from None


def check_saved(path: str, suffixes: Sequence[str]) -> None:
    """The kind of file and its folder. Raises UsageError."""
    file = Path(path)
    if file.suffix.lower() not in suffixes:
        raise InvalidParameter("save", path, f"a file name that ends in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    if file.is_dir():
        raise UsageError(f"save: {path} is a directory: name a file")
    if not file.parent.is_dir():
        raise UsageError(f"save: there is no directory {str(file.parent)!r}: make it, or name another file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"save: {path} cannot be written: name another file")


def write_picture(path: str, figure: Figure) -> None:
    """PNG or SVG, as the name ends; nothing is left behind where drawing fails."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix.lower()[1:], dpi=150)
    Path(path).write_bytes(buffer.getvalue())
