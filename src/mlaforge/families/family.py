"""The Family class, and shared functions of all families' readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaforge.families.spec import ModelSpec, RopeSpec
from mlaforge.runtime import UserError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One model family.

    `read_spec`: converts its config.json to a ModelSpec.
    `attention`: prefix of a layer's attention tensors; the projections are q_proj, k_proj, v_proj and o_proj below it.
    `computed_by`: model_type whose transformers classes compute the model, if it has none.
    `left_out`: prefixes of tensors that do not affect the logits; they are neither read nor written.
    `router`: module below a decoder layer that scores the experts; its (first) output is their logits.
    `fixed`: fields of config.json that are constants in vLLM's class of the family, and their values there.
    `defaults`: values of transformers' config class for fields that config.json leaves out.
    `gguf`: llama.cpp's name of the architecture, None if its GGUF files are not supported; `gguf_pairs`: they store the
    pairs that RoPE rotates as adjacent rows.
    """

    model_type: str
    read_spec: Callable[[Config], ModelSpec]
    attention: str = "model.layers.{layer}.self_attn."
    computed_by: str | None = None
    left_out: tuple[str, ...] = ()
    router: str | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf: str | None = None
    gguf_pairs: bool = False


def read_rope(config: Config) -> RopeSpec:
    """Return the RoPE of `rope_parameters` (transformers 5) or of `rope_theta` with `rope_scaling` (earlier versions),
    which take precedence, as in transformers (modeling_rope_utils.py, convert_rope_params_to_dict).

    Raises UserError for types whose frequencies depend on the length, because cached keys are rotated when they are
    read; for parameters by layer type; and for a partial rotary factor.
    """
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if nested := [name for name in ("full_attention", "sliding_attention") if name in parameters]:
        raise UserError(f"config.json: rope_parameters has {nested[0]!r}; RoPE that differs by layer is not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UserError(f"RoPE type {kind!r} is not supported; default, linear, llama3 and yarn are")
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise UserError(f"config.json: partial_rotary_factor = {part!r} is not supported; 1 is")
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    scaling = _yarn_scaling(parameters) if kind == "yarn" else 1.0
    return RopeSpec(theta=float(theta), kind=kind, attention_scaling=scaling, parameters=parameters)


def _yarn_scaling(parameters: Config) -> float:
    """Return YaRN's factor of cos and sin (arXiv:2309.00071), by transformers' rules for its optional keys."""
    if parameters.get("attention_factor"):
        return float(parameters["attention_factor"])
    if not parameters.get("factor"):
        raise UserError("config.json has no 'factor' in its rope_parameters, which YaRN must have")
    factor = float(parameters["factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(float(parameters["mscale"])) / mscale(float(parameters["mscale_all_dim"]))
    return mscale(1.0)


def require(config: Config, *keys: str) -> list[Any]:
    """Return the values of `keys`. Raises UserError for the first missing one."""
    for key in keys:
        if config.get(key) is None:
            raise UserError(f"config.json has no {key!r}, which a {config.get('model_type')} model must have")
    return [config[key] for key in keys]


def weight_bits(config: Config) -> float:
    """Return the bits per weight of the checkpoint's dtype."""
    return {"float32": 32.0, "float": 32.0}.get(
        str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), 16.0
    )
