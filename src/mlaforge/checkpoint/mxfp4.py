"""Names and shapes of the MXFP4 tensors of a checkpoint (ops/mxfp4.py has the format)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlaforge.ops.mxfp4 import BLOCK
from mlaforge.runtime import UserError

BLOCKS, SCALES = "_blocks", "_scales"

Shapes = dict[str, tuple[int, ...]]


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return whether config.json declares MXFP4."""
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def packed_names(config: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the parameters of a model (name -> shape) that its checkpoint stores as MXFP4: the fused experts' weights.

    Modules in `modules_to_not_convert` are excluded, by transformers' rules: a prefix or a pattern up to a dot, or a
    suffix. Empty if config.json declares no MXFP4.
    """
    if not is_packed(config):
        return []
    excluded = config["quantization_config"].get("modules_to_not_convert") or []

    def is_excluded(module: str) -> bool:
        return any(re.match(rf"(?:{p})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(p) for p in excluded)

    fused = [name for name, shape in expected.items() if len(shape) == 3 and ".experts." in name]
    return [name for name in fused if not is_excluded(name.rpartition(".")[0])]


def stored_names(name: str) -> tuple[str, str]:
    """Return the names of the two tensors of the parameter `name` in an MXFP4 checkpoint: blocks, scales."""
    return name + BLOCKS, name + SCALES


def stored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of blocks and scales of a parameter [E, K, N]. Raises UserError if K is not a multiple of
    32."""
    experts, k, n = shape
    if k % BLOCK:
        raise UserError(f"MXFP4 holds blocks of {BLOCK} inputs; a weight {list(shape)} with {k} inputs does not fit")
    return (experts, n, k // BLOCK, BLOCK // 2), (experts, n, k // BLOCK)


def stored(config: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return a model's parameters (name -> shape) as its checkpoint stores them: packed ones become blocks and
    scales."""
    packed, shapes = set(packed_names(config, expected)), dict[str, tuple[int, ...]]()
    for name, shape in expected.items():
        tensors = zip(stored_names(name), stored_shapes(shape), strict=True) if name in packed else [(name, shape)]
        shapes.update(tensors)
    return shapes
