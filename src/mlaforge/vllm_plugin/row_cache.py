"""The cache that vLLM allots to a converted model: one row per token and group of layers with the same window.

A row holds what every layer of the group caches, side by side: latents (and rotary keys) of converted layers, keys and
values of the others, and behind those of a sparse layer its index key. So the bytes of a token are the sum over layers,
whatever ranks they have; one cache per layer would be filled up to the widest, as vLLM wants pages of one size. Pages
of several groups are made equal by block sizes, and by columns that stay empty in rows of windows alone, which are few.

Legend: L slots (block * block_size + offset), W numbers in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.execution.attention import PagedAttention, Step
from mlaforge.engine.execution.batch import Batch, Chunk, make_batch
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_format import Plain
from mlaforge.ops.token_selection import TOGETHER
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin.pages import even_pages


class RowBackend(AttentionBackend):
    """What vLLM asks of the layers that have a cache. It picks no kernel by this and makes no AttentionImpl of it:
    attention is mlaforge.engine.execution.attention."""

    @staticmethod
    def get_name() -> str:
        return "MLAFORGE_ROWS"

    @staticmethod
    def get_builder_cls() -> type[RowBatchBuilder]:
        return RowBatchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Slots of a cache lie one after another; with one head these two are the same.
        return KVCacheLayout.LBHNC, KVCacheLayout.LBNHC


class RowBatchBuilder(AttentionMetadataBuilder[Batch]):
    """vLLM's block tables -> the view that the engine's attention reads. Host numbers: it waits for the device."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.window: int | None = getattr(kv_cache_spec, "sliding_window", None)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        metadata = common_attn_metadata
        starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1].tolist()
        lengths = metadata.seq_lens[: metadata.num_reqs].tolist()
        prompts = metadata.is_prefilling
        generating = [False] * len(lengths) if prompts is None else (~prompts[: metadata.num_reqs]).tolist()
        chunks = [
            Chunk(seq, (), length - (stop - start), length, generating=generating[seq])
            for seq, ((start, stop), length) in enumerate(zip(pairwise(starts), lengths, strict=True))
            # Rows that fill up a batch have no tokens.
            if stop > start
        ]
        tables = _Tables(metadata.block_table_tensor, chunks, self.kv_cache_spec.block_size, self.window)
        return make_batch(chunks, tables, self.device)


class _Tables:
    """vLLM's block table of one group, as make_batch reads it."""

    def __init__(self, table_SB: Tensor, chunks: Sequence[Chunk], block_size: int, window: int | None):
        self.block_size = block_size
        self.groups = (CacheGroup("rows", 0, window),)
        self._table_SB = table_SB.cpu()
        self._ends = {chunk.seq: -(-chunk.stop // block_size) for chunk in chunks}
        # Blocks that have left the window are gone.
        self._firsts = {
            chunk.seq: 0 if window is None else max(0, chunk.start - window + 1) // block_size for chunk in chunks
        }

    def table(self, seq: int, group: int) -> tuple[int, list[int]]:
        first = self._firsts[seq]
        blocks: list[int] = self._table_SB[seq, first : self._ends[seq]].tolist()
        return first * self.block_size, blocks

    def written(self, seq: int, group: int) -> dict[int, int]:
        raise AssertionError("no block of vLLM's is whole")


class Model(Protocol):
    """What a cache needs of the model whose layers it serves."""

    def on(self, index: int, rows: PagedRows) -> PagedAttention:
        """Attention of a layer on its columns of a cache."""

    def step(self, batch: Batch) -> Step:
        """A step's tokens with their rotations."""


@dataclass(frozen=True)
class Columns:
    """What a layer keeps of a token: so many numbers, and an index key of `index` bytes."""

    numbers: int
    index: int = 0

    def width(self, dtype: torch.dtype) -> int:
        """In numbers of the cache's dtype."""
        return self.numbers + -(-self.index // dtype.itemsize)


class RowCache(AttentionLayerBase):
    """The cache of the layers that see `window` tokens (None: all); vLLM knows it as one layer named `name`.

    `columns` is what each layer keeps of a token; in a row they lie one after another.
    """

    # vLLM's builders of other layers' metadata look at it.
    impl = None

    def __init__(self, name: str, window: int | None, columns: dict[int, Columns], dtype: torch.dtype, model: Model):
        self.name, self.window, self.columns, self.dtype, self.model = name, window, columns, dtype, model
        self.siblings: Sequence[RowCache] = (self,)
        self.kv_cache = torch.empty(0)
        self._layers: dict[int, PagedAttention] = {}
        self._step: tuple[Batch, Step] | None = None

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return sum(own.width(self.dtype) for own in self.columns.values())

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        block_sizes, widths = even_pages(
            [cache.width for cache in self.siblings],
            vllm_config.cache_config.block_size,
            drafted_width(vllm_config),
        )
        at = self.siblings.index(self)
        fields: dict[str, Any] = {
            "block_size": block_sizes[at], "num_kv_heads": 1, "head_size": widths[at], "head_size_v": 0,
            "dtype": self.dtype,
        }  # fmt: skip
        if self.window is None:
            return FullAttentionSpec(**fields)
        return SlidingWindowSpec(**fields, sliding_window=self.window)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """`kv_cache`: [blocks, 1, block_size, W]. vLLM may bind a small one first, to measure."""
        if not kv_cache.is_contiguous():
            raise UserError(f"vLLM allotted {self.name} pages with gaps, which this plugin cannot read")
        self.kv_cache = kv_cache
        rows_LW, begin = kv_cache.view(-1, kv_cache.shape[-1]), 0
        for index, columns in self.columns.items():
            numbers, end = columns.numbers, begin + columns.numbers
            keys = index_keys(rows_LW, end, columns.index) if columns.index else None
            own = PagedRows(Plain(numbers, self.dtype), rows_LW[:, begin:end], self.dtype, index=keys)
            if index in self._layers:
                self._layers[index].bind_cache(own)
            else:
                self._layers[index] = self.model.on(index, own)
            begin += columns.width(self.dtype)

    def attend(self, index: int, hidden_NC: Tensor, batch: Batch) -> Tensor:
        """The output of a layer's attention, [N, C]."""
        if self._step is None or self._step[0] is not batch:
            self._step = batch, self.model.step(batch)
        return self._layers[index](hidden_NC, self._step[1], None)


def index_keys(rows_LW: Tensor, begin: int, count: int) -> Tensor:
    """Bytes of each row from number `begin` on as the engine knows index keys, int8 [L / 16, count, 16]: a view."""
    if len(rows_LW) % TOGETHER:
        raise UserError(f"a sparse model needs blocks of whole {TOGETHER} tokens (--block-size)")
    first = begin * rows_LW.itemsize
    return rows_LW.view(torch.int8)[:, first : first + count].unflatten(0, (-1, TOGETHER)).transpose(1, 2)


def drafted_width(vllm_config: Any) -> int:
    """Numbers that the layer of a draft head caches per token; 0 without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    draft = speculative.draft_model_config
    return 2 * int(draft.get_num_kv_heads(vllm_config.parallel_config)) * int(draft.get_head_size())
