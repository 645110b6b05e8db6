"""Sparse attention: which of the cached tokens a layer's queries read, found by a small index of all of them.

A token's index key is a linear map of what its layer caches, turned by its position as a key is, and rounded to whole
numbers of 8 bits; its index queries, one per head, are linear maps of its queries. What they multiply to stands for a
head's logit. Every head has a softmax over all that it may see; their mean is a token's score. The first tokens, and
the newest, are always read, and the best of the others. One selection serves all heads of a layer.

Copied into checkpoints; needs only torch.

Legend: B batch, T query tokens, S cached tokens, H query heads, G KV heads, I numbers of an index key, F features,
k tokens that are read.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .rope_mla import rotate

# Query rows are scored in chunks so that one chunk's logits stay below this many numbers.
MAX_SCORES = 1 << 25
# Index keys are whole numbers up to this.
LARGEST_KEY = 127


class PairsIndex(nn.Module):
    """Index kind `pairs`: I/2 channels that commute with RoPE, each turned by one of the model's frequencies, or by
    none.

    Parameters, below `self_attn.index.`:
        key.weight [I, F], key.bias [I]   features of a token -> its index key, not turned yet: pair n is n and n + I/2
        query [G, I, E]                   a head's query, not turned yet -> its index query, by KV head; the softmax's
                                          scale and the unit of the keys are in it
        frequency [I/2] int64             the model's frequency that a pair turns with; -1 where it does not
    """

    frequency: Tensor

    def __init__(self, num_kv_heads: int, width: int, key_features: int, query_features: int):
        super().__init__()
        self.key = nn.Linear(key_features, width)
        self.query = nn.Parameter(torch.zeros(num_kv_heads, width, query_features))
        self.register_buffer("frequency", torch.zeros(width // 2, dtype=torch.int64))

    def _turned(self, x_BHTI: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        at, still = self.frequency.clamp_min(0), self.frequency < 0
        cos = cos_BTP[..., at].masked_fill(still, 1.0)
        return rotate(x_BHTI, cos, sin_BTP[..., at].masked_fill(still, 0.0))

    def keys(self, features_BTF: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        """[B, T, I]: whole numbers in the features' dtype. `cos` and `sin`: all the model's frequencies."""
        keys = self._turned(self.key(features_BTF)[:, None], cos_BTP, sin_BTP)[:, 0]
        return keys.round().clamp(-LARGEST_KEY, LARGEST_KEY)

    def queries(self, q_BHTE: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        """[B, H, T, I], from queries as they are before RoPE."""
        B, H, T, E = q_BHTE.shape
        grouped = q_BHTE.reshape(B, len(self.query), -1, E)
        return self._turned((grouped @ self.query.transpose(1, 2)).view(B, H, T, -1), cos_BTP, sin_BTP)


def scores(queries_BHTI: Tensor, keys_BSI: Tensor, visible_BTS: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """[B, T, S] in fp32: the mean over heads of what a softmax of index logits gives to each token. A learned sink
    takes its share of a head's softmax as it does in attention."""
    logits = (queries_BHTI @ keys_BSI[:, None].to(queries_BHTI.dtype).transpose(-1, -2)).float()
    logits = logits.masked_fill_(~visible_BTS[:, None], -torch.inf)
    if sinks_H is None:
        return torch.softmax(logits, dim=-1).mean(1).nan_to_num_(0.0)
    lse = torch.logsumexp(logits, dim=-1)
    lse = torch.logaddexp(lse, sinks_H.float()[:, None].expand_as(lse))
    return torch.exp(logits - lse[..., None]).mean(1)


