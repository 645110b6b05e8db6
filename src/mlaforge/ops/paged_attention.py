"""Attention of a step's query tokens over the paged cache: GQA, and absorbed MLA as GQA with one KV head.

For MLA the cached row [latent r, rotary e] is the key, and its first r columns are the value: pass k = rows[:, None]
and v = k[..., :r], which implementations recognise as shared memory and read once.

Legend: N query tokens of all sequences, concatenated, T of one sequence, H query heads, G KV heads (head h reads KV
head h // (H / G)), E heads per KV head, L slots of the cache, P cached positions, D key width, V value width.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge.modeling.attention_mla import sink_share
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op, triton_device
from mlaforge.ops.external.attention_library import AttentionLibrary
from mlaforge.ops.external.flash_mla import FlashMla
from mlaforge.ops.external.flashinfer import FlashInfer
from mlaforge.ops.external.vllm import Vllm
from mlaforge.ops.native import kernel, supports_bfloat16
from mlaforge.ops.paged_attention_cpu import paged_attention_runs


def paged_attention(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float, sinks_H: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention; `view` defines what each query token sees (ops/cache_view.py).

    k_LGD and v_LGV are views over all slots of a layer's cache, with any strides, in the queries' dtype or in one that
    is cast to it (bf16, fp8). sinks_H: learned sinks, by which out becomes out * sigmoid(lse - sink). Returns out
    [N, H, V] in the queries' dtype and lse [N, H], the natural logarithm of the softmax denominator without sinks, in
    fp32; a row that sees nothing gives 0 and -inf. `implementation` None lets ops/dispatch.py choose. UserError if the
    named one cannot run.
    """
    out, lse = OP(q_NHD, k_LGD, v_LGV, view, scale, sinks_H, implementation=implementation)
    return out, lse


def apply_sinks(out_NHV: Tensor, lse_NH: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Return attention with learned sinks, from attention without."""
    if sinks_H is None:
        return out_NHV
    return out_NHV * sink_share(lse_NH.T, sinks_H).T[..., None].to(out_NHV.dtype)


def capturable(q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float) -> bool:
    """Whether a CUDA graph can capture `paged_attention` for queries like these, of any number."""
    return OP.capturable(q_NHD, k_LGD, v_LGV, view, scale)


def reference(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute in fp32, sequence by sequence. Reads the lengths from the device."""
    (N, H, _), G, V = q_NHD.shape, k_LGD.shape[1], v_LGV.shape[2]
    out_NHV = q_NHD.new_zeros(N, H, V)
    lse_NH = torch.full((N, H), -torch.inf, device=q_NHD.device)
    starts = view.query_start_S1.tolist()
    for s, (length, first) in enumerate(zip(view.seq_lens_S.tolist(), view.first_S.tolist(), strict=True)):
        rows = slice(starts[s], starts[s + 1])
        T = starts[s + 1] - starts[s]
        position_P = torch.arange(first, length, device=q_NHD.device)
        row_P = position_P - first
        block_P = view.block_table_SB[s, row_P // view.block_size].long()
        slot_P = block_P * view.block_size + row_P % view.block_size

        if view.tree_Tn is None:
            position_T1 = torch.arange(length - T, length, device=q_NHD.device)[:, None]
            visible_TP = position_P <= position_T1
            if view.window is not None:
                visible_TP &= position_P > position_T1 - view.window
        else:
            visible_TP = view.visible(T, length - first)

        q_TGED = q_NHD[rows].float().unflatten(1, (G, H // G))
        scores = torch.einsum("tged,pgd->tgep", q_TGED, k_LGD[slot_P].float()) * scale
        scores = scores.masked_fill(~visible_TP[:, None, None], -torch.inf)
        lse_TGE = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse_TGE.masked_fill(lse_TGE.isinf(), 0.0)[..., None])
        out_TGEV = torch.einsum("tgep,pgv->tgev", weights, v_LGV[slot_P].float())
        out_NHV[rows] = out_TGEV.flatten(1, 2).to(q_NHD.dtype)
        lse_NH[rows] = lse_TGE.flatten(1, 2)
    return apply_sinks(out_NHV, lse_NH, sinks_H), lse_NH


def _runs(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = paged_attention_runs(q_NHD, k_LGD, v_LGV, view, scale)
    return apply_sinks(out, lse, sinks_H), lse


def _triton(*inputs: Any) -> tuple[Tensor, Tensor]:
    from mlaforge.ops import paged_attention_triton

    return paged_attention_triton.attend(*inputs)


def _triton_supports(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, *others: Any
) -> Literal[True] | str:  # fmt: skip
    if (reason := triton_device(q_NHD.device)) is not True:
        return reason
    if view.tree_Tn is not None and not view.tree_Tn.is_contiguous():
        return "the tree must be contiguous"
    from mlaforge.ops import paged_attention_triton

    return paged_attention_triton.supports(q_NHD, k_LGD, v_LGV)


def _runs_supports(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, *others: Any
) -> Literal[True] | str:  # fmt: skip
    if q_NHD.device.type != "cpu":
        return f"it needs CPU tensors, the inputs are on {q_NHD.device.type}"
    if k_LGD.dtype != q_NHD.dtype:
        return f"rows are {k_LGD.dtype}, queries {q_NHD.dtype}"
    if len(view.runs) != len(view.seq_lens_S):
        return "the view has no runs"
    if k_LGD.shape[2] != v_LGV.shape[2] and (k_LGD.data_ptr(), k_LGD.stride()) != (v_LGV.data_ptr(), v_LGV.stride()):
        return "keys and values differ in width and do not share memory"
    return True


def _native(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (L, G, D), V = k_LGD.shape, v_LGV.shape[2]
    values = v_LGV.storage_offset() - k_LGD.storage_offset()
    rows_LW = k_LGD.as_strided((L, max(G * D, values + G * V)), (k_LGD.stride(0), 1))
    table, window = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1), view.window or 0
    out, lse = kernel("decode")(
        q_NHD, rows_LW, None, [0], G, V, values, *table, view.block_size, window, scale, view.tree_Tn
    )
    return apply_sinks(out, lse, sinks_H), lse


def _native_supports(q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, *others: Any) -> Literal[True] | str:
    if (reason := supports_bfloat16(q_NHD)) is not True:
        return reason
    if k_LGD.dtype != torch.bfloat16:
        return f"it supports bfloat16, rows are {k_LGD.dtype}"
    if k_LGD.stride(2) != 1 or v_LGV.stride(2) != 1 or k_LGD.stride(0) != v_LGV.stride(0):
        return "keys and values are not parts of one row"
    if k_LGD.untyped_storage().data_ptr() != v_LGV.untyped_storage().data_ptr():
        return "keys and values are not parts of one row"
    if k_LGD.shape[1] > 1 and (k_LGD.stride(1) != k_LGD.shape[2] or v_LGV.stride(1) != v_LGV.shape[2]):
        return "heads are not contiguous"
    return True


def _external(
    library: AttentionLibrary, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = library.attend(q_NHD, k_LGD, v_LGV, view, scale)
    return apply_sinks(out, lse, sinks_H), lse


LIBRARIES: tuple[AttentionLibrary, ...] = (FlashMla(), FlashInfer(), Vllm())
OP = Op("paged_attention", reference)
OP.register_native(_native_supports, _native)
OP.register("runs", _runs, _runs_supports, device_type="cpu")
OP.register("triton", _triton, _triton_supports, device_type="cuda", capturable=True)
for _library in LIBRARIES:
    OP.register(
        _library.library.name, functools.partial(_external, _library), _library.supports, device_type="cuda",
        on_request=True,
    )  # fmt: skip
