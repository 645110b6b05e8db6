"""config.json of models whose expected numbers are computed by hand."""

from __future__ import annotations

from typing import Any

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "tie_word_embeddings": False,
    "dtype": "bfloat16", "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GPT_OSS_120B = GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}
# 4 query and 2 KV heads of 16: 2·2·16 = 64 cached numbers.
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 100, "vocab_size": 1000,
    "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
# SmolLM2-135M: 384 cached numbers, made for 8,192 tokens.
SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
    "tie_word_embeddings": True, "dtype": "float32", "max_position_embeddings": 8192,
}  # fmt: skip
