"""Where the attention of a step's newest query tokens falls: over each cached token, the sum of all heads' shares.

On a CPU attention's own kernel keeps them on the way (`attention_and_attended`), where it attends to the cached rows
themselves. Else a kernel reads the keys once more (ops/cpu/attended.h).

Legend: N query tokens of all sequences one after another, H query heads, G key heads, D key dimensions, L rows of a
sequence, W what a cached row has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge import runtime
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_rows import PagedRows, native_reads, native_rows


def newest(view: CacheView, sequence: int) -> int:
    """The step's row of a sequence's last query token."""
    return sum(view.queries[: sequence + 1]) - 1


def attended(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, wanted: Sequence[int]
) -> list[Tensor]:
    """For the last query token of the sequences `wanted`, which see all, [L] in fp32. A row begins with its keys."""
    lengths = [view.lengths[s] for s in wanted]
    last = [newest(view, s) for s in wanted]
    native = kernels() if native_reads(rows) else None
    if native is not None:
        table, held = view.block_table_SB[list(wanted)], view.seq_lens_S[list(wanted)]
        mass = native.attended(q_NHD[last], *native_rows(rows), kv_heads, table, held, view.block_size, scale)
        return [own[:length] for own, length in zip(mass, lengths, strict=True)]
    D = q_NHD.shape[2]
    rows_LW, seen = rows.numbers(view)
    attention_mass = []
    for s, row in zip(wanted, last, strict=True):
        k_GDL = seen.sequence(s, rows_LW)[0][0, :, : kv_heads * D].unflatten(1, (kv_heads, D)).permute(1, 2, 0)
        logits_GJL = (q_NHD[row].view(kv_heads, -1, D).to(k_GDL.dtype) @ k_GDL).float() * scale
        attention_mass.append(logits_GJL.softmax(-1).sum((0, 1)))
    return attention_mass


def attention_and_attended(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, wanted: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]] | None:
    """Attention to rows of keys and, behind them, values, as ops.paged_attention has it, and `attended` of the same;
    None where no kernel does both, or $MLAFORGE_OPS chooses attention's. The view has no window."""
    native = kernels() if native_reads(rows) and q_NHD.dtype == torch.bfloat16 else None
    if native is None or runtime.ops_choice():
        return None
    D = q_NHD.shape[2]
    table = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1, view.block_size)
    out, lse, mass = native.decode_and_watch(
        q_NHD, *native_rows(rows), kv_heads, D, kv_heads * D, *table, 0, scale, view.tree_Tn, wanted
    )
    lengths = [view.lengths[s] for s in wanted]
    return out, lse, [own[:length] for own, length in zip(mass, lengths, strict=True)]


def top_tokens(attention_mass: Sequence[Tensor], first: int, last: int, count: int) -> Tensor:
    """Of each layer's [L] the `count` tokens with most among positions [first, last), int64 [layers, count], rising."""
    some = torch.stack([mass[first:last] for mass in attention_mass])
    return some.topk(min(count, some.shape[1]), dim=1).indices.sort(dim=1).values + first
