"""The supported model families: reading of config.json and of weight names. See docs/adding-a-family.md."""

from __future__ import annotations

from typing import Any

from mlaforge.families import schema
from mlaforge.families.family import Config, Family
from mlaforge.families.spec import ModelSpec
from mlaforge.runtime import UserError

_MERGED = "transformers merges its experts' tensors while loading, which the strict check of names does not follow"
# Unsupported model_type -> reason.
REFUSED = {
    "mixtral": _MERGED,
    "qwen2_moe": _MERGED,
    "qwen3_moe": _MERGED,
    "mimo_v2_flash": "its keys and values have different head sizes, only a third of a key is rotated, and KV heads "
    "and RoPE differ between layers",
}


def families() -> dict[str, Family]:
    """Return all families by model_type."""
    from mlaforge.families import gpt_oss, llama, mimo, ministral, mistral, qwen2, qwen3

    modules = (llama, qwen2, qwen3, mistral, ministral, mimo, gpt_oss)
    return {family.model_type: family for module in modules for family in [module.FAMILY]}


def family_of(config: Config) -> Family:
    """Return the family of a config.json. Raises UserError that lists the supported ones."""
    from mlaforge.config import nearest

    known = families()
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError("config.json has no 'model_type'; a Hugging Face model's config.json has one")
    if model_type not in known:
        reason = REFUSED.get(model_type)
        raise UserError(
            f"model type {model_type!r} is not supported{f': {reason}' if reason else ''}; supported are "
            f"{', '.join(sorted(known))}; docs/adding-a-family.md says what a new one needs (about 50 lines)"
            f"{'' if reason else nearest(model_type, known)}"
        )
    return known[model_type]


def canonical(config: Config) -> dict[str, Any]:
    """Return a config.json with the model_type of the class that transformers loads: a mistral config with
    `layer_types` is a ministral one (configuration_auto.py, AutoConfig.from_pretrained)."""
    if config.get("model_type") == "mistral" and "layer_types" in config:
        return {**config, "model_type": "ministral"}
    return dict(config)


def left_out(config: Config) -> tuple[str, ...]:
    """Return the prefixes of tensors in the checkpoint that the model of a config.json does not use."""
    family = families().get(str(config.get("model_type")))
    return family.left_out if family else ()


def read_spec(config: Config) -> ModelSpec:
    """Return the ModelSpec of a config.json. Raises UserError for an unsupported family and for an invalid field."""
    family = family_of(config)
    schema.check_config(config)
    method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise UserError(f"weights quantised with {method!r} are not supported; give the original checkpoint")
    if config.get("is_causal") is False:
        raise UserError("config.json: is_causal = False is not supported: attention must be causal")
    spec = family.read_spec({**family.defaults, **config})
    for layer, kind in zip(spec.layers, config.get("layer_types") or (), strict=False):
        if kind == "sliding_attention" and layer.window is None:
            raise UserError(
                "config.json: layer_types has sliding_attention, but there is no sliding_window, or "
                "use_sliding_window is false"
            )
    for layer in spec.layers:
        if layer.head_dim % 2:
            raise UserError(f"config.json: head_dim = {layer.head_dim} must be even: RoPE rotates pairs")
        if layer.num_heads % layer.num_kv_heads:
            raise UserError(
                f"config.json: {layer.num_heads} attention heads are not a multiple of {layer.num_kv_heads} KV heads"
            )
        if layer.moe and layer.moe.top_k > layer.moe.num_experts:
            expected = f"at most num_local_experts = {layer.moe.num_experts}"
            raise schema.invalid("config.json", "num_experts_per_tok", layer.moe.top_k, expected)
    return spec
