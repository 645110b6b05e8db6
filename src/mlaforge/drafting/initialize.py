"""Initialisation of a draft head: a linear map solved in closed form, with lookup heads in its attention.

The map predicts the target's next final state by least squares over the text, from the captured states of a position,
the embedding of the next token, and the embedding that followed that token earlier (lookup_init.py), all normalised.
`fc` holds the part of the map for states, and the identity of their tokens; values and output projection of the
attention hold the part for embeddings, approximated to their rank. Queries without lookup equal their keys, so these
heads attend mostly to their own position. The MLP is initialised with small random weights.

The head's state has coordinates of its own: those of the target's final state that explain most of the draft
vocabulary's logits, scaled to equal size, and identity coordinates of tokens, which the language model head ignores.

Legend: N positions, S concatenated captured states, C hidden size, F features: states, embedding and copied embedding
(S + 2 C, or S + C), D head dimension, R predictive coordinates, I identity coordinates (R + I = C), V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.data.packing import Rows
from mlaforge.drafting.lookup_init import BATCH_TOKENS, Lookup, identity_size, train_lookup
from mlaforge.drafting.objective import States
from mlaforge.modeling.eagle3 import Eagle3Attention, Eagle3Head
from mlaforge.runtime import progress

# Maximum number of positions for the least-squares fit.
MAX_POSITIONS = 1 << 17
# Ridge, relative to the mean square of a feature: 1e-4 to 1e-2 predict equally well, 1e-1 worse
# (docs/notes/training.md).
RIDGE = 1e-3
# Standard deviation of random weights, as in transformers.
INIT_STD = 0.02
# Scale of equal queries and keys: a position's score with itself is sqrt(head_dim) · QK_SCALE², with others
# N(0, QK_SCALE⁴).
QK_SCALE = 1.2


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments of features [F, F], of features and the target's next final state [F, C], of that state [C, C]."""

    gram: Tensor
    cross: Tensor
    finals: Tensor

    def solve(self) -> Tensor:
        """Return the least-squares map from features to the next final state, [F, C]."""
        return torch.linalg.solve(self.gram + _ridge(self.gram), self.cross)


def _ridge(moments: Tensor) -> Tensor:
    return RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).double()


