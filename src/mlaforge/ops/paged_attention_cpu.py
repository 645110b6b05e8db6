"""Paged attention on a CPU: a sequence's consecutive slots are read where they lie, nothing is gathered.

Torch's flash kernel takes any strides and returns the lse, so a stretch of the cache is a view of it, the query heads
of one key head become rows of one product, and stretches merge by their lse. Only where many short sequences decode
together are their rows copied side by side: a call of the kernel costs more than the copy.

Legend: N query tokens, S sequences, T query tokens of one sequence, L slots or tokens of a stretch, H query heads,
G key heads, J = H / G, D key and V value dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView

# Cached bytes up to which decoding sequences are copied side by side (measured: LOG.md).
GATHER_BYTES = 2 << 20
# A stretch of at least this many tokens is cut in two, so that an odd number of key heads keeps two cores busy.
SPLIT_TOKENS = 1024
# Query rows up to which the heads of a group fold into one product; beyond, every head is a task of its own.
FOLD_ROWS = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Part = tuple[Tensor, Tensor]


def merge(parts: list[Part]) -> Part:
    """Attention over several sets of keys from attention over each: out [..., V] and lse [...] of every part."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts])
    total = torch.logsumexp(lse, dim=0)
    share = torch.exp(lse - torch.where(total.isinf(), 0.0, total))
    out = sum(w[..., None] * part[0] for w, part in zip(share, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), total


def paged_attention_runs(q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float) -> Part:
    """As ops.paged_attention; needs the view's `queries` and `runs`."""
    N, H, D = q_NHD.shape
    G, V = k_LGD.shape[1], v_LGV.shape[-1]
    if V != D:
        # The kernel wants one width. In MLA the value is a part of the key's own row.
        assert v_LGV.data_ptr() == k_LGD.data_ptr() and v_LGV.stride() == k_LGD.stride()
        v_LGV = k_LGD
    q_NGJD = q_NHD.view(N, G, H // G, D)
    if view.max_query == 1 and len(view.queries) > 1 and _fits(k_LGD, v_LGV, view):
        out, lse = _side_by_side(q_NGJD, k_LGD, v_LGV, view, scale)
    else:
        outs, lses, row = [], [], 0
        for queries, runs in zip(view.queries, view.runs, strict=True):
            q = q_NGJD[row : row + queries]
            row += queries
            length = sum(length for _, length in runs)
            visible = length - queries if view.window is None else min(length - queries, view.window - 1)
            if queries == 1:
                part = _decode(q[0], k_LGD, v_LGV, _tail(runs, visible + 1), scale)
            elif view.window is None:
                part = _chunk(q, k_LGD, v_LGV, runs, scale)
            else:
                part = _windowed_chunk(q, k_LGD, v_LGV, _tail(runs, visible + queries), view.window, scale)
            outs.append(part[0])
            lses.append(part[1])
        out, lse = torch.cat(outs), torch.cat(lses)
    return out.reshape(N, H, D)[..., :V], lse.reshape(N, H)


def _tail(runs: tuple[tuple[int, int], ...], tokens: int) -> tuple[tuple[int, int], ...]:
    """The stretches that hold the last `tokens` tokens."""
    kept: list[tuple[int, int]] = []
    for start, length in reversed(runs):
        take = min(length, tokens)
        kept.append((start + length - take, take))
        tokens -= take
        if not tokens:
            break
    return tuple(reversed(kept))


def _decode(q_GJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: tuple[tuple[int, int], ...], scale: float) -> Part:
    """One query token: [1, G, J, D] and [1, G, J]."""
    G = len(q_GJD)
    parts = []
    for start, length in runs:
        cuts = 2 if length >= SPLIT_TOKENS else 1
        even = length // cuts
        q = q_GJD.expand(cuts, *q_GJD.shape)
        out, lse = _flash(q, _cut(k_LGD, start, cuts, even), _cut(v_LGV, start, cuts, even), 0.0, False, scale=scale)
        parts += [(out[i : i + 1], lse[i : i + 1]) for i in range(cuts)]
        if length > cuts * even:
            rest = slice(start + cuts * even, start + length)
            k, v = k_LGD[rest].transpose(0, 1)[None], v_LGV[rest].transpose(0, 1)[None]
            parts.append(_flash(q_GJD[None], k, v, 0.0, False, scale=scale))
    assert k_LGD.shape[1] == G
    return merge(parts)


def _cut(rows_LGD: Tensor, start: int, cuts: int, length: int) -> Tensor:
    """`cuts` neighbouring stretches of `length` slots as a batch: [cuts, G, length, D], nothing copied."""
    slot, head, unit = rows_LGD.stride()
    _, G, D = rows_LGD.shape
    size, strides = (cuts, G, length, D), (length * slot, head, slot, unit)
    return rows_LGD.as_strided(size, strides, rows_LGD.storage_offset() + start * slot)


def _chunk(q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: tuple[tuple[int, int], ...], scale: float) -> Part:
    """T query tokens that stand last: all of them see what came before, and each other causally."""
    T, _, J, _ = q_TGJD.shape
    before = sum(length for _, length in runs) - T
    past, own = _head(runs, before) if before else (), _tail(runs, T)
    q_GJTD = q_TGJD.permute(1, 2, 0, 3)
    parts = []
    for start, length in past:
        k, v = (rows[start : start + length].transpose(0, 1)[:, None] for rows in (k_LGD, v_LGV))
        if J * T <= FOLD_ROWS:
            folded = q_GJTD.reshape(len(q_GJTD), 1, J * T, -1)
            out, lse = _flash(folded, k, v, 0.0, False, scale=scale)
            parts.append((out.view(q_GJTD.shape), lse.view(q_GJTD.shape[:3])))
        else:
            parts.append(_flash(q_GJTD, k.expand(-1, J, -1, -1), v.expand(-1, J, -1, -1), 0.0, False, scale=scale))
    k, v = (_gather(rows, own).transpose(0, 1)[:, None].expand(-1, J, -1, -1) for rows in (k_LGD, v_LGV))
    parts.append(_flash(q_GJTD, k, v, 0.0, True, scale=scale))
    out, lse = merge(parts)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _windowed_chunk(
    q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: tuple[tuple[int, int], ...], window: int, scale: float
) -> Part:
    """As `_chunk` where a token sees only the last `window`: a band, so the kernel is given a mask."""
    T, _, J, _ = q_TGJD.shape
    L = sum(length for _, length in runs)
    distance = torch.arange(L - T, L)[:, None] - torch.arange(L)
    mask = torch.zeros(T, L, dtype=q_TGJD.dtype).masked_fill_((distance < 0) | (distance >= window), -torch.inf)
    k, v = (_gather(rows, runs).transpose(0, 1)[:, None].expand(-1, J, -1, -1) for rows in (k_LGD, v_LGV))
    out, lse = _flash(q_TGJD.permute(1, 2, 0, 3), k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _head(runs: tuple[tuple[int, int], ...], tokens: int) -> tuple[tuple[int, int], ...]:
    """The stretches that hold the first `tokens` tokens."""
    kept: list[tuple[int, int]] = []
    for start, length in runs:
        take = min(length, tokens)
        kept.append((start, take))
        tokens -= take
        if not tokens:
            break
    return tuple(kept)


def _gather(rows_LGD: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    """The rows of all stretches one after another; a view where there is one stretch."""
    pieces = [rows_LGD[start : start + length] for start, length in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _fits(k_LGD: Tensor, v_LGV: Tensor, view: CacheView) -> bool:
    numbers = k_LGD.shape[1] * (k_LGD.shape[2] + v_LGV.shape[2])
    longest = view.max_seq_len if view.window is None else min(view.max_seq_len, view.window + view.block_size)
    return len(view.queries) * longest * numbers * k_LGD.element_size() <= GATHER_BYTES


def _side_by_side(q_SGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float) -> Part:
    """One query token of each of S short sequences: [S, G, J, D] and [S, G, J]."""
    slots_SL, mask_S11L = view.dense(q_SGJD.dtype)
    k = k_LGD[slots_SL].transpose(1, 2)
    v = k if v_LGV.data_ptr() == k_LGD.data_ptr() else v_LGV[slots_SL].transpose(1, 2)
    out: Tensor
    out, lse = _flash(q_SGJD, k, v, 0.0, False, attn_mask=mask_S11L, scale=scale)
    return out, lse
