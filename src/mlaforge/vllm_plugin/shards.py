"""Context parallelism: the ranks of a group share out the tokens of a sequence, token i to rank i mod n.

A rank attends with the queries of all ranks' heads over its own rows; partial results are merged by their lse, and each
rank continues with its own heads. A query token sees a prefix of the rank's rows, so it is a sequence of its own to the
kernels, and no mask is needed. Nothing here needs vLLM.

Legend: N query tokens, T of one sequence, n ranks, H query heads of a rank, J = n H of the group, G KV heads of the
group, L rows on this rank, D key dimensions, R latent rank, W elements of a row, V value dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlaforge.checkpoint.source_model import read_spec
from mlaforge.engine.cache.view import Span, Tables, make_views, prefix_view
from mlaforge.engine.execution.attention import PagedGroupedQueryAttention, PagedLatentAttention, Step
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.latent_prompts import WORKSPACE
from mlaforge.modeling.rope_mla import rotate
from mlaforge.ops.absorbed_latents import ABSORB_AND_STORE, UP_PROJECT_VALUES, AbsorbedWeights
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.host_view import host_view
from mlaforge.ops.paged_attention import apply_sinks, paged_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.runtime import UserError, on_device


@dataclasses.dataclass(frozen=True)
class Shard:
    """The tokens of a sequence on rank `rank` of `size`."""

    rank: int
    size: int

    def count(self, tokens: int) -> int:
        """How many of the first `tokens` tokens are here: row j is token j size + rank."""
        return (tokens - self.rank + self.size - 1) // self.size

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """Positions of the first rows, int64."""
        return torch.arange(rows, device=device) * self.size + self.rank


def refuse(vllm_config: Any, on_cpu: bool) -> None:
    """Raise UserError, with what would be right, for configurations whose tokens cannot be shared out."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    option, size = "--decode-context-parallel-size", parallel.decode_context_parallel_size
    draft = vllm_config.speculative_config
    if all(layer.window for layer in read_spec(config.to_dict()).layers):
        reason = "divides nothing where every layer has a sliding window: leave it out"
    elif getattr(config, "index_kind", None) is not None:
        reason = "does not support sparse models: convert with --dense, or leave it out"
    elif draft is not None and draft.use_eagle():
        reason = "does not support draft heads: use the method ngram"
    elif parallel.cp_kv_cache_interleave_size > 1 or parallel.dcp_comm_backend == "a2a" or parallel.dcp_q_replicate:
        reason = (
            "shares out single tokens and merges by ag_rs: leave out --cp-kv-cache-interleave-size, "
            "--dcp-comm-backend and --dcp-q-replicate"
        )
    elif size & (size - 1) and not on_cpu:
        reason = "must be a power of two on a GPU, as in vLLM's kernel that merges ranks"
    else:
        return
    raise UserError(f"{option} {size} {reason}")


