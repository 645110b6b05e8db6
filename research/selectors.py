"""Token selectors compared with the `pairs` index: exact, of other methods, and independent of content.

    python -m research.selectors --data ../shared/data --model DIR [--topk 1024 512] [--selectors pairs oracle ...]

Documents, protocol and columns are those of benchmarks/sparsity.py; DIR is an output of `mlaforge sparsify`. Each
selector is an index (keys and queries) and a score of tokens; the pattern of forced tokens and the budget are equal for
all.

Legend: B batch, T query tokens, S cached tokens, H query heads, G KV heads, D head_dim, I width of an index key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.script import run
from benchmarks.sparsity import measure, short, sparse_parser, table
from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import rotate
from mlaforge.modeling.token_index_mla import scores

# Tokens per block in Quest, and stride of the forced tokens.
BLOCK, STRIDE = 16, 64


class ExactIndex(nn.Module):
    """The token's full keys and the heads' queries: scores equal those of attention."""

    def __init__(self, attention: Any):
        super().__init__()
        self.latent = [attention] if isinstance(attention, LatentAttention) else []
        self.groups, self.scale = attention.num_kv_heads, attention.scaling

    def keys(self, features_BTF: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        """[B, T, G·D], and the rotary key behind them in `latent_rope`."""
        still = features_BTF[..., :0]
        if self.latent and not self.latent[0].qk_norm:
            attention = self.latent[0]
            w_uk, _, b_k, _ = attention.up_projections()
            latents = features_BTF[..., : attention.rank]
            keys = nn.functional.linear(latents, w_uk.flatten(0, 1), b_k.flatten())
            if attention.rope_dim:
                cos, sin = cos_BTP[..., attention.rope_index], sin_BTP[..., attention.rope_index]
                return torch.cat((keys, rotate(features_BTF[:, None, :, attention.rank :], cos, sin)[:, 0]), dim=-1)
            features_BTF = keys
        keys_BGTD = features_BTF.unflatten(-1, (self.groups, -1)).transpose(1, 2)
        return torch.cat((rotate(keys_BGTD, cos_BTP, sin_BTP).transpose(1, 2).flatten(2), still), dim=-1)

    def queries(self, q_BHTE: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
        """[B, H, T, I]: a head's query at its group's position, zeros elsewhere."""
        rope_dim = self.latent[0].rope_dim if self.latent else 0
        head_queries, rope = q_BHTE, q_BHTE[..., :0]
        if rope_dim:
            at = self.latent[0].rope_index
            head_queries, rope = q_BHTE.split([q_BHTE.shape[-1] - rope_dim, rope_dim], dim=-1)
            rope = rotate(rope, cos_BTP[..., at], sin_BTP[..., at])
        else:
            head_queries = rotate(head_queries, cos_BTP, sin_BTP)
        B, H, T, D = head_queries.shape
        placed = head_queries.new_zeros(B, self.groups, H // self.groups, T, self.groups, D)
        for group, part in enumerate(head_queries.unflatten(1, (self.groups, -1)).unbind(1)):
            placed[:, group, :, :, group] = part
        return torch.cat((placed.flatten(1, 2).flatten(3), rope), dim=-1) * self.scale


Score = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def quest(queries_BHTI: Tensor, keys_BSI: Tensor, visible_BTS: Tensor, sinks_H: Tensor | None) -> Tensor:
    """arXiv 2406.10774: a block's score is the most that any key within its least and largest numbers could have."""
    S = keys_BSI.shape[1]
    padded = nn.functional.pad(keys_BSI, (0, 0, 0, -S % BLOCK), value=torch.nan).unflatten(1, (-1, BLOCK))
    least, most = padded.nan_to_num(torch.inf).amin(2), padded.nan_to_num(-torch.inf).amax(2)
    bound = queries_BHTI.clamp_min(0) @ most[:, None].mT + queries_BHTI.clamp_max(0) @ least[:, None].mT
    seen = nn.functional.pad(visible_BTS, (0, -S % BLOCK)).unflatten(2, (-1, BLOCK)).any(-1)
    share = torch.softmax(bound.float().masked_fill(~seen[:, None], -torch.inf), dim=-1).mean(1)
    return share.repeat_interleave(BLOCK, dim=-1)[..., :S]


def relu(queries_BHTI: Tensor, keys_BSI: Tensor, visible_BTS: Tensor, sinks_H: Tensor | None) -> Tensor:
    """DeepSeek-V3.2's form with heads of equal weight, not trained."""
    return (queries_BHTI @ keys_BSI[:, None].mT).relu().sum(1).float()


def newest(queries_BHTI: Tensor, keys_BSI: Tensor, visible_BTS: Tensor, sinks_H: Tensor | None) -> Tensor:
    """The budget goes to the newest tokens."""
    return torch.arange(keys_BSI.shape[1], device=keys_BSI.device).float().expand(visible_BTS.shape)


def blind(queries_BHTI: Tensor, keys_BSI: Tensor, visible_BTS: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Any tokens."""
    return torch.rand(visible_BTS.shape, generator=torch.Generator().manual_seed(visible_BTS.shape[1]))


# Name -> whether its index is exact, and its score. `strided` and `placed`: `pairs` with the first of every
# STRIDE tokens forced, and with the budgets and indexes that the model has.
SELECTORS: dict[str, tuple[bool, Score]] = {
    "pairs": (False, scores), "oracle": (True, scores), "Quest": (True, quest), "ReLU": (False, relu),
    "newest": (False, newest), "random": (False, blind), "strided": (False, scores), "placed": (False, scores),
}  # fmt: skip


def select_by(model: Any, name: str, topk: int) -> None:
    """Every sparse layer of a causal LM chooses so, and so many tokens; `placed` ones as many as they were given."""
    exact, model.model.sparsity.score = SELECTORS[name]
    model.model.sparsity.stride = STRIDE if name == "strided" else model.config.index_stride
    for layer in model.model.layers:
        sparse = getattr(layer.self_attn, "sparse", None)
        if sparse is None:
            continue
        if name != "placed":
            sparse.topk = topk
        if sparse.index is not None:
            if not hasattr(sparse, "trained_index"):
                sparse.trained_index = sparse.index
            sparse.index = layer.self_attn.index = ExactIndex(layer.self_attn) if exact else sparse.trained_index


EXACT = [name for name, (exact, _) in SELECTORS.items() if exact]

if __name__ == "__main__":
    arguments = sparse_parser(__doc__, "research/sparsity.json", "selectors")
    arguments.add_argument("--selectors", nargs="*", choices=[*SELECTORS], default=["pairs", "oracle"])
    run(
        arguments,
        lambda options: measure(options, options.selectors, choose=select_by, exact=EXACT),
        short, table,
    )  # fmt: skip
