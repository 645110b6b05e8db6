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

# Cached bytes up to which decoding sequences are copied side by side (measured: docs/notes/cpu-kernels.md).
GATHER_BYTES = 2 << 20
# A stretch of at least this many tokens is cut in two, so that an odd number of key heads keeps two cores busy.
SPLIT_TOKENS = 1024
# Query rows up to which the heads of a group fold into one product; beyond, every head is a task of its own.
FOLD_ROWS = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Part = tuple[Tensor, Tensor]
Runs = tuple[tuple[int, int], ...]


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
        parts = [
            _sequence(q, k_LGD, v_LGV, runs, view, scale)
            for q, runs in zip(q_NGJD.split(view.queries), view.runs, strict=True)
        ]
        if len(parts) == 1:
            out, lse = parts[0]
        else:
            out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    return out.reshape(N, H, D)[..., :V], lse.reshape(N, H)


def _sequence(q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, view: CacheView, scale: float) -> Part:
    """One sequence's query tokens: [T, G, J, D] and [T, G, J]."""
    T, tree = len(q_TGJD), view.tree_Tn is not None
    if view.window is not None:
        runs = _tail(runs, min(sum(length for _, length in runs), view.window - 1 + view.own(T)))
    if T == 1 and not tree:
        return _decode(q_TGJD, k_LGD, v_LGV, runs, scale)
    if view.window is None:
        return _chunk(q_TGJD, k_LGD, v_LGV, runs, view, scale)
    return _windowed_chunk(q_TGJD, k_LGD, v_LGV, runs, view, scale)


def _tail(runs: Runs, tokens: int) -> Runs:
    """The stretches that hold the last `tokens` tokens."""
    tail: list[tuple[int, int]] = []
    for start, length in reversed(runs):
        take = min(length, tokens)
        tail.append((start + length - take, take))
        tokens -= take
        if not tokens:
            break
    return tuple(reversed(tail))


def _decode(q_1GJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, scale: float) -> Part:
    """One query token: [1, G, J, D] and [1, G, J]."""
    parts = []
    for start, length in runs:
        cuts = 2 if length >= SPLIT_TOKENS else 1
        even = length // cuts
        q = q_1GJD if cuts == 1 else q_1GJD.expand(cuts, -1, -1, -1)
        k, v = _cut(k_LGD, start, cuts, even), _cut(v_LGV, start, cuts, even)
        out, lse = _flash(q, k, v, 0.0, False, scale=scale)
        parts += [(out, lse)] if cuts == 1 else list(zip(out.split(1), lse.split(1), strict=True))
        if length > cuts * even:
            at, rest = start + cuts * even, length - cuts * even
            k, v = _cut(k_LGD, at, 1, rest), _cut(v_LGV, at, 1, rest)
            parts.append(_flash(q_1GJD, k, v, 0.0, False, scale=scale))
    return merge(parts)


def _cut(rows_LGD: Tensor, start: int, cuts: int, length: int) -> Tensor:
    """`cuts` neighbouring stretches of `length` slots as a batch: [cuts, G, length, D], nothing copied."""
    slot, head, unit = rows_LGD.stride()
    _, G, D = rows_LGD.shape
    size, strides = (cuts, G, length, D), (length * slot, head, slot, unit)
    return rows_LGD.as_strided(size, strides, rows_LGD.storage_offset() + start * slot)


def _chunk(q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, view: CacheView, scale: float) -> Part:
    """T query tokens that stand last: all of them see what came before, and each other causally or as a tree."""
    T, _, J, _ = q_TGJD.shape
    last = view.own(T)
    before = sum(length for _, length in runs) - last
    past, own = _head(runs, before) if before else (), _tail(runs, last)
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
    if view.tree_Tn is None:
        parts.append(_flash(q_GJTD, k, v, 0.0, True, scale=scale))
    else:
        mask = _additive(view.visible(T, last), q_TGJD.dtype)
        parts.append(_flash(q_GJTD, k, v, 0.0, False, attn_mask=mask, scale=scale))
    out, lse = merge(parts)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _additive(visible_TL: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: -inf where nothing is to be seen."""
    return torch.zeros_like(visible_TL, dtype=dtype).masked_fill_(~visible_TL, -torch.inf)


def _windowed_chunk(q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, view: CacheView, scale: float) -> Part:
    """As `_chunk` where a token sees only a window: a band, so the kernel is given a mask."""
    T, _, J, _ = q_TGJD.shape
    mask = _additive(view.visible(T, sum(length for _, length in runs)), q_TGJD.dtype)
    k, v = (_gather(rows, runs).transpose(0, 1)[:, None].expand(-1, J, -1, -1) for rows in (k_LGD, v_LGV))
    out, lse = _flash(q_TGJD.permute(1, 2, 0, 3), k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _head(runs: Runs, tokens: int) -> Runs:
    """The stretches that hold the first `tokens` tokens."""
    head: list[tuple[int, int]] = []
    for start, length in runs:
        take = min(length, tokens)
        head.append((start, take))
        tokens -= take
        if not tokens:
            break
    return tuple(head)


def _gather(rows_LGD: Tensor, runs: Runs) -> Tensor:
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
    k, v = (rows.transpose(1, 2) for rows in _rows(k_LGD, v_LGV, slots_SL))
    out: Tensor
    out, lse = _flash(q_SGJD, k, v, 0.0, False, attn_mask=mask_S11L, scale=scale)
    return out, lse


def _rows(k_LGD: Tensor, v_LGV: Tensor, slots_SL: Tensor) -> list[Tensor]:
    """Keys [S, L, G, D] and values of these slots: whole rows of the cache are copied where both are parts of one row,
    which takes a third of the time of copying them apart."""
    width, storage = k_LGD.stride(0), k_LGD.untyped_storage().data_ptr()
    parts = (k_LGD, v_LGV)
    if any(
        part.stride(0) != width or part.untyped_storage().data_ptr() != storage or part.storage_offset() >= width
        for part in parts
    ):
        return [part[slots_SL] for part in parts]
    rows = k_LGD.as_strided((len(k_LGD), width), (width, 1), 0).index_select(0, slots_SL.flatten())
    return [
        rows.as_strided(
            (*slots_SL.shape, *part.shape[1:]), (slots_SL.shape[1] * width, *part.stride()), part.storage_offset()
        )
        for part in parts
    ]
