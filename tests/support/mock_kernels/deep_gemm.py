"""DeepGEMM 2.6.1 (commit 54e2261): m_grouped_fp8_gemm_nt_contiguous, the arguments of csrc/apis/gemm.hpp and the checks
of csrc/apis/layout.hpp and csrc/utils/layout.hpp. Rows of -1 stay unwritten."""

import torch

from support.mock_kernels import check

__version__ = "2.6.1"


def get_mk_alignment_for_contiguous_layout():
    return 128


def m_grouped_fp8_gemm_nt_contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe=None,
    recipe_a=None,
    recipe_b=None,
    compiled_dims="nk",
    disable_ue8m0_cast=False,
    use_psum_layout=False,
    ensure_zero_padding=True,
    expected_m_for_psum_layout=None,
):
    (x, x_scales), (w, w_scales), (m, n) = a, b, d.shape
    groups, n_, k = w.shape
    check(x.dtype == w.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16, "dtypes")
    check(tuple(x.shape) == (m, k) and n_ == n and x.is_contiguous() and w.is_contiguous(), "shapes")
    check(x_scales.dtype == w_scales.dtype == torch.float32, "scales are fp32")
    check(tuple(x_scales.shape) == (m, -(-k // 128)), "input scales")
    check(tuple(w_scales.shape) == (groups, -(-n // 128), -(-k // 128)) and w_scales.is_contiguous(), "weight scales")
    check(grouped_layout.dtype == torch.int32 and tuple(grouped_layout.shape) == (m,), "grouped_layout")
    # Compute capability 10.0 takes the exponents of scales only.
    check(all((torch.frexp(scales)[0] == 0.5).all() for scales in (x_scales, w_scales)), "scales are powers of two")
    check(m % 128 == 0 and recipe is None and not use_psum_layout, "whole tiles")
    d.fill_(torch.nan)
    for tile in range(0, m, 128):
        layout = grouped_layout[tile : tile + 128]
        group = int(layout[0])
        # The kernel reads the group of a tile from its first row.
        check(((layout == group) | (layout == -1)).all(), "a tile is of one group")
        if group < 0:
            continue
        rows = x[tile : tile + 128].double() * x_scales[tile : tile + 128].double().repeat_interleave(128, 1)[:, :k]
        scales = w_scales[group].double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        d[tile : tile + 128] = (rows @ (w[group].double() * scales).T).bfloat16()
