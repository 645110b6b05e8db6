"""Attention layers of a converted model in vLLM: the model's own modules, with the heads of one tensor parallel
rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

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

OP = "mlaforge_attention"


class Attentions:
    """All attention layers of a model: their modules, weights and caches."""

    def __init__(self, vllm_config: Any, prefix: str):
        model_config = vllm_config.model_config
        raw: dict[str, Any] = model_config.hf_config.to_dict()
        self.spec, self.dtype = read_spec(raw), model_config.dtype
        size = get_tensor_model_parallel_world_size()
        self.heads = Heads(raw["num_key_value_heads"], get_tensor_model_parallel_rank(), size)
        rank_config = self.heads.config(raw)
        skeleton = loading.skeleton(rank_config)
        self.device = torch.get_default_device()
        rotary = type(skeleton.model.rotary_emb)(skeleton.config).to(self.device)
        self.angles = RotaryEmbedding(rotary, self.spec.layers[0].head_dim, self.dtype)
        self.modules: list[Any] = [layer.self_attn for layer in skeleton.model.layers]
        for module in self.modules:
            if hasattr(module, "table"):
                module.table.rotary = rotary
        self._pending: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(self.modules))}
        self._prefixes = {
            families.family_of({"model_type": self.spec.model_type}).attention.format(layer=index): index
            for index in range(len(self.modules))
        }
        self.caches = self._make_caches(read_spec(rank_config), skeleton.config, prefix)
        for cache in self.caches:
            vllm_config.compilation_config.static_forward_context[cache.name] = cache

    def _make_caches(self, spec: Any, config: Any, prefix: str) -> list[RowCache]:
        """Create the caches. `spec` and `config` have only the rank's heads."""
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
        part = self.heads.share(rest, tensor, self._by_head(index)).to(self.device)
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
        attention = make_paged_attention(
            self.modules[index], self.kinds[index], 0, rows, self.spec.layers[index].sinks, format
        )
        if self.heads.size > 1 and attention.sparse is not None and attention.sparse.index is not None:
            select_together(attention.sparse, self.heads.size, by_head)
        return attention

    def step(self, batch: Batch) -> Step:
        """Return a step's tokens with their rotations."""
        return Step.make(batch, self.angles)


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
