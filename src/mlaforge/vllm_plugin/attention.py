"""Attention layers of a converted model in vLLM: the model's own modules, with the heads of one tensor parallel
rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_dcp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs

from mlaforge import families
from mlaforge.checkpoint import loading
from mlaforge.checkpoint.source_model import read_spec
from mlaforge.engine.cache.kv_cache import layer_caches
from mlaforge.engine.execution.attention import PagedAttention, Step, make_paged_attention
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.vllm_plugin.heads import Heads
from mlaforge.vllm_plugin.row_cache import CODED_ALIGNMENT, RowCache
from mlaforge.vllm_plugin.selection import select_together
from mlaforge.vllm_plugin.shards import ShardedGroupedQueryAttention, ShardedLatentAttention

OP = "mlaforge_attention"


class Attentions:
    """All attention layers of a model: their modules, weights and caches."""

    def __init__(self, vllm_config: Any, prefix: str):
        model_config = vllm_config.model_config
        raw: dict[str, Any] = model_config.hf_config.to_dict()
        self.spec, self.dtype = read_spec(raw), model_config.dtype
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        context = vllm_config.parallel_config.decode_context_parallel_size
        ranks = raw["num_key_value_heads"], rank, size, context
        self.heads = Heads(*ranks)
        grouped = Heads(*ranks, grouped=True) if context > 1 else self.heads
        # Rows of a window stay on every rank: they are few, and vLLM does not share them out.
        self.sharded = [context > 1 and layer.window is None for layer in self.spec.layers]
        self.layer_heads = [grouped if sharded else self.heads for sharded in self.sharded]
        skeletons = {heads: loading.skeleton(heads.config(raw)) for heads in (self.heads, grouped)}
        skeleton = skeletons[self.heads]
        self.device = torch.get_default_device()
        rotary = type(skeleton.model.rotary_emb)(skeleton.config).to(self.device)
        self.angles = RotaryEmbedding(rotary, self.spec.layers[0].head_dim, self.dtype)
        self.modules: list[Any] = [
            skeletons[heads].model.layers[index].self_attn for index, heads in enumerate(self.layer_heads)
        ]
        for module in self.modules:
            if hasattr(module, "table"):
                module.table.rotary = rotary
        self._pending: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self.modules))}
        self._prefixes = {
            families.family_of({"model_type": self.spec.model_type}).attention.format(layer=index): index
            for index in range(len(self.modules))
        }
        cached = tuple(
            dataclasses.replace(layer, num_kv_heads=heads.num_kv_heads // heads.kv_parts)
            for layer, heads in zip(self.spec.layers, self.layer_heads, strict=True)
        )
        self.caches = self._make_caches(dataclasses.replace(self.spec, layers=cached), skeleton.config, prefix)
        for cache in self.caches:
            vllm_config.compilation_config.static_forward_context[cache.name] = cache

    def _make_caches(self, spec: Any, config: Any, prefix: str) -> list[RowCache]:
        """Create the caches. `spec` has the KV heads that the rank caches."""
        layers, windows = layer_caches(spec, config, self.dtype)
        self.kinds = [layer.kind for layer in layers]
        alignment = CODED_ALIGNMENT if any(layer.format.coded for layer in layers) else self.dtype.itemsize
        caches = []
        for group, window in enumerate(windows):
            members = {index: layer for index, layer in enumerate(layers) if layer.group == group}
            # vLLM orders caches by the only number in their name.
            name = f"{prefix}.layers.{min(members)}.rows"
            caches.append(RowCache(name, window, members, self.dtype, alignment, self))
        for cache in caches:
            cache.siblings = caches
        return caches

    def layer(self, index: int) -> Attention:
        """Return the module that replaces a decoder layer's attention."""
        name = next(cache.name for cache in self.caches if index in cache.layers)
        return Attention(index, name, self.heads.size)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Store a checkpoint tensor if it belongs to attention. Returns whether it does."""
        prefix, _, rest = name.partition(".self_attn.")
        index = self._prefixes.get(f"{prefix}.self_attn.")
        if not rest or index is None:
            return False
        part = self.layer_heads[index].share(rest, tensor, self._by_head(index)).to(self.device)
        self._pending[index][rest] = part.to(self.dtype) if part.is_floating_point() else part.clone()
        return True

    def finish(self) -> None:
        """Load the stored tensors into the modules. RuntimeError names missing, extra and wrongly shaped ones."""
        for index, state in self._pending.items():
            self.modules[index].load_state_dict(state, assign=True)
            self.modules[index].requires_grad_(False).eval()
        self._pending = {}

    def _by_head(self, index: int) -> bool:
        """Whether a layer's index keys are maps of the keys of its heads, not of a latent."""
        return self.kinds[index] == "gqa" or self.modules[index].qk_norm

    def on(self, index: int, rows: PagedRows) -> PagedAttention:
        """Return the paged attention of a layer on its columns of a cache."""
        format, by_head = str(self.dtype).removeprefix("torch."), self._by_head(index)
        module, kind, sinks = self.modules[index], self.kinds[index], self.spec.layers[index].sinks
        if self.sharded[index]:
            sharded: Any = (
                ShardedGroupedQueryAttention(module, 0, rows, sinks, format) if kind == "gqa"
                else ShardedLatentAttention(module, 0, rows, format, self.layer_heads[index].kv_slice)
            )  # fmt: skip
            sharded.exchange = Group()
            return sharded
        attention = make_paged_attention(module, kind, 0, rows, sinks, format)
        if self.heads.size > 1 and attention.sparse is not None and attention.sparse.index is not None:
            select_together(attention.sparse, self.heads.size, by_head)
        return attention

    def step(self, batch: Batch) -> Step:
        """Return a step's tokens with their rotations."""
        return Step.make(batch, self.angles)


