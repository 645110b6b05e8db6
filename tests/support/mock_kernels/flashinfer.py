"""FlashInfer 0.6.18 (commit fb28d72): BatchPrefillWithPagedKVCacheWrapper of flashinfer/prefill.py, with checks of
csrc/batch_prefill.cu. lse is to base 2."""

import math

import torch

from support import mock_kernels
from support.mock_kernels import attention, check

__version__ = "0.6.18"


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        check(float_workspace_buffer.data_ptr() % 16 == 0 and kv_layout == "NHD" and not use_cuda_graph, "constructor")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        check(all(table.dtype == torch.int32 for table in tables), "tables must be int32")
        check(len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1, "batch")
        check(len(paged_kv_indices) >= paged_kv_indptr[-1], "page numbers")
        check(head_dim_qk in (64, 128, 256) and head_dim_vo in (None, head_dim_qk), "head_dim")
        check(num_qo_heads % num_kv_heads == 0 and custom_mask is None, "heads")
        self.starts, self.indptr, self.indices, self.last = tables
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.causal, self.window_left = causal, window_left
        self.scale = 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale
        self.dtypes = q_data_type, kv_data_type or q_data_type

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        H, G, D, size = self.shape
        k, v = paged_kv_cache
        check(not args and window_left in (None, self.window_left) and return_lse, "arguments")
        check(tuple(q.shape[1:]) == (H, D) and q.dtype == self.dtypes[0] and q.shape[0] == self.starts[-1], "q")
        check(
            k.dtype == v.dtype == self.dtypes[1] and tuple(k.shape[1:]) == tuple(v.shape[1:]) == (size, G, D), "cache"
        )
        check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "last dimension")
        out, lse = torch.zeros_like(q), torch.empty(q.shape[:2])
        for s in range(len(self.last)):
            rows, pages = slice(*self.starts[s : s + 2].tolist()), slice(*self.indptr[s : s + 2].tolist())
            count, T = pages.stop - pages.start, rows.stop - rows.start
            L = max(count - 1, 0) * size + int(self.last[s])
            numbers = self.indices[pages].long()
            window = None if self.window_left < 0 else self.window_left + 1
            seen = mock_kernels.causal(T, L, window) if self.causal else torch.ones(T, L, dtype=torch.bool)
            of = [cache[numbers].flatten(0, 1)[:L] for cache in (k, v)]
            out[rows], natural = attention(q[rows], *of, seen, self.scale)
            lse[rows] = (natural / math.log(2)).float()
        return out, lse
