"""Selections of sparse models: defaults, the width of index keys by a model's geometry, and sparse plans."""

from __future__ import annotations

import dataclasses
import math

from mlaforge.planning.plan import Plan
from mlaforge.runtime import UserError

# Tokens that a generated token reads in a sparse layer, and those of them that are always read: first and newest ones.
DEFAULT_TOPK, DEFAULT_SINK, DEFAULT_WINDOW = 1024, 4, 128
# Width of an index key, in elements of one byte, for every INDEX_UNIT elements or part of them that GQA caches per
# token and layer: 32 for SmolLM2's 384 and 64 for GPT-OSS's 1,024 (recipes/sparse-gptoss.yaml).
INDEX_WIDTH, INDEX_UNIT, WIDTH_MULTIPLE = 32, 512, 8


def index_width(plan: Plan) -> int:
    """Width of the index keys by the geometry of the layers without a window, at most the width of a complete index."""
    layers = [(chosen, layer) for chosen, layer in zip(plan.layers, plan.spec.layers, strict=True) if not layer.window]
    complete = min(
        chosen.kv_lora_rank // 2 * 2 + chosen.qk_rope_head_dim if chosen.layout == "latent_rope" else layer.cached // 2
        for chosen, layer in layers
    )
    width = max(INDEX_WIDTH * math.ceil(layer.cached / INDEX_UNIT) for _, layer in layers)
    return max(WIDTH_MULTIPLE, min(width, complete // WIDTH_MULTIPLE * WIDTH_MULTIPLE))


def sparse(plan: Plan, topk: int, width: int | None = None) -> Plan:
    """A copy in which a generated token reads `topk` tokens in every layer without a window. width: of the index keys
    (`index_width`). Raise UserError if there is no such layer."""
    if all(layer.window is not None for layer in plan.spec.layers):
        raise UserError("all layers have a sliding window: there is nothing to make sparse")
    width = width or index_width(plan)
    layers = (
        dataclasses.replace(chosen, topk=topk, index=width) if layer.window is None else chosen
        for chosen, layer in zip(plan.layers, plan.spec.layers, strict=True)
    )
    return dataclasses.replace(plan, layers=tuple(layers))
