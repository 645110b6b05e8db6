"""Qwen2: biases on q, k and v; an optional sliding window in the upper layers."""

from __future__ import annotations

import dataclasses

from mlaforge.families.family import Config, Family, require
from mlaforge.families.llama import dense_spec
from mlaforge.families.spec import ModelSpec


def with_windows(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return `spec` with the sliding windows of `use_sliding_window`, `max_window_layers` and `layer_types`."""
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    (first,) = require(config, "max_window_layers")
    kinds = config.get("layer_types") or [
        "sliding_attention" if window and i >= first else "full_attention" for i in range(spec.num_layers)
    ]
    layers = tuple(
        dataclasses.replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return dataclasses.replace(spec, layers=layers)


def read_spec(config: Config) -> ModelSpec:
    require(config, "num_key_value_heads")
    spec = dense_spec(config)
    biased = dataclasses.replace(spec.layers[0], q_bias=True, k_bias=True, v_bias=True)
    return with_windows(dataclasses.replace(spec, layers=(biased,) * spec.num_layers), config)


DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
FAMILY = Family("qwen2", read_spec, defaults=DEFAULTS, gguf="qwen2")
