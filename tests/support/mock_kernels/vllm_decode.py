"""vLLM 0.32.0: decode_attention_fwd of vllm/v1/attention/ops/triton_decode_attention.py. An empty sequence gives
NaN."""

import torch

from support.mock_kernels import attention, check


def decode_attention_fwd(
    q,
    k_buffer,
    v_buffer,
    o,
    lse,
    req_to_token,
    b_seq_len,
    attn_logits,
    num_kv_splits,
    sm_scale,
    page_size=1,
    logit_cap=0.0,
    k_scale=None,
    v_scale=None,
    is_mla=False,
):
    assert num_kv_splits == attn_logits.shape[2]
    (N, H, D), V = q.shape, v_buffer.shape[-1]
    check(k_buffer.shape[1] == v_buffer.shape[1] == page_size and k_buffer.shape[3] == D, "cache")
    check(tuple(attn_logits.shape) == (N, H, num_kv_splits, V + 1) and attn_logits.dtype == torch.float32, "parts")
    check(req_to_token.dtype == torch.int32 and b_seq_len.dtype == torch.int32 and len(b_seq_len) == N, "tables")
    check(tuple(o.shape) == (N, H, V) and tuple(lse.shape) == (N, H) and is_mla and logit_cap == 0, "outputs")
    for n, L in enumerate(b_seq_len.tolist()):
        if not L:
            o[n], lse[n] = torch.nan, -torch.inf
            continue
        numbers = req_to_token[n, : -(-L // page_size)].long()
        k, v = (cache[numbers].flatten(0, 1)[:L].float() for cache in (k_buffer, v_buffer))
        out, natural = attention(q[n : n + 1], k, v, torch.ones(1, L, dtype=torch.bool), sm_scale)
        o[n], lse[n] = out[0].to(o.dtype), natural[0]
