"""Where the training of a draft head begins: at a linear map that is solved in closed form, with heads that look up.

The map predicts the target's final state one place on from the captured states of a place, the embedding of the token
after it, and what followed that token before (lookup_init.py), all normed, by least squares over the text. The head's
own parts hold it: `fc` what is of the states, and which tokens they are of; values and output projection of the
attention what is of embeddings, as near as their rank allows. Queries that are not taught to look up equal their keys,
so that such a head sees its own row and little else. What the map leaves to the MLP is drawn small.

The head's state is not the target's: its coordinates are those of the target's final state that say most of the logits
of the head's own tokens, of equal size, and those that identify tokens, which the language model head does not read.

Legend: N places, S captured states side by side, C hidden size, F features: states, embedding and copied embedding
(S + 2 C, or S + C), D head dimension, R coordinates that predict, I that identify (R + I = C), V the head's tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.data.packing import Rows
from mlaforge.drafting.lookup_init import TOKENS, Lookup, identity_size, teach
from mlaforge.drafting.unroll import States
from mlaforge.modeling.eagle3 import Eagle3Attention, Eagle3Head
from mlaforge.runtime import progress

# Places that the map is solved on.
PLACES = 1 << 17
# Of the mean square of a feature, what is added to each: 1e-4 to 1e-2 predict the same, 1e-1 less
# (docs/notes/training.md).
RIDGE = 1e-3
# Spread of what is drawn, as transformers draws new layers.
SPREAD = 0.02
# Size of queries and keys, which are equal: a row's score with itself is sqrt(head_dim) OWN², with others N(0, OWN⁴).
OWN = 1.2


def normed(x: Tensor, eps: float) -> Tensor:
    """By its root mean square, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Second moments: of features [F, F], of features with the target's next final state [F, C], of that [C, C]."""

    gram: Tensor
    cross: Tensor
    finals: Tensor

    def solve(self) -> Tensor:
        """Features -> next final state, [F, C]."""
        return torch.linalg.solve(self.gram + _noise(self.gram), self.cross)


def _noise(moments: Tensor) -> Tensor:
    return RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).double()


