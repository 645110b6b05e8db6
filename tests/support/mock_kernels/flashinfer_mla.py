"""FlashInfer 0.6.18 (commit fb28d72): BatchMLAPagedAttentionWrapper of flashinfer/mla/_core.py on compute capability
9.0, with checks of csrc/batch_mla_plan.cu and csrc/batch_mla_run.cu. lse is to base 2, or natural on request."""

import math

import torch

from support import mock_kernels
from support.mock_kernels import attention, check


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        check(not use_cuda_graph and backend == "auto", "constructor")

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
        tables = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        check(all(table.dtype == torch.int32 for table in tables), "tables must be int32")
        if kv_data_type not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(f"MLA kv_data_type {kv_data_type} is not supported.")
        if kv_data_type == torch.float8_e4m3fn and q_data_type != torch.bfloat16:
            raise ValueError("FP8 kv_data_type needs bfloat16 queries")
        check((head_dim_ckv, head_dim_kpe) == (512, 64), "head dimensions")
        self.starts, self.indptr, self.indices, self.lengths = tables
        self.shape, self.causal, self.scale = (num_heads, page_size), causal, sm_scale
        self.dtypes = q_data_type, kv_data_type

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
    ):
        (H, size), (q_dtype, rows_dtype) = self.shape, self.dtypes
        check(q_nope.dtype == q_pe.dtype == q_dtype and ckv_cache.dtype == kpe_cache.dtype == rows_dtype, "dtypes")
        fp8 = rows_dtype == torch.float8_e4m3fn
        check((ckv_scale is not None) == fp8 and (kpe_scale is not None) == fp8 and ckv_scale_arr is None, "scales")
        check(tuple(q_nope.shape[1:]) == (H, 512) and tuple(q_pe.shape[1:]) == (H, 64), "queries")
        check(tuple(ckv_cache.shape[1:]) == (size, 512) and tuple(kpe_cache.shape[1:]) == (size, 64), "cache")
        check(all(x.stride(-1) == 1 for x in (q_nope, q_pe, ckv_cache, kpe_cache)), "last dimension")
        check(return_lse and o_scale is None, "arguments")
        q = torch.cat((q_nope, q_pe), dim=-1)
        out, lse = torch.empty_like(q_nope), torch.empty(q.shape[:2])
        for s, L in enumerate(self.lengths.tolist()):
            rows, pages = slice(*self.starts[s : s + 2].tolist()), slice(*self.indptr[s : s + 2].tolist())
            numbers, T = self.indices[pages].long(), rows.stop - rows.start
            check(len(numbers) == -(-L // size), "pages")
            ckv, kpe = (cache[numbers].flatten(0, 1)[:L, None].float() for cache in (ckv_cache, kpe_cache))
            seen = mock_kernels.causal(T, L) if self.causal else torch.ones(T, L, dtype=torch.bool)
            out[rows], natural = attention(q[rows], torch.cat((ckv, kpe), dim=-1), ckv, seen, self.scale)
            lse[rows] = (natural if return_lse_base_on_e else natural / math.log(2)).float()
        return out, lse