class Sparsity:
    """What the layers of one sparse model have in common: the pattern, and what the last layer with an index chose.

    `prompts`: whether several query tokens of one step are each given a selection. Without it, as in serving, a prompt
    reads everything, and only tokens that are generated read a selection.
    """

    def __init__(self, config: Any):
        self.sink, self.window, self.stride = config.index_sink, config.index_window, config.index_stride
        self.prompts = False
        # All is read without an index where it is not more than a selection; tests want the index all the same.
        self.shortcut = True
        self.score = scores
        self.chosen: Tensor | None = None

    def active(self, num_queries: int) -> bool:
        """Whether so many query tokens of a step read a selection."""
        return num_queries == 1 or self.prompts

    def forced(self, visible_BTS: Tensor) -> Tensor:
        """bool [B, T, S]: of what each query token sees, the tokens that are read in any case."""
        order = visible_BTS.cumsum(-1)
        forced = (order <= self.sink) | (order[..., -1:] - order < self.window)
        if self.stride:
            forced |= (order - 1) % self.stride == 0
        return forced & visible_BTS

    def top(self, scores_BTS: Tensor, visible_BTS: Tensor, k: int) -> Tensor:
        """int64 [B, T, k]: tokens in rising order; where fewer are visible, some that are not are among them."""
        ranked = scores_BTS.masked_fill(~visible_BTS, -1.0).masked_fill(self.forced(visible_BTS), torch.inf)
        return ranked.topk(min(k, ranked.shape[-1]), dim=-1, sorted=False).indices.sort(dim=-1).values

    @torch.no_grad()
    def choose(
        self, queries_BHTI: Tensor, keys_BSI: Tensor, visible_B1TS: Tensor, k: int, sinks_H: Tensor | None
    ) -> Tensor:
        """As `top`, by the index; some query tokens at a time."""
        B, H, T, _ = queries_BHTI.shape
        visible_BTS = visible_B1TS[:, 0]
        rows = max(1, MAX_SCORES // (B * H * keys_BSI.shape[1]))
        parts = []
        for start in range(0, T, rows):
            queries, visible = queries_BHTI[:, :, start : start + rows], visible_BTS[:, start : start + rows]
            parts.append(self.top(self.score(queries, keys_BSI, visible, sinks_H), visible, k))
        return torch.cat(parts, dim=1)


def seen(mask: Tensor | None, B: int, T: int, S: int, device: torch.device) -> Tensor:
    """bool [B, 1, T, S]: what an attention mask of transformers (None, boolean or additive) lets each token see."""
    if mask is None:
        rows = torch.ones(T, S, dtype=torch.bool, device=device)
        return (rows.tril() if T > 1 else rows).expand(B, 1, T, S)
    mask = mask[..., :S]
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min
    return mask.expand(B, 1, T, S)


class SparseLayer:
    """One layer's part in sparse attention: its index where it has one, and how many tokens it reads.

    For every step: `ask` with the queries, then `read` with what the cache holds.
    """

    def __init__(self, index: PairsIndex | None, sparsity: Sparsity, topk: int):
        self.index, self.sparsity, self.topk = index, sparsity, topk
        self._asked: Tensor | None = None

    @classmethod
    def of(
        cls, config: Any, layer_idx: int, sparsity: Sparsity | None, key_features: int, query_features: int
    ) -> "SparseLayer | None":
        """None where the layer's attention is dense."""
        if sparsity is None or config.indexer_types[layer_idx] == "dense":
            return None
        index = None
        if config.indexer_types[layer_idx] == "full":
            kind = INDEXES[config.index_kind]
            index = kind(config.num_key_value_heads, config.index_head_dim, key_features, query_features)
        own = config.index_topk_per_layer
        return cls(index, sparsity, own[layer_idx] if own else config.index_topk)

    def ask(self, q_BHTE: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> None:
        """What this step's query tokens look for, from queries as they are before RoPE."""
        if self.index is not None and self.sparsity.active(q_BHTE.shape[2]):
            self._asked = self.index.queries(q_BHTE, cos_BTP, sin_BTP)

    def read(
        self, row_BSW: Tensor, keys_BSI: Tensor | None, mask: Tensor | None, T: int, sinks_H: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What T query tokens read of all rows: the rows, their mask, and their positions [B, k] where they are some.

        One query token reads rows that are gathered; several read all, with a mask.
        """
        B, S, W = row_BSW.shape
        if not self.sparsity.active(T) or (self.sparsity.shortcut and self.topk >= S):
            return row_BSW, mask, None
        visible = seen(mask, B, T, S, row_BSW.device)
        if self.index is not None:
            assert self._asked is not None and keys_BSI is not None
            self.sparsity.chosen = self.sparsity.choose(self._asked, keys_BSI, visible, self.topk, sinks_H)
        chosen_BTk = self.sparsity.chosen
        assert chosen_BTk is not None, "the first sparse layer has an index"
        if T > 1:
            some = torch.zeros(B, T, S, dtype=torch.bool, device=row_BSW.device).scatter_(2, chosen_BTk, True)
            return row_BSW, visible & some[:, None], None
        at_Bk = chosen_BTk[:, 0]
        rows = row_BSW.gather(1, at_Bk[..., None].expand(-1, -1, W))
        return rows, visible.gather(3, at_Bk[:, None, None]), at_Bk


def cached(cache: Any, layer_idx: int, row_B1TW: Tensor, index_BTI: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A step's rows, and index keys where there are any, into a transformers cache, as its keys and its values; gives
    all that it holds."""
    packed = not row_B1TW.is_floating_point()
    if index_BTI is None:
        return cache.update(row_B1TW, row_B1TW[..., :0], layer_idx)[0], None
    keys = index_BTI[:, None].to(torch.int8).view(torch.uint8) if packed else index_BTI[:, None].to(row_B1TW.dtype)
    row_B1SW, keys = cache.update(row_B1TW, keys, layer_idx)
    return row_B1SW, (keys.contiguous().view(torch.int8) if packed else keys)[:, 0]


# Kinds of indexes by the name that a config has for them.
INDEXES = {"pairs": PairsIndex}
