"""GPT-OSS: sinks, biases everywhere, alternating 128-token windows, YaRN, MXFP4 experts."""

from __future__ import annotations

from mlaforge.families.family import Config, Family, read_rope, require, weight_bits
from mlaforge.families.spec import LayerSpec, ModelSpec, MoeSpec
from mlaforge.runtime import UserError


def read_spec(config: Config) -> ModelSpec:
    hidden, layers, heads, kv_heads, mlp, experts, top_k, window, vocab, context = require(
        config,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "num_local_experts",
        "num_experts_per_tok",
        "sliding_window",
        "vocab_size",
        "max_position_embeddings",
    )
    head_dim = config.get("head_dim") or hidden // heads
    if config.get("experts_per_token") not in (None, top_k):
        raise UserError(
            f"config.json: experts_per_token = {config['experts_per_token']}, num_experts_per_tok = {top_k}; "
            "transformers and vLLM read the latter: make both the same"
        )
    quantised = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    biased = bool(config["attention_bias"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)
    ]
    return ModelSpec(
        model_type=config["model_type"],
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                mlp_params=3 * hidden * mlp,
                mlp_bits=4.25 if quantised else weight_bits(config),
                window=window if kind == "sliding_attention" else None,
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


ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FAMILY = Family(
    "gpt_oss", read_spec, router="mlp.router",
    fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    defaults={
        "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "attention_bias": True, "rope_theta": 150000.0, "rope_parameters": ROPE,
    },
)  # fmt: skip
