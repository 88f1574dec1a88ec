"""Random models of a few kilobytes as GGUF files: an attention model, one with sliding windows, a
recurrent one. They let every kind of model be tested without a download."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, LAYERS, CONTEXT, HIDDEN_WIDTH = 64, 4, 2, 1024, 128


def tokens(last: str = "<0xFF>") -> list[str]:
    """Three control tokens and the 256 bytes; `last` renames the last one."""
    return ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(255)] + [last]


def write(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    last: str = "<0xFF>",
    template: str | None = None,
    context: int = CONTEXT,
    vocabulary: bool = True,
) -> Path:
    """architecture: llama, gemma2 (every other layer sees 8 tokens only) or mamba."""
    writer = gguf.GGUFWriter(str(path), architecture)
    generator = np.random.default_rng(seed)
    spelled = tokens(last)

    def tensor(name: str, *shape: int, scale: float = 0.4) -> None:
        writer.add_tensor(name, (generator.normal(size=shape) * scale).astype(np.float32))

    def ones(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))

    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(spelled))
    writer.add_tokenizer_model("llama" if vocabulary else "no_vocab")
    writer.add_token_list(spelled)
    writer.add_token_scores([0.0] * len(spelled))
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 255
    kinds.append(gguf.TokenType.BYTE if last.startswith("<0x") else gguf.TokenType.NORMAL)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)
    tensor("token_embd.weight", len(spelled), WIDTH, scale=1.0)
    ones("output_norm.weight", WIDTH)
    if architecture == "mamba":
        _mamba(writer, tensor, ones, generator)
    else:
        _attention(writer, tensor, ones, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _attention(writer: gguf.GGUFWriter, tensor, ones, architecture: str) -> None:
    head = WIDTH // HEADS
    writer.add_feed_forward_length(HIDDEN_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(head)
    if architecture == "gemma2":
        writer.add_sliding_window(8)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    else:
        tensor("output.weight", len(tokens()), WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"{block}.{name}.weight", WIDTH, WIDTH)
        ones(f"{block}.ffn_norm.weight", WIDTH)
        tensor(f"{block}.ffn_gate.weight", HIDDEN_WIDTH, WIDTH)
        tensor(f"{block}.ffn_up.weight", HIDDEN_WIDTH, WIDTH)
        tensor(f"{block}.ffn_down.weight", WIDTH, HIDDEN_WIDTH)
        if architecture == "gemma2":
            ones(f"{block}.post_attention_norm.weight", WIDTH)
            ones(f"{block}.post_ffw_norm.weight", WIDTH)


def _mamba(writer: gguf.GGUFWriter, tensor, ones, generator) -> None:
    inner, state, rank, kernel = 2 * WIDTH, 16, 4, 4
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    tensor("output.weight", len(tokens()), WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight", WIDTH)
        tensor(f"{block}.ssm_in.weight", 2 * inner, WIDTH, scale=0.2)
        tensor(f"{block}.ssm_conv1d.weight", inner, kernel)
        tensor(f"{block}.ssm_conv1d.bias", inner)
        tensor(f"{block}.ssm_x.weight", rank + 2 * state, inner, scale=0.2)
        tensor(f"{block}.ssm_dt.weight", inner, rank)
        tensor(f"{block}.ssm_dt.bias", inner)
        writer.add_tensor(f"{block}.ssm_a", -np.abs(generator.normal(size=(inner, state))).astype(np.float32))
        ones(f"{block}.ssm_d", inner)
        tensor(f"{block}.ssm_out.weight", WIDTH, inner, scale=0.2)
