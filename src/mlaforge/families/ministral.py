"""Ministral: mistral with a sliding window in the layers that `layer_types` lists."""

from __future__ import annotations

import dataclasses

from mlaforge.families.family import Config, Family
from mlaforge.families.mistral import DEFAULTS
from mlaforge.families.mistral import read_spec as read_mistral
from mlaforge.families.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    spec = read_mistral(config)
    kinds = config.get("layer_types") or ["sliding_attention"] * spec.num_layers
    layers = tuple(
        layer if kind == "sliding_attention" else dataclasses.replace(layer, window=None)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return dataclasses.replace(spec, layers=layers)


FAMILY = Family("ministral", read_spec, defaults=DEFAULTS)
