"""Memory of an engine, planned before anything is loaded: all weights, and the cache beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from mlaforge.checkpoint.draft_head import DraftHead
from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.kv_cache import (
    CacheTooSmall,
    LayerCache,
    MinimumCache,
    free_bytes,
    group_bytes,
    layer_caches,
    size_groups,
)
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.draft_head import head_caches, head_format
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.weight_bytes import weight_bytes
from mlaforge.engine.speculation.sparse_view import sparse_view_format
from mlaforge.ops import native
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.runtime import UserError

# Formats with less memory, the one with the least loss of quality first.
SMALLER_FORMATS = {"cpu": ("bfloat16", "int8", "int4"), "cuda": ("bfloat16",)}


def cache_layout(
    model: EngineModel, head: DraftHead | None, config: EngineConfig, max_model_len: int, name: str
) -> tuple[list[LayerCache], list[CacheGroup]]:
    """Return the cache of every layer, a draft head's last, and the groups with their blocks: `cache_bytes` in all, or
    `cache_fraction` of the memory that the weights leave. `name` is the model's, for error messages.

    Raises CacheTooSmall, which says what would fit, where weights and cache do not.
    """
    block_size, fraction, max_step = config.block_size, config.cache_fraction, config.max_num_batched_tokens
    assert block_size is not None and fraction is not None and max_step is not None
    cache_keys = model.device.type == "cpu" and model.dtype == torch.bfloat16 and native.is_available()
    layers, windows = layer_caches(model.spec, model.config, model.dtype, config.kv_cache_dtype, cache_keys)
    if model.device.type == "cuda" and any(layer.kind != "gqa" and isinstance(layer.format, Int8) for layer in layers):
        raise UserError("kv_cache_dtype int8 is for grouped-query layers on a GPU, not for latents; use auto or fp8")
    if head is not None:
        layers += head_caches(head.config, len(windows), model.dtype)
        windows.append(head.config.sliding_window)
    minimum = MinimumCache.of(layers, windows, block_size, max_model_len, max_step).bytes
    free = free_bytes(model.device)
    available = free - _checked_weight_bytes(
        model, lambda format: _weights(model, head, config, format), minimum, free, name
    )
    groups = size_groups(
        layers, windows, config.cache_bytes or int(fraction * available), block_size, max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len, max_step=max_step,
    )  # fmt: skip
    if (cache_bytes := group_bytes(layers, groups, block_size)) > available:
        raise CacheTooSmall(
            f"cache_bytes = {config.cache_bytes} does not fit beside the weights of {name}: the cache would use "
            f"{cache_bytes:,} bytes, and {available:,} of the {free:,} that are free on this {model.device.type} "
            "remain; give at most those"
        )
    if head is not None:
        groups[-1] = dataclasses.replace(groups[-1], name="draft")
    return layers, groups


def _weights(model: EngineModel, head: DraftHead | None, config: EngineConfig, format: str) -> int:
    """Bytes of all weights in a format: the model's, a draft head's, and those of sparse-view steps."""
    total = model.weight_bytes(format)
    if head is not None:
        total += weight_bytes(head, head_format(format, model.device), model.device)
    if (
        config.specpv
        and format == model.format
        and (sparse_view_weights := sparse_view_format(config, model)) != format
    ):
        # It shares the embedding.
        total += (
            model.weight_bytes(sparse_view_weights)
            - model.spec.vocab_size * model.spec.hidden_size * model.dtype.itemsize
        )
    return total


def _checked_weight_bytes(model: EngineModel, weights: Callable[[str], int], minimum: int, free: int, name: str) -> int:
    """Return the bytes of the weights; raise CacheTooSmall where a cache of `minimum` bytes does not fit beside
    them."""
    format, kind = model.format, model.device.type
    needed = weights(format)
    if needed + minimum <= free:
        return needed
    formats = SMALLER_FORMATS.get(kind, ())
    smaller = {other: weights(other) for other in formats[formats.index(format) + 1 if format in formats else 0 :]}
    fitting = next((other for other, size in smaller.items() if size + minimum <= free), None)
    if fitting is None:
        advice = f"no dtype would fit: the smallest needs {min([needed, *smaller.values()]) + minimum:,} in all"
    else:
        advice = f"dtype {fitting} would fit: {smaller[fitting]:,} bytes of weights"
    raise CacheTooSmall(
        f"{name} does not fit into memory: its weights in {format} take {needed:,} bytes and the smallest cache "
        f"{minimum:,}, and {free:,} are free on this {kind}; {advice}"
    )
