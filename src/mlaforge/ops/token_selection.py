"""Token selection of sparse attention: index keys in the paged cache, and the tokens that a step's queries read by
them.

modeling/token_index_mla.py defines the index; here it is computed over blocks for the tokens of a step. The last query
token of a sequence selects for the whole step: the others are drafts, or earlier tokens.

Legend: N query tokens of all sequences, concatenated, S sequences, L slots, H query heads, G KV heads, I elements of an
index key, F features of a key, E of a query, P rotary pairs, K maximum tokens that are read.
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

# Log every message once.
log_once = functools.cache(log)
# Tokens whose index keys are stored together, element by element.
KEY_TILE = 16


def empty_keys(slots: int, width: int, device: torch.device) -> Tensor:
    """Allocate index keys for `slots` tokens, int8 [L / 16, I, 16]. Zeros, because a tile's unwritten tokens are read
    with the others."""
    return torch.zeros(-(-slots // KEY_TILE), width, KEY_TILE, dtype=torch.int8, device=device)


def keys_at(keys: Tensor, slots: Tensor) -> Tensor:
    """Return the index keys of some slots, [..., I]."""
    return keys[slots // KEY_TILE, :, slots % KEY_TILE]


@dataclasses.dataclass(frozen=True)
class TokenIndex:
    """A layer's PairsIndex in fp32, in the layout of the kernels.

    `key` [I, F] and `bias` [I]; `halves` [R], or None: for coded rows, the first R features are rounded to integers
    from -half to half - 1; `pre_rotated`: features and queries are rotated already, because the map commutes with RoPE.
    `query` [G, I, E], `frequency` [I/2]. `sinks` [H] or None. The pattern: tokens that are always read, and `topk`
    tokens in total.
    """

    key: Tensor
    bias: Tensor
    query: Tensor
    frequency: Tensor
    heads: int
    halves: Tensor | None = None
    pre_rotated: bool = False
    sinks: Tensor | None = None
    sink: int = 0
    window: int = 1
    stride: int = 0
    topk: int = 1

    def write(self, keys: Tensor, features_NF: Tensor, rotation_N1P: Tensor, slots_N: Tensor) -> None:
        """Write the index keys of a step's tokens to the cache. rotation_N1P: complex, of their positions."""
        native = kernels() if _native_reads(features_NF, keys) else None
        if native is not None:
            rotation = None if self.pre_rotated else rotation_N1P
            native.write_index(features_NF, self.halves, self.key, self.bias, rotation, self.frequency, keys, slots_N)
            return
        features = features_NF.float()
        if self.halves is not None:
            rounded = features[:, : len(self.halves)].bfloat16().float().round()
            rounded = torch.maximum(torch.minimum(rounded, self.halves - 1), -self.halves)
            features = torch.cat((rounded, features[:, len(self.halves) :]), dim=1)
        index_keys = features @ self.key.T + self.bias
        if not self.pre_rotated:
            index_keys = self._rotate(index_keys[:, None], rotation_N1P)[:, 0]
        index_keys = index_keys.round().clamp(-LARGEST_KEY, LARGEST_KEY).nan_to_num().to(torch.int8)
        keys[slots_N // KEY_TILE, :, slots_N % KEY_TILE] = index_keys

    def choose(
        self,
        keys: Tensor,
        q_NX: Tensor,
        rotation_N1P: Tensor,
        view: CacheView,
        counts: Sequence[int],
        multiple: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Select `counts` tokens per sequence, or all if there are no more: slots and positions, int32 [S, K],
        ascending. q_NX: queries, H·E elements, and possibly more. The view must be without a window. K is a multiple of
        `multiple`."""
        native = kernels() if _native_reads(q_NX, keys) else None
        if native is None and q_NX.device.type == "cuda" and (reason := triton_supports(keys, q_NX, view)) is True:
            return self._triton(keys, q_NX, rotation_N1P, view, counts, multiple)
        if native is None:
            if q_NX.device.type == "cuda":
                log_once(f"token selection: triton is not used: {reason}")
            return self._reference(keys, q_NX, rotation_N1P, view, counts, multiple)
        rotation = None if self.pre_rotated else rotation_N1P
        slots, positions = native.select_tokens(
            q_NX, self.heads, self.query, rotation, self.frequency, self.sinks, keys, view.block_table_SB,
            view.seq_lens_S, view.query_start_S1, view.block_size, counts, self.sink, self.window, self.stride,
            multiple,
        )  # fmt: skip
        return slots, positions

    def _index_queries(self, q_NX: Tensor, rotation_N1P: Tensor, rows: Tensor) -> Tensor:
        """Return index queries [R, H, I] of some rows of a step, in fp32."""
        G, _, E = self.query.shape
        q_RGJE = q_NX[rows, : self.heads * E].float().view(len(rows), G, -1, E)
        index_queries = (q_RGJE @ self.query.mT).flatten(1, 2)
        return index_queries if self.pre_rotated else self._rotate(index_queries, rotation_N1P[rows])

    def _triton(
        self, keys: Tensor, q_NX: Tensor, rotation_N1P: Tensor, view: CacheView, counts: Sequence[int], multiple: int
    ) -> tuple[Tensor, Tensor]:
        reason = triton_supports(keys, q_NX, view)
        if reason is not True:
            raise UserError(f"token selection: triton cannot run here: {reason}")
        from mlaforge.ops import token_selection_triton

        index_queries = self._index_queries(q_NX, rotation_N1P, (view.query_start_S1[1:] - 1).long())
        pattern = (self.sinks, self.sink, self.window, self.stride)
        return token_selection_triton.choose(keys, index_queries, view, counts, multiple, *pattern)

    def _reference(
        self,
        keys: Tensor,
        q_NX: Tensor,
        rotation_N1P: Tensor,
        view: CacheView,
        counts: Sequence[int],
        multiple: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Compute in fp32, sequence by sequence."""
        device, size = q_NX.device, view.block_size
        slots = torch.zeros(len(counts), -(-max(counts) // multiple) * multiple, dtype=torch.int32, device=device)
        positions = torch.zeros_like(slots)
        lasts = (view.query_start_S1[1:] - 1).tolist()
        for s, (count, length, last) in enumerate(zip(counts, view.seq_lens_S.tolist(), lasts, strict=True)):
            at_L = torch.arange(length, device=device)
            slots_L = view.block_table_SB[s, at_L // size].long() * size + at_L % size
            if count < length:
                index_queries = self._index_queries(q_NX, rotation_N1P, torch.tensor([last], device=device)).transpose(
                    0, 1
                )
                token_keys = keys_at(keys, slots_L).float()
                seen = torch.ones(1, 1, length, dtype=torch.bool, device=device)
                score_L = scores(index_queries[None], token_keys[None], seen, self.sinks)[0, 0]
                score_L[: self.sink] = score_L[length - self.window :] = torch.inf
                if self.stride:
                    score_L[:: self.stride] = torch.inf
                # Ties go to the last token.
                at_L = score_L.flip(0).sort(descending=True, stable=True).indices[:count]
                at_L = (length - 1 - at_L).sort().values
            positions[s, : len(at_L)], slots[s, : len(at_L)] = at_L.int(), slots_L[at_L].int()
        return slots, positions

    def _rotate(self, x_NHI: Tensor, rotation_N1P: Tensor) -> Tensor:
        unrotated = self.frequency < 0
        rotation = rotation_N1P[..., self.frequency.clamp_min(0)]
        cos, sin = rotation.real.masked_fill(unrotated, 1.0), rotation.imag.masked_fill(unrotated, 0.0)
        return rotate(x_NHI[:, :, None], cos, sin)[:, :, 0]


def triton_supports(keys: Tensor, q_NX: Tensor, view: CacheView) -> Literal[True] | str:
    """Return True, or the reason why the Triton kernels cannot select by these index keys and queries."""
    # Importing Triton takes a second; a CPU that never runs it should not pay for it.
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
    view: CacheView, slots_SK: Tensor, positions_SK: Tensor, counts: tuple[int, ...], by_sequence: bool
) -> CacheView:
    """Return the view of the selected tokens as if their rows were all that exists: blocks of one row.

    With `by_sequence` the rows of sequence s count from s·K on, so that `positions_SK` is one table of positions.
    """
    first_S, lengths_S = _bounds(counts, slots_SK.shape[1] if by_sequence else 0, slots_SK.device)
    return dataclasses.replace(
        view, block_table_SB=slots_SK, first_S=first_S, seq_lens_S=lengths_S, block_size=1, runs=(),
        positions_SK=positions_SK, counts=counts, lengths=counts,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _bounds(counts: tuple[int, ...], row_stride: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return first rows and ends, int32 [S]. Cached: they repeat from layer to layer and step to step."""
    first = [s * row_stride for s in range(len(counts))]
    last = [start + count for start, count in zip(first, counts, strict=True)]
    return on_device(first, torch.int32, device), on_device(last, torch.int32, device)
