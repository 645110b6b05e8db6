"""Attention of a decoder layer over the paged cache, built from the layer's own module.

A grouped-query layer caches its rotated keys and its values side by side, a converted layer the row that its module
caches. The mathematics of latents is in modeling/latent_attention_mla.py.

Legend: N tokens of a step, S sequences, H query heads, G KV heads, D key dimensions, V value dimensions, R latent rank,
E rotary dimensions, W elements that a token caches, X columns of a fused projection.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.indexer import Selections, make_indexer
from mlaforge.engine.execution.latent_prompts import attend_prompt
from mlaforge.engine.execution.linear import fused
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import RotationTable, rotate
from mlaforge.ops.absorbed_latents import ABSORB_AND_STORE, UP_PROJECT_VALUES, AbsorbedWeights
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.coded_rows import PACK_ROWS
from mlaforge.ops.dispatch import prefers_triton, refresh
from mlaforge.ops.host_view import host_view
from mlaforge.ops.latent_attention import LATENT, LATENT_ROPE, LatentWeights
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.packed_attention import OP as PACKED_ATTENTION
from mlaforge.ops.packed_attention import packed_latent_attention
from mlaforge.ops.paged_attention import OP as PAGED_ATTENTION
from mlaforge.ops.paged_attention import capturable
from mlaforge.ops.paged_rows import PagedRows, native_reads
from mlaforge.ops.rope_and_store import OP as ROPE_AND_STORE


@dataclasses.dataclass
class Step:
    """A step in progress: what the attention layers need besides their view.

    rotation_N1P  a column per rotary pair, cos + i sin (rotary_embedding.py); `cos_N1P` and `sin_N1P` are its parts in
                  `dtype`
    selections    token selections, passed from sparse layers to later ones; under a sparse view no layer selects
    """

    batch: Batch
    rotation_N1P: Tensor
    dtype: torch.dtype
    selections: Selections = dataclasses.field(default_factory=Selections)
    _angles: dict[tuple[RotationTable, int], tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    def angles(self, table: RotationTable, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of at least `length` positions, [L, P], looked up once for all layers."""
        if (table, length) not in self._angles:
            cos, sin = table(length, self.rotation_N1P.real)
            self._angles[table, length] = cos[0], sin[0]
        return self._angles[table, length]

    def probe(self, view: CacheView) -> AttentionProbe | None:
        """The probe that a layer with this view must record to, if any."""
        return self.batch.probe if view.window is None else None

    @functools.cached_property
    def cos_N1P(self) -> Tensor:
        return self.rotation_N1P.real.to(self.dtype)

    @functools.cached_property
    def sin_N1P(self) -> Tensor:
        return self.rotation_N1P.imag.to(self.dtype)

    @classmethod
    def make(cls, batch: Batch, rotary_embedding: RotaryEmbedding) -> Step:
        """Begin a step; bound ops follow $MLAFORGE_OPS as it is now."""
        refresh()
        rotation_N1P = rotary_embedding(batch.positions_N, max(view.max_seq_len for view in batch.views))
        return cls(batch, rotation_N1P, rotary_embedding.dtype)


def interleaved(head_dim: int) -> Tensor:
    """Return the order of a head's dimensions that places rotary pairs (i, i + head_dim/2) side by side, so that one
    complex product rotates a pair. Queries and keys take the same order, so their products do not change."""
    return torch.arange(head_dim).view(2, -1).T.flatten()


