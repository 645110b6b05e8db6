"""Paged attention on a CPU that reads runs of consecutive slots in place.

Torch's flash kernel takes any strides and returns the lse: a run is a strided view of the cache, the query heads of one
KV head become rows of one product, and runs are merged by their lse. Only many short decoding sequences are copied next
to each other: a kernel call costs more than the copy.

Legend: N query tokens, S sequences, T query tokens of one sequence, L slots or tokens of a run, H query heads, G KV
heads, J = H / G, D key and V value dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.host_view import host_view

# Maximum cached bytes for which decoding sequences are copied (measured: docs/notes/cpu-kernels.md).
GATHER_BYTES = 2 << 20
# Runs of at least this many tokens are split in two, so that an odd number of KV heads occupies two cores.
SPLIT_TOKENS = 1024
# Maximum query rows for which the heads of a group are folded into one product; beyond, every head is a task.
FOLD_ROWS = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Part = tuple[Tensor, Tensor]
Runs = tuple[tuple[int, int], ...]


def merge(parts: list[Part]) -> Part:
    """Merge attention over several sets of keys by lse. Each part is out [..., V] and lse [...]."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts])
    total = torch.logsumexp(lse, dim=0)
    share = torch.exp(lse - torch.where(total.isinf(), 0.0, total))
    out = sum(w[..., None] * part[0] for w, part in zip(share, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), total


def paged_attention_runs(q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float) -> Part:
    """As ops.paged_attention; requires the view's `queries` and `runs`."""
    N, H, D = q_NHD.shape
    G, V = k_LGD.shape[1], v_LGV.shape[-1]
    if V != D:
        # The kernel requires equal widths. In MLA the value is a part of the key's row.
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
    """Attention of one sequence's query tokens: out [T, G, J, D] and lse [T, G, J]."""
    T, tree = len(q_TGJD), view.tree_Tn is not None
    if view.window is not None:
        runs = _tail(runs, min(sum(length for _, length in runs), view.window - 1 + view.step_rows(T)))
    if T == 1 and not tree:
        return _decode(q_TGJD, k_LGD, v_LGV, runs, scale)
    if view.window is None:
        return _chunk(q_TGJD, k_LGD, v_LGV, runs, view, scale)
    return _windowed_chunk(q_TGJD, k_LGD, v_LGV, runs, view, scale)


def _tail(runs: Runs, tokens: int) -> Runs:
    """Return the runs of the last `tokens` tokens."""
    tail: list[tuple[int, int]] = []
    for start, length in reversed(runs):
        take = min(length, tokens)
        tail.append((start + length - take, take))
        tokens -= take
        if not tokens:
            break
    return tuple(reversed(tail))


def _decode(q_1GJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, scale: float) -> Part:
    """Attention of one query token: out [1, G, J, D] and lse [1, G, J]."""
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
    """Return `cuts` adjacent runs of `length` slots as a batch [cuts, G, length, D], without a copy."""
    slot, head, unit = rows_LGD.stride()
    _, G, D = rows_LGD.shape
    size, strides = (cuts, G, length, D), (length * slot, head, slot, unit)
    return rows_LGD.as_strided(size, strides, rows_LGD.storage_offset() + start * slot)


def _chunk(q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, view: CacheView, scale: float) -> Part:
    """Attention of the last T tokens of a sequence: all see the tokens before, and each other causally or as a tree."""
    T, _, J, _ = q_TGJD.shape
    last = view.step_rows(T)
    before = sum(length for _, length in runs) - last
    past_runs, step_runs = _head(runs, before) if before else (), _tail(runs, last)
    q_GJTD = q_TGJD.permute(1, 2, 0, 3)
    parts = []
    for start, length in past_runs:
        k, v = (rows[start : start + length].transpose(0, 1)[:, None] for rows in (k_LGD, v_LGV))
        if J * T <= FOLD_ROWS:
            folded = q_GJTD.reshape(len(q_GJTD), 1, J * T, -1)
            out, lse = _flash(folded, k, v, 0.0, False, scale=scale)
            parts.append((out.view(q_GJTD.shape), lse.view(q_GJTD.shape[:3])))
        else:
            parts.append(_flash(q_GJTD, k.expand(-1, J, -1, -1), v.expand(-1, J, -1, -1), 0.0, False, scale=scale))
    k, v = (_gather(rows, step_runs).transpose(0, 1)[:, None].expand(-1, J, -1, -1) for rows in (k_LGD, v_LGV))
    if view.tree_Tn is None:
        parts.append(_flash(q_GJTD, k, v, 0.0, True, scale=scale))
    else:
        mask = _additive(view.visible(T, last), q_TGJD.dtype)
        parts.append(_flash(q_GJTD, k, v, 0.0, False, attn_mask=mask, scale=scale))
    out, lse = merge(parts)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _additive(visible_TL: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: -inf for invisible positions."""
    return torch.zeros_like(visible_TL, dtype=dtype).masked_fill_(~visible_TL, -torch.inf)


def _windowed_chunk(q_TGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, runs: Runs, view: CacheView, scale: float) -> Part:
    """As `_chunk` with a sliding window: a band, so the kernel needs a mask."""
    T, _, J, _ = q_TGJD.shape
    mask = _additive(view.visible(T, sum(length for _, length in runs)), q_TGJD.dtype)
    k, v = (_gather(rows, runs).transpose(0, 1)[:, None].expand(-1, J, -1, -1) for rows in (k_LGD, v_LGV))
    out, lse = _flash(q_TGJD.permute(1, 2, 0, 3), k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _head(runs: Runs, tokens: int) -> Runs:
    """Return the runs of the first `tokens` tokens."""
    head: list[tuple[int, int]] = []
    for start, length in runs:
        take = min(length, tokens)
        head.append((start, take))
        tokens -= take
        if not tokens:
            break
    return tuple(head)


def _gather(rows_LGD: Tensor, runs: Runs) -> Tensor:
    """Concatenate the rows of all runs; a view if there is one run."""
    pieces = [rows_LGD[start : start + length] for start, length in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _fits(k_LGD: Tensor, v_LGV: Tensor, view: CacheView) -> bool:
    numbers = k_LGD.shape[1] * (k_LGD.shape[2] + v_LGV.shape[2])
    longest = view.max_seq_len if view.window is None else min(view.max_seq_len, view.window + view.block_size)
    return len(view.queries) * longest * numbers * k_LGD.element_size() <= GATHER_BYTES


def _side_by_side(q_SGJD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float) -> Part:
    """Attention of one query token of each of S short sequences: out [S, G, J, D] and lse [S, G, J]."""
    slots_SL, mask_S11L = host_view(view).dense(q_SGJD.dtype)
    k, v = (rows.transpose(1, 2) for rows in _rows(k_LGD, v_LGV, slots_SL))
    out: Tensor
    out, lse = _flash(q_SGJD, k, v, 0.0, False, attn_mask=mask_S11L, scale=scale)
    return out, lse


def _rows(k_LGD: Tensor, v_LGV: Tensor, slots_SL: Tensor) -> list[Tensor]:
    """Return keys [S, L, G, D] and values of these slots. If both are parts of one row, complete rows are copied, which
    takes a third of the time of two copies."""
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
