"""The KV cache's memory: one tensor of rows per layer, in groups of layers that share their blocks.

Layers that see everything form one group, layers with the same sliding window another; within a group a block has the
same number in every layer, though a layer's rows may be wider than another's.
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
from mlaforge.ops.decompressed_keys import decompressed_keys_bytes
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_format import Coded, Plain, RowFormat, row_format
from mlaforge.runtime import UserError, on_device


class CacheTooSmall(UserError):
    """The memory for the cache does not hold one short sequence."""


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What a layer keeps per token: `kind` is gqa, latent or latent_rope, `format` how; `group` is its group's number,
    `index` how many bytes of an index key it keeps too, `keys` how many numbers decompressed keys have, which are kept
    for some of the tokens."""

    kind: str
    format: RowFormat
    group: int
    index: int = 0
    keys: int = 0

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.format.width

    def block_bytes(self, block_size: int) -> int:
        kept = decompressed_keys_bytes(block_size, self.keys) if self.keys else 0
        return self.format.unit_bytes * block_size // self.format.tokens + self.index * block_size + kept

    def whole_bytes(self, block_size: int) -> int:
        """Of a block whose rows are kept as they are."""
        plain = isinstance(self.format, Plain)
        return self.block_bytes(block_size) if plain else 2 * self.width * block_size


def layer_caches(
    spec: ModelSpec, config: Any, dtype: torch.dtype, stored: str = "auto", keep: bool = False
) -> tuple[list[LayerCache], list[int | None]]:
    """Every layer's cache, and the window of each group. `config` is the model's own, converted or not, `dtype` what it
    computes in, `stored` a name of ops/row_format.py; with `keep`, decompressed keys are kept where layers are sparse.
    Raises UserError for a format that does not suit a layer."""
    kinds = getattr(config, "mla_layer_types", None) or ["gqa"] * spec.num_layers
    codes: list[list[int]] = getattr(config, "mla_code_counts", None) or [[]] * spec.num_layers
    sparse = getattr(config, "index_kind", None) is not None
    if stored == "coded" and not any(codes):
        raise UserError("kv_cache_dtype coded is for models that were converted with --bits; use auto")
    windows = sorted({layer.window for layer in spec.layers}, key=lambda w: (w is not None, w))
    layers = []
    for index, (layer, kind) in enumerate(zip(spec.layers, kinds, strict=True)):
        if kind == "gqa":
            parts = [layer.head_dim] * (2 * layer.num_kv_heads)
        else:
            if codes[index] and stored not in ("auto", "coded", "bf16"):
                raise UserError(f"kv_cache_dtype {stored} is not for coded rows; use auto, coded or bf16")
            if stored == "int4":
                raise UserError(f"kv_cache_dtype int4 is for grouped-query layers; layer {index} is {kind}: use int8")
            parts = [config.mla_kv_lora_ranks[index], *([config.qk_rope_head_dim] if kind == "latent_rope" else [])]
        format: RowFormat = row_format("auto" if stored == "coded" else stored, parts, dtype)
        if codes[index] and stored != "bf16":
            format = Coded(tuple(codes[index]), sum(parts[1:]))
        own = config.index_head_dim if sparse and config.indexer_types[index] == "full" else 0
        if own and format.unquantized_blocks:
            raise UserError(
                f"kv_cache_dtype {stored} keeps whole blocks, of which no selection is read; use int8 or bf16"
            )
        keys = 0
        if keep and sparse and kind == "latent" and config.indexer_types[index] != "dense":
            keys = layer.num_kv_heads * layer.head_dim
        layers.append(LayerCache(kind, format, windows.index(layer.window), own, keys))
    return layers, windows


