"""Shared fixtures: toy engines, tiny GGUF files and the demo model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

from truedraw import kernels

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("default", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """On a fresh machine the first command says that kernels are being compiled; not in the middle of a test."""
    kernels.warm()
    kernels.cool()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(architecture, **options): the path of a random model of that kind."""
    import tiny_gguf

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple, Path] = {}

    def get(architecture: str = "llama", **options) -> Path:
        key = (architecture, *sorted(options.items()))
        if key not in made:
            made[key] = tiny_gguf.write(folder / f"{architecture}-{len(made)}.gguf", architecture, **options)
        return made[key]

    return get
