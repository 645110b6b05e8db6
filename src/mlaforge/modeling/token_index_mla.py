"""Sparse attention (DSA): a small index of all cached tokens selects those that a layer's queries read.

A token's index key is a linear map of the row that its layer caches, rotated by its position like a key, and rounded to
8-bit integers; its index queries, one per head, are linear maps of its queries. Their products approximate the heads'
logits. Each head has a softmax over all visible tokens; a token's score is the mean over heads. The first and the
newest tokens are always read, and the best of the others. All heads of a layer share one selection.

Copied into checkpoints; requires only torch.

Legend: B batch, T query tokens, S cached tokens, H query heads, G KV heads, I elements of an index key, F features, k
tokens that are read.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .rope_mla import rotate

# Maximum index logits in memory: query rows are scored in chunks.
MAX_SCORES = 1 << 25
# Index keys are integers of at most this magnitude.
LARGEST_KEY = 127


class PairsIndex(nn.Module):
    """Index kind `pairs`: I/2 channel pairs that commute with RoPE, each rotated by one of the model's frequencies or
    not at all.

    Parameters, under `self_attn.index.`:
        key.weight [I, F], key.bias [I]   a token's features -> its index key before rotation: pair n is n and n + I/2
        query [G, I, E]                   a head's query before rotation -> its index query, by KV head; includes the
                                          softmax scale and the unit of the keys
        frequency [I/2] int64             model frequency of each pair; -1 for no rotation
    """

    frequency: Tensor

    def __init__(self, num_kv_heads: int, width: int, key_features: int, query_features: int):
        super().__init__()
        self.key = nn.Linear(key_features, width)
        self.query = nn.Parameter(torch.zeros(num_kv_heads, width, query_features))
        self.register_buffer("frequency", torch.zeros(width // 2, dtype=torch.int64))

    def _rotated(self, x_BHTI: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        at, unrotated = self.frequency.clamp_min(0), self.frequency < 0
        cos = cos_BTP[..., at].masked_fill(unrotated, 1.0)
        return rotate(x_BHTI, cos, sin_BTP[..., at].masked_fill(unrotated, 0.0))

    def keys(self, features_BTF: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        """Return index keys [B, T, I], integers in the features' dtype. `cos` and `sin`: all frequencies of the
        model."""
        keys = self._rotated(self.key(features_BTF)[:, None], cos_BTP, sin_BTP)[:, 0]
        return keys.round().clamp(-LARGEST_KEY, LARGEST_KEY)

    def queries(self, q_BHTE: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        """Return index queries [B, H, T, I] from queries before RoPE."""
        B, H, T, E = q_BHTE.shape
        grouped = q_BHTE.reshape(B, len(self.query), -1, E)
        return self._rotated((grouped @ self.query.transpose(1, 2)).view(B, H, T, -1), cos_BTP, sin_BTP)


def scores(queries_BHTI: Tensor, keys_BSI: Tensor, visible_BTS: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Return token scores [B, T, S] in fp32: the mean over heads of the softmax of index logits. A learned sink takes
    its share of a head's softmax as in attention."""
    logits = (queries_BHTI @ keys_BSI[:, None].to(queries_BHTI.dtype).transpose(-1, -2)).float()
    logits = logits.masked_fill_(~visible_BTS[:, None], -torch.inf)
    if sinks_H is None:
        return torch.softmax(logits, dim=-1).mean(1).nan_to_num_(0.0)
    lse = torch.logsumexp(logits, dim=-1)
    lse = torch.logaddexp(lse, sinks_H.float()[:, None].expand_as(lse))
    return torch.exp(logits - lse[..., None]).mean(1)