class Group:
    """What the ranks that share out tokens send each other (shards.Exchange), by vLLM's functions."""

    def gather(self, q_NHD: Tensor) -> Tensor:
        q_NJD: Tensor = get_dcp_group().all_gather(q_NHD.contiguous(), dim=1)
        return q_NJD

    def merge(self, out_NJV: Tensor, lse_NJ: Tensor) -> tuple[Tensor, Tensor]:
        N, _, V = out_NJV.shape
        # vLLM's kernel takes heads of a power of two: wider ones become several with the same lse.
        width = V & -V
        parts = V // width
        out, lse = cp_lse_ag_out_rs(
            out_NJV.reshape(N, -1, width), lse_NJ.repeat_interleave(parts, 1), get_dcp_group(), return_lse=True
        )
        return out.reshape(N, -1, V), lse[:, ::parts]


class Attention(nn.Module):
    """Attention of decoder layer `index`; `cache` is the name of its cache in vLLM."""

    def __init__(self, index: int, cache: str, ranks: int):
        super().__init__()
        self.index, self.cache, self.ranks = index, cache, ranks

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Map normed hidden states [N, C] to the layer's output [N, C], reduced over ranks. Positions follow from the
        cache."""
        out = torch.zeros_like(hidden_states)
        getattr(torch.ops.vllm, OP)(hidden_states, out, self.cache, self.index)
        return tensor_model_parallel_all_reduce(out) if self.ranks > 1 else out


def _attend(hidden: Tensor, out: Tensor, cache: str, layer: int) -> None:
    """Write the outputs of the step's tokens to `out`, which may have padding rows. Opaque to torch.compile."""
    context = get_forward_context()
    # vLLM's memory profiling runs without metadata.
    if context.attn_metadata is not None:
        batch = context.attn_metadata[cache]
        N = len(batch.positions_N)
        out[:N] = context.no_compile_layers[cache].attend(layer, hidden[:N], batch)


def _attend_fake(hidden: Tensor, out: Tensor, cache: str, layer: int) -> None:
    return None


if not hasattr(torch.ops.vllm, OP):
    direct_register_custom_op(OP, _attend, mutates_args=["out"], fake_impl=_attend_fake)
