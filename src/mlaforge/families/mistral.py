"""Mistral: llama's shape without biases; one sliding window for every layer, or none."""

from __future__ import annotations

from mlaforge.families.family import Config, Family, require
from mlaforge.families.llama import dense_spec
from mlaforge.families.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    require(config, "num_key_value_heads")
    # An absent key is transformers' default window; null is no window.
    return dense_spec(config, window=config.get("sliding_window", 4096))


FAMILY = Family("mistral", read_spec)
