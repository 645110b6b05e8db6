"""Memory of the KV cache: one tensor of rows per layer, in groups of layers that share their blocks.

Layers with full attention form one group, layers with the same sliding window another. Within a group a block has the
same number in every layer, though rows of different layers may differ in width.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup, Copy
from mlaforge.families.spec import ModelSpec
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.decompressed_keys import decompressed_keys_bytes, key_format
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats import row_format, row_format_type
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain, dtype_name
from mlaforge.runtime import UserError, on_device


class CacheTooSmall(UserError):
    """The cache memory does not hold one short sequence."""


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What a layer caches per token.

    kind         gqa, latent or latent_rope
    format       how a row is stored (ops/row_formats/)
    group        number of the layer's cache group
    index_bytes  bytes of the index key that a sparse layer caches too
    key_format   of a token's decompressed keys where those are cached too, for some of the tokens
    """

    kind: str
    format: RowFormat
    group: int
    index_bytes: int = 0
    key_format: Int8 | None = None

    @property
    def width(self) -> int:
        """Elements of a token's row."""
        return self.format.width

    def block_bytes(self, block_size: int) -> int:
        key_bytes = decompressed_keys_bytes(block_size, self.key_format) if self.key_format else 0
        return self.format.bytes(block_size) + self.index_bytes * block_size + key_bytes

    def unquantized_block_bytes(self, block_size: int) -> int:
        """Bytes of a block whose rows are not quantized."""
        plain = isinstance(self.format, Plain)
        return self.block_bytes(block_size) if plain else self.format.unquantized_bytes(block_size)


def layer_caches(
    spec: ModelSpec, config: Any, dtype: torch.dtype, kv_cache_dtype: str = "auto", cache_keys: bool = False
) -> tuple[list[LayerCache], list[int | None]]:
    """Return the cache of every layer, and the window of each group.

    config          the model's config, converted or not
    dtype           what the model computes in
    kv_cache_dtype  a name of ops/row_formats/, or auto
    cache_keys      cache decompressed keys where layers are sparse

    Raises UserError for a format that does not suit a layer.
    """
    kinds = getattr(config, "mla_layer_types", None) or ["gqa"] * spec.num_layers
    codes: list[list[int]] = getattr(config, "mla_code_counts", None) or [[]] * spec.num_layers
    sparse = getattr(config, "index_kind", None) is not None
    chosen = row_format_type(kv_cache_dtype) if kv_cache_dtype != "auto" else None
    if chosen is not None and chosen.coded and not any(codes):
        raise UserError("kv_cache_dtype coded is for models that were converted with --bits; use auto")
    if chosen is not None and chosen.latent_rope_only and "latent_rope" not in kinds:
        raise UserError(f"kv_cache_dtype {kv_cache_dtype} is for models that were converted to latent_rope; use auto")
    windows = sorted({layer.window for layer in spec.layers}, key=lambda w: (w is not None, w))
    layers = []
    for index, (layer, kind) in enumerate(zip(spec.layers, kinds, strict=True)):
        if kind == "gqa":
            groups = [layer.head_dim] * (2 * layer.num_kv_heads)
        else:
            if codes[index] and chosen is not None and not chosen.coded and kv_cache_dtype != "bf16":
                raise UserError(f"kv_cache_dtype {kv_cache_dtype} is not for coded rows; use auto, coded or bf16")
            if chosen is not None and chosen.grouped_query_only:
                raise UserError(
                    f"kv_cache_dtype {kv_cache_dtype} is for grouped-query layers; layer {index} is {kind}: use int8"
                )
            groups = [config.mla_kv_lora_ranks[index], *([config.qk_rope_head_dim] if kind == "latent_rope" else [])]
        if chosen is not None and chosen.latent_rope_only and kind == "latent":
            raise UserError(f"kv_cache_dtype {kv_cache_dtype} is for latent_rope; layer {index} is {kind}: use auto")
        # Without a code of its own a layer of a coded model has plain rows.
        plain = chosen is None or chosen.coded or (chosen.latent_rope_only and kind == "gqa")
        name = "auto" if plain else kv_cache_dtype
        format = row_format(name, groups, dtype_name(dtype), codes[index])
        index_bytes = config.index_head_dim if sparse and config.indexer_types[index] == "full" else 0
        if index_bytes and format.newest_unquantized:
            raise UserError(
                f"kv_cache_dtype {kv_cache_dtype} keeps unquantized blocks, which sparse attention cannot select from; "
                "use int8 or bf16"
            )
        keys = None
        if cache_keys and sparse and kind == "latent" and config.indexer_types[index] != "dense":
            keys = key_format(layer.num_kv_heads, layer.head_dim)
        layers.append(LayerCache(kind, format, windows.index(layer.window), index_bytes, keys))
    return layers, windows


