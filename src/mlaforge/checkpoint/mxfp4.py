"""Which of a checkpoint's tensors are MXFP4 (ops/mxfp4.py has the format), under which names and in which shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlaforge.ops.mxfp4 import BLOCK
from mlaforge.runtime import UserError

BLOCKS, SCALES = "_blocks", "_scales"

Shapes = dict[str, tuple[int, ...]]


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its checkpoint holds MXFP4."""
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def packed_names(config: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Which of a model's parameters (name -> shape) its checkpoint stores as MXFP4: the fused experts' weights.

    Modules that `modules_to_not_convert` names are left out, by transformers' rules: a prefix or a pattern up to a
    dot, or a suffix. Empty where the config.json is of another kind.
    """
    if not is_packed(config):
        return []
    spared = config["quantization_config"].get("modules_to_not_convert") or []

    def stays(module: str) -> bool:
        return any(re.match(rf"(?:{p})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(p) for p in spared)

    fused = [name for name, shape in expected.items() if len(shape) == 3 and ".experts." in name]
    return [name for name in fused if not stays(name.rpartition(".")[0])]


def stored_names(name: str) -> tuple[str, str]:
    """The two tensors that hold the parameter `name` in an MXFP4 checkpoint: blocks, scales."""
    return name + BLOCKS, name + SCALES


def stored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of blocks and scales for a parameter [E, K, N]. UserError where K is no multiple of 32."""
    experts, k, n = shape
    if k % BLOCK:
        raise UserError(f"MXFP4 holds blocks of {BLOCK} inputs; a weight {list(shape)} with {k} inputs does not fit")
    return (experts, n, k // BLOCK, BLOCK // 2), (experts, n, k // BLOCK)


def stored(config: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> Shapes:
    """A model's parameters (name -> shape) as its checkpoint stores them: those that MXFP4 packs become two each."""
    packed, shapes = set(packed_names(config, expected)), dict[str, tuple[int, ...]]()
    for name, shape in expected.items():
        own = zip(stored_names(name), stored_shapes(shape), strict=True) if name in packed else [(name, shape)]
        shapes.update(own)
    return shapes
