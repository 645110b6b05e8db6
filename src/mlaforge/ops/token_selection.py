"""Which cached tokens a step's queries read in sparse attention: index keys in the paged cache, and the choice by them.

modeling/token_index_mla.py says what an index is and what is computed; here it is computed over blocks, for the tokens
of a step. The last query token of a sequence chooses for all of its step: the others are drafts, or before them.

Legend: N query tokens of all sequences one after another, S sequences, L slots, H query heads, G KV heads, I numbers of
an index key, F features of a key, E of a query, P rotary pairs, K tokens that are read at the most.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from mlaforge.modeling.rope_mla import rotate
from mlaforge.modeling.token_index_mla import LARGEST_KEY, scores
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.native import kernels
from mlaforge.runtime import UserError, log, on_device, triton_interpreted

# Every line once.
log_once = functools.cache(log)
# Tokens whose index keys lie together, number by number.
TOGETHER = 16


def empty_keys(slots: int, width: int, device: torch.device) -> Tensor:
    """Room for the index keys of so many tokens, int8 [L / 16, I, 16]; zeros, because what no token has written is read
    beside what others have."""
    return torch.zeros(-(-slots // TOGETHER), width, TOGETHER, dtype=torch.int8, device=device)


def keys_at(keys: Tensor, slots: Tensor) -> Tensor:
    """[..., I]: those of some slots."""
    return keys[slots // TOGETHER, :, slots % TOGETHER]


@dataclasses.dataclass(frozen=True)
class TokenIndex:
    """A layer's PairsIndex in fp32, as its kernels read it.

    `key` [I, F] and `bias` [I]; `halves` [R], or None: of coded rows, whose first R features are read as whole numbers
    from -half to half - 1; `turned`: features and queries were turned already, as the map commutes with RoPE. `query`
    [G, I, E], `frequency` [I/2]. `sinks` [H] or None. The pattern: tokens that are read in any case, and `topk` in all.
    """

    key: Tensor
    bias: Tensor
    query: Tensor
    frequency: Tensor
    heads: int
    halves: Tensor | None = None
    turned: bool = False
    sinks: Tensor | None = None
    sink: int = 0
    window: int = 1
    stride: int = 0
    topk: int = 1

    def write(self, keys: Tensor, features_NF: Tensor, rotation_N1P: Tensor, slots_N: Tensor) -> None:
        """Puts the index keys of a step's tokens into the cache. rotation_N1P: complex, of their positions."""
        native = kernels() if _native_reads(features_NF, keys) else None
        if native is not None:
            turn = None if self.turned else rotation_N1P
            native.write_index(features_NF, self.halves, self.key, self.bias, turn, self.frequency, keys, slots_N)
            return
        features = features_NF.float()
        if self.halves is not None:
            whole = features[:, : len(self.halves)].bfloat16().float().round()
            whole = torch.maximum(torch.minimum(whole, self.halves - 1), -self.halves)
            features = torch.cat((whole, features[:, len(self.halves) :]), dim=1)
        made = features @ self.key.T + self.bias
        if not self.turned:
            made = self._rotate(made[:, None], rotation_N1P)[:, 0]
        made = made.round().clamp(-LARGEST_KEY, LARGEST_KEY).nan_to_num().to(torch.int8)
        keys[slots_N // TOGETHER, :, slots_N % TOGETHER] = made

    def choose(
        self, keys: Tensor, q_NX: Tensor, rotation_N1P: Tensor, view: CacheView, counts: Sequence[int], apart: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Slots and positions, int32 [S, K], of as many tokens as `counts` says, or all where a sequence has no more;
        in rising order. q_NX: queries, H·E numbers and what else lies behind them. The view sees all. K is a multiple
        of `apart`."""
        native = kernels() if _native_reads(q_NX, keys) else None
        if native is None and q_NX.device.type == "cuda" and (reason := triton_supports(keys, q_NX, view)) is True:
            return self._triton(keys, q_NX, rotation_N1P, view, counts, apart)
        if native is None:
            if q_NX.device.type == "cuda":
                log_once(f"token selection: not triton: {reason}")
            return self._reference(keys, q_NX, rotation_N1P, view, counts, apart)
        turn = None if self.turned else rotation_N1P
        slots, positions = native.select_tokens(
            q_NX, self.heads, self.query, turn, self.frequency, self.sinks, keys, view.block_table_SB,
            view.seq_lens_S, view.query_start_S1, view.block_size, counts, self.sink, self.window, self.stride, apart,
        )  # fmt: skip
        return slots, positions

    def _asked(self, q_NX: Tensor, rotation_N1P: Tensor, rows: Tensor) -> Tensor:
        """Index queries [R, H, I] of some rows of a step, fp32."""
        G, _, E = self.query.shape
        q_RGJE = q_NX[rows, : self.heads * E].float().view(len(rows), G, -1, E)
        asked = (q_RGJE @ self.query.mT).flatten(1, 2)
        return asked if self.turned else self._rotate(asked, rotation_N1P[rows])

    def _triton(
        self, keys: Tensor, q_NX: Tensor, rotation_N1P: Tensor, view: CacheView, counts: Sequence[int], apart: int
    ) -> tuple[Tensor, Tensor]:
        reason = triton_supports(keys, q_NX, view)
        if reason is not True:
            raise UserError(f"token selection: triton cannot run here: {reason}")
        from mlaforge.ops import token_selection_triton

        asked = self._asked(q_NX, rotation_N1P, (view.query_start_S1[1:] - 1).long())
        pattern = (self.sinks, self.sink, self.window, self.stride)
        return token_selection_triton.choose(keys, asked, view, counts, apart, *pattern)

    def _reference(
        self, keys: Tensor, q_NX: Tensor, rotation_N1P: Tensor, view: CacheView, counts: Sequence[int], apart: int = 1
    ) -> tuple[Tensor, Tensor]:
        """In fp32, sequence by sequence."""
        device, size = q_NX.device, view.block_size
        slots = torch.zeros(len(counts), -(-max(counts) // apart) * apart, dtype=torch.int32, device=device)
        positions = torch.zeros_like(slots)
        lasts = (view.query_start_S1[1:] - 1).tolist()
        for s, (count, length, last) in enumerate(zip(counts, view.seq_lens_S.tolist(), lasts, strict=True)):
            at_L = torch.arange(length, device=device)
            slots_L = view.block_table_SB[s, at_L // size].long() * size + at_L % size
            if count < length:
                asked = self._asked(q_NX, rotation_N1P, torch.tensor([last], device=device)).transpose(0, 1)
                own = keys_at(keys, slots_L).float()
                seen = torch.ones(1, 1, length, dtype=torch.bool, device=device)
                score_L = scores(asked[None], own[None], seen, self.sinks)[0, 0]
                score_L[: self.sink] = score_L[length - self.window :] = torch.inf
                if self.stride:
                    score_L[:: self.stride] = torch.inf
                # Of equal ones the last.
                at_L = score_L.flip(0).sort(descending=True, stable=True).indices[:count]
                at_L = (length - 1 - at_L).sort().values
            positions[s, : len(at_L)], slots[s, : len(at_L)] = at_L.int(), slots_L[at_L].int()
        return slots, positions

    def _rotate(self, x_NHI: Tensor, rotation_N1P: Tensor) -> Tensor:
        still = self.frequency < 0
        turn = rotation_N1P[..., self.frequency.clamp_min(0)]
        cos, sin = turn.real.masked_fill(still, 1.0), turn.imag.masked_fill(still, 0.0)
        return rotate(x_NHI[:, :, None], cos, sin)[:, :, 0]


def triton_supports(keys: Tensor, q_NX: Tensor, view: CacheView) -> Literal[True] | str:
    """True, or the reason why the Triton kernels cannot choose by these index keys and queries."""
    # Loading Triton takes a second, which a CPU that never runs it should not pay.
    if q_NX.device.type != "cuda" and not triton_interpreted():
        return f"it needs CUDA tensors, queries are on {q_NX.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    from mlaforge.ops import token_selection_triton

    return token_selection_triton.supports(keys, q_NX, view)


def _native_reads(x_NX: Tensor, keys: Tensor) -> bool:
    on_cpu = x_NX.device.type == "cpu" and x_NX.dtype == torch.bfloat16
    return on_cpu and x_NX.stride(1) == 1 and keys.is_contiguous()


def narrowed(
    view: CacheView, slots_SK: Tensor, positions_SK: Tensor, counts: tuple[int, ...], apart: bool
) -> CacheView:
    """The view of the tokens chosen, as if their rows were all that there is: blocks of one row.

    With `apart` the rows of sequence s count from s·K on, so that `positions_SK` is one table of where they stand.
    """
    first_S, lengths_S = _bounds(counts, slots_SK.shape[1] if apart else 0, slots_SK.device)
    return dataclasses.replace(
        view, block_table_SB=slots_SK, first_S=first_S, seq_lens_S=lengths_S, block_size=1, runs=(),
        positions_SK=positions_SK, counts=counts, lengths=counts,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _bounds(counts: tuple[int, ...], apart: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [S]: first rows, and those behind the last; the same from layer to layer and from step to step."""
    first = [place * apart for place in range(len(counts))]
    last = [begin + count for begin, count in zip(first, counts, strict=True)]
    return on_device(first, torch.int32, device), on_device(last, torch.int32, device)
