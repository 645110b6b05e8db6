"""Latent attention of a converted layer, in both layouts on a CPU and `latent` on a GPU: from the projections of its
input to the input of o_proj, the write of the step's rows included. The mathematics is
modeling/latent_attention_mla.py's.

Legend: N tokens of a step, H query heads, G KV heads, J = H / G, D key and V value dimensions, R latent rank, E rotary
dimensions, W = R + E elements of a row, P rotary pairs, L positions of a table or rows of a sequence, T query tokens of
a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.modeling.attention_mla import sink_share
from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import rotate
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op
from mlaforge.ops.host_view import host_view
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.native import form, kernel, pack, supports_bfloat16, unpack
from mlaforge.ops.paged_rows import PagedRows, native_rows, native_supports, written_rows
from mlaforge.ops.row_formats.coded import Coded


@dataclasses.dataclass(frozen=True)
class LatentWeights:
    """Weights of a layer in the layout of the compiled CPU kernels; latent_weights_gpu.py has those of a GPU.

    w_up        W_uk of all KV heads [G D, R], packed with outputs padded to 16, then W_uv [V, R], padded per KV head;
                inputs padded to 32
    codes       `latent`: W_uk in 8 bits where latents are coded, so integers, and the processor multiplies bytes; else
                None
    w_uk        `latent_rope`: [G] of [R, D], stacked and packed, which multiplies queries; None in `latent`
    b_k, b_v    `latent`: bf16 [G D], fp32 [G, V]; `latent_rope`: fp32 [G, D] and [G, V]
    sinks       fp32 [H], or None
    rope_index  `latent_rope`: the model's frequency of each rotary pair, int64 [E / 2]; None in `latent`
    q_norm      bf16 [D], or None; so is k_norm; `eps` is theirs
    """

    w_up: Tensor
    codes: CodeWeights | None
    w_uk: Tensor | None
    b_k: Tensor
    b_v: Tensor
    sinks: Tensor | None
    rope_index: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    @classmethod
    def of(cls, attention: LatentAttention, rows: PagedRows) -> LatentWeights | None:
        """Pack the weights of a layer's module whose cache is `rows`. None where the kernels cannot multiply them."""
        if attention.rank % 2 or attention.nope_dim % 2 or attention.v_dim > 256:
            return None
        w_uk, w_uv, b_k, b_v = attention.up_projections()
        up = [w_uk.flatten(0, 1), *w_uv]
        w_up = torch.cat([pack(weight, 32) for weight in up])
        sinks = attention.sinks.detach().float() if attention.config.mla_sinks else None
        if attention.rope_dim:
            packed_w_uk = torch.stack([pack(weight.T) for weight in w_uk])
            b_k, b_v = b_k.float().contiguous(), b_v.float().contiguous()
            return cls(w_up, None, packed_w_uk, b_k, b_v, sinks, attention.rope_index)
        b_k = b_k.flatten().bfloat16()
        norms: list[Any] = [attention.q_norm, attention.k_norm] if attention.qk_norm else []
        q_norm, k_norm = [norm.weight.detach().bfloat16() for norm in norms] or [None, None]
        eps = norms[0].eps if norms else 0.0
        codes = None
        if isinstance(rows.format, Coded) and form() in ("amx", "avx512"):
            codes = CodeWeights.of(w_uk.flatten(0, 1), rows.format.counts)
        return cls(w_up, codes, None, b_k, b_v.float().contiguous(), sinks, None, q_norm, k_norm, eps)

    def up_projections(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return W_uk [G D, rank], as rounded as kernels multiply it, and W_uv [G, V, rank] in fp32."""
        GD, (G, V) = self.b_k.numel(), self.b_v.shape
        blocks = -(-GD // 16)
        w_uk = unpack(self.w_up[:blocks]) if self.codes is None else self.codes.unpacked()
        w_uv = unpack(self.w_up[blocks:]).view(G, -1, 2 * self.w_up.shape[1])
        return w_uk[:GD, :rank], w_uv[:, :V, :rank]


@dataclasses.dataclass(frozen=True)
class CodeWeights:
    """W_uk [M, R] in 8 bits for coded latents, in the layout of ops/cpu/attention/code_product.h.

    weights     int8 [M / 16, K / 4, 16, 4], M and K = R rounded up to whole blocks and steps
    scales      fp32 [M], the factor of each output
    offsets     int32 [M], added to each sum, because the kernels' bytes are unsigned
    wide_steps  steps of 64 coordinates whose codes may have more than 8 bits
    """

    weights: Tensor
    scales: Tensor
    offsets: Tensor
    wide_steps: int

    def unpacked(self) -> Tensor:
        """Return the rounded weight, fp32 [M, K], with its padding."""
        steps = self.weights.view(len(self.weights), -1, 16, 16, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return steps.reshape(len(self.scales), -1) * self.scales[:, None]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The arguments by which the kernel takes them."""
        return self.weights, self.scales, self.offsets, self.wide_steps

    @classmethod
    def of(cls, weight_MR: Tensor, counts: Sequence[int]) -> CodeWeights:
        """Round to nearest with a scale per output. counts: of a code (ops/row_formats/coded.py)."""
        M, R = weight_MR.shape
        weight = F.pad(weight_MR.detach().float(), (0, -R % 64, 0, -M % 16))
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        rounded = (weight / scales[:, None]).round().clamp(-127, 127)
        wide_steps = -(-counts[8] // 64) if len(counts) > 8 else 0
        offset_K = torch.full((weight.shape[1],), -128.0)
        offset_K[: wide_steps * 64] = -1088.0
        # Of every 64 inputs, 2 i, 2 i + 1, 2 i + 32 and 2 i + 33 are multiplied together.
        packed = rounded.to(torch.int8).view(len(weight) // 16, 16, -1, 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
        offsets = (rounded.double() @ offset_K.double()).to(torch.int32)
        return cls(packed.reshape(len(weight) // 16, -1, 16, 4).contiguous(), scales, offsets, wide_steps)


def latent_reference(
    q_kv_NX: Tensor, cos_LP: Tensor, sin_LP: Tensor, weights: LatentWeights, rows: PagedRows, view: CacheView,
    scale: float,
) -> Tensor:  # fmt: skip
    """Layout `latent`: write the rows, and attend over decompressed keys and latent values, in fp32.

    q_kv_NX: [q (H D), c (R)]; cos_LP, sin_LP: rotations of positions 0, 1, .... Returns [N, H V] in the input's dtype.
    """
    R, G, D = rows.format.width, len(weights.b_v), 2 * cos_LP.shape[1]
    w_uk, _ = weights.up_projections(R)
    q_NHD = q_kv_NX[:, :-R].float().unflatten(1, (-1, D))
    if weights.q_norm is not None:
        q_NHD = F.rms_norm(q_NHD, (D,), weights.q_norm.float(), weights.eps)
    rows.write(view.slots_N, q_kv_NX[:, -R:])
    outs = []
    for q_HTD, row_LR, mask_TL, at_L in _sequences(q_NHD, rows, view):
        k_LGD = (row_LR @ w_uk.T + weights.b_k.float()).unflatten(1, (G, D))
        if weights.k_norm is not None:
            k_LGD = F.rms_norm(k_LGD, (D,), weights.k_norm.float(), weights.eps)
        k_GLD = rotate(k_LGD.transpose(0, 1), cos_LP[at_L], sin_LP[at_L])
        last = at_L[-q_HTD.shape[1] :]
        q_GXD = rotate(q_HTD, cos_LP[last], sin_LP[last]).reshape(G, -1, D)
        logits_HTL = (q_GXD @ k_GLD.mT).view(*q_HTD.shape[:2], -1) * scale
        outs.append(_absorbed_values(logits_HTL, mask_TL, row_LR, weights))
    return torch.cat(outs).to(q_kv_NX.dtype)


def latent_rope_reference(
    q_kv_NX: Tensor, rotation_N1P: Tensor, weights: LatentWeights, rows: PagedRows, view: CacheView, scale: float
) -> Tensor:
    """Layout `latent_rope`: rotate, write the rows [c, rotary key], and attend over them, in fp32.

    q_kv_NX: [q (H (D + E)), c (R), rotary key (E)]; rotation_N1P: cos + i sin. Returns [N, H V] in the input's dtype.
    """
    assert weights.rope_index is not None
    W, E, (G, D) = rows.format.width, 2 * len(weights.rope_index), weights.b_k.shape
    R = W - E
    rotation = rotation_N1P[..., weights.rope_index]
    q_NHX = q_kv_NX[:, :-W].float().unflatten(1, (-1, D + E))
    q_NHE, k_N1E = (_rotate(x.float(), rotation) for x in (q_NHX[..., D:], q_kv_NX[:, None, -E:]))
    rows.write(view.slots_N, torch.cat((q_kv_NX[:, -W:-E], k_N1E[:, 0].to(q_kv_NX.dtype)), dim=1))
    w_uk_GDR = weights.up_projections(R)[0].unflatten(0, (G, D))
    q_NGJD = q_NHX[..., :D].unflatten(1, (G, -1))
    q_NHR = torch.einsum("ngjd,gdr->ngjr", q_NGJD, w_uk_GDR).flatten(1, 2)
    shift_NH = torch.einsum("ngjd,gd->ngj", q_NGJD, weights.b_k).flatten(1) * scale
    outs, first = [], 0
    for q_HTW, row_LW, mask_TL, _ in _sequences(torch.cat((q_NHR, q_NHE), dim=-1), rows, view):
        T = q_HTW.shape[1]
        logits_HTL = q_HTW @ row_LW.T * scale + shift_NH[first : first + T].T[..., None]
        outs.append(_absorbed_values(logits_HTL, mask_TL, row_LW[:, :R], weights))
        first += T
    return torch.cat(outs).to(q_kv_NX.dtype)


def _sequences(q_NHD: Tensor, rows: PagedRows, view: CacheView) -> Any:
    """Yield queries [H, T, D], rows [L, W] in fp32, visibility [T, L] or None, and positions [L] of each sequence."""
    rows_LW, decoded_view = rows.decode(view)
    for s, q_THD in enumerate(q_NHD.split(view.queries)):
        row_1LW, mask = host_view(decoded_view).sequence(s, rows_LW)
        L = row_1LW.shape[1]
        positions_L = view.positions(s, L)
        at_L = torch.arange(L, device=q_NHD.device) if positions_L is None else positions_L
        yield q_THD.transpose(0, 1), row_1LW[0].float(), None if mask is None else mask[0, 0], at_L


def _absorbed_values(logits_HTL: Tensor, mask_TL: Tensor | None, c_LR: Tensor, weights: LatentWeights) -> Tensor:
    """Attend over latents, multiply by W_uv, and apply the sinks: [T, H V]."""
    G, V = weights.b_v.shape
    if mask_TL is not None:
        logits_HTL = logits_HTL.masked_fill(~mask_TL, -torch.inf)
    lse_HT = logits_HTL.logsumexp(-1)
    c_GXR = ((logits_HTL - lse_HT[..., None]).exp() @ c_LR).reshape(G, -1, c_LR.shape[1])
    _, w_uv_GVR = weights.up_projections(c_LR.shape[1])
    out_HTV = (c_GXR @ w_uv_GVR.mT + weights.b_v[:, None]).view(*lse_HT.shape, V)
    if weights.sinks is not None:
        out_HTV = out_HTV * sink_share(lse_HT, weights.sinks)[..., None]
    return out_HTV.transpose(0, 1).flatten(1)


def _rotate(x_NHE: Tensor, rotation_N1P: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E / 2)."""
    return rotate(x_NHE[:, :, None], rotation_N1P.real, rotation_N1P.imag)[:, :, 0]


def _step(
    weights: LatentWeights, rows: PagedRows, view: CacheView, readings: Sequence[int], scale: float
) -> tuple[Any, ...]:
    """The arguments that both kernels have in common."""
    table = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1, view.block_size)
    return weights.sinks, *native_rows(rows), view.slots_N, *table, view.window or 0, readings, scale, view.tree_Tn


def _latent_native(
    q_kv_NX: Tensor, cos_LP: Tensor, sin_LP: Tensor, weights: LatentWeights, rows: PagedRows, view: CacheView,
    scale: float,
) -> Tensor:  # fmt: skip
    w, keys = weights, rows.decompressed_keys
    cached_keys = () if keys is None else (keys.keys, keys.metadata)
    codes = (None, None, None, 0) if w.codes is None else w.codes.arguments
    out: Tensor = kernel("latent")(
        q_kv_NX, cos_LP, sin_LP, w.w_up, *codes, w.b_k, w.b_v, w.q_norm, w.k_norm, w.eps,
        *_step(w, rows, view, view.readings, scale), view.positions_SK, *cached_keys,
    )  # fmt: skip
    return out


def _latent_rope_native(
    q_kv_NX: Tensor, rotation_N1P: Tensor, weights: LatentWeights, rows: PagedRows, view: CacheView, scale: float
) -> Tensor:
    w = weights
    out: Tensor = kernel("latent_rope")(
        q_kv_NX, rotation_N1P, w.rope_index, w.w_uk, w.w_up, w.b_k, w.b_v,
        *_step(w, rows, view, view.prompts, scale),
    )  # fmt: skip
    return out


def _latent_supports(
    q_kv_NX: Tensor, cos_LP: Any, sin_LP: Any, weights: LatentWeights, rows: PagedRows, *others: Any
) -> Literal[True] | str:
    if (reason := supports_bfloat16(q_kv_NX)) is not True:
        return reason
    return "weights are packed for a GPU" if isinstance(weights, GpuLatentWeights) else native_supports(rows)


def _latent_rope_supports(
    q_kv_NX: Tensor, rotation_N1P: Any, weights: LatentWeights, rows: PagedRows, *others: Any
) -> Literal[True] | str:
    return _latent_supports(q_kv_NX, None, None, weights, rows)


def _observe(inputs: Sequence[Any], outputs: Tensor) -> Sequence[Tensor]:
    *_, rows, view, _ = inputs
    return outputs, written_rows(rows, view.slots_N)


# The kernels round decompressed keys and values to bf16, and with AMX softmax weights too.
LATENT = Op("latent", latent_reference, mutates=(4,), observe=_observe, tolerance=(6e-2, 3e-2))
LATENT.register_native(_latent_supports, _latent_native)
LATENT.register_triton("latent_attention_gpu", "attend")
LATENT_ROPE = Op("latent_rope", latent_rope_reference, mutates=(3,), observe=_observe, tolerance=(6e-2, 3e-2))
LATENT_ROPE.register_native(_latent_rope_supports, _latent_rope_native)
