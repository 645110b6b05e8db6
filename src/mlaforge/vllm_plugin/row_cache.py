"""The cache that vLLM allocates for a converted model: one row per token and group of layers with the same window.

A row concatenates the bytes that the group's layers cache of a token: latents (and rotary keys) of converted layers,
plain or coded, keys and values of the others, followed, for sparse layers, by the index key. So the bytes of a token
are the sum over layers of any ranks; separate caches per layer would be padded to the widest one, because vLLM requires
equal page sizes. Pages of several groups are made equal by block sizes, and by unused bytes only in rows of sliding
windows, which are few.

Legend: L slots (block * block_size + offset), B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.kv_cache import LayerCache
from mlaforge.engine.execution.attention import PagedAttention, Step
from mlaforge.engine.execution.batch import Batch, Chunk, make_batch
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.ops.token_selection import KEY_TILE
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin.pages import even_pages
from mlaforge.vllm_plugin.shards import Shard, sharded_batch

# Bytes at whose multiples the parts of a row with coded parts begin, so that kernels load whole words.
CODED_ALIGNMENT = 16


class RowBackend(AttentionBackend):
    """Describes the cache to vLLM. vLLM does not choose a kernel by it or create an AttentionImpl: attention is
    mlaforge.engine.execution.attention."""

    @staticmethod
    def get_name() -> str:
        return "MLAFORGE_ROWS"

    @staticmethod
    def get_builder_cls() -> type[RowBatchBuilder]:
        return RowBatchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Slots are contiguous; with one head these two layouts are the same.
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC


class RowBatchBuilder(AttentionMetadataBuilder[Batch]):
    """Converts vLLM's metadata to the view that the engine's attention reads. Needs host values, so it synchronises."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.window: int | None = getattr(kv_cache_spec, "sliding_window", None)
        size, rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self.shard = Shard(rank, size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        metadata, count = common_attn_metadata, self.shard.count
        starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1].tolist()
        lengths = metadata.seq_lens[: metadata.num_reqs].tolist()
        prompts = metadata.is_prefilling
        generating = [False] * len(lengths) if prompts is None else (~prompts[: metadata.num_reqs]).tolist()
        chunks = [
            Chunk(seq, (), length - (stop - start), length, generating=generating[seq])
            for seq, ((start, stop), length) in enumerate(zip(pairwise(starts), lengths, strict=True))
            # Padding requests have no tokens.
            if stop > start
        ]
        rows = {chunk.seq: (count(chunk.start), count(chunk.stop)) for chunk in chunks}
        tables = _Tables(metadata.block_table_tensor, rows, self.kv_cache_spec.block_size, self.window)
        if self.shard.size == 1:
            return make_batch(chunks, tables, self.device)
        spans = [(chunk.seq, chunk.start, chunk.stop) for chunk in chunks]
        slots_N = metadata.slot_mapping[: sum(stop - start for _, start, stop in spans)]
        return sharded_batch(spans, tables, slots_N, self.shard, self.device)


