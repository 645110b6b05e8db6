"""Products of a few rows with plain weights on a GPU, whose inputs may be divided among programs (split-K). Used
instead of F.linear where the tuned table has a configuration for the weights' shape (engine/execution/linear.py).

Legend: N rows (tokens), K inputs, M outputs.
"""

from __future__ import annotations

from torch import Tensor

from mlaforge.ops.dispatch import Op

# Most rows: beyond them a product's weights are no longer what limits it.
MOST_ROWS = 8


def reference(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, out_fp32: bool = False) -> Tensor:
    """Return y [N, M] = x Wᵀ + bias, summed in fp32, in the dtype of x, or in fp32 with `out_fp32`."""
    out = x_NK.float() @ weight_MK.float().T
    if bias_M is not None:
        out += bias_M
    return out if out_fp32 else out.to(x_NK.dtype)


OP = Op("vector_product", reference)
OP.register_triton("vector_product_triton", "product", on_request=True)
