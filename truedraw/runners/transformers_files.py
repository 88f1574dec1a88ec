"""Where models of transformers come from: a folder, a GGUF file, the embedded demo model, or a model hub."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraw.errors import InvalidParameter, MissingExtra, ModelFileError, ModelNotFound, TruedrawError
from truedraw.runners import gguf
from truedraw.runners.machine import of_file
from truedraw.runners.transformers_tokenizer import TransformersTokenizer

try:
    import torch
    import transformers
except ImportError:
    raise MissingExtra("torch and transformers", "transformers") from None

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """What transformers is asked for: a folder or a name of the hub, and a GGUF file in it."""

    name: str
    gguf_file: str | None = None

    @property
    def in_hub(self) -> bool:
        return not Path(self.name).is_dir()

    def identity(self) -> dict[str, str]:
        """What the cost of a pass and the best number of threads depend on, by name."""
        folder = Path(self.name)
        if self.in_hub:
            return {"file": self.name}
        if self.gguf_file is not None:
            return {"file": of_file(folder / self.gguf_file)}
        weights = sorted(folder.glob("*.safetensors"))
        return {"file": "; ".join(of_file(path) for path in [folder / "config.json", *weights[:1]])}


def parse(name: str) -> tuple[str, str | None]:
    """NAME[@bf16|@f32] to the name and the type, None where none was given. Raises InvalidParameter."""
    base, at, dtype = name.rpartition("@")
    if not at or Path(name).expanduser().exists():
        return name, None
    if dtype not in DTYPES:
        raise InvalidParameter("weights", dtype, " or ".join(f"@{known}" for known in DTYPES))
    return base, dtype


def locate(name: str) -> Source:
    """smollm2, a folder, a GGUF file, or ORG/NAME of the hub. Raises ModelNotFound, ModelFileError or MissingExtra."""
    if name == "smollm2":
        path = gguf.shipped()
        return Source(str(path.parent), path.name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelFileError(f"{path} holds no config.json: a folder saved by transformers, or a GGUF file, is needed")
        return Source(str(path))
    if path.is_file():
        gguf.checked(path)
        return Source(str(path.parent), path.name)
    if _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return Source(name)
    raise ModelNotFound(
        f"no model {name!r}: hf: takes smollm2, a folder saved by transformers, a GGUF file or ORG/NAME of the hub, each "
        "with @bf16 or @f32 behind it, or neither"
    )


def load(source: Source, dtype: str | None, device: str) -> tuple[Any, TransformersTokenizer]:
    """The model, on the device, and its tokenizer.

    dtype  bf16 or f32; None: bf16 for GGUF files and where the weights are bf16 already, else f32, which holds f16
           weights exactly
    device  cpu or cuda
    Pickled weights and code from the folder are not run. Raises InvalidParameter, ModelNotFound or ModelFileError.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", device, "cpu: PyTorch finds no CUDA device here")
    with _quietly(), _told(source):
        tokenizer = _fetched(source, transformers.AutoTokenizer.from_pretrained)
        options: dict[str, Any] = {"dtype": DTYPES[dtype or _own_type(source)], "output_loading_info": True}
        if source.gguf_file is None:
            options["use_safetensors"] = True
        elif hasattr(transformers, "GgufConfig"):  # newer ones would leave the weights in their blocks
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, info = _fetched(source, transformers.AutoModelForCausalLM.from_pretrained, **options)
        lost = sorted({*info["missing_keys"], *map(str, info.get("mismatched_keys", ()))})
        if lost:
            raise ModelFileError(f"{source.name} lacks {len(lost)} weights of {type(model).__name__} ({lost[0]}, ...)")
        ends = model.generation_config.eos_token_id if model.can_generate() else None
        eos_ids = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
        rows = len(model.get_output_embeddings().weight)
        return model.to(device), TransformersTokenizer(tokenizer, rows, eos_ids)


def _own_type(source: Source) -> str:
    if source.gguf_file is not None:
        return "bf16"
    config = _fetched(source, transformers.AutoConfig.from_pretrained).get_text_config()
    return "bf16" if config.dtype in (torch.bfloat16, "bfloat16") else "f32"


def _fetched(source: Source, load: Callable[..., Any], **options: Any) -> Any:
    """From the hub's local cache where it is there, else from the hub."""
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    if source.in_hub:
        with contextlib.suppress(OSError):
            return load(source.name, local_files_only=True, **options)
    return load(source.name, **options)


@contextlib.contextmanager
def _told(source: Source) -> Iterator[None]:
    """Whatever transformers raises, as one line of ours. Its errors share no base class."""
    try:
        yield
    except TruedrawError:
        raise
    except ImportError as error:
        raise MissingExtra(error.name or _one_line(error), "transformers") from error
    except Exception as error:
        if source.in_hub and isinstance(error, OSError):
            message = f"hf:{source.name} is neither in the hub's local cache nor could it be fetched ({_one_line(error)})"
            raise ModelNotFound(message) from error
        file = f"{source.name}/{source.gguf_file}" if source.gguf_file else source.name
        raise ModelFileError(f"{file} cannot be loaded by transformers: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Transformers reports to standard error by itself: what matters of it is told in our own words."""
    hub, before = logging.getLogger("huggingface_hub"), transformers.logging.get_verbosity()
    hub.setLevel(logging.ERROR)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
