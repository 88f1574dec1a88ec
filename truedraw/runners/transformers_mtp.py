"""The MTP module that public checkpoints ship, by its usual names: DeepSeek-V3, GLM-4.5 and their like write it as one
layer more than the configuration counts, Qwen3-Next under mtp.

    DeepSeek-V3 (arXiv 2412.19437), GLM-4.5       Qwen3-Next
    model.layers.N.hnorm, enorm, eh_proj          mtp.pre_fc_norm_hidden, mtp.pre_fc_norm_embedding, mtp.fc
    model.layers.N.(a layer of the model)         mtp.layers.0.(a layer of the model)
    model.layers.N.shared_head.norm               mtp.norm

The layer runs in the model's own class of transformers, as a model of one layer. Embeddings and output matrix are the target's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from truedraw.errors import MissingExtra, ModelFileError, ModelNotFound, one_line
from truedraw.protocols import TokenMatrices

try:
    import torch
    import transformers
    from safetensors import SafetensorError, safe_open

    from truedraw.runners import transformers_cache as caches
    from truedraw.runners.transformers_files import quietly
except ImportError:
    raise MissingExtra("torch or transformers", "transformers") from None

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]

MAX_ENTRIES = 65536
"""Of one text."""

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class _Names:
    """How a family of checkpoints calls the parts of its module."""

    hidden_norm: str
    embedding_norm: str
    join: str
    layer: str
    out_norm: str


def _families(num_layers: int) -> tuple[_Names, _Names]:
    extra = f"model.layers.{num_layers}."
    return (
        _Names(f"{extra}hnorm.", f"{extra}enorm.", f"{extra}eh_proj.", extra, f"{extra}shared_head.norm."),
        _Names("mtp.pre_fc_norm_hidden.", "mtp.pre_fc_norm_embedding.", "mtp.fc.", "mtp.layers.0.", "mtp.norm."),
    )


class EntryCache:
    """Keys and values of the entries of one text. All are kept: the layer has no window of its own."""

    def __init__(self, config: Any) -> None:
        self.cache = caches.new_cache(config, MAX_ENTRIES)

    @property
    def position(self) -> int:
        """Of the next entry."""
        return int(self.cache.get_seq_length())

    def truncate(self, position: int) -> None:
        """Forget the entries from `position` on."""
        if position < self.position:
            caches.crop(self.cache, position)


class PublishedModule:
    """The module of a checkpoint, ready to draft: a drafters.mtp_modules.DraftModule over the whole vocabulary.

    block    a model of one layer, with the module's norm behind it
    norms    of the states and of the embeddings; join: (width, 2 x width), embeddings first
    """

    def __init__(self, block: Any, norms: tuple[Any, Any], join: Any, matrices: TokenMatrices) -> None:
        self._block, self._norms, self._join = block, norms, join
        self._embedding = torch.from_numpy(np.array(matrices.embedding)).to(join.dtype)
        tied = matrices.output is matrices.embedding
        self._output = self._embedding if tied else torch.from_numpy(np.array(matrices.output)).to(join.dtype)
        self.vocab_size = len(self._output)
        self.draft_ids = np.arange(self.vocab_size)

    def new_cache(self) -> EntryCache:
        return EntryCache(self._block.config)

    def remember(self, states: Floats, tokens: Ids, cache: EntryCache) -> None:
        """See DraftModule."""
        self._states(states, tokens, cache)

    def step(self, states: Floats, tokens: Ids, caches: Sequence[EntryCache]) -> Floats:
        """See DraftModule. One text after the other, since their caches are not ragged."""
        made = [self._states(states[i : i + 1], tokens[i : i + 1], cache) for i, cache in enumerate(caches)]
        return np.concatenate(made)

    def logits(self, states: Floats) -> Floats:
        """See DraftModule."""
        with torch.inference_mode():
            rows: Floats = (torch.from_numpy(states).to(self._output.dtype) @ self._output.T).float().numpy()
        return rows

    def _states(self, states: Floats, tokens: Ids, cache: EntryCache) -> Floats:
        hidden_norm, embedding_norm = self._norms
        with torch.inference_mode():
            embeddings = embedding_norm(self._embedding[torch.from_numpy(np.array(tokens, np.int64))])
            below = hidden_norm(torch.from_numpy(np.array(states)).to(self._join.dtype))
            joined = torch.cat([embeddings, below], dim=-1) @ self._join.T
            made = self._block(
                inputs_embeds=joined[None], use_cache=True, **{caches.argument(self._block): cache.cache}
            ).last_hidden_state
            own: Floats = made[0].float().numpy()
        return own


def load(folder: Path, check: Callable[[Floats, str], TokenMatrices]) -> PublishedModule:
    """The module in a folder as it is downloaded. A checkpoint with several has its first one used for every depth.

    check  given the embeddings that the module was trained with, (tokens, width), and what model they are of, hands out the
           target's matrices, or raises
    Raises ModelNotFound, ModelFileError, and what `check` raises.
    """
    if not (folder / "config.json").exists():
        raise ModelNotFound(
            f"{folder} holds no config.json: the folder of a checkpoint, or a file of truedraw train mtp, is needed"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
        files = _files(folder)
        names = next((names for names in _families(config.num_hidden_layers) if f"{names.join}weight" in files), None)
        if names is None:
            raise ModelFileError(
                f"{folder} holds no MTP module: neither model.layers.{config.num_hidden_layers}.eh_proj nor mtp.fc is in it"
            )
        matrices = check(_read(folder, files, "model.embed_tokens.weight").float().numpy(), config.model_type)
        weights = {key: _read(folder, files, key) for key in files if key.startswith((names.layer, "mtp."))}
        return _module(config, names, weights, matrices)
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
        raise ModelFileError(f"{folder} cannot be read for its MTP module: {one_line(error)}") from error


def _files(folder: Path) -> Mapping[str, str]:
    """Weights to the files that hold them. Raises ModelFileError where one of these is missing."""
    if (folder / _INDEX).exists():
        files: Mapping[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
    else:
        with safe_open(str(folder / _WHOLE), framework="pt") as file:
            files = dict.fromkeys(file.keys(), _WHOLE)
    missing = sorted({file for file in files.values() if not (folder / file).exists()})
    if missing:
        raise ModelFileError(f"{folder} lacks {missing[0]} ({len(missing)} missing in all): fetch what is not there yet")
    return files


def _read(folder: Path, files: Mapping[str, str], key: str) -> Any:
    """Raises ModelFileError for weights of fewer bits than 16, which come with scales of their own."""
    with safe_open(str(folder / files[key]), framework="pt") as file:
        tensor = file.get_tensor(key)
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ModelFileError(f"{folder} has {key} as {tensor.dtype}: bf16, f16 or f32 weights are needed")
    return tensor


def _module(config: Any, names: _Names, weights: Mapping[str, Any], matrices: TokenMatrices) -> PublishedModule:
    """Raises ModelFileError where weights are missing: they would be drawn at random."""
    dtype = weights[f"{names.join}weight"].dtype
    block_class = transformers.MODEL_MAPPING[type(config)]
    parts = (names.hidden_norm, names.embedding_norm, names.join, names.out_norm)
    state = {
        key.replace(names.layer, "layers.0.", 1): weight
        for key, weight in weights.items()
        if key.startswith(names.layer)
        and not key.startswith((*parts, f"{names.layer}shared_head.", f"{names.layer}embed_tokens."))
    }
    state["norm.weight"] = weights[f"{names.out_norm}weight"]
    state["embed_tokens.weight"] = torch.zeros(1, config.hidden_size, dtype=dtype)  # it is fed vectors
    with quietly():
        block, info = block_class.from_pretrained(
            None, config=_one_layer(config), state_dict=state, dtype=dtype, output_loading_info=True
        )
    wrong = sorted({*info["missing_keys"], *map(str, info["mismatched_keys"]), *info["unexpected_keys"]})
    if wrong:
        raise ModelFileError(f"the MTP module does not fit a layer of {block_class.__name__}: {wrong[0]} ({len(wrong)} in all)")
    norms = tuple(_norm(block.norm, weights[f"{part}weight"]) for part in (names.hidden_norm, names.embedding_norm))
    return PublishedModule(block.eval(), (norms[0], norms[1]), weights[f"{names.join}weight"], matrices)


def _one_layer(config: Any) -> Any:
    """The configuration of a model of one layer, with full attention, and with experts where the model has any."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.vocab_size, one.pad_token_id = 1, 1, None
    for name, value in (("layer_types", ["full_attention"]), ("mlp_layer_types", ["sparse"])):
        if getattr(one, name, None):
            setattr(one, name, value)
    experts: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    for name, value in experts.items():
        if hasattr(one, name):
            setattr(one, name, value)
    return one


def _norm(like: Any, weight: Any) -> Any:
    """A norm of the model's own kind: what its weight means differs between them."""
    norm = copy.deepcopy(like)
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm
