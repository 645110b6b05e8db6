"""GPT-OSS: sinks, biases everywhere, alternating 128-token windows, YaRN, MXFP4 experts."""

from __future__ import annotations

from mlaforge.families.family import Config, Family, read_rope, require, weight_bits
from mlaforge.families.spec import LayerSpec, ModelSpec, MoeSpec


def read_spec(config: Config) -> ModelSpec:
    hidden, layers, heads, kv_heads, mlp, experts, vocab = require(
        config,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "num_local_experts",
        "vocab_size",
    )
    head_dim = config.get("head_dim") or 64
    top_k = config.get("num_experts_per_tok") or config.get("experts_per_token") or 4
    quantised = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    biased = bool(config.get("attention_bias", True))
    kinds = config.get("layer_types") or [
        "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)
    ]
    return ModelSpec(
        model_type=config["model_type"],
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=config.get("max_position_embeddings") or 131072,
        layers=tuple(
            LayerSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                mlp_params=3 * hidden * mlp,
                mlp_bits=4.25 if quantised else weight_bits(config),
                window=config.get("sliding_window") or 128 if kind == "sliding_attention" else None,
                sinks=True,
                q_bias=biased,
                k_bias=biased,
                v_bias=biased,
                o_bias=biased,
                moe=MoeSpec(experts, top_k),
            )
            for kind in kinds
        ),
        rope=read_rope(config),
        softmax_scale=head_dim**-0.5,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bits=weight_bits(config),
    )


FAMILY = Family(
    "gpt_oss", read_spec, router="mlp.router",
    fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
)  # fmt: skip