@dataclasses.dataclass(frozen=True)
class MinimumCache:
    """What one short sequence needs, group by group: blocks, whole blocks, and the bytes of one of each."""

    blocks: list[int]
    whole: list[int]
    block_bytes: list[int]
    whole_bytes: list[int]
    kinds: list[frozenset[str]]

    @classmethod
    def of(
        cls, layers: Sequence[LayerCache], windows: Sequence[int | None], block_size: int, max_model_len: int,
        max_step: int,
    ) -> MinimumCache:  # fmt: skip
        held = [[layer for layer in layers if layer.group == group] for group in range(len(windows))]
        kinds = [frozenset[str]().union(*(layer.format.unquantized_blocks for layer in own)) for own in held]
        longest = -(-max_model_len // block_size)
        # What one sequence holds while a step is computed.
        blocks = [min(longest, 2 if window is None else (window + max_step) // block_size + 2) for window in windows]
        touched = min(longest, (max_step - 1) // block_size + 2)
        whole = [touched * ("newest" in kind) + ("first" in kind) for kind in kinds]
        sizes = (sum(layer.block_bytes(block_size) for layer in own) for own in held)
        whole_sizes = (sum(layer.whole_bytes(block_size) for layer in own) for own in held)
        return cls(blocks, whole, list(sizes), list(whole_sizes), kinds)

    @property
    def bytes(self) -> int:
        return _sum(self.blocks, self.block_bytes) + _sum(self.whole, self.whole_bytes)


def size_groups(
    layers: Sequence[LayerCache], windows: Sequence[int | None], budget: int, block_size: int,
    *, max_num_seqs: int, max_model_len: int, max_step: int,
) -> list[CacheGroup]:  # fmt: skip
    """Blocks per group that fit `budget` bytes. Every group gets what one short sequence needs. Of the rest windows get
    up to twice what all sequences can use at once (the other half for prefixes of finished requests), and no more than
    half where there is full attention, which gets what is left. Where some blocks are whole they come first.

    Raises CacheTooSmall where the budget does not hold one short sequence.
    """
    minimum = MinimumCache.of(layers, windows, block_size, max_model_len, max_step)
    minimum_blocks, minimum_whole, kinds = minimum.blocks, minimum.whole, minimum.kinds
    bytes_per_block, bytes_per_whole = minimum.block_bytes, minimum.whole_bytes
    most, need = max_num_seqs * -(-max_model_len // block_size) + 1, minimum.bytes
    if budget < need:
        raise CacheTooSmall(
            f"cache_bytes = {budget} does not hold one short sequence in blocks of {block_size} tokens; at least "
            f"{need} bytes are needed"
        )
    left = budget - need
    # Whole blocks: what all sequences can write to at once, and first ones of finished requests; a quarter at most.
    wanted = [
        (2 * max_num_seqs + max_step // block_size) * ("newest" in kind) + 2 * max_num_seqs * ("first" in kind)
        for kind in kinds
    ]
    scale = min(1.0, left / 4 / max(1, _sum(wanted, bytes_per_whole)))
    whole = [minimum + int(n * scale) for n, minimum in zip(wanted, minimum_whole, strict=True)]
    budget -= _sum(whole, bytes_per_whole)
    left = budget - _sum(minimum_blocks, bytes_per_block)
    # Beyond the least.
    wanted = [
        2 * (max_num_seqs * (-(-window // block_size) + 2) + -(-max_step // block_size) + 2) - minimum if window else 0
        for window, minimum in zip(windows, minimum_blocks, strict=True)
    ]
    for_windows = max(1, _sum(wanted, bytes_per_block))
    scale = min(1.0, left / 2 / for_windows) if None in windows else left / for_windows
    counts = [min(most, minimum + int(n * scale)) for n, minimum in zip(wanted, minimum_blocks, strict=True)]
    left = budget - _sum(counts, bytes_per_block)
    # Every position is in all groups that see everything.
    full = max(1, sum(size for window, size in zip(windows, bytes_per_block, strict=True) if window is None))
    counts = [
        min(most, count + left // full) if window is None else count
        for window, count in zip(windows, counts, strict=True)
    ]
    return [
        CacheGroup("full" if window is None else f"window {window}", *rest)
        for window, rest in zip(windows, zip(counts, windows, kinds, whole, strict=True), strict=True)
    ]


def group_bytes(layers: Sequence[LayerCache], groups: Sequence[CacheGroup], block_size: int) -> int:
    """Of all blocks of these groups."""
    return sum(
        (group := groups[layer.group]).num_blocks * layer.block_bytes(block_size)
        + group.num_whole * layer.whole_bytes(block_size)
        for layer in layers
    )


def _sum(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(map(operator.mul, counts, sizes))


class Cache:
    """`rows[layer]` has the blocks of its group. Not cleared: what no sequence has written is never read, and on
    a CPU the system gives memory only where a block is written. `dtype` is the model's.

    `spare` more blocks per group than `groups` says stand behind those that the pools hand out: `scratch` is the first.
    """

    def __init__(
        self, layers: Sequence[LayerCache], groups: Sequence[CacheGroup], block_size: int, dtype: torch.dtype,
        device: torch.device, spare: int = 0,
    ):  # fmt: skip
        self.layers, self.groups, self.block_size = layers, groups, block_size
        assert not spare or not any(group.num_whole for group in groups), "whole blocks stand behind the others too"
        self.scratch = tuple(group.num_blocks for group in groups)
        self.rows = []
        for layer in layers:
            group = groups[layer.group]
            packed, whole = (count * block_size for count in (group.num_blocks + spare, group.num_whole))
            self.rows.append(PagedRows.empty(layer.format, packed, dtype, device, whole, layer.index, layer.keys))

    @property
    def tensors(self) -> list[Tensor]:
        """All of its memory."""
        return [tensor for rows in self.rows for tensor in rows.tensors]

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def bytes_used(self, tables: BlockTables) -> list[int]:
        """Bytes of the blocks that are held, group by group."""
        used = []
        for group, (blocks, whole) in enumerate(zip(tables.used_by_group, tables.whole_by_group, strict=True)):
            own = [layer for layer in self.layers if layer.group == group]
            packed = (blocks - whole) * sum(layer.block_bytes(self.block_size) for layer in own)
            used.append(packed + whole * sum(layer.whole_bytes(self.block_size) for layer in own))
        return used

    def move(self, views: Sequence[CacheView], kept: Sequence[int]) -> None:
        """Of the rows that a step has written those numbered `kept`, rising, to where its first rows are."""
        if list(kept) == list(range(len(kept))):
            return
        rows_K = on_device(kept, torch.int64, views[0].slots_N.device)
        for rows, layer in zip(self.rows, self.layers, strict=True):
            rows.move(views[layer.group].slots_N, rows_K)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Block by block, before a step writes: what is shared is copied before it is changed."""
        for copy in copies:
            for rows, layer in zip(self.rows, self.layers, strict=True):
                if layer.group == copy.group:
                    rows.copy(copy.source, copy.target, self.block_size)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now."""
    if device.type == "cuda":
        # Torch's allocator does not return the memory of an engine that is gone by itself.
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
