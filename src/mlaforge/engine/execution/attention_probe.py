"""Attention probe: what the last query tokens of a step attend to, for sparse views (speculation/sparse_view.py).

Legend: N tokens of a step, L rows of a sequence, B blocks, W elements of a cached row, H query heads, G KV heads,
J = H / G, D key dimensions.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import rotate
from mlaforge.ops.attention_mass import attention_with_mass, last_query_row, probe_attention_mass
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.host_view import host_view
from mlaforge.ops.paged_attention import apply_sinks
from mlaforge.ops.paged_rows import PagedRows


@dataclasses.dataclass(frozen=True)
class AttentionProbe:
    """Records the attention of the last query token of some sequences of a step.

    sequences  their numbers in the step
    layers     a list per layer with full attention, a tensor per sequence: the attention mass of each token, [tokens]
               (ops/attention_mass.py), or, of a sparse layer, the positions that it selects, int32
    """

    sequences: list[int]
    layers: list[list[Tensor]] = dataclasses.field(default_factory=list)

    def attend(
        self, q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        """Return grouped-query attention with sinks, [N, H, D], and record its mass."""
        out_NHD, lse_NH, mass = attention_with_mass(q_NHD, rows, kv_heads, view, scaling, self.sequences)
        self.layers.append(mass)
        return apply_sinks(out_NHD, lse_NH, sinks)

    def record_latent(self, latent: LatentAttention, q_NHD: Tensor, rows: PagedRows, view: CacheView) -> None:
        """Record the mass of a layer over latents, for queries before the rotation of the layout `latent`.

        Decompressing every key would cost as much as the step, so for the layout `latent` the key of a block's mean
        latent, at its middle position, stands for the block's tokens. A partly filled last block gets no mass."""
        if latent.rope_dim:
            q_NHW = latent.absorbed_queries(q_NHD.transpose(0, 1)[None])[0][0].transpose(0, 1)
            self.layers.append(probe_attention_mass(q_NHW, rows, 1, view, latent.scaling, self.sequences))
            return
        size, wide = view.block_size, latent.kv_b_proj.weight.dtype
        rows_LW, rows_view = rows.decode(view)
        w_uk, _, b_k, _ = latent.up_projections()
        masses = []
        for s in self.sequences:
            row_LW = host_view(rows_view).sequence(s, rows_LW)[0][0]
            L, G = len(row_LW), latent.num_kv_heads
            mean_BR = row_LW[: L // size * size].view(-1, size, row_LW.shape[1]).mean(1, dtype=wide)
            at_B = torch.arange(len(mean_BR), device=rows_LW.device) * size + size // 2
            q_1H1D = q_NHD[last_query_row(view, s)][None, :, None]
            cos, sin = (table[:, L - 1 :][:, :1] for table in latent.table(L, q_1H1D))
            k_1GBD = latent.rotated_keys(((mean_BR @ w_uk.mT) + b_k[:, None])[None], at_B)
            q_GJD = rotate(q_1H1D, cos, sin)[0, :, 0].view(G, -1, k_1GBD.shape[-1])
            mass_B = ((q_GJD @ k_1GBD[0].mT) * latent.scaling).softmax(-1).sum((0, 1))
            masses.append(F.pad(mass_B.repeat_interleave(size) / size, (0, L % size)))
        self.layers.append(masses)