@dataclasses.dataclass(frozen=True)
class MinimumCache:
    """What one short sequence needs, per group: blocks, unquantized blocks, and the bytes of one of each."""

    blocks: list[int]
    unquantized: list[int]
    block_bytes: list[int]
    unquantized_block_bytes: list[int]
    newest_unquantized: list[bool]

    @classmethod
    def of(
        cls, layers: Sequence[LayerCache], windows: Sequence[int | None], block_size: int, max_model_len: int,
        max_step: int,
    ) -> MinimumCache:  # fmt: skip
        by_group = [[layer for layer in layers if layer.group == group] for group in range(len(windows))]
        newest_unquantized = [any(layer.format.newest_unquantized for layer in members) for members in by_group]
        longest = -(-max_model_len // block_size)
        # Blocks of one sequence during a step.
        blocks = [min(longest, 2 if window is None else (window + max_step) // block_size + 2) for window in windows]
        touched = min(longest, (max_step - 1) // block_size + 2)
        unquantized = [touched * newest for newest in newest_unquantized]
        sizes = [sum(layer.block_bytes(block_size) for layer in members) for members in by_group]
        unquantized_sizes = [
            sum(layer.unquantized_block_bytes(block_size) for layer in members) for members in by_group
        ]
        return cls(blocks, unquantized, sizes, unquantized_sizes, newest_unquantized)

    @property
    def bytes(self) -> int:
        return _dot(self.blocks, self.block_bytes) + _dot(self.unquantized, self.unquantized_block_bytes)


def size_groups(
    layers: Sequence[LayerCache], windows: Sequence[int | None], budget: int, block_size: int,
    *, max_num_seqs: int, max_model_len: int, max_step: int,
) -> list[CacheGroup]:  # fmt: skip
    """Return the groups with as many blocks as fit `budget` bytes.

    Every group gets what one short sequence needs. Of the rest, window groups get up to twice what all sequences can
    use at once (the other half for prefixes of finished requests), and at most half where there is full attention,
    which gets what remains. Unquantized blocks, where there are any, come first.

    Raises CacheTooSmall where the budget does not hold one short sequence.
    """
    minimum = MinimumCache.of(layers, windows, block_size, max_model_len, max_step)
    minimum_blocks, minimum_unquantized = minimum.blocks, minimum.unquantized
    block_bytes, unquantized_bytes = minimum.block_bytes, minimum.unquantized_block_bytes
    max_blocks = max_num_seqs * -(-max_model_len // block_size) + 1
    if budget < minimum.bytes:
        raise CacheTooSmall(
            f"cache_bytes = {budget} does not hold one short sequence in blocks of {block_size} tokens; at least "
            f"{minimum.bytes} bytes are needed"
        )
    remaining = budget - minimum.bytes
    # Unquantized blocks: for all that sequences write at once; at most 1/4.
    target = [(2 * max_num_seqs + max_step // block_size) * newest for newest in minimum.newest_unquantized]
    scale = min(1.0, remaining / 4 / max(1, _dot(target, unquantized_bytes)))
    unquantized = [minimum + int(n * scale) for n, minimum in zip(target, minimum_unquantized, strict=True)]
    budget -= _dot(unquantized, unquantized_bytes)
    remaining = budget - _dot(minimum_blocks, block_bytes)
    # Blocks of windows, in addition to the minimum.
    target = [
        2 * (max_num_seqs * (-(-window // block_size) + 2) + -(-max_step // block_size) + 2) - minimum if window else 0
        for window, minimum in zip(windows, minimum_blocks, strict=True)
    ]
    window_bytes = max(1, _dot(target, block_bytes))
    scale = min(1.0, remaining / 2 / window_bytes) if None in windows else remaining / window_bytes
    counts = [min(max_blocks, minimum + int(n * scale)) for n, minimum in zip(target, minimum_blocks, strict=True)]
    remaining = budget - _dot(counts, block_bytes)
    # A position takes a row in every group with full attention.
    full_bytes = max(1, sum(size for window, size in zip(windows, block_bytes, strict=True) if window is None))
    counts = [
        min(max_blocks, count + remaining // full_bytes) if window is None else count
        for window, count in zip(windows, counts, strict=True)
    ]
    return [
        CacheGroup("full" if window is None else f"window {window}", *fields)
        for window, fields in zip(
            windows, zip(counts, windows, minimum.newest_unquantized, unquantized, strict=True), strict=True
        )
    ]


def group_bytes(layers: Sequence[LayerCache], groups: Sequence[CacheGroup], block_size: int) -> int:
    """Return the bytes of all blocks of these groups."""
    return sum(
        (group := groups[layer.group]).num_blocks * layer.block_bytes(block_size)
        + group.num_unquantized * layer.unquantized_block_bytes(block_size)
        for layer in layers
    )


def _dot(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(map(operator.mul, counts, sizes))


class Cache:
    """The rows of all layers: `rows[layer]` has the blocks of the layer's group. `dtype` is the model's.

    The memory is not cleared: no query reads a row that no sequence has written, and on a CPU the system commits memory
    only where a block is written. Each group has `num_scratch` blocks after those of the pool; `scratch` is the first.
    """

    def __init__(
        self, layers: Sequence[LayerCache], groups: Sequence[CacheGroup], block_size: int, dtype: torch.dtype,
        device: torch.device, num_scratch: int = 0,
    ):  # fmt: skip
        self.layers, self.groups, self.block_size = layers, groups, block_size
        assert not num_scratch or not any(group.num_unquantized for group in groups), (
            "scratch blocks and unquantized blocks would share their numbers"
        )
        self.scratch = tuple(group.num_blocks for group in groups)
        self.rows = []
        for layer in layers:
            group = groups[layer.group]
            quantized = (group.num_blocks + num_scratch) * block_size
            unquantized = group.num_unquantized * block_size
            self.rows.append(
                PagedRows.empty(
                    layer.format, quantized, dtype, device, unquantized, layer.index_bytes, layer.key_format
                )
            )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [tensor for rows in self.rows for tensor in rows.tensors]

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def bytes_used(self, tables: BlockTables) -> list[int]:
        """Bytes of the used blocks, by group."""
        used = []
        counts = zip(tables.used_by_group, tables.unquantized_by_group, strict=True)
        for group, (blocks, unquantized) in enumerate(counts):
            layers = [layer for layer in self.layers if layer.group == group]
            quantized_bytes = (blocks - unquantized) * sum(layer.block_bytes(self.block_size) for layer in layers)
            unquantized_bytes = unquantized * sum(layer.unquantized_block_bytes(self.block_size) for layer in layers)
            used.append(quantized_bytes + unquantized_bytes)
        return used

    def move(self, views: Sequence[CacheView], accepted: Sequence[int]) -> None:
        """Move the step's rows with the ascending numbers `accepted` to the places of its first rows."""
        if list(accepted) == list(range(len(accepted))):
            return
        rows_K = on_device(accepted, torch.int64, views[0].slots_N.device)
        for rows, layer in zip(self.rows, self.layers, strict=True):
            rows.move(views[layer.group].slots_N, rows_K)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Execute the copies, in order, before a step writes: a shared block is copied before it is changed."""
        for copy in copies:
            for rows, layer in zip(self.rows, self.layers, strict=True):
                if layer.group == copy.group:
                    rows.copy(copy.source, copy.target, self.block_size)


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on the device now."""
    if device.type == "cuda":
        # Torch's allocator does not return the memory of a deleted engine by itself.
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
