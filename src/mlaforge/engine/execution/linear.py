"""Linear layers of the engine: fused where they read the same input, packed for the device.

At decoding, the bytes of its weights limit a linear layer, and how close to the memory's speed they are read; at
prefill arithmetic does. On a CPU bfloat16, int8 and int4 use our own kernels (ops/cpu/linear/), which read one packed
copy of the weights for any number of rows; where these are not compiled, torch's.

Legend: N rows (tokens), K input width, M output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlaforge.ops import native, tuned
from mlaforge.ops.linear import LINEAR, LINEAR_INT4, LINEAR_INT8
from mlaforge.ops.native import pack
from mlaforge.ops.rounded_weights import packed4, packed8
from mlaforge.ops.vector_product import MOST_ROWS
from mlaforge.ops.vector_product import OP as VECTOR_PRODUCT
from mlaforge.runtime import UserError, ops_choice

# Formats of weights that are not a torch dtype, with the dtype of their activations.
QUANTIZED = {"int8": torch.bfloat16, "int4": torch.bfloat16}
# Bits that a weight takes in each format; int4 has a step and a zero of 8 bits per 32 weights.
BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "int4": 4.5}
# From this number of rows on, unpacking torch's int8 to fp32 is faster (2 cores with AVX-512: docs/notes/engine.md).
WIDE = 64
# torch's int8 kernel needs widths that are multiples of this and does not check them.
INT8_COLUMNS = 16
# Input columns that share one scale and zero point in torch's int4.
INT4_GROUP = 32

Product = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class PackedLinear:
    """y = x Wᵀ + b for rows x [N, K], with weights in `format`: the name of a torch dtype, int8 or int4.

    int8 is symmetric with one scale per output row; int4 is asymmetric with a step and a zero per 32 inputs
    (ops/rounded_weights.py). Both round to nearest and exist on the CPU only. Their activations are bf16, which our
    kernels multiply as 16-bit integers. `out_fp32`: y is fp32 on a GPU and from our kernels; torch has no such product
    on a CPU, where y has the dtype of x. `tag`: its place in a layer, for records of shapes (bench/gemm_shapes.py). Not
    an nn.Module: for one row the call of a module costs a tenth of the product.
    """

    def __init__(
        self, weight_MK: Tensor, bias_M: Tensor | None, format: str, out_fp32: bool = False, tag: str = "other"
    ):
        self.out_features, self.in_features = weight_MK.shape
        self.format, self.tag = format, tag
        self.bias = None if bias_M is None else bias_M.clone()
        on_cpu = weight_MK.device.type == "cpu"
        # Weights of our own kernel for bf16; None for other products.
        self.packed: Tensor | None = None
        # Weights and epsilon of a norm of the input: `fold_norm`.
        self.norm: tuple[Tensor, float] | None = None
        self._product: Product
        if format in QUANTIZED:
            if not on_cpu:
                raise UserError(f"dtype {format!r} exists on the CPU only; use bfloat16 on {weight_MK.device.type}")
            # The kernels read neither transposed weights, as experts have, nor rows with gaps between them.
            self._product = _quantized(weight_MK.contiguous(), format, out_fp32)
        elif format == "bfloat16" and on_cpu and native.is_available() and self.in_features % 2 == 0:
            self.packed = pack(weight_MK)
            self._product = _packed_bfloat16(self.packed, self.out_features, out_fp32)
        else:
            self._product = (
                _onednn_bfloat16(weight_MK, out_fp32)
                if format == "bfloat16" and on_cpu
                else _plain(weight_MK, out_fp32)
            )

    def __call__(self, x_NK: Tensor, residual_NM: Tensor | None = None) -> Tensor:
        """Return y [N, M] plus `residual_NM`."""
        return self._product(x_NK, self.bias, residual_NM)

    def fold_norm(self, weight_K: Tensor, eps: float) -> bool:
        """Apply an RMS norm to x from now on, if one kernel does both; return whether it does."""
        if self.packed is None or weight_K.dtype != torch.bfloat16:
            return False
        self.norm = weight_K, eps
        self._product = _packed_bfloat16(self.packed, self.out_features, False, self.norm)
        return True


def _add(out_NM: Tensor, residual_NM: Tensor | None) -> Tensor:
    return out_NM if residual_NM is None else out_NM.add_(residual_NM)


def _plain(weight_MK: Tensor, out_fp32: bool) -> Product:
    weight = weight_MK.clone()
    if weight.device.type != "cuda" or weight.dtype == torch.float32:
        return lambda x, bias, residual: _add(F.linear(x, weight, bias), residual)
    key = tuned.vector_product_key(weight)

    def product(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if len(x) <= MOST_ROWS and ops_choice() != "reference" and tuned.config("vector_product", key):
            return _add(VECTOR_PRODUCT(x, weight, bias, out_fp32, implementation="triton"), residual)
        if out_fp32:
            # torch.mm has an out_dtype on CUDA only. Elsewhere fp32 sums would need a copy of the weights in fp32.
            return _add(_add(torch.mm(x, weight.T, out_dtype=torch.float32), bias), residual)
        return _add(F.linear(x, weight, bias), residual)

    return product


def _packed_bfloat16(packed: Tensor, M: int, out_fp32: bool, norm: tuple[Tensor, float] | tuple[()] = ()) -> Product:
    """Our own kernel."""
    product = LINEAR.bind(packed.new_empty(0, 0), packed)
    return lambda x, bias, residual: product(x, packed, M, bias, residual, out_fp32, *norm)


def _onednn_bfloat16(weight_MK: Tensor, out_fp32: bool) -> Product:
    """oneDNN's kernel, which packs from AVX-512 on only: 1.3 to 1.5 times the speed of F.linear at one to eight
    rows."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _plain(weight_MK, out_fp32)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_MK.bfloat16().contiguous(), 1)
    product, product_add = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

    def onednn_product(x_NK: Tensor, bias: Tensor | None, residual_NM: Tensor | None) -> Tensor:
        if residual_NM is None:
            return product(x_NK, packed, bias, "none", [], "")
        return product_add(x_NK, residual_NM, packed, bias, "add")

    return onednn_product


