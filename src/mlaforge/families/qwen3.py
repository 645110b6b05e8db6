"""Qwen3: RMS norms per head on queries and keys, one bias flag for all four projections, qwen2's sliding windows."""

from __future__ import annotations

import dataclasses

from mlaforge.families.family import Config, Family, require
from mlaforge.families.llama import dense_spec
from mlaforge.families.qwen2 import DEFAULTS, with_windows
from mlaforge.families.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    require(config, "num_key_value_heads")
    spec = dense_spec(config)
    bias = bool(config.get("attention_bias", False))
    layer = dataclasses.replace(spec.layers[0], q_bias=bias, k_bias=bias, v_bias=bias, o_bias=bias, qk_norm=True)
    return with_windows(dataclasses.replace(spec, layers=(layer,) * spec.num_layers), config)


FAMILY = Family("qwen3", read_spec, defaults={**DEFAULTS, "head_dim": 128}, gguf="qwen3")
