"""Softmax attention over latents: the reference implementation.

Every attention function returns `(out, lse)`, where lse is the natural logarithm of the softmax denominator, in fp32. A
learned sink is then `out * sigmoid(lse - sink)`, for any backend. Copied into checkpoints; requires only torch.

Legend: B batch, H query heads, G KV heads (H is a multiple of G), T query tokens, S cached tokens, D key dimensions, V
value dimensions.
"""

import torch
from torch import Tensor, nn

# Maximum fp32 scores in memory: query rows are processed in chunks.
MAX_SCORES = 1 << 25
# Name of `attend_fused` in transformers' registry of attention functions.
FUSED = "mlaforge_fused"
# Fused kernels require head dimensions that are multiples of this.
WIDTH = 8


def attend(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention with grouped KV heads; query head h reads KV head h // (H / G).

    `mask` is None (causal, as in transformers' SDPA: one query token sees everything, several are aligned with the
    first key), boolean (True = visible) or additive, and broadcasts against [B, 1, T, S]. Returns out [B, H, T, V] in
    the dtype of v, and lse [B, H, T] in fp32. A row that sees nothing gives out 0 and lse -inf.
    """
    B, H, T, D = q_BHTD.shape
    G, V = k_BGSD.shape[1], v_BGSV.shape[-1]
    if mask is None and T > 1:
        S = T
        k_BGSD, v_BGSV = k_BGSD[:, :, :T], v_BGSV[:, :, :T]
        mask = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).tril()[None, None]
    else:
        S = k_BGSD.shape[2]
    k_BGDS = k_BGSD.transpose(-1, -2)
    rows = max(1, MAX_SCORES // max(1, B * H * S))
    outs, lses = [], []
    for start in range(0, T, rows):
        q = q_BHTD[:, :, start : start + rows]
        t = q.shape[2]
        # The heads of a group are contiguous, so they become rows of one matrix product.
        scores = (q.reshape(B, G, -1, D) @ k_BGDS).view(B, H, t, S).float() * scale
        if mask is not None:
            part = mask[..., start : start + rows, :S]
            if part.dtype == torch.bool:
                scores = scores.masked_fill(~part, -torch.inf)
            else:
                scores = scores + part
                # transformers' additive masks contain the dtype's minimum instead of -inf.
                scores = scores.masked_fill(part <= torch.finfo(part.dtype).min, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).to(v_BGSV.dtype)
        outs.append((weights.view(B, G, -1, S) @ v_BGSV).view(B, H, t, V))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def sink_share(lse_BHT: Tensor, sinks_H: Tensor) -> Tensor:
    """Fraction of the softmax that a learned sink leaves to the tokens: sigmoid(lse - sink), [B, H, T] in fp32."""
    return torch.sigmoid(lse_BHT - sinks_H.float()[:, None])


def attend_fused(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, mask: Tensor | None, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """`attend` with a learned sink, by torch's fused attention: [B, H, T, V]. Differentiable; does not materialise the
    scores.

    The sink of head h is one more key with value zero: queries get a coordinate sink_h / scale that only this key has.
    `mask`: None or boolean, as in `attend`.
    """
    B, H, T, D = q_BHTD.shape
    G, V = k_BGSD.shape[1], v_BGSV.shape[-1]
    causal = mask is None and T > 1
    if sinks_H is not None:
        # Infinity times the other keys' zero would be NaN.
        least = max(torch.finfo(dtype).min for dtype in (q_BHTD.dtype, torch.float32))
        coordinate = (sinks_H.float() / scale).clamp_min(least).to(q_BHTD.dtype)
        q_BHTD = torch.cat((q_BHTD, coordinate[:, None, None].expand(B, H, T, 1)), dim=-1)
        sink = torch.zeros(B, G, 1, D + 1, dtype=k_BGSD.dtype, device=k_BGSD.device)
        sink[..., D] = 1
        k_BGSD = torch.cat((sink, nn.functional.pad(k_BGSD, (0, 1))), dim=2)
        v_BGSV = nn.functional.pad(v_BGSV, (0, 0, 1, 0))
        if causal:
            # A query before the others, which sees only the sink, so that no mask tensor keeps flash attention away.
            q_BHTD = nn.functional.pad(q_BHTD, (0, 0, 1, 0))
        if mask is not None:
            assert mask.dtype == torch.bool
            mask = nn.functional.pad(mask, (1, 0), value=True)
    # Pad queries, keys and values to one width: otherwise torch on a CPU takes a path that is 4.5 times slower.
    width = -(-max(k_BGSD.shape[-1], V) // WIDTH) * WIDTH
    q, k, v = (nn.functional.pad(t, (0, width - t.shape[-1])) for t in (q_BHTD, k_BGSD, v_BGSV))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=H != G
    )
    return out[:, :, -T:, :V]
