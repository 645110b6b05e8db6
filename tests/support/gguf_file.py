"""A tiny random llama as an unquantised GGUF file."""

from pathlib import Path
from typing import Any


def save_gguf(
    path: Path, keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, parts: int = 1,
    without: str | None = None, quantized: bool = False,
) -> Path:  # fmt: skip
    """Write the file to `path`, the first of `parts`, with additional `keys` and `tensors`, without the tensors that
    have `without` in their names. `quantized`: matrices in Q4_0."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "head_count": 4,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-6, "rope_dimension_count": 16, "rope_freq_base": 10000.0,
        "vocab_size": 260, "tokenizer_model": "gpt2", "tokenizer_pre": "llama-bpe", "token_merges": ["a b"],
        "token_list": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<pad>", "<s>", "</s>"],
        "token_types": [1] * 257 + [3] * 3, "bos_token_id": 258, "eos_token_id": 259,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    if parts > 1:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", parts)
    shapes = {"token_embd": (260, 64), "output": (260, 64), "output_norm": (64,)}
    for i in range(2):
        names = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        names |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        names |= {"attn_norm": (64,), "ffn_norm": (64,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in names.items()}
    values = {f"{name}.weight": random.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    kind = gguf.GGMLQuantizationType.Q4_0
    for name, value in {**values, **(tensors or {})}.items():
        if without is None or without not in name:
            packed = quantized and value.ndim == 2
            writer.add_tensor(name, gguf.quantize(value, kind) if packed else value, raw_dtype=kind if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
