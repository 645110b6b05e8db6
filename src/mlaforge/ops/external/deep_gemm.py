"""DeepGEMM (github.com/deepseek-ai/DeepGEMM): the two products of a mixture of MXFP4 experts as grouped products of
8-bit floats.

Weights are converted at their first use and stay in memory beside the packed ones, at twice their bytes. Their scales
are powers of two per 128 x 128 elements, so that the conversion is exact where a tile's MXFP4 scales differ by at most
a factor of 2^14. Inputs are rounded to 8-bit floats with a scale per 128 elements: 2.6 % of their norm, where the other
implementations round to bf16. Its index logits are sums of ReLUs, which the index of this package is not.

Legend: N tokens, K experts per token, E experts, X inputs, Y outputs, M rows of all groups, each padded to whole tiles.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from mlaforge import runtime
from mlaforge.ops.external.library import DEEP_GEMM, needs_gpu
from mlaforge.ops.gpu_properties import capability_name, gpu_properties
from mlaforge.ops.mxfp4 import BLOCK, unpack
from mlaforge.ops.row_formats.fp8_ds_mla import fp8_codes

# Elements with one scale: of an input along its row, of a weight in both dimensions.
TILE = 128

_converted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def supports(hidden_NC: Tensor, topk_ids_NK: Any, topk_weights_NK: Tensor, *packed: Any) -> Literal[True] | str:
    """Return True, or the reason why DeepGEMM cannot compute these experts here."""
    if reason := DEEP_GEMM.missing() or needs_gpu(hidden_NC.device):
        return reason
    if torch.is_grad_enabled() and (hidden_NC.requires_grad or topk_weights_NK.requires_grad):
        return "it computes no gradients"
    gate_up_scales, down_scales = packed[1], packed[4]
    widths = {gate_up_scales.shape[2] * BLOCK, down_scales.shape[2] * BLOCK}
    return refusal(hidden_NC.dtype, widths, gpu_properties(hidden_NC.device).capability) or True


def refusal(dtype: torch.dtype, widths: set[int], capability: tuple[int, int]) -> str | None:
    """Return the reason why the products do not compute inputs of these widths, or None."""
    if capability[0] not in (9, 10):
        return f"it is for compute capability 9.0 and 10.0, this GPU has {capability_name(capability)}"
    if dtype != torch.bfloat16:
        return f"hidden states must be bfloat16, they are {dtype}"
    if unaligned := [width for width in widths if width % 16]:
        return f"rows of {unaligned[0]} bytes are not aligned to 16"
    return None


def weight_codes(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Convert MXFP4 blocks [E, Y, X / 32, 16] and scales [E, Y, X / 32] to float8_e4m3fn [E, Y, X] and fp32 scales
    [E, Y / 128, X / 128], rounded up."""
    (E, Y), X = scales.shape[:2], scales.shape[2] * BLOCK
    rows, columns = -(-Y // TILE), -(-X // TILE)
    codes = torch.empty(E, Y, X, dtype=torch.float8_e4m3fn, device=blocks.device)
    tile_scales = torch.empty(E, rows, columns, device=blocks.device)
    for expert in range(E):
        weight = F.pad(unpack(blocks[expert], scales[expert]), (0, -X % TILE, 0, -Y % TILE))
        tiles = weight.view(rows, TILE, columns, TILE).transpose(1, 2)
        tile_codes, tile_scales[expert] = fp8_codes(tiles.flatten(2))
        whole = tile_codes.view(torch.uint8).view(rows, columns, TILE, TILE).transpose(1, 2).reshape(weight.shape)
        codes[expert].view(torch.uint8).copy_(whole[:Y, :X])
    return codes, tile_scales


def _weights(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """As weight_codes, converted once while `blocks` lives."""
    if blocks not in _converted:
        _converted[blocks] = weight_codes(blocks, scales)
        runtime.log(f"deep_gemm: {_converted[blocks][0].nbytes / 2**30:.2f} GiB of experts are converted to 8 bits")
    weights: tuple[Tensor, Tensor] = _converted[blocks]
    return weights


def input_codes(x_NX: Tensor) -> tuple[Tensor, Tensor]:
    """Round inputs to float8_e4m3fn [N, X], with fp32 scales [N, X / 128], rounded up."""
    X = x_NX.shape[1]
    codes, scales = fp8_codes(F.pad(x_NX.float(), (0, -X % TILE)).unflatten(1, (-1, TILE)))
    return codes.flatten(1)[:, :X].contiguous(), scales


def group_rows(topk_ids_NK: Tensor, experts: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Return the row of each token and expert, int64 [N K], and the expert of each row, int32 [M], -1 for padding.

    Rows of an expert follow each other from a multiple of `alignment` on. M depends on numbers of the host alone.
    """
    experts_of = topk_ids_NK.flatten()
    count, device = experts_of.numel(), experts_of.device
    order = experts_of.argsort(stable=True)
    counts_E = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(
        0, experts_of.long(), torch.ones_like(experts_of, dtype=torch.int64)
    )
    starts_E = counts_E.cumsum(0) - counts_E
    aligned_E = (counts_E + alignment - 1) // alignment * alignment
    aligned_starts_E = aligned_E.cumsum(0) - aligned_E
    sorted_experts = experts_of[order].long()
    row = torch.arange(count, device=device) - starts_E[sorted_experts] + aligned_starts_E[sorted_experts]
    rows = torch.empty_like(row).index_copy_(0, order, row)
    # Every expert that is used adds less than a tile.
    M = (count + min(experts, count) * (alignment - 1)) // alignment * alignment
    of_row = torch.full((M,), -1, dtype=torch.int32, device=device)
    return rows, of_row.index_copy_(0, rows, experts_of.int())


def mixture(
    hidden_NC: Tensor, topk_ids_NK: Tensor, topk_weights_NK: Tensor, gate_up_blocks: Tensor, gate_up_scales: Tensor,
    gate_up_bias: Tensor, down_blocks: Tensor, down_scales: Tensor, down_bias: Tensor, alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """As mxfp4_experts.reference, [N, C], for inputs that are supported."""
    library, (N, K) = DEEP_GEMM.load(), topk_ids_NK.shape
    alignment = library.get_mk_alignment_for_contiguous_layout()
    rows, of_row = group_rows(topk_ids_NK, len(gate_up_blocks), alignment)
    experts = topk_ids_NK.flatten().long()

    def product(inputs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], bias_EY: Tensor) -> Tensor:
        """Inputs of each token and expert [N K, X], times the expert's weight, plus its bias, in fp32."""
        codes, scales = inputs
        grouped = torch.zeros(len(of_row), codes.shape[1], dtype=torch.uint8, device=codes.device)
        # Not every device copies rows of 8-bit floats.
        grouped.index_copy_(0, rows, codes.view(torch.uint8))
        grouped_scales = scales.new_ones(len(of_row), scales.shape[1]).index_copy_(0, rows, scales)
        out = hidden_NC.new_empty(len(of_row), weights[0].shape[1])
        library.m_grouped_fp8_gemm_nt_contiguous(
            (grouped.view(torch.float8_e4m3fn), grouped_scales), weights, out, of_row
        )
        return out[rows].float() + bias_EY[experts].float()

    repeated = input_codes(hidden_NC.repeat_interleave(K, dim=0))
    gate_up = product(repeated, _weights(gate_up_blocks, gate_up_scales), gate_up_bias)
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(min=-limit, max=limit)
    gated = (up + 1) * gate * torch.sigmoid(gate * alpha)
    down = product(input_codes(gated), _weights(down_blocks, down_scales), down_bias)
    return (down.view(N, K, -1) * topk_weights_NK[..., None].float()).sum(1).to(hidden_NC.dtype)
