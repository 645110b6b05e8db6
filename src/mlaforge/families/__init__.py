"""The supported families: how each one's config.json and weight names are read. See docs/adding-a-family.md."""

from __future__ import annotations

from typing import Any

from mlaforge.families import schema
from mlaforge.families.family import Config, Family
from mlaforge.families.spec import ModelSpec
from mlaforge.runtime import UserError

_MERGED = "transformers merges its experts' tensors while loading, which the strict check of names does not follow"
# What is asked for and does not fit, and why.
REFUSED = {
    "mixtral": _MERGED,
    "qwen2_moe": _MERGED,
    "qwen3_moe": _MERGED,
    "mimo_v2_flash": "its heads are of another size in keys than in values, only a third of a key turns, and KV heads "
    "and RoPE differ between layers",
}


def families() -> dict[str, Family]:
    """All families by model_type."""
    from mlaforge.families import gpt_oss, llama, mimo, ministral, mistral, qwen2, qwen3

    modules = (llama, qwen2, qwen3, mistral, ministral, mimo, gpt_oss)
    return {family.model_type: family for module in modules for family in [module.FAMILY]}


def family_of(config: Config) -> Family:
    """The family of a config.json. Raises UserError that lists the supported ones and says what a new one needs."""
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
    """A config.json with the model_type of the class that transformers makes of it: a mistral config that has
    `layer_types` is a ministral one (configuration_auto.py, AutoConfig.from_pretrained)."""
    if config.get("model_type") == "mistral" and "layer_types" in config:
        return {**config, "model_type": "ministral"}
    return dict(config)


def left_out(config: Config) -> tuple[str, ...]:
    """Prefixes of tensors in the checkpoint of a config.json that its model does not use."""
    family = families().get(str(config.get("model_type")))
    return family.left_out if family else ()


def read_spec(config: Config) -> ModelSpec:
    """The ModelSpec of a config.json. Raises UserError for an unsupported family, and by the field's name for what no
    model of it can have."""
    family = family_of(config)
    schema.check_config(config)
    method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise UserError(f"weights quantised with {method!r} are not read; give the checkpoint it was made from")
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
            raise UserError(f"config.json: head_dim = {layer.head_dim} must be even: RoPE turns pairs")
        if layer.num_heads % layer.num_kv_heads:
            raise UserError(
                f"config.json: {layer.num_heads} attention heads are not a multiple of {layer.num_kv_heads} KV heads"
            )
        if layer.moe and layer.moe.top_k > layer.moe.num_experts:
            words = f"at most num_local_experts = {layer.moe.num_experts}"
            raise schema.broken("config.json", "num_experts_per_tok", layer.moe.top_k, words)
    return spec
