"""Token selection of sparse attention: index keys in the paged cache, and the tokens that a step's queries read by
them.

modeling/token_index_mla.py defines the index; here it is computed over blocks for the tokens of a step. The last query
token of a sequence selects; where several are generated or drafted, the view has each as a sequence
(engine/cache/view.py).

Legend: N query tokens of all sequences, concatenated, S sequences, L slots, H query heads, G KV heads, I elements of an
index key, F features of a key, E of a query, P rotary pairs, K maximum tokens that are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge.modeling.rope_mla import rotate
from mlaforge.modeling.token_index_mla import LARGEST_KEY, scores
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op
from mlaforge.ops.native import kernel, supports_bfloat16

# Tokens whose index keys are stored together, on a CPU element by element.
KEY_TILE = 16


def empty_keys(slots: int, width: int, device: torch.device) -> Tensor:
    """Allocate index keys for `slots` tokens, int8 [L / 16, I, 16]. Zeros, because a tile's unwritten tokens are read
    with the others. On a GPU the numbers of a token are side by side, as its products read them."""
    tiles = -(-slots // KEY_TILE)
    if device.type == "cuda":
        return torch.zeros(tiles, KEY_TILE, width, dtype=torch.int8, device=device).transpose(1, 2)
    return torch.zeros(tiles, width, KEY_TILE, dtype=torch.int8, device=device)


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

    def write(
        self,
        keys: Tensor,
        features_NF: Tensor,
        rotation_N1P: Tensor,
        slots_N: Tensor,
        implementation: str | None = None,
    ) -> None:
        """Write the index keys of a step's tokens to the cache. rotation_N1P: complex, of their positions."""
        WRITE_INDEX(features_NF, self, rotation_N1P, keys, slots_N, implementation=implementation)

    def choose(
        self, keys: Tensor, q_NX: Tensor, rotation_N1P: Tensor, view: CacheView, counts: Sequence[int],
        multiple: int = 1, implementation: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Select `counts` tokens per sequence, or all that its last query token sees if there are no more: slots and
        positions, int32 [S, K], ascending. q_NX: queries, H·E elements, and possibly more. The view must be without a
        window. K is a multiple of `multiple`."""
        inputs = (q_NX, self, rotation_N1P, keys, view, counts, multiple)
        slots, positions = SELECT_TOKENS(*inputs, implementation=implementation)
        return slots, positions

    def queries(self, q_NX: Tensor, rotation_N1P: Tensor, rows: Tensor) -> Tensor:
        """Return index queries [R, H, I] of some rows of a step, in fp32."""
        G, _, E = self.query.shape
        q_RGJE = q_NX[rows, : self.heads * E].float().view(len(rows), G, -1, E)
        index_queries = (q_RGJE @ self.query.mT).flatten(1, 2)
        return index_queries if self.pre_rotated else self.rotate(index_queries, rotation_N1P[rows])

    def rotate(self, x_NHI: Tensor, rotation_N1P: Tensor) -> Tensor:
        """Rotate index keys or queries; pairs without a frequency stay."""
        unrotated = self.frequency < 0
        rotation = rotation_N1P[..., self.frequency.clamp_min(0)]
        cos, sin = rotation.real.masked_fill(unrotated, 1.0), rotation.imag.masked_fill(unrotated, 0.0)
        return rotate(x_NHI[:, :, None], cos, sin)[:, :, 0]


def write_reference(
    features_NF: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, slots_N: Tensor,
    merge: Callable[[Tensor], Tensor] | None = None,
) -> None:  # fmt: skip
    """As TokenIndex.write. merge: makes keys from those that come of a rank's features."""
    features = features_NF.float()
    if index.halves is not None:
        rounded = features[:, : len(index.halves)].bfloat16().float().round()
        rounded = torch.maximum(torch.minimum(rounded, index.halves - 1), -index.halves)
        features = torch.cat((rounded, features[:, len(index.halves) :]), dim=1)
    index_keys = features @ index.key.T + index.bias
    if merge is not None:
        index_keys = merge(index_keys)
    if not index.pre_rotated:
        index_keys = index.rotate(index_keys[:, None], rotation_N1P)[:, 0]
    index_keys = index_keys.round().clamp(-LARGEST_KEY, LARGEST_KEY).nan_to_num().to(torch.int8)
    keys[slots_N // KEY_TILE, :, slots_N % KEY_TILE] = index_keys


def _write_native(features_NF: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, slots_N: Tensor) -> None:
    rotation = None if index.pre_rotated else rotation_N1P
    kernel("write_index")(features_NF, index.halves, index.key, index.bias, rotation, index.frequency, keys, slots_N)


def _written_keys(inputs: Sequence[Any], outputs: None) -> Sequence[Tensor]:
    *_, keys, slots_N = inputs
    return (keys_at(keys, slots_N).float(),)


def token_scores(
    q_NX: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, view: CacheView, sequence: int, slots_L: Tensor
) -> Tensor:
    """Return the score of each token of a sequence for its last query token, fp32 [L]; infinite where the pattern
    always reads it. slots_L: the slots of all tokens that it sees."""
    last = view.query_start_S1[sequence + 1 : sequence + 2].long() - 1
    index_queries = index.queries(q_NX, rotation_N1P, last).transpose(0, 1)
    L = len(slots_L)
    seen = torch.ones(1, 1, L, dtype=torch.bool, device=q_NX.device)
    score_L = scores(index_queries[None], keys_at(keys, slots_L).float()[None], seen, index.sinks)[0, 0]
    score_L[: index.sink] = score_L[max(0, L - index.window) :] = torch.inf
    if index.stride:
        score_L[:: index.stride] = torch.inf
    return score_L


def visible_slots(view: CacheView, sequence: int) -> Tensor:
    """Return the slots of the tokens that a sequence's last query token sees, in the order of their positions, [L]."""
    at_L = torch.arange(int(view.seq_lens_S[sequence]), device=view.block_table_SB.device)
    slots_L = view.block_table_SB[sequence, at_L // view.block_size].long() * view.block_size + at_L % view.block_size
    if view.tree_Tn is None:
        return slots_L
    distance_n = view.tree_Tn[int(view.query_start_S1[sequence + 1]) - 1]
    path = distance_n.argsort(descending=True)[: int((distance_n >= 0).sum())]
    before = len(slots_L) - len(distance_n)
    return torch.cat((slots_L[:before], slots_L[before:][path]))


def select_reference(
    q_NX: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, view: CacheView, counts: Sequence[int],
    multiple: int, merge: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As TokenIndex.choose; in fp32, sequence by sequence. merge: makes the scores of all heads from those of a rank's,
    for all sequences together."""
    K = -(-max(counts) // multiple) * multiple
    slots = torch.zeros(len(counts), K, dtype=torch.int32, device=q_NX.device)
    positions = torch.zeros_like(slots)
    slots_SL = [visible_slots(view, s) for s in range(len(counts))]
    scores_SL = {
        s: token_scores(q_NX, index, rotation_N1P, keys, view, s, slots_L)
        for s, (slots_L, count) in enumerate(zip(slots_SL, counts, strict=True))
        if count < len(slots_L)
    }
    if merge is not None and scores_SL:
        merged = merge(torch.cat(list(scores_SL.values()))).split(list(map(len, scores_SL.values())))
        scores_SL = dict(zip(scores_SL, merged, strict=True))
    for s, (slots_L, count) in enumerate(zip(slots_SL, counts, strict=True)):
        length = len(slots_L)
        at_L = torch.arange(length, device=q_NX.device)
        if count < length:
            score_L = scores_SL[s]
            # Ties go to the last token.
            at_L = score_L.flip(0).sort(descending=True, stable=True).indices[:count]
            at_L = (length - 1 - at_L).sort().values
        positions[s, : len(at_L)], slots[s, : len(at_L)] = at_L.int(), slots_L[at_L].int()
    return slots, positions


def _select_native(
    q_NX: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, view: CacheView, counts: Sequence[int],
    multiple: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slots, positions = kernel("select_tokens")(
        q_NX, index.heads, index.query, None if index.pre_rotated else rotation_N1P, index.frequency, index.sinks, keys,
        view.block_table_SB, view.seq_lens_S, view.query_start_S1, view.block_size, counts, index.sink, index.window,
        index.stride, multiple, view.tree_Tn,
    )  # fmt: skip
    return slots, positions


def _selected_scores(inputs: Sequence[Any], outputs: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    """Per sequence, the sorted scores of the selected tokens relative to their mean: different tokens with equal scores
    are equally right. Then whether positions ascend and slots are those of the positions."""
    q_NX, index, rotation_N1P, keys, view, counts, _ = inputs
    observed = []
    for s, count in enumerate(counts):
        slots_L = visible_slots(view, s)
        length = len(slots_L)
        slots_K, positions_K = (x[s, : min(count, length)].long() for x in outputs)
        score_L = token_scores(q_NX, index, rotation_N1P, keys, view, s, slots_L)
        score_K = score_L[positions_K.clamp(0, length - 1)].sort().values
        consistent = (slots_L[positions_K.clamp(0, length - 1)] == slots_K) & (positions_K < length)
        observed += [score_K * length, consistent.float(), positions_K.diff().clamp_max(1).float()]
    return observed


def _native_supports(
    x_NX: Tensor, index: TokenIndex, rotation_N1P: Any, keys: Tensor, *others: Any
) -> Literal[True] | str:
    if (reason := supports_bfloat16(x_NX)) is not True:
        return reason
    return True if x_NX.stride(1) == 1 and keys.is_contiguous() else "inputs or index keys are not contiguous"


# A key may be rounded to its other neighbour.
WRITE_INDEX = Op("write_index", write_reference, mutates=(3,), observe=_written_keys, tolerance=(1.0, 0.0))
WRITE_INDEX.register_native(_native_supports, _write_native)
WRITE_INDEX.register_triton("index_projection_triton", "write", "write_supports")
SELECT_TOKENS = Op("select_tokens", select_reference, observe=_selected_scores, tolerance=(1e-2, 1e-2))
SELECT_TOKENS.register_native(_native_supports, _select_native)
SELECT_TOKENS.register_triton("token_selection_triton", "choose")