class _Tables:
    """vLLM's block table of one group, in the interface that make_batch reads. rows: by sequence, the rows that the
    step computes, from the first to behind the last."""

    def __init__(self, table_SB: Tensor, rows: dict[int, tuple[int, int]], block_size: int, window: int | None):
        self.block_size = block_size
        self.groups = (CacheGroup("rows", 0, window),)
        self._table_SB = table_SB.cpu()
        self._ends = {seq: -(-stop // block_size) for seq, (_, stop) in rows.items()}
        # Blocks before the window are freed.
        self._firsts = {
            seq: 0 if window is None else max(0, start - window + 1) // block_size for seq, (start, _) in rows.items()
        }

    def table(self, seq: int, group: int) -> tuple[int, list[int]]:
        first = self._firsts[seq]
        blocks: list[int] = self._table_SB[seq, first : self._ends[seq]].tolist()
        return first * self.block_size, blocks

    def written(self, seq: int, group: int) -> dict[int, int]:
        raise AssertionError("no block of vLLM's is whole")


class Model(Protocol):
    """What a cache needs from its model."""

    def on(self, index: int, rows: PagedRows) -> PagedAttention:
        """Return the paged attention of a layer on its columns of a cache."""

    def step(self, batch: Batch) -> Step:
        """Return a step's tokens with their rotations."""


class RowCache(AttentionLayerBase):
    """The cache of the layers with one window (None: full attention); vLLM knows it as one layer named `name`.

    `layers` says what each layer caches, in the order of the row. Parts begin at multiples of `alignment` bytes.
    """

    # vLLM's metadata builders of other layers read this attribute.
    impl = None

    def __init__(
        self, name: str, window: int | None, layers: dict[int, LayerCache], dtype: torch.dtype, alignment: int,
        model: Model,
    ):  # fmt: skip
        self.name, self.window, self.layers, self.dtype = name, window, layers, dtype
        self.alignment, self.model = alignment, model
        self.siblings: Sequence[RowCache] = (self,)
        self.kv_cache = torch.empty(0)
        self._layers: dict[int, PagedAttention] = {}
        self._step: tuple[Batch, Step] | None = None

    def part_bytes(self, index: int) -> int:
        """Bytes of a layer's part of a row."""
        return -(-self.layers[index].block_bytes(1) // self.alignment) * self.alignment

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row."""
        return sum(map(self.part_bytes, self.layers))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        block_sizes, row_bytes = even_pages(
            [cache.row_bytes for cache in self.siblings],
            vllm_config.cache_config.block_size,
            drafted_elements(vllm_config) * self.dtype.itemsize,
            self.alignment,
        )
        at = self.siblings.index(self)
        # With a head_size_v other than 0 the bytes would double.
        fields: dict[str, Any] = {
            "block_size": block_sizes[at], "num_kv_heads": 1, "head_size": row_bytes[at], "head_size_v": 0,
            "dtype": torch.uint8,
        }  # fmt: skip
        if self.window is None:
            return FullAttentionSpec(**fields)
        # Windows are whole on every rank. With one rank vLLM would look for a layout that only several need.
        whole = vllm_config.parallel_config.decode_context_parallel_size > 1
        return SlidingWindowSpec(**fields, sliding_window=self.window, dcp_sharded=not whole)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Bind `kv_cache`, uint8 [blocks, 1, block_size, B]. vLLM may bind a small one first, for profiling."""
        if not kv_cache.is_contiguous():
            raise UserError(f"vLLM allocated {self.name} with gaps between pages, which this plugin does not support")
        self.kv_cache = kv_cache
        rows_LB, begin = kv_cache.view(-1, kv_cache.shape[-1]), 0
        for index, layer in self.layers.items():
            end = begin + layer.format.unit_bytes
            keys = index_keys(rows_LB, end, layer.index_bytes) if layer.index_bytes else None
            packed = rows_LB[:, begin:end]
            if isinstance(layer.format, Plain):
                packed = packed.view(layer.format.torch_dtype)
            rows = PagedRows(layer.format, packed, self.dtype, index=keys)
            if index in self._layers:
                self._layers[index].bind_cache(rows)
            else:
                self._layers[index] = self.model.on(index, rows)
            begin += self.part_bytes(index)

    def attend(self, index: int, hidden_NC: Tensor, batch: Batch) -> Tensor:
        """Return the output of a layer's attention, [N, C]."""
        if self._step is None or self._step[0] is not batch:
            self._step = batch, self.model.step(batch)
        attention = self._layers[index]
        return attention(hidden_NC, batch.views[attention.group], self._step[1], None)


def index_keys(rows_LB: Tensor, begin: int, count: int) -> Tensor:
    """View `count` bytes of each row from byte `begin` on as index keys: int8 [L / 16, count, 16]."""
    if len(rows_LB) % KEY_TILE:
        raise UserError(f"a sparse model needs a multiple of {KEY_TILE} tokens per block (--block-size)")
    return rows_LB.view(torch.int8)[:, begin : begin + count].unflatten(0, (-1, KEY_TILE)).transpose(1, 2)


def drafted_elements(vllm_config: Any) -> int:
    """Elements that a draft head's layer caches per token; 0 without a draft head."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    draft = speculative.draft_model_config
    return 2 * int(draft.get_num_kv_heads(vllm_config.parallel_config)) * int(draft.get_head_size())
