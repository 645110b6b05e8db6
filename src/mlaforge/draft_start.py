"""Where the training of a draft head begins: at a linear map that is solved in closed form.

The map predicts the target's final state one place on from the captured states of a place and the embedding of the
token after it, all normed, by least squares over the text. The head's own parts hold it: `fc` what is of the states;
values and output projection of the attention what is of the embedding, as near as their rank allows, with queries equal
to keys, so that a row sees little but itself. Final norm and language model head are the target's own reading of its
final states. What the map leaves to the MLP, and to other rows, is drawn small.

Legend: N places, C hidden size, F features: three states and an embedding (4 C), R dimensions of all key-value heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.packing import Rows
from mlaforge.runtime import progress
from mlaforge.unroll import States

# Places that the map is solved on.
PLACES = 1 << 17
# Of the mean square of a feature, what is added to each: 1e-4 to 1e-2 predict the same, 1e-1 less (LOG.md).
RIDGE = 1e-3
# Spread of what is drawn, as transformers draws new layers.
SPREAD = 0.02
# Size of queries and keys, which are equal: a row's score with itself is sqrt(head_dim) OWN², with others N(0, OWN⁴).
OWN = 1.2


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """Features to the target's next final state, [F, C]; the features' second moments [F, F]; the size of what it
    predicts (root mean square)."""

    weight: Tensor
    moments: Tensor
    size: float


def normed(x: Tensor, eps: float) -> Tensor:
    """By its root mean square, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def solve(rows: Rows, states: Callable[[Rows], States], embedding: Tensor, eps: float) -> LinearMap:
    """Over the first PLACES places of `rows` that have a next token in their document. Sums are in fp64."""
    gram = cross = torch.zeros((), dtype=torch.float64)
    count = 0
    parts = torch.arange(len(rows)).split(4)
    for some in progress(parts, "solve the start", len(parts)):
        part = rows.take(some).to(embedding.device)
        found, keep = states(part), ~part.last.flatten()
        C = found.final.shape[-1]
        features = [normed(state, eps) for state in found.captured.split(C, dim=-1)]
        features.append(normed(F.embedding(part.ids.roll(-1, dims=1).flatten(), embedding), eps))
        x = torch.cat(features, dim=-1)[keep]
        # Rows that do not end in the row have a next state.
        y = found.final.roll(-1, dims=0)[keep].float()
        gram, cross = gram + (x.mT @ x).double().cpu(), cross + (x.mT @ y).double().cpu()
        count += len(x)
        if count >= PLACES:
            break
    gram, cross = gram / count, cross / count
    weight = torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).double(), cross)
    size = float((weight * (gram @ weight)).sum(0).mean().sqrt())
    return LinearMap(weight, gram, size)


@torch.no_grad()
def start(head: Eagle3Head, found: LinearMap, wanted_head: Tensor, seed: int) -> None:
    """Fills the parameters of a new head that norms each captured state. wanted_head [V, C]: the target's language
    model head for the head's own tokens."""
    draw: Any = torch.Generator().manual_seed(seed)
    attention, C = head.midlayer.self_attn, head.config.layer.hidden_size
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=SPREAD, generator=draw)
    head.fc.weight.copy_(found.weight[:-C].mT)
    head.lm_head.weight.copy_(wanted_head)
    head.norm.weight.fill_(found.size)
    R, D = attention.v_proj.out_features, attention.head_dim
    values, mixed = low_rank(found.weight[-C:], found.moments[-C:, -C:], R)
    # [E | hidden]: what is of the hidden half stays drawn, and small.
    own = torch.randn(R, C, generator=draw) * (OWN / C**0.5)
    for projection, of_embedding in ((attention.q_proj, own), (attention.k_proj, own), (attention.v_proj, values)):
        heads = of_embedding.view(-1, D, C)
        repeats = projection.out_features // R
        projection.weight[:, :C] = heads.repeat_interleave(repeats, dim=0).reshape(-1, C)
        projection.weight[:, C:] *= 0.25
    groups = attention.q_proj.out_features // R
    blocks = mixed.view(C, -1, 1, D).expand(-1, -1, groups, -1)
    attention.o_proj.weight.copy_(blocks.reshape(C, -1) / groups)


def low_rank(weight: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best two factors [R, C] and [C', R] of x -> x @ weight [C, C'] for inputs of these second moments; the first
    one's outputs are of size 1. What is beyond the rank of `weight` is 0."""
    noise = RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).double()
    root = torch.linalg.cholesky(moments + noise)
    U, S, Vh = torch.linalg.svd(root.mT @ weight, full_matrices=False)
    back = torch.linalg.solve_triangular(root.mT, U, upper=True)
    values, mixed = weight.new_zeros(rank, len(weight)), weight.new_zeros(weight.shape[1], rank)
    kept = min(rank, len(S))
    values[:kept], mixed[:, :kept] = back[:, :kept].mT, Vh[:kept].mT * S[:kept]
    return values, mixed
