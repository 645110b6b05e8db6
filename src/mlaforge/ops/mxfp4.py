"""MXFP4: blocks of 32 four-bit floats with a shared 8-bit scale, as public checkpoints store fused experts.

Legend: E experts, K inputs, N outputs, G = K / 32 blocks. A weight is [E, K, N] as in transformers' fused experts;
stored, it is `<name>_blocks` u8 [E, N, G, 16] and `<name>_scales` u8 [E, N, G]: blocks run along the inputs, the low
nibble is the even element. A value is code · 2^(scale - 127), with an E2M1 code. (Format: OCP Microscaling Formats
specification 1.0.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mlaforge.ops.dispatch import Op
from mlaforge.ops.native import supports_device

BLOCK = 32
# E2M1: one sign bit, two of exponent, one of mantissa; the code of a value is its index.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Rounding boundaries between magnitudes, and whether the midpoint itself rounds up: ties go to the even code.
MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
BIAS = 127
# NaN, by the specification.
NAN_SCALE = 255
# Exponent of the largest code, 6 = 1.5 · 2^2.
LARGEST = 2
# Weights processed at a time: memory besides input and output stays under about a hundred MB.
CHUNK = 1 << 22


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize blocks [..., N, G, 16] and scales [..., N, G], both u8, to fp32 [..., N, 32 G], exactly.

    The scale 255, NaN in the specification, gives infinity as in transformers. ValueError if shapes or dtypes do not
    match.
    """
    if blocks.ndim < 3 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"MXFP4 blocks {list(blocks.shape)} and scales {list(scales.shape)} must be [E, N, G, 16] and [E, N, G]"
        )
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"MXFP4 blocks and scales must be uint8, not {blocks.dtype} and {scales.dtype}")
    weights: Tensor = OP(blocks, scales)
    return weights


def reference(blocks: Tensor, scales: Tensor) -> Tensor:
    """As `unpack`, by a table of the pairs of values in a byte."""
    codes = torch.arange(256, device=blocks.device)
    values = torch.tensor(VALUES, device=blocks.device)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], dim=-1)
    powers = torch.pow(2.0, torch.arange(256, device=blocks.device) - BIAS)
    weights = nn.functional.embedding(blocks.int(), pairs).view(*scales.shape, BLOCK)
    return weights.mul_(powers[scales.int()][..., None]).flatten(-2)


OP = Op("unpack_mxfp4", reference)
OP.register_native(lambda blocks, scales: supports_device(blocks.device))


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks [E, N, G, 16] and scales [E, N, G], both u8, to [E, K, N] of `dtype`.

    Bitwise equal to transformers, including its overflow to infinity for the scale 255. Any slice of experts is
    allowed. ValueError as in `unpack`.
    """
    experts, n, groups, _ = blocks.shape if blocks.ndim == 4 else (0, 0, 0, 0)
    out = torch.empty(experts, groups * BLOCK, n, dtype=dtype, device=blocks.device)
    rows = max(1, CHUNK // max(1, groups * BLOCK))
    for expert in range(experts):
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            # Exact in fp32, so the conversion to `dtype` is the only rounding.
            out[expert, :, part] = unpack(blocks[expert, part], scales[expert, part]).to(dtype).T
    return out


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [E, K, N] to blocks [E, N, G, 16] and scales [E, N, G], both u8.

    A block's exponent is that of its largest magnitude minus 2. Values round to the nearest code, ties to even, and
    saturate above 6. A block of zeros has the scale 0. ValueError if K is not a multiple of 32 or the weight is not
    finite.
    """
    if weight.ndim != 3 or weight.shape[1] % BLOCK:
        raise ValueError(f"MXFP4 needs a weight [E, K, N] with K a multiple of {BLOCK}, not {list(weight.shape)}")
    experts, k, n = weight.shape
    blocks = torch.empty(experts, n, k // BLOCK, BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(experts, n, k // BLOCK, dtype=torch.uint8, device=weight.device)
    rows = max(1, CHUNK // k)
    for expert in range(experts):
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            values = weight[expert, :, part].float().T.reshape(-1, k // BLOCK, BLOCK)
            blocks[expert, part], scales[expert, part] = _quantize_blocks(values)
    return blocks, scales


def _quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize fp32 values [..., G, 32] to pairs of codes [..., G, 16] and scales [..., G]."""
    largest = values.abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        raise ValueError("MXFP4 cannot represent NaN or infinity")
    # frexp's mantissa is in [0.5, 1), so its exponent is floor(log2) + 1, exactly.
    exponent = (torch.frexp(largest).exponent - 1 - LARGEST).clamp(-BIAS, BIAS)
    exponent = torch.where(largest == 0, -BIAS, exponent)
    scaled = torch.ldexp(values, -exponent[..., None])
    magnitude, code = scaled.abs(), torch.signbit(values).to(torch.uint8) << 3
    for midpoint, tie in MIDPOINTS:
        code += magnitude >= midpoint if tie else magnitude > midpoint
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + BIAS).to(torch.uint8)