class Sparsity:
    """State that the layers of a sparse model share: the pattern, and the selection of the last layer with an index.

    `prompts`: whether each of several query tokens of a step gets a selection. If False, as in serving, prompts read
    all tokens, and only generated tokens read a selection.
    """

    def __init__(self, config: Any):
        self.sink, self.window, self.stride = config.index_sink, config.index_window, config.index_stride
        self.prompts = False
        # Skip the index if a selection would contain all tokens; tests disable this.
        self.shortcut = True
        self.score = scores
        self.chosen: Tensor | None = None

    def active(self, num_queries: int) -> bool:
        """Whether a step of so many query tokens reads a selection."""
        return num_queries == 1 or self.prompts

    def forced(self, visible_BTS: Tensor) -> Tensor:
        """Mask of the visible tokens that are always read: bool [B, T, S]."""
        order = visible_BTS.cumsum(-1)
        forced = (order <= self.sink) | (order[..., -1:] - order < self.window)
        if self.stride:
            forced |= (order - 1) % self.stride == 0
        return forced & visible_BTS

    def top(self, scores_BTS: Tensor, visible_BTS: Tensor, k: int) -> Tensor:
        """Return the k best tokens, ascending: int64 [B, T, k]. Includes invisible tokens if fewer are visible."""
        ranked = scores_BTS.masked_fill(~visible_BTS, -1.0).masked_fill(self.forced(visible_BTS), torch.inf)
        return ranked.topk(min(k, ranked.shape[-1]), dim=-1, sorted=False).indices.sort(dim=-1).values

    @torch.no_grad()
    def choose(
        self, queries_BHTI: Tensor, keys_BSI: Tensor, visible_B1TS: Tensor, k: int, sinks_H: Tensor | None
    ) -> Tensor:
        """Return `top` of the index scores, for chunks of query tokens."""
        B, H, T, _ = queries_BHTI.shape
        visible_BTS = visible_B1TS[:, 0]
        rows = max(1, MAX_SCORES // (B * H * keys_BSI.shape[1]))
        parts = []
        for start in range(0, T, rows):
            queries, visible = queries_BHTI[:, :, start : start + rows], visible_BTS[:, start : start + rows]
            parts.append(self.top(self.score(queries, keys_BSI, visible, sinks_H), visible, k))
        return torch.cat(parts, dim=1)


def visible_mask(mask: Tensor | None, B: int, T: int, S: int, device: torch.device) -> Tensor:
    """Return the visibility that a transformers attention mask (None, boolean or additive) defines: bool [B, 1, T,
    S]."""
    if mask is None:
        rows = torch.ones(T, S, dtype=torch.bool, device=device)
        return (rows.tril() if T > 1 else rows).expand(B, 1, T, S)
    mask = mask[..., :S]
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min
    return mask.expand(B, 1, T, S)


class SparseLayer:
    """One layer's part in sparse attention: its index, if it has one, and its number of tokens to read.

    Per step: `set_queries`, then `read` with the contents of the cache.
    """

    def __init__(self, index: PairsIndex | None, sparsity: Sparsity, topk: int):
        self.index, self.sparsity, self.topk = index, sparsity, topk
        self._queries: Tensor | None = None

    @classmethod
    def of(
        cls, config: Any, layer_idx: int, sparsity: Sparsity | None, key_features: int, query_features: int
    ) -> "SparseLayer | None":
        """Return None if the layer's attention is dense."""
        if sparsity is None or config.indexer_types[layer_idx] == "dense":
            return None
        index = None
        if config.indexer_types[layer_idx] == "full":
            kind = INDEXES[config.index_kind]
            index = kind(config.num_key_value_heads, config.index_head_dim, key_features, query_features)
        topk_per_layer = config.index_topk_per_layer
        return cls(index, sparsity, topk_per_layer[layer_idx] if topk_per_layer else config.index_topk)

    def set_queries(self, q_BHTE: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> None:
        """Set the step's index queries, from queries before RoPE."""
        if self.index is not None and self.sparsity.active(q_BHTE.shape[2]):
            self._queries = self.index.queries(q_BHTE, cos_BTP, sin_BTP)

    def read(
        self, row_BSW: Tensor, keys_BSI: Tensor | None, mask: Tensor | None, T: int, sinks_H: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Select what T query tokens read: returns the rows, their mask, and their positions [B, k] if rows were
        gathered.

        One query token reads gathered rows; several read all rows with a mask.
        """
        B, S, W = row_BSW.shape
        if not self.sparsity.active(T) or (self.sparsity.shortcut and self.topk >= S):
            return row_BSW, mask, None
        visible = visible_mask(mask, B, T, S, row_BSW.device)
        if self.index is not None:
            assert self._queries is not None and keys_BSI is not None
            self.sparsity.chosen = self.sparsity.choose(self._queries, keys_BSI, visible, self.topk, sinks_H)
        chosen_BTk = self.sparsity.chosen
        assert chosen_BTk is not None, "the first sparse layer has an index"
        if T > 1:
            some = torch.zeros(B, T, S, dtype=torch.bool, device=row_BSW.device).scatter_(2, chosen_BTk, True)
            return row_BSW, visible & some[:, None], None
        at_Bk = chosen_BTk[:, 0]
        rows = row_BSW.gather(1, at_Bk[..., None].expand(-1, -1, W))
        return rows, visible.gather(3, at_Bk[:, None, None]), at_Bk


def update_cache(
    cache: Any, layer_idx: int, row_B1TW: Tensor, index_BTI: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Append a step's rows, and index keys if any, to a transformers cache, as its keys and values. Returns all rows
    and keys."""
    packed = not row_B1TW.is_floating_point()
    if index_BTI is None:
        return cache.update(row_B1TW, row_B1TW[..., :0], layer_idx)[0], None
    keys = index_BTI[:, None].to(torch.int8).view(torch.uint8) if packed else index_BTI[:, None].to(row_B1TW.dtype)
    row_B1SW, keys = cache.update(row_B1TW, keys, layer_idx)
    return row_B1SW, (keys.contiguous().view(torch.int8) if packed else keys)[:, 0]


# Index kinds by their name in configs.
INDEXES = {"pairs": PairsIndex}