@dataclasses.dataclass(frozen=True)
class Text:
    """Rows, what the target computes on some of them, and what a head reads of that."""

    rows: Rows
    states: Callable[[Rows], States]
    embedding: Tensor
    eps: float

    def read(self, part: Rows, states: States | None = None) -> tuple[Tensor, Tensor]:
        """Captured states [B·T, S] and embeddings of the next tokens [B·T, C], each normed."""
        captured = (states or self.states(part)).captured.split(self.embedding.shape[1], dim=-1)
        embedded = F.embedding(part.ids.roll(-1, dims=1).flatten(), self.embedding)
        return torch.cat([normed(state, self.eps) for state in captured], dim=-1), normed(embedded, self.eps)

    def moments(self, lookup: Lookup | None) -> Moments:
        """Over the first PLACES places that have a next token in their document. Sums are in fp64."""
        gram = cross = finals = torch.zeros((), dtype=torch.float64)
        count = 0
        parts = torch.arange(len(self.rows)).split(max(1, TOKENS // self.rows.ids.shape[1]))
        for some in progress(parts, "solve the start", len(parts)):
            part = self.rows.take(some).to(self.embedding.device)
            states, keep = self.states(part), ~part.last.flatten()
            read = self.read(part, states)
            copied = () if lookup is None else (lookup.copied(part, *read),)
            x = torch.cat((*read, *copied), dim=-1)[keep]
            # Rows that do not end in the row have a next state.
            y = states.final.roll(-1, dims=0)[keep].float()
            gram, cross, finals = (
                total + product.double().cpu()
                for total, product in ((gram, x.mT @ x), (cross, x.mT @ y), (finals, y.mT @ y))
            )
            count += len(x)
            if count >= PLACES:
                break
        return Moments(gram / count, cross / count, finals / count)


def coordinates(finals: Tensor, wanted_head: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` coordinates of final states with these second moments that say most of the logits by `wanted_head`
    [V, C]: from final states [C, size], each of size 1, and to logits [V, size]."""
    root = torch.linalg.cholesky(finals + _noise(finals))
    head = wanted_head.double()
    directions = torch.linalg.eigh(root.mT @ (head.mT @ head) @ root).eigenvectors.flip(1)[:, :size]
    return torch.linalg.solve_triangular(root.mT, directions, upper=True), head @ (root @ directions)


@torch.no_grad()
def start(head: Eagle3Head, text: Text, wanted_head: Tensor, seed: int) -> None:
    """Fills the parameters of a new head that norms each captured state. wanted_head [V, C]: the target's language
    model head for the head's own tokens."""
    draw: Any = torch.Generator().manual_seed(seed)
    C = head.config.layer.hidden_size
    S, R = 3 * C, C - identity_size(head.config)
    moments, lookup = text.moments(None), None
    read, said = coordinates(moments.finals, wanted_head.cpu(), R)
    weight = moments.solve() @ read
    if R < C:
        lookup = teach(head, weight[:S].mT.float().to(text.embedding.device), text.rows, text.read, draw)
        moments = text.moments(lookup)
        weight = moments.solve() @ read
        lookup = lookup.cpu()
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=SPREAD, generator=draw)
    head.fc.weight[:R] = weight[:S].mT
    # Of an average state, which the final norm divides by.
    squares = (weight * (moments.gram @ weight)).sum()
    if lookup is not None:
        head.fc.weight[R:] = lookup.identity
        squares += (lookup.identity.double() @ moments.gram[:S, :S] * lookup.identity).sum()
    _fill_attention(head.midlayer.self_attn, weight[S:], moments.gram[S:, S:], lookup, draw)
    head.norm.weight.fill_((squares / C).sqrt())
    head.lm_head.weight[:, :R], head.lm_head.weight[:, R:] = said, 0


def _fill_attention(
    attention: Eagle3Attention, weight: Tensor, gram: Tensor, lookup: Lookup | None, draw: torch.Generator
) -> None:  # fmt: skip
    """weight [C, R] or [2 C, R]: of the next token's embedding, and of the copied one; `gram`: their second moments."""
    C, D, R = attention.o_proj.out_features, attention.head_dim, weight.shape[1]
    q, k, v = (proj.weight.view(-1, D, 2 * C) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    o = attention.o_proj.weight.view(C, -1, D)
    groups = len(q) // len(k)
    own = len(k) if lookup is None else len(k) - len(lookup.keys) // D
    for part in (q, k, v):
        part[..., C:] *= 0.25
    alike = torch.randn(own, D, C, generator=draw) * (OWN / C**0.5)
    k[:own, :, :C], q[: own * groups, :, :C] = alike, alike.repeat_interleave(groups, dim=0)
    if lookup is not None:
        for taught, part in ((lookup.queries, q[own * groups :]), (lookup.keys, k[own:])):
            part[..., C : C + R] = 0
            part[..., :C], part[..., C + R :] = taught[:, :C].view(-1, D, C), taught[:, C:].view(-1, D, C - R)
    for heads, of in ((slice(0, own), slice(0, C)), (slice(own, len(k)), slice(C, 2 * C))):
        if count := len(k[heads]):
            values, outputs = low_rank(weight[of], gram[of, of], count * D)
            v[heads, :, :C] = values.view(count, D, C)
            mixed = outputs.view(R, count, D).repeat_interleave(groups, dim=1) / groups
            o[:R, heads.start * groups : heads.stop * groups] = mixed


def low_rank(weight: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best two factors [R, C] and [C', R] of x -> x @ weight [C, C'] for inputs of these second moments; the first
    one's outputs are of size 1. What is beyond the rank of `weight` is 0."""
    root = torch.linalg.cholesky(moments + _noise(moments))
    U, S, Vh = torch.linalg.svd(root.mT @ weight, full_matrices=False)
    back = torch.linalg.solve_triangular(root.mT, U, upper=True)
    values, mixed = weight.new_zeros(rank, len(weight)), weight.new_zeros(weight.shape[1], rank)
    kept = min(rank, len(S))
    values[:kept], mixed[:, :kept] = back[:, :kept].mT, Vh[:kept].mT * S[:kept]
    return values, mixed