class PagedGroupedQueryAttention:
    """Grouped-query attention with q, k and v as one projection; biases, norms, sinks and windows as in the source."""

    def __init__(
        self, attention: Any, group: int, rows: PagedRows, sinks: bool, format: str,
        tags: tuple[str, str] = ("qkv", "o"),
    ):  # fmt: skip
        self.group = group
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = rows.format.width // (2 * self.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.bind_cache(rows)
        self.scaling: float = attention.scaling
        order = interleaved(self.head_dim).to(rows.packed.device)
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight = _reordered(projection.weight, order)
            if projection.bias is not None:
                projection.bias = _reordered(projection.bias, order)
        self.norms: tuple[Tensor, Tensor, float] | None = None
        if hasattr(attention, "q_norm"):
            weights = (_reordered(norm.weight, order).detach() for norm in (attention.q_norm, attention.k_norm))
            self.norms = (*weights, attention.q_norm.variance_epsilon)
        self.qkv = self.input_projection = fused(
            [attention.q_proj, attention.k_proj, attention.v_proj], format, tags[0]
        )
        self.o_proj = fused([attention.o_proj], format, tags[1])
        self.sinks = attention.sinks if sinks else None
        self.sparse = make_indexer(attention, self.num_heads, rows, self.sinks, order=order)
        example = torch.empty(
            0, self.num_heads * self.head_dim + rows.format.width, dtype=rows.dtype, device=rows.device
        )
        self.rope_and_store = ROPE_AND_STORE.bind(example, None, rows)

    def bind_cache(self, rows: PagedRows) -> None:
        """Use `rows` as the cache from now on."""
        self.rows = rows
        self.k_LGD = self.v_LGD = None
        if rows.direct:
            self.k_LGD, self.v_LGD = rows.packed.view(-1, 2, self.num_kv_heads, self.head_dim).unbind(1)
        q_0HD = rows.packed.new_empty(0, self.num_heads, self.head_dim, dtype=rows.dtype)
        self.attend = (
            PACKED_ATTENTION.bind(q_0HD, rows) if self.k_LGD is None
            else PAGED_ATTENTION.bind(q_0HD, self.k_LGD, self.v_LGD)
        )  # fmt: skip

    def __call__(self, normed_NC: Tensor, view: CacheView, step: Step, residual_NC: Tensor | None) -> Tensor:
        """Return the layer's output for normed hidden states, plus `residual_NC`. `view`: of the layer's group."""
        N, H, G, D = normed_NC.shape[0], self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.store(normed_NC, view, step)
        qk_NHD = qkv[:, : (H + G) * D].view(N, H + G, D)
        if view.packs_2K is not None:
            self.rows.pack(view.packs_2K, view.block_size)
        probe = step.probe(view)
        if self.sparse is not None and not step.batch.sparse_views:
            keys_NF = qkv[:, H * D : (H + G) * D]
            view = self.sparse(keys_NF, qkv, step.rotation_N1P, self.rows, view, step.selections, probe)
            probe = None
        q_NHD = qk_NHD[:, :H]
        if probe is not None:
            out_NHD = probe.attend(q_NHD, self.rows, G, view, self.scaling, self.sinks)
        elif self.k_LGD is not None:
            out_NHD = self.attend(q_NHD, self.k_LGD, self.v_LGD, view, self.scaling, self.sinks)[0]
        else:
            out_NHD = self.attend(q_NHD, self.rows, view, self.scaling, self.sinks)[0]
        return self.o_proj(out_NHD.reshape(N, H * D), residual_NC)

    def store(self, normed_NC: Tensor, view: CacheView, step: Step) -> Tensor:
        """Write the rows of normed hidden states to the cache; return rotated queries and keys, and values, side by
        side."""
        qkv = self.qkv(normed_NC)
        # In place, so that the row to cache follows the queries in memory.
        heads = self.num_heads + self.num_kv_heads
        self.rope_and_store(qkv, step.rotation_N1P, self.rows, view.slots_N, heads, self.head_dim, self.norms)
        return qkv

    def capturable(self, view: CacheView) -> bool:
        """Whether a CUDA graph can capture a step of this layer."""
        if self.sparse is not None and not self.sparse.capturable(view):
            return False
        q_NHD = self.rows.packed.new_empty(0, self.num_heads, self.head_dim, dtype=self.rows.dtype)
        if self.k_LGD is None or self.v_LGD is None:
            rotation = q_NHD.new_empty(0, 1, self.head_dim // 2, dtype=torch.complex64)
            stored = ROPE_AND_STORE.capturable(q_NHD[:, 0], rotation, self.rows, view.slots_N, 0, self.head_dim)
            return stored and PACKED_ATTENTION.capturable(q_NHD, self.rows, view, self.scaling)
        return capturable(q_NHD, self.k_LGD, self.v_LGD, view, self.scaling)


class PagedLatentAttention:
    """Multi-head latent attention. `attention` is the converted layer's module and does the mathematics. Its
    projections of the input are fused into one; on a CPU it computes in fp32, the fastest dtype there."""

    def __init__(self, attention: LatentAttention, group: int, rows: PagedRows, format: str):
        self.group = group
        self.bind_cache(rows)
        self.factored = attention.config.q_lora_rank is not None
        self.widths = [attention.num_heads * (attention.nope_dim + attention.rope_dim), rows.format.width]
        first = attention.q_a_proj if self.factored else attention.q_proj
        self.q_kv_a = self.input_projection = fused([first, attention.kv_a_proj_with_mqa], format, "qkv")
        self.q_b_proj = fused([attention.q_b_proj], format, "q_b") if self.factored else None
        self.o_proj = fused([attention.o_proj], format, "o")
        # The projections that are fused above; the others stay, in fp32 on a CPU.
        for name in ("o_proj", "kv_a_proj_with_mqa", *(("q_a_proj", "q_b_proj") if self.factored else ("q_proj",))):
            delattr(attention, name)
        sinks = attention.sinks if attention.config.mla_sinks else None
        self.sparse = make_indexer(attention, attention.num_heads, rows, sinks, reads_positions=not attention.rope_dim)
        self.fused = FusedLatent.of(attention, rows)
        # On a CPU arithmetic limits the product with decompressed keys and values.
        self.latent = attention.float() if rows.packed.device.type == "cpu" else attention
        self.absorbed = AbsorbedWeights.of(attention) if attention.rope_dim and self.fused is None else None

    def bind_cache(self, rows: PagedRows) -> None:
        """Use `rows` as the cache from now on."""
        self.rows = rows

    def __call__(self, normed_NC: Tensor, view: CacheView, step: Step, residual_NC: Tensor | None) -> Tensor:
        """Return the layer's output for normed hidden states, plus `residual_NC`. `view`: of the layer's group."""
        latent = self.latent
        W = self.widths[1]
        q_kv_NX = self.q_kv_a(normed_NC)
        if self.q_b_proj is not None:
            q_kv_NX = torch.cat((self.q_b_proj(q_kv_NX[:, :-W]), q_kv_NX[:, -W:]), dim=1)
        probe, dense_view = step.probe(view), view
        if self.sparse is not None and not step.batch.sparse_views:
            features, query = q_kv_NX[:, -W:], q_kv_NX
            if latent.qk_norm:
                features, query = self._index_inputs(features, q_kv_NX[:, :-W])
            view = self.sparse(features, query, step.rotation_N1P, self.rows, view, step.selections, probe)
            probe = None
        whole = dense_view.positions_SK is None and dense_view.tree_Tn is None
        if whole and any(view.prompts) and prefers_triton(self.rows.device):
            out_NX = self._with_prompts(q_kv_NX, step, dense_view, view)
        elif self.fused is not None:
            out_NX = self.fused(q_kv_NX, step, self.rows, view)
        elif self.absorbed is not None and not any(view.prompts):
            out_NX = self._absorbed(q_kv_NX, step.rotation_N1P, view)
        else:
            out_NX = self._by_sequence(self._write(q_kv_NX, step, view), view)
        if probe is not None:
            q_NHD = self._queries(q_kv_NX[:, :-W].to(latent.kv_b_proj.weight.dtype), step)
            probe.record_latent(latent, q_NHD, self.rows, view)
        return self.o_proj(out_NX.to(normed_NC.dtype), residual_NC)

    def _write(self, q_kv_NX: Tensor, step: Step, view: CacheView) -> Tensor:
        """Write the step's rows; return the queries [N, H, D] in the dtype of the products."""
        latent, W = self.latent, self.widths[1]
        row_NW = q_kv_NX[:, -W:]
        if latent.rope_dim:
            cos, sin = step.cos_N1P[..., latent.rope_index], step.sin_N1P[..., latent.rope_index]
            c, k_rope = row_NW.split([latent.rank, latent.rope_dim], dim=-1)
            row_NW = torch.cat((c, _rotate(k_rope[:, None], cos, sin)[:, 0]), dim=-1)
        self.rows.write(view.slots_N, row_NW)
        return self._queries(q_kv_NX[:, :-W], step).to(latent.kv_b_proj.weight.dtype)

    def _queries(self, q_NX: Tensor, step: Step) -> Tensor:
        """Queries [N, H, D] as keys expect them, except that the layout `latent` rotates them later."""
        latent = self.latent
        q_NHD = q_NX.view(len(q_NX), latent.num_heads, -1)
        if latent.rope_dim:
            cos, sin = step.cos_N1P[..., latent.rope_index], step.sin_N1P[..., latent.rope_index]
            q_nope, q_rope = q_NHD.split([latent.nope_dim, latent.rope_dim], dim=-1)
            q_NHD = torch.cat((q_nope, _rotate(q_rope, cos, sin)), dim=-1)
        elif latent.qk_norm:
            q_NHD = latent.q_norm(q_NHD)
        return q_NHD

    def _index_inputs(self, row_NW: Tensor, q_NX: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and queries after their norms: the inputs of an index where the layer has these norms."""
        latent = self.latent
        wide = latent.kv_b_proj.weight.dtype
        q_NHD = latent.q_norm(q_NX.to(wide).unflatten(1, (latent.num_heads, -1)))
        return latent.index_features(row_NW.to(wide)).to(row_NW.dtype), q_NHD.flatten(1).to(q_NX.dtype)

    def capturable(self, view: CacheView) -> bool:
        """Whether a CUDA graph can capture a step of this layer. It cannot where sequences are computed one by one."""
        if any(view.prompts) or (self.sparse is not None and not self.sparse.capturable(view)):
            return False
        if self.fused is not None:
            return self.fused.capturable(self.rows, view)
        if self.absorbed is None or not self.rows.direct:
            return False
        rows_L1W = self.rows.packed[:, None]
        q_NHW = rows_L1W.new_empty(0, self.latent.num_heads, rows_L1W.shape[2], dtype=self.rows.dtype)
        return capturable(q_NHW, rows_L1W, rows_L1W[..., : self.latent.rank], view, self.latent.scaling)

    def _absorbed(self, q_kv_NX: Tensor, rotation_N1P: Tensor, view: CacheView) -> Tensor:
        """Absorbed form, for `latent_rope`: a cached row is the key and the value of all heads. Writes the rows.
        Returns [N, H V]."""
        latent, weights = self.latent, self.absorbed
        q_NHW, shift_NH = ABSORB_AND_STORE(q_kv_NX, rotation_N1P, weights, self.rows, view.slots_N, latent.scaling)
        out_NHR, lse_NH = packed_latent_attention(q_NHW, self.rows, latent.rank, view, latent.scaling)
        out: Tensor = UP_PROJECT_VALUES(out_NHR, lse_NH, shift_NH, weights)
        return out

    def _with_prompts(self, q_kv_NX: Tensor, step: Step, dense_view: CacheView, view: CacheView) -> Tensor:
        """A step with prompts on a GPU: each prompt over the decompressed keys and values of all its tokens, then all
        other sequences together, as `view` selects. Returns [N, H V]."""
        q_NHD = self._write(q_kv_NX, step, dense_view)
        out_NX = q_NHD.new_empty(len(q_NHD), self.latent.num_heads * self.latent.v_dim)
        queries, prompts = dense_view.queries, dense_view.prompts
        for index, (q_THD, part) in enumerate(zip(q_NHD.split(queries), out_NX.split(queries), strict=True)):
            if prompts[index]:
                part.copy_(attend_prompt(self.latent, q_THD, self.rows, dense_view, index))
        others = [index for index, prompt in enumerate(view.prompts) if not prompt]
        if others:
            others_view, rows_N = view.part(others)
            if self.fused is not None:
                out = self.fused(q_kv_NX[rows_N], step, self.rows, others_view)
            else:
                out = self._absorbed(q_kv_NX[rows_N], step.rotation_N1P[rows_N], others_view)
            out_NX.index_copy_(0, rows_N, out.to(out_NX.dtype))
        return out_NX

    def _by_sequence(self, q_NHD: Tensor, view: CacheView) -> Tensor:
        """One sequence after another: prompts in the expanded form, others in the absorbed one. Positions count from
        the first row that is read. Returns [N, H V]."""
        latent = self.latent
        rows_LW, view = self.rows.decode(view)
        outs = []
        for index, (T, prompt) in enumerate(zip(view.queries, view.prompts, strict=True)):
            rows_1LW, mask = host_view(view).sequence(index, rows_LW)
            q_1HTD = q_NHD.narrow(0, sum(view.queries[:index]), T).transpose(0, 1)[None]
            L = rows_1LW.shape[1]
            positions_L = view.positions(index, L)
            if not latent.rope_dim:
                cos, sin = latent.table(view.max_seq_len, q_1HTD)
                last = slice(L - T, L) if positions_L is None else positions_L[L - T :]
                q_1HTD = rotate(q_1HTD, cos[:, last], sin[:, last])
            form = latent.expanded if prompt else latent.absorbed
            outs.append(form(q_1HTD, rows_1LW.to(q_1HTD.dtype), mask, positions_L)[0].transpose(0, 1))
        return torch.cat(outs).flatten(1)


class FusedLatent:
    """Latent attention from the projections of the input to the input of o_proj, as one op: ops/latent_attention.py."""

    @classmethod
    def of(cls, attention: LatentAttention, rows: PagedRows) -> FusedLatent | None:
        """Return None where no kernel supports the layer; its module, or the absorbed form, then computes it."""
        if prefers_triton(rows.device):
            return None if attention.rope_dim else cls(attention, GpuLatentWeights.of(attention, rows), rows)
        if not native_reads(rows) or (weights := LatentWeights.of(attention, rows)) is None:
            return None
        return cls(attention, weights, rows)

    def __init__(self, attention: LatentAttention, weights: LatentWeights | GpuLatentWeights, rows: PagedRows):
        self.weights, self.scaling, self.table = weights, attention.scaling, attention.table
        # Tables of rotations that captured steps read, by length: they outlive the growth of the table.
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        example = torch.empty(0, 0, dtype=rows.dtype, device=rows.device)
        self.rope_dim = attention.rope_dim
        self.op = (
            LATENT_ROPE.bind(example, None, weights, rows) if self.rope_dim
            else LATENT.bind(example, None, None, weights, rows)
        )  # fmt: skip

    def __call__(self, q_kv_NX: Tensor, step: Step, rows: PagedRows, view: CacheView) -> Tensor:
        """Return [N, H·V] for queries and the row to cache, concatenated; write the rows to the cache."""
        if self.rope_dim:
            out: Tensor = self.op(q_kv_NX, step.rotation_N1P, self.weights, rows, view, self.scaling)
        else:
            cos, sin = step.angles(self.table, view.max_seq_len)
            self.tables[self.table.length] = self.table.cos, self.table.sin
            out = self.op(q_kv_NX, cos, sin, self.weights, rows, view, self.scaling)
        return out

    def capturable(self, rows: PagedRows, view: CacheView) -> bool:
        """Whether a CUDA graph can capture a step with this view."""
        x = angles = rows.packed.new_empty(0, 1, dtype=rows.dtype)
        write = not rows.format.coded or PACK_ROWS.capturable(x, rows.format, rows.packed, view.slots_N)
        return write and LATENT.capturable(x, angles, angles, self.weights, rows, view, self.scaling)


def _reordered(parameter: Tensor, order: Tensor) -> nn.Parameter:
    """The rows of a projection, or the weights of a norm, with each head's dimensions in `order`."""
    heads = parameter.view(-1, len(order), *parameter.shape[1:])[:, order]
    return nn.Parameter(heads.reshape(parameter.shape), requires_grad=False)


def _rotate(x_NHE: Tensor, cos_N1P: Tensor, sin_N1P: Tensor) -> Tensor:
    a, b = x_NHE.chunk(2, dim=-1)
    return torch.cat((a * cos_N1P - b * sin_N1P, b * cos_N1P + a * sin_N1P), dim=-1)


PagedAttention = PagedGroupedQueryAttention | PagedLatentAttention


def make_paged_attention(
    attention: Any, kind: str, group: int, rows: PagedRows, sinks: bool, format: str
) -> PagedAttention:
    """Return the paged attention for a decoder layer with `attention` as its self_attn. `kind` is LayerCache's, `group`
    the number of the layer's view."""
    if kind == "gqa":
        return PagedGroupedQueryAttention(attention, group, rows, sinks, format)
    return PagedLatentAttention(attention, group, rows, format)
