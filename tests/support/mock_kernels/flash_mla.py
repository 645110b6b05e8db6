"""FlashMLA at commit 9241ae3 (2026-04-29): flash_mla/flash_mla_interface.py, checks of csrc/api/dense_decode.h and
csrc/api/sparse_decode.h on compute capability 9.0."""

import dataclasses

import torch

from support import mock_kernels
from support.mock_kernels import attention, check


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Scheduling of calls with the same shapes and lengths."""

    have_initialized: bool = False
    config: tuple | None = None
    lengths: torch.Tensor | None = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
):
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None
    assert extra_k_cache is None and extra_indices_in_kvcache is None and extra_topk_length is None
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    meta, topk = tile_scheduler_metadata, None if indices is None else indices.shape[-1]
    config = (*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache, topk)
    if not meta.have_initialized:
        meta.have_initialized, meta.config, meta.lengths = True, config, cache_seqlens
    assert meta.config == config, f"arguments are inconsistent with the metadata: {meta.config}, {config}"
    # The library does not compare the lengths; the schedule is wrong for others.
    assert cache_seqlens is None or torch.equal(meta.lengths, cache_seqlens)
    if indices is not None:
        assert not causal and is_fp8_kvcache
        return _sparse(q, k_cache, indices, topk_length, attn_sink, head_dim_v, scale)
    assert attn_sink is None and topk_length is None and block_table is not None and cache_seqlens is not None
    return _dense(q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal)


def _dense(q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal):
    check(q.dtype in (torch.bfloat16, torch.float16) and kcache.dtype == q.dtype, "same half dtype")
    check(seqlens_k.dtype == torch.int32 and seqlens_k.is_contiguous(), "seqlens_k")
    check(block_table.dtype == torch.int32 and block_table.stride(-1) == 1, "block_table")
    check(q.stride(-1) == 1 and kcache.stride(-1) == 1, "contiguous last dimension")
    b, s_q, h_q, d = q.shape
    check(d in (576, 512) and head_size_v == 512, "head sizes")
    size, h_k, d_k = kcache.shape[1:]
    check(size == 64 and d_k == d and h_k == 1 and b > 0 and h_q % h_k == 0, "cache")
    check(tuple(seqlens_k.shape) == (b,) and block_table.shape[0] == b, "batch")
    q.view(b, s_q, h_k, h_q, d)
    out, lse = q.new_empty(b, s_q, h_q, head_size_v), torch.empty(b, h_q, s_q)
    for s in range(b):
        L = int(seqlens_k[s])
        rows = kcache[block_table[s, : -(-L // size)].long()].flatten(0, 1)[:L]
        seen = mock_kernels.causal(s_q, L) if is_causal else torch.ones(s_q, L, dtype=torch.bool)
        out[s], lse_TH = attention(q[s], rows, rows[..., :head_size_v], seen, softmax_scale)
        lse[s] = lse_TH.T
    return _marked(out, lse)


def _sparse(q, kv, indices, topk_length, attn_sink, d_v, sm_scale):
    (b, s_q, h_q, d_qk), (blocks, size, h_kv, width) = q.shape, kv.shape
    check(q.dtype == torch.bfloat16 and kv.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8), "dtypes")
    check(indices.dtype == torch.int32 and tuple(indices.shape[:2]) == (b, s_q), "indices")
    check(q.stride(-1) == 1 and kv.stride(-1) == 1 and indices.stride(-1) == 1, "contiguous last dimension")
    check(h_kv == 1 and d_qk == 576 and d_v == 512 and width == 656 and kv.stride(1) == 656, "cache")
    check(h_q in (64, 128), "Unsupported h_q")
    # The kernel reads indices 64 at a time.
    check(indices.shape[2] % 64 == 0 and indices.shape[2] > 0, "topk")
    assert topk_length is None and attn_sink is None
    rows = _dequantized(kv.reshape(-1, 656))
    out, lse = q.new_empty(b, s_q, h_q, d_v), torch.empty(b, h_q, s_q)
    for s in range(b):
        for t in range(s_q):
            chosen = indices[s, t][indices[s, t] >= 0].long()
            check((chosen < blocks * size).all(), "an index is beyond the cache")
            seen = torch.ones(1, len(chosen), dtype=torch.bool)
            out[s, t], lse[s, :, t] = attention(q[s, t : t + 1], rows[chosen], rows[chosen][..., :d_v], seen, sm_scale)
    return _marked(out, lse)


def _dequantized(row_LB):
    """bf16 [L, 1, 576], a second implementation of the codec, element by element of a row."""
    row = row_LB.view(torch.uint8)
    codes, scales = row[:, :512].view(torch.float8_e4m3fn).float(), row[:, 512:528].contiguous().view(torch.float32)
    latent = torch.cat([codes[:, 128 * i : 128 * (i + 1)] * scales[:, i : i + 1] for i in range(4)], dim=1)
    return torch.cat((latent.bfloat16(), row[:, 528:].contiguous().view(torch.bfloat16)), dim=1)[:, None]


def _marked(out, lse):
    """lse is +inf where a query token sees nothing, as in the library's tests."""
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)
