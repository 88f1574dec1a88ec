"""What is audited: engines that PyPI has, how each is installed and started, and how it is asked for plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is started.

    environment  the folder of its virtual environment
    models       the demo model, by name: "q8_0.gguf" and such are files, made by models.py
    port         to listen on
    """

    environment: Path
    models: Path
    port: int

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    def packaged(self, pattern: str) -> str:
        """A file inside the environment."""
        found = sorted(self.environment.glob(f"lib/python*/site-packages/{pattern}"))
        if not found:
            sys.exit(f"{self.environment} has no {pattern}")
        return str(found[0])


Command = Callable[[Place], list[str]]


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run an engine.

    name     as "n-gram drafts"
    on       starts the server with speculation
    off      and the one without; None: the same server, asked with `off_fields` in the body
    reference  a model that truedraw generate takes, with the same weights
    detect   --detect of its audit, and the tokens it may take: slow engines get fewer
    """

    name: str
    on: Command
    off: Command | None = None
    off_fields: str = ""
    reference: str = "smollm2:q8_0"
    detect: float = 0.15
    most: int = 40_000
    concurrency: int = 4
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """steps: the arguments of pip, one call after the other. libraries: folders that its program needs, in the environment."""

    steps: tuple[tuple[str, ...], ...]
    shown: tuple[str, ...]
    setups: tuple[Setup, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("q8_0.gguf",)


def llama_cpp(*drafter: str) -> Command:
    def command(place: Place) -> list[str]:
        named = [str(place.models / name) if name.endswith(".gguf") else name for name in drafter]
        return [place.python, str(HERE / "llama_cpp_server.py"), str(place.port), str(place.models / "q8_0.gguf"), *named]

    return command


ENGINES: dict[str, Engine] = {
    "llama.cpp": Engine(
        steps=(("install", "--only-binary", ":all:", "xllamacpp==2026.10.11549"),),
        shown=("xllamacpp",),
        setups=(
            Setup("n-gram drafts (ngram-simple)", llama_cpp("ngram-simple"), llama_cpp()),
            Setup("draft model", llama_cpp("draft.gguf"), llama_cpp()),
        ),
        needs=("q8_0.gguf", "draft.gguf"),
    ),
}
