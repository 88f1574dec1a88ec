"""Random models of a few kilobytes in the classes of transformers, and tokenizers for them: every kind of cache can be
tested without a download."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
import transformers

VOCAB, CONTEXT, WINDOW = 259, 1024, 8

_SHARED = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_OWN = {
    "Bert": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Gemma2": {"sliding_window": WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Llama": {},
    "Mamba": {"state_size": 8, "expand": 2},
    "Mistral": {"sliding_window": WINDOW},
    "Phi3": {},
    "Qwen2": {},
}


def model(architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options) -> transformers.PreTrainedModel:
    """A model with random weights; for other options see its configuration."""
    config = getattr(transformers, f"{architecture}Config")(**{**_SHARED, **_OWN[architecture], **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def byte_level() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, one merge, a control token and a word that was added."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {unit: i for i, unit in enumerate(sorted(ByteLevel.alphabet()))}
    vocab["he"] = 256
    made = Tokenizer(models.BPE(vocab, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.add_tokens(["naïve"])
    return fast


def sentencepiece() -> transformers.PreTrainedTokenizerFast:
    """As SentencePiece is written by transformers: pieces with a mark for the space, and tokens for bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "▁a"]
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def word_piece() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def save(folder: Path, architecture: str = "Qwen2", **options) -> Path:
    """A folder as transformers saves it: model and tokenizer."""
    model(architecture, **options).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


_MOE = {
    "DeepseekV3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
        "topk_group": 1, "n_routed_experts": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
    "Glm4Moe": {"n_routed_experts": 8, "head_dim": 8},
    "Qwen3Next": {"num_experts": 8, "head_dim": 8, "shared_expert_intermediate_size": 16},
}  # fmt: skip


def with_mtp(folder: Path, architecture: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Save a checkpoint of two layers with a third as its MTP module, by the names that published ones use, and a tokenizer.
    Returns the model of three layers: its third is the module's."""
    options = {**_MOE[architecture], "moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    if architecture == "Qwen3Next":  # as published it has recurrent layers, which nothing can be drafted for
        options["layer_types"] = ["full_attention"] * 3
    config = getattr(transformers, f"{architecture}Config")(**{**_SHARED, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        three = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        width = config.hidden_size
        own = {
            "hidden_norm": 1 + 0.3 * torch.randn(width), "embedding_norm": 1 + 0.3 * torch.randn(width),
            "join": torch.randn(width, 2 * width) * width**-0.5, "out_norm": 1 + 0.3 * torch.randn(width),
        }  # fmt: skip
    three.save_pretrained(folder)
    whole = safetensors.torch.load_file(folder / "model.safetensors")
    extra = "model.layers.2."
    if architecture == "Qwen3Next":
        whole = {key.replace(extra, "mtp.layers.0."): value for key, value in whole.items()}
        names = ("mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding", "mtp.fc", "mtp.norm")
        config.layer_types = ["full_attention"] * 2
    else:
        names = tuple(f"{extra}{part}" for part in ("hnorm", "enorm", "eh_proj", "shared_head.norm"))
        for copied, source in (("shared_head.head", "lm_head"), ("embed_tokens", "model.embed_tokens")):
            whole[f"{extra}{copied}.weight"] = whole[f"{source}.weight"].clone()
    whole |= {f"{name}.weight": weight for name, weight in zip(names, own.values(), strict=True)}
    config.num_hidden_layers = 2
    config.save_pretrained(folder)
    safetensors.torch.save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    byte_level().save_pretrained(folder)
    three.own = own
    return three
