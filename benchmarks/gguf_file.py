"""GGUF file for llama.cpp from a GPT-OSS checkpoint, with identical values: MXFP4 as MXFP4, bf16 as bf16.

In a block of 32 codes, llama.cpp's byte j holds codes j and j + 16, the checkpoint's byte j codes 2 j and 2 j + 1; the
scale precedes them. Gate and up are separate tensors. The vocabulary has placeholder names: prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from mlaforge.checkpoint.reader import Reader, read_config
from mlaforge.runtime import progress

PLAIN = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def packed(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """uint8 [E, rows, G * 17] from blocks [E, rows, G, 16] and scales [E, rows, G]."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    block = torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), dim=-1)
    return block.flatten(-2).contiguous().numpy()


def layer_tensors(reader: Reader, index: int) -> Iterator[tuple[str, Any]]:
    """(name, array) of a layer; bf16 as tensors, which numpy lacks."""
    source_prefix, target_prefix = f"model.layers.{index}.", f"blk.{index}."
    yield target_prefix + "attn_norm.weight", reader[source_prefix + "input_layernorm.weight"].float()
    yield (
        target_prefix + "post_attention_norm.weight",
        reader[source_prefix + "post_attention_layernorm.weight"].float(),
    )
    for source, target in PLAIN.items():
        weight = reader[f"{source_prefix}{source}.weight"]
        # llama.cpp needs an fp32 router.
        yield f"{target_prefix}{target}.weight", weight.float() if source == "mlp.router" else weight
        yield f"{target_prefix}{target}.bias", reader[f"{source_prefix}{source}.bias"].float()
    yield target_prefix + "attn_sinks.weight", reader[source_prefix + "self_attn.sinks"].float()
    experts = source_prefix + "mlp.experts."
    parts = {name: reader[f"{experts}gate_up_proj_{name}"] for name in ("blocks", "scales", "bias")}
    for first, name in enumerate(("ffn_gate_exps", "ffn_up_exps")):
        yield f"{target_prefix}{name}.weight", packed(parts["blocks"][:, first::2], parts["scales"][:, first::2])
        yield f"{target_prefix}{name}.bias", parts["bias"][:, first::2].float()
    yield (
        target_prefix + "ffn_down_exps.weight",
        packed(reader[experts + "down_proj_blocks"], reader[experts + "down_proj_scales"]),
    )
    yield target_prefix + "ffn_down_exps.bias", reader[experts + "down_proj_bias"].float()


def tensors(reader: Reader, layers: int) -> Iterator[tuple[str, Any]]:
    """All tensors, with one layer in memory at a time."""
    yield "token_embd.weight", reader["model.embed_tokens.weight"]
    for index in range(layers):
        yield from layer_tensors(reader, index)
    yield "output_norm.weight", reader["model.norm.weight"].float()
    yield "output.weight", reader["lm_head.weight"]


def stored(tensor: Any) -> tuple[np.ndarray, Any]:
    """Return an array of bytes or fp32, and its GGUF type if it is neither."""
    if isinstance(tensor, np.ndarray):
        return tensor, gguf.GGMLQuantizationType.MXFP4
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16
    return tensor.contiguous().numpy(), None


def write(source: Path, out: Path) -> None:
    """The GGUF file of a checkpoint whose experts are MXFP4 and whose other weights are bf16; written atomically."""
    partial = out.with_suffix(".partial")
    config = read_config(source)
    rope, layers = config["rope_parameters"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(partial, "gpt-oss")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = [f"<{i}>" for i in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * len(names))
    writer.add_token_merges([f"{names[0]} {names[1]}"])
    writer.add_eos_token_id(0)
    with Reader(source) as reader:
        # The first pass collects sizes, as the tensor table precedes the tensors.
        for name, tensor in progress(tensors(reader, layers), "sizes"):
            array, kind = stored(tensor)
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in progress(tensors(reader, layers), "write"):
            writer.write_tensor_data(stored(tensor)[0])
    writer.close()
    partial.rename(out)
