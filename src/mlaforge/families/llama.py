"""Llama and families with its config: one attention bias flag for q, k, v and o, full attention in every layer."""

from __future__ import annotations

import dataclasses

from mlaforge.families.family import Config, Family, read_rope, require, weight_bits
from mlaforge.families.spec import LayerSpec, ModelSpec
from mlaforge.runtime import UserError


def dense_spec(config: Config, window: int | None = None) -> ModelSpec:
    """Return the spec of a dense model of llama's architecture: gated MLP, RMSNorm, grouped-query attention without
    biases, the same sliding window in all layers."""
    hidden, layers, heads, mlp, vocab, context = require(
        config, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
        "max_position_embeddings",
    )  # fmt: skip
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if not head_dim:
        raise UserError(f"config.json: hidden_size {hidden} is too small for {heads} attention heads")
    bits = weight_bits(config)
    layer = LayerSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, mlp_params=3 * hidden * mlp, mlp_bits=bits,
        window=window,
    )  # fmt: skip
    return ModelSpec(
        model_type=config["model_type"],
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=context,
        layers=(layer,) * layers,
        rope=read_rope(config),
        softmax_scale=head_dim**-0.5,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bits=bits,
    )


def read_spec(config: Config) -> ModelSpec:
    spec = dense_spec(config)
    bias = bool(config.get("attention_bias", False))
    biased = dataclasses.replace(spec.layers[0], q_bias=bias, k_bias=bias, v_bias=bias, o_bias=bias)
    return dataclasses.replace(spec, layers=(biased,) * spec.num_layers)


FAMILY = Family(
    "llama", read_spec, defaults={"max_position_embeddings": 2048}, gguf="llama", gguf_pairs=True,
)  # fmt: skip