@dataclasses.dataclass(frozen=True)
class Text:
    """Rows, a function for the target's states on them, and the inputs of a head computed from these."""

    rows: Rows
    states: Callable[[Rows], States]
    embedding: Tensor
    eps: float

    def read(self, part: Rows, states: States | None = None) -> tuple[Tensor, Tensor]:
        """Return captured states [B·T, S] and embeddings of the next tokens [B·T, C], normalised."""
        captured = (states or self.states(part)).captured.split(self.embedding.shape[1], dim=-1)
        embedded = F.embedding(part.ids.roll(-1, dims=1).flatten(), self.embedding)
        return torch.cat([rms_normalize(state, self.eps) for state in captured], dim=-1), rms_normalize(
            embedded, self.eps
        )

    def moments(self, lookup: Lookup | None) -> Moments:
        """Return moments over the first MAX_POSITIONS positions with a next token in their document, summed in fp64."""
        gram = cross = finals = torch.zeros((), dtype=torch.float64)
        count = 0
        parts = torch.arange(len(self.rows)).split(max(1, BATCH_TOKENS // self.rows.ids.shape[1]))
        for indices in progress(parts, "initialize the head", len(parts)):
            part = self.rows.take(indices).to(self.embedding.device)
            states, keep = self.states(part), ~part.last.flatten()
            inputs = self.read(part, states)
            copied = () if lookup is None else (lookup.copied(part, *inputs),)
            x = torch.cat((*inputs, *copied), dim=-1)[keep]
            # All but the last position of a document have a next state.
            y = states.final.roll(-1, dims=0)[keep].float()
            gram, cross, finals = (
                total + product.double().cpu()
                for total, product in ((gram, x.mT @ x), (cross, x.mT @ y), (finals, y.mT @ y))
            )
            count += len(x)
            if count >= MAX_POSITIONS:
                break
        return Moments(gram / count, cross / count, finals / count)


def coordinates(finals: Tensor, target_head: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` coordinates of final states that explain most of the logits of target_head [V, C].

    finals: second moments of final states. Returns the maps from final states [C, size], with unit mean square, and to
    logits [V, size].
    """
    root = torch.linalg.cholesky(finals + _ridge(finals))
    head = target_head.double()
    directions = torch.linalg.eigh(root.mT @ (head.mT @ head) @ root).eigenvectors.flip(1)[:, :size]
    return torch.linalg.solve_triangular(root.mT, directions, upper=True), head @ (root @ directions)


@torch.no_grad()
def initialize_head(head: Eagle3Head, text: Text, target_head: Tensor, seed: int) -> None:
    """Initialise the parameters of a new head with fc_norm. target_head [V, C]: the target's language model head for
    the draft vocabulary."""
    generator: Any = torch.Generator().manual_seed(seed)
    C = head.config.layer.hidden_size
    S, R = 3 * C, C - identity_size(head.config)
    moments, lookup = text.moments(None), None
    state_weights, logit_weights = coordinates(moments.finals, target_head.cpu(), R)
    weight = moments.solve() @ state_weights
    if R < C:
        lookup = train_lookup(head, weight[:S].mT.float().to(text.embedding.device), text.rows, text.read, generator)
        moments = text.moments(lookup)
        weight = moments.solve() @ state_weights
        lookup = lookup.cpu()
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=INIT_STD, generator=generator)
    head.fc.weight[:R] = weight[:S].mT
    # Mean square of a state, which the final norm divides out.
    squares = (weight * (moments.gram @ weight)).sum()
    if lookup is not None:
        head.fc.weight[R:] = lookup.identity
        squares += (lookup.identity.double() @ moments.gram[:S, :S] * lookup.identity).sum()
    _fill_attention(head.midlayer.self_attn, weight[S:], moments.gram[S:, S:], lookup, generator)
    head.norm.weight.fill_((squares / C).sqrt())
    head.lm_head.weight[:, :R], head.lm_head.weight[:, R:] = logit_weights, 0


def _fill_attention(
    attention: Eagle3Attention, weight: Tensor, gram: Tensor, lookup: Lookup | None, generator: torch.Generator
) -> None:  # fmt: skip
    """Initialise the attention. weight: map of the next token's embedding [C, R], or of that and the copied one
    [2 C, R]; gram: their second moments."""
    C, D, R = attention.o_proj.out_features, attention.head_dim, weight.shape[1]
    q, k, v = (proj.weight.view(-1, D, 2 * C) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    o = attention.o_proj.weight.view(C, -1, D)
    groups = len(q) // len(k)
    num_self_heads = len(k) if lookup is None else len(k) - len(lookup.keys) // D
    for part in (q, k, v):
        part[..., C:] *= 0.25
    qk = torch.randn(num_self_heads, D, C, generator=generator) * (QK_SCALE / C**0.5)
    k[:num_self_heads, :, :C], q[: num_self_heads * groups, :, :C] = qk, qk.repeat_interleave(groups, dim=0)
    if lookup is not None:
        for source, part in ((lookup.queries, q[num_self_heads * groups :]), (lookup.keys, k[num_self_heads:])):
            part[..., C : C + R] = 0
            part[..., :C], part[..., C + R :] = source[:, :C].view(-1, D, C), source[:, C:].view(-1, D, C - R)
    for heads, inputs in ((slice(0, num_self_heads), slice(0, C)), (slice(num_self_heads, len(k)), slice(C, 2 * C))):
        if count := len(k[heads]):
            values, outputs = low_rank(weight[inputs], gram[inputs, inputs], count * D)
            v[heads, :, :C] = values.view(count, D, C)
            mixed = outputs.view(R, count, D).repeat_interleave(groups, dim=1) / groups
            o[:R, heads.start * groups : heads.stop * groups] = mixed


def low_rank(weight: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best factors [rank, C] and [C', rank] of x -> x @ weight [C, C'] for inputs with these second moments.

    Outputs of the first factor have unit mean square; rows beyond the rank of `weight` are 0.
    """
    root = torch.linalg.cholesky(moments + _ridge(moments))
    U, S, Vh = torch.linalg.svd(root.mT @ weight, full_matrices=False)
    back = torch.linalg.solve_triangular(root.mT, U, upper=True)
    values, mixed = weight.new_zeros(rank, len(weight)), weight.new_zeros(weight.shape[1], rank)
    retained = min(rank, len(S))
    values[:retained], mixed[:, :retained] = back[:, :retained].mT, Vh[:retained].mT * S[:retained]
    return values, mixed