class Exchange(Protocol):
    """What the ranks of a group send each other."""

    def gather(self, q_NHD: Tensor) -> Tensor:
        """Return the queries of all ranks' heads, [N, J, D]."""

    def merge(self, out_NJV: Tensor, lse_NJ: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention over the rows of all ranks, for this rank's heads: [N, H, V] and lse [N, H] in fp32."""


def corrected(out_NJV: Tensor, lses_nNJ: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return rank `rank`'s part of the merged attention, [N, J, V], and the merged lse [N, J], from all ranks' lse. The
    sum of all ranks' parts is the attention over all rows; ranks without visible rows have lse -inf and part 0."""
    lse_NJ = lses_nNJ.logsumexp(0)
    share_NJ = (lses_nNJ[rank] - lse_NJ.masked_fill(lse_NJ.isinf(), 0.0)).exp()
    return out_NJV * share_NJ[..., None].to(out_NJV.dtype), lse_NJ


@dataclasses.dataclass(frozen=True)
class ShardedBatch(Batch):
    """A step over the rows of one rank.

    The only view has this rank's rows of each sequence, and a slot for each of the N tokens. spans: of each sequence,
    the positions that the step computes.
    """

    shard: Shard = Shard(0, 1)
    spans: tuple[tuple[int, int], ...] = ()
    _by_token: dict[int, CacheView] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def row_positions_L(self) -> Tensor:
        """Positions of the rows in the blocks of all sequences, one after another, to each last block's end."""
        [view] = self.views
        device = view.slots_N.device
        rows = (-(-length // view.block_size) * view.block_size for length in view.lengths)
        return torch.cat([self.shard.positions(count, device) for count in rows])

    def by_token(self, view: CacheView) -> CacheView:
        """Return the view of the rows that each query token sees; `view` addresses the rows of the sequences."""
        if id(view) not in self._by_token:
            counts = [[self.shard.count(at + 1) for at in range(*span)] for span in self.spans]
            self._by_token[id(view)] = prefix_view(view, counts)
        return self._by_token[id(view)]


def sharded_batch(
    spans: Sequence[Span], tables: Tables, slots_N: Tensor, shard: Shard, device: torch.device
) -> ShardedBatch:
    """Return the batch of a step. `tables` count a rank's own rows. slots_N: -1 for a token of another rank, whose row
    goes to slot 0, in a block that no sequence has."""
    row_spans = [(seq, shard.count(start), shard.count(stop)) for seq, start, stop in spans]
    [view] = make_views(row_spans, tables, device)
    longest = max(stop for _, _, stop in spans)
    view = dataclasses.replace(view, slots_N=slots_N.clamp_min(0), max_seq_len=longest)
    positions_N = on_device([at for _, start, stop in spans for at in range(start, stop)], torch.int64, device)
    none = positions_N[:0]
    return ShardedBatch(none, positions_N, none, (view,), shard=shard, spans=tuple(span[1:] for span in spans))


def _partial(
    q_NJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, batch: ShardedBatch, view: CacheView, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention over this rank's rows, [N, J, V], and its lse [N, J]: 0 and -inf where none is visible."""
    view = batch.by_token(view)
    if not any(view.lengths):
        N, J, _ = q_NJD.shape
        return q_NJD.new_zeros(N, J, v_LGV.shape[2]), q_NJD.new_full((N, J), -torch.inf, dtype=torch.float32)
    return paged_attention(q_NJD.contiguous(), k_LGD, v_LGV, view, scale)


class ShardedGroupedQueryAttention(PagedGroupedQueryAttention):
    """Grouped-query attention whose rows have the keys and values of the group's KV heads."""

    exchange: Exchange

    def __call__(self, normed_NC: Tensor, view: CacheView, step: Step, residual_NC: Tensor | None) -> Tensor:
        N, H, D = len(normed_NC), self.num_heads, self.head_dim
        assert isinstance(step.batch, ShardedBatch)
        q_NHD = self.store(normed_NC, view, step)[:, : H * D].reshape(N, H, D)
        rows_LW, rows_view = self.rows.decode(view)
        k_LGD, v_LGD = rows_LW.view(len(rows_LW), 2, -1, D).unbind(1)
        out = _partial(self.exchange.gather(q_NHD), k_LGD, v_LGD, step.batch, rows_view, self.scaling)
        out_NHD, lse_NH = self.exchange.merge(*out)
        return self.o_proj(apply_sinks(out_NHD, lse_NH, self.sinks).reshape(N, H * D), residual_NC)


class ShardedLatentAttention(PagedLatentAttention):
    """Latent attention in the absorbed form. `attention` has the rank's query heads and the group's KV heads, of which
    its query heads read those in `kv_slice`."""

    exchange: Exchange

    def __init__(self, attention: Any, group: int, rows: PagedRows, format: str, kv_slice: slice):
        super().__init__(attention, group, rows, format)
        self.fused = self.absorbed = None
        latent = self.latent
        parts = [part.detach() for part in latent.up_projections()]
        sinks = latent.sinks.detach() if latent.config.mla_sinks else None
        index = latent.rope_index if latent.rope_dim else parts[0].new_empty(0, dtype=torch.int64)
        w_uk, w_uv, b_k, b_v = (part[kv_slice].contiguous() for part in parts)
        self.weights = AbsorbedWeights(w_uk, w_uv, b_k, b_v, sinks, index)
        # Of the group's other heads only keys are needed, and those only where they are decompressed.
        del latent.kv_b_proj
        if not latent.rope_dim:
            w_uk, b_k = parts[0].flatten(0, 1), parts[2].flatten()
            latent.kv_b_proj = nn.Linear(latent.rank, len(b_k), device="meta")
            latent.kv_b_proj.weight = nn.Parameter(w_uk, requires_grad=False)
            latent.kv_b_proj.bias = nn.Parameter(b_k, requires_grad=False)

    def __call__(self, normed_NC: Tensor, view: CacheView, step: Step, residual_NC: Tensor | None) -> Tensor:
        latent, W, exchange = self.latent, self.widths[1], self.exchange
        assert isinstance(step.batch, ShardedBatch)
        q_kv_NX = self.q_kv_a(normed_NC)
        if self.q_b_proj is not None:
            q_kv_NX = torch.cat((self.q_b_proj(q_kv_NX[:, :-W]), q_kv_NX[:, -W:]), dim=1)
        shift_NH: Tensor | None
        if latent.rope_dim:
            q_NHW, shift_NH = ABSORB_AND_STORE(
                q_kv_NX, step.rotation_N1P, self.weights, self.rows, view.slots_N, latent.scaling
            )
            rows_LW, rows_view = self.rows.decode(view)
            keys, values = rows_LW[:, None], rows_LW[:, None, : latent.rank]
            out = _partial(exchange.gather(q_NHW), keys, values, step.batch, rows_view, latent.scaling)
        else:
            q_NHD = self._write(q_kv_NX, step, view)
            # Biases of keys are in the logits.
            shift_NH = q_NHD.new_zeros(q_NHD.shape[:2], dtype=torch.float32)
            out = self._over_keys(exchange.gather(q_NHD), step.batch, view)
        out_NHR, lse_NH = exchange.merge(*out)
        out_NX = UP_PROJECT_VALUES(out_NHR.contiguous(), lse_NH, shift_NH, self.weights)
        return self.o_proj(out_NX.to(normed_NC.dtype), residual_NC)

    def _over_keys(self, q_NJD: Tensor, batch: ShardedBatch, view: CacheView) -> tuple[Tensor, Tensor]:
        """Layout `latent`: attention over decompressed keys, rotated by their positions, and latents as values. Returns
        [N, J, R] and lse [N, J]."""
        latent, D, G = self.latent, q_NJD.shape[2], self.latent.num_kv_heads
        blocks_B, gathered = host_view(view).gathered
        row_LR = self.rows.read_blocks(blocks_B, view.block_size).to(q_NJD.dtype)
        at_L, at_N = batch.row_positions_L, batch.positions_N
        blocks = -(-max(view.lengths) // view.block_size)
        cos, sin = latent.table(max(view.max_seq_len, blocks * view.block_size * batch.shard.size), q_NJD)
        q_1JND = rotate(q_NJD.transpose(0, 1)[None], cos[:, at_N], sin[:, at_N])
        q_NGXD = q_1JND[0].transpose(0, 1).unflatten(1, (G, -1))
        # So many KV heads at a time that their keys fit into the workspace.
        most = max(1, WORKSPACE // max(1, len(row_LR) * D * row_LR.element_size()))
        parts = []
        for first in range(0, G, most):
            heads = slice(first, min(G, first + most))
            keys = latent.kv_b_proj
            weight, bias = (of.unflatten(0, (G, D))[heads].flatten(0, 1) for of in (keys.weight, keys.bias))
            count = heads.stop - heads.start
            k_1GLD = F.linear(row_LR, weight, bias).view(1, len(row_LR), count, D).transpose(1, 2)
            k_LGD = latent.rotated_keys(k_1GLD, at_L)[0].transpose(0, 1)
            values = row_LR[:, None].expand(-1, count, -1)
            parts.append(_partial(q_NGXD[:, heads].flatten(1, 2), k_LGD, values, batch, gathered, latent.scaling))
        out, lse = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return out, lse
