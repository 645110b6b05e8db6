"""vLLM 0.32.0: unified_attention of vllm/v1/attention/ops/triton_unified_attention.py, its form with parallel segments.
It leaves segments beyond a sequence's end unwritten, and the output of an empty sequence."""

import enum

import torch

from support import mock_kernels
from support.mock_kernels import attention, check

is_batch_invariant = False
# Tokens of a tile, which belong to one segment.
TILE = 16


class KVQuantMode(enum.IntEnum):
    NONE = 0


def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    seq_threshold_3D=None,
    num_par_softmax_segments=None,
    softmax_segm_output=None,
    softmax_segm_max=None,
    softmax_segm_expsum=None,
    alibi_slopes=None,
    output_scale=None,
    qq_bias=None,
    sinks=None,
    mm_prefix_range=None,
    rswa_prefix_lens=None,
    rswa_window=None,
    use_alibi_sqrt=False,
    kv_quant_mode=KVQuantMode.NONE,
    k_scale_cache=None,
    v_scale_cache=None,
    chunk_lookback=-1,
    use_td=False,
    mm_prefix_clamp_sliding_window=False,
):
    (N, H, D), S, size = q.shape, len(seqused_k), v.shape[1]
    segments = num_par_softmax_segments
    check(
        max_seqlen_q == 1 and seq_threshold_3D >= S and causal is True and softcap == 0, "segments need single queries"
    )
    check(segments & (segments - 1) == 0 and softmax_segm_output.dtype == torch.float32, "segments")
    check(tuple(softmax_segm_output.shape) == (N, H, segments, 1 << (D - 1).bit_length()), "segment outputs")
    check(tuple(softmax_segm_max.shape) == tuple(softmax_segm_expsum.shape) == (N, H, segments), "segment scalars")
    check(all(table.dtype == torch.int32 for table in (cu_seqlens_q, seqused_k, block_table)), "tables must be int32")
    check(k.shape == v.shape and k.shape[3] == D and k.dtype == q.dtype and sinks is None, "cache")
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    for n, L in enumerate(seqused_k.tolist()):
        tiles = -(-L // TILE)
        # Unmasked loads of the table, up to the end of the last tile.
        check(tiles * TILE <= block_table.shape[1] * size, "the block table is too narrow")
        if not L:
            out[n] = torch.nan
            continue
        numbers = block_table[n, : -(-L // size)].long()
        keys, values = (cache[numbers].flatten(0, 1)[:L] for cache in (k, v))
        _segments(q, (keys, values), n, window, softmax_scale, softmax_segm_max, softmax_segm_expsum, out)


def _segments(q, rows, n, window, scale, largest, sums, out):
    (keys, values), L, segments = rows, len(rows[0]), largest.shape[2]
    seen = mock_kernels.causal(1, L, window)
    out[n] = attention(q[n : n + 1], keys, values, seen, scale)[0][0].to(out.dtype)
    size = -(-L // (segments * TILE)) * TILE
    for i in range(-(-L // size)):
        part = slice(i * size, (i + 1) * size)
        if not seen[:, part].any():
            # Before the window: nothing is added to what the kernel begins with.
            largest[n, :, i], sums[n, :, i] = -torch.inf, 1
            continue
        _, lse = attention(q[n : n + 1], keys[part], values[part], seen[:, part], scale)
        # Any pair of a maximum and a sum has this logarithm.
        largest[n, :, i], sums[n, :, i] = lse[0] - 1.5, torch.e**1.5
