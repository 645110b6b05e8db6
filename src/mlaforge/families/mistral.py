"""Mistral: llama's architecture without biases; one sliding window for all layers, or none."""

from __future__ import annotations

from mlaforge.families.family import Config, Family, require
from mlaforge.families.llama import dense_spec
from mlaforge.families.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    require(config, "num_key_value_heads")
    # null means no window.
    return dense_spec(config, window=config["sliding_window"])


DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096}
FAMILY = Family("mistral", read_spec, defaults=DEFAULTS)
