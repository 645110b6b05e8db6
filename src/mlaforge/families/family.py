"""What a family is: how its config.json and weight names are read, and what all families' readers share."""

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
    """One family: `read_spec` turns its config.json into a ModelSpec.

    `attention` is the prefix of a layer's attention tensors; below it every supported family calls its
    projections q_proj, k_proj, v_proj and o_proj.
    `computed_by` is the model_type whose transformers classes compute the model, where they are not its own.
    `left_out` are prefixes of tensors that its logits do not depend on: they are neither read nor written.
    `router` is the module below a decoder layer that scores the experts: its output, or the first of several, are their
    logits.
    `fixed` are fields of config.json that vLLM's class of the family has as constants, and their values there.
    `defaults` are the values of transformers' config class for fields that config.json leaves out.
    `gguf` is llama.cpp's name of the architecture, None where its GGUF files are not read; `gguf_pairs`: it keeps the
    pairs that RoPE turns side by side.
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
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before it), which decides where
    both are there, as in transformers (modeling_rope_utils.py, convert_rope_params_to_dict).

    Raises UserError for kinds whose frequencies depend on the length: keys that are rotated when they are read
    cannot follow them; for parameters by layer type; and where only a part of a head is rotated.
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
    """What YaRN multiplies cos and sin with (arXiv:2309.00071), by transformers' rules for its optional keys."""
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
    """The values of `keys`; raises UserError that names the first one that is not there."""
    for key in keys:
        if config.get(key) is None:
            raise UserError(f"config.json has no {key!r}, which a {config.get('model_type')} model must have")
    return [config[key] for key in keys]


def weight_bits(config: Config) -> float:
    """Bits per weight of the checkpoint's dtype."""
    return {"float32": 32.0, "float": 32.0}.get(
        str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), 16.0
    )
