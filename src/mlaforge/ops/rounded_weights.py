"""Weights quantized to 8 or 4 bits in the layout of the compiled kernels (cpu/linear/linear_int8.h, linear_int4.h).

Legend: M outputs, K inputs, B blocks of 16 outputs, G groups of 32 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Minimum scale, so that a row of zeros can be divided by it.
LEAST = 1e-30
# Inputs that share a step and a zero in 4 bits.
GROUP = 32
# Rows quantized at a time: 4 bits try several steps, each with temporaries as large as the fp32 weights.
CHUNK = 4096


def rounded8(weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to integers from -127 to 127 [M, K] with scales [M], both in fp32: a weight is code * scale.

    Symmetric, round to nearest, one scale per output.
    """
    scale_M = (weight_MK.abs().amax(dim=1) / 127).clamp_min(LEAST)
    return torch.round(weight_MK / scale_M[:, None]), scale_M


def packed8(weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Pack to uint8 [B, K / 4, 16, 4], K padded to a multiple of 64, and fp32 scales [16 B]: a weight is (w - 128) *
    scale.

    Quantized by `rounded8`.
    """
    codes_MK, scale_M = rounded8(_filled(weight_MK))
    bytes_MK = codes_MK.add_(128).to(torch.uint8)
    return bytes_MK.view(-1, 16, bytes_MK.shape[1] // 4, 4).transpose(1, 2).contiguous(), scale_M


def packed4(weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Pack to uint8 [B, K / 64, 576], K padded to a multiple of 64, and fp32 scales [16 B]: a weight is (zero + (code *
    step >> 4) - 128) * scale, with a code per weight and a step and a zero per group."""
    weight_MK = _filled(weight_MK)
    parts = [_rounded4(chunk) for chunk in weight_MK.split(CHUNK)]
    code_MK, step_MG, zero_MG, scale_M = (torch.cat(part) for part in zip(*parts, strict=True))
    blocks, steps = len(scale_M) // 16, weight_MK.shape[1] // 64
    # [B, K / 64, group, 16, (step, zero)]
    pairs = torch.stack((step_MG, zero_MG), dim=-1).view(blocks, 16, steps, 2, 2).permute(0, 2, 3, 1, 4)
    # Two lines of four inputs per vector: [B, K / 64, 8, line, 16, half, byte of the half]
    lines = code_MK.view(blocks, 16, steps, 8, 2, 2, 2).permute(0, 2, 3, 4, 1, 5, 6)
    first, second = lines.unbind(3)
    codes = torch.stack((second[..., 1] | first[..., 1] << 4, second[..., 0] | first[..., 0] << 4), dim=-1)
    packed = torch.cat((pairs.reshape(blocks, steps, 64), codes.reshape(blocks, steps, 512)), dim=-1)
    return packed.contiguous(), scale_M


def unpacked8(packed: Tensor) -> Tensor:
    """Return the integers of `packed8`, padded, fp32 [16 B, K]."""
    B, quads = packed.shape[:2]
    return packed.transpose(1, 2).reshape(B * 16, quads * 4).float() - 128


def unpacked4(packed: Tensor) -> Tensor:
    """Return the integers of `packed4`, padded, fp32 [16 B, K]: zero + (code * step >> 4) - 128."""
    B, steps = packed.shape[:2]
    pairs = packed[..., :64].view(B, steps, 2, 16, 2).int()
    step, zero = (part.permute(0, 3, 1, 2).reshape(B * 16, steps * 2, 1) for part in pairs.unbind(-1))
    low, high = packed[..., 64:].view(B, steps, 8, 16, 2, 2).int().unbind(-1)
    # Inputs 0 to 7 of a vector: two lines of four, a pair of bytes in each half.
    lines = [[high >> 4, low >> 4], [high & 15, low & 15]]
    codes = torch.stack([torch.stack(halves, dim=-1).flatten(-2) for halves in lines], dim=3)
    codes = codes.permute(0, 4, 1, 2, 3, 5).reshape(B * 16, steps * 2, 32)
    return ((codes * step >> 4) + zero).view(B * 16, -1).float() - 128


def _rounded4(weight_MK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize to uint8 codes [M, K], steps and zeros [M, G], and fp32 scales [M]. Steps and zeros are those with the
    least squared error near the ones that span a group."""
    groups = weight_MK.view(len(weight_MK), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    # Weights within -127 to 127, groups within 15 steps of 255 / 16.
    scale_M = torch.maximum(weight_MK.abs().amax(1) / 127, (most - least).amax(1) / 239).clamp_min(LEAST)
    target = groups / scale_M[:, None, None] + 128
    least, most = target.amin(-1), target.amax(-1)
    span = torch.round((most - least) * 16 / 15)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    best_error = torch.full_like(span, torch.inf)
    for wider in (-1, 0, 1):
        step = (span + wider).clamp_(1, 255)
        for higher in (0, 1):
            zero = torch.minimum(torch.floor(least + higher), 255 - torch.floor(step * 15 / 16))
            # The kernel truncates the product: half a unit on average.
            code = torch.round((target - zero[..., None] + 0.47) * 16 / step[..., None]).clamp_(0, 15)
            value = torch.floor(code * step[..., None] / 16) + zero[..., None]
            error = (value - target).square_().sum(-1)
            if best is None:
                best = code, step, zero
            else:
                better = error < best_error
                best = (
                    torch.where(better[..., None], code, best[0]),
                    torch.where(better, step, best[1]),
                    torch.where(better, zero, best[2]),
                )
            best_error = torch.minimum(best_error, error)
    assert best is not None
    code, step, zero = (part.to(torch.uint8) for part in best)
    return code.view(weight_MK.shape), step, zero, scale_M


def _filled(weight_MK: Tensor) -> Tensor:
    """Convert to fp32 and zero-pad to multiples of 16 outputs and 64 inputs."""
    return F.pad(weight_MK.float(), (0, -weight_MK.shape[1] % 64, 0, -len(weight_MK) % 16))