def _quantized(weight_MK: Tensor, format: str, out_fp32: bool) -> Product:
    """Our own kernels where they are compiled, else torch's."""
    if not native.is_available():
        return _torch_int4(weight_MK) if format == "int4" else _torch_int8(weight_MK)
    M = len(weight_MK)
    packed, scale = (packed4 if format == "int4" else packed8)(weight_MK)
    op = LINEAR_INT4 if format == "int4" else LINEAR_INT8
    product = op.bind(torch.empty(0, 0, dtype=QUANTIZED[format]), packed, scale)
    return lambda x, bias, residual: product(x, packed, scale, M, bias, residual, out_fp32)


def _torch_int8(weight_MK: Tensor) -> Product:
    scale_M = (weight_MK.float().abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    # The kernel takes the scale in bf16, so the weights are rounded with that scale.
    scale = scale_M.bfloat16()
    codes = torch.round(weight_MK.float() / scale.float()[:, None]).clamp(-127, 127).to(torch.int8)
    K = weight_MK.shape[1]
    # The kernel reads full vectors, beyond the end of a narrower row.
    padding = -K % INT8_COLUMNS
    codes = F.pad(codes, (0, padding))

    def product(x_NK: Tensor, bias: Tensor | None, residual_NM: Tensor | None) -> Tensor:
        if len(x_NK) >= WIDE:
            weight = codes[:, :K].float().mul_(scale.float()[:, None])
            out = F.linear(x_NK.float(), weight, None if bias is None else bias.float())
            return _add(out, residual_NM).to(x_NK.dtype)
        x_NK = F.pad(x_NK, (0, padding)) if padding else x_NK.contiguous()
        return _add(_add(torch._weight_int8pack_mm(x_NK, codes, scale), bias), residual_NM)

    return product


def _torch_int4(weight_MK: Tensor) -> Product:
    M, K = weight_MK.shape
    if K % INT4_GROUP or M % 16:
        return _torch_int8(weight_MK)
    groups = weight_MK.float().view(M, -1, INT4_GROUP)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(1e-8).bfloat16().float()
    # value = (code - 8) * scale + zero
    zero = (low + 8 * scale).bfloat16().float()
    codes = torch.round((groups - zero[..., None]) / scale[..., None]).add_(8).clamp_(0, 15).to(torch.int32).view(M, K)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()

    def product(x_NK: Tensor, bias: Tensor | None, residual_NM: Tensor | None) -> Tensor:
        out = torch._weight_int4pack_mm_for_cpu(x_NK.contiguous(), packed, INT4_GROUP, scales)
        return _add(_add(out, bias), residual_NM)

    return product


def vocabulary_head(weight_VK: Tensor, format: str, tag: str = "lm_head") -> PackedLinear:
    """Return the vocabulary head. In int4 it keeps 8 bits: 4 bits cost more there than in all other layers together
    (docs/notes/cpu-kernels.md). Logits are fp32 sums on a GPU and where a kernel is compiled: rounded to bf16, many of
    the likeliest would be equal."""
    return PackedLinear(weight_VK, None, "int8" if format == "int4" else format, out_fp32=True, tag=tag)


def fused(linears: Sequence[nn.Linear], format: str, tag: str = "other") -> PackedLinear:
    """Return one linear layer that computes all of `linears`, which read the same input, their outputs concatenated."""
    weight = torch.cat([linear.weight for linear in linears])
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([_bias(linear) for linear in linears])
    return PackedLinear(weight, bias, format, tag=tag)


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def bfloat16_unit() -> str | None:
    """Return what makes bfloat16 the faster format on this CPU, where its weights have half the bytes of float32: an
    instruction set that multiplies it, or our own kernels, which widen it in registers. None without either: then every
    product would widen its weights in memory first."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    return "compiled kernels" if native.is_available() else None
