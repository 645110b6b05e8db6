"""Initialisation of a block head: the linear map of drafting/initialize.py, carried to the masked places by attention.

The map predicts the target's next final state from the newest state and the newest token. In the first layer some heads
attend to the newest state, the others to the newest token: all keys of the kind that a head reads point in one
direction, those of the other kind in the opposite one, and a masked place's query is that direction, rotated back by
the distance. `fc` and values hold the map's part for states, values alone that for the token, both reduced to their
rank. Everything else is random and small. The language model head is the target's.

Legend: N positions, S concatenated captured states, C hidden size, K key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlaforge.drafting.initialize import INIT_STD, RIDGE, Text, low_rank, rms_normalize
from mlaforge.modeling.block_head import BlockAttention, BlockHead
from mlaforge.modeling.rope_mla import pairs, rotate

# Rows of text from which directions are computed.
SAMPLE_ROWS = 8
# A place's score with the position that it reads. Its neighbours' are lower by the fast rotary pairs.
SHARPNESS = 20.0
# Slowest rotary pair of a key's direction, in radians per position.
MIN_ANGLE = 0.1
# Size of random output projections, relative to INIT_STD.
SMALL = 0.1
# Random part of a weight, relative to a row of equal elements of norm 1.
NOISE = 0.05


@torch.no_grad()
def initialize_block_head(head: BlockHead, text: Text, target_head: Tensor, seed: int) -> None:
    """Initialise the parameters of a new head with fc_norm. target_head: as in initialize_head."""
    generator: Any = torch.Generator().manual_seed(seed)
    layers: list[Any] = list(head.layers)
    C = head.config.layer.hidden_size
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=INIT_STD, generator=generator)
    for layer in layers:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.mul_(SMALL)
    moments = text.moments(None)
    weight, S = moments.solve(), head.fc.in_features
    size = float(((weight * (moments.gram @ weight)).sum() / C).sqrt())
    # Places differ by directions that hardly change logits, as long as the prediction that is added.
    blind = torch.linalg.eigh((target_head.mT @ target_head).double().cpu()).eigenvectors[:, : len(head.mask_embedding)]
    head.mask_embedding.copy_(blind.mT * (size * C**0.5))
    head.norm.weight.fill_(2**0.5 * size)
    head.lm_head.weight.copy_(target_head)
    attention: Any = layers[0].self_attn
    D, K = attention.head_dim, head.config.layer.num_key_value_heads
    of_states = K - K // 2
    rank = min(of_states * D, C - 1)
    values, mixed = low_rank(weight[:S], moments.gram[:S, :S], rank)
    states_NS, embedded_NC = sample(text)
    head.fc.weight.normal_(std=NOISE * S**-0.5, generator=generator)
    head.fc.weight[:rank] = values
    # States have no constant part, but a direction in which they are nearly alike.
    head.fc.weight[rank] = fit(states_NS, torch.ones(len(states_NS)).double())
    fused_NC = states_NS @ head.fc.weight.double().mT
    length = fused_NC.square().mean(-1).sqrt().mean()
    inputs = [fused_NC / length, embedded_NC, rms_normalize(head.mask_embedding, head.norm.variance_epsilon).double()]
    _attend(head, attention, inputs, of_states)
    v, o = attention.v_proj.weight.view(K, D, C), attention.o_proj.weight.view(C, K, -1, D)
    v[:of_states].view(-1, C)[:rank, :rank] += torch.eye(rank)
    _write(o[:, :of_states], mixed * length)
    if of_states < K:
        values, mixed = low_rank(weight[S:], moments.gram[S:, S:], (K - of_states) * D)
        v[of_states:] = values.view(-1, D, C).float()
        _write(o[:, of_states:], mixed)


def sample(text: Text) -> tuple[Tensor, Tensor]:
    """Return the normalised states [N, S] and embeddings of next tokens [N, C] of the first rows, fp64 on the CPU."""
    part = text.rows.take(torch.arange(min(SAMPLE_ROWS, len(text.rows)))).to(text.embedding.device)
    states, embedded = (x[~part.last.flatten()].double().cpu() for x in text.read(part))
    return states, embedded


def fit(x_NF: Tensor, y_N: Tensor) -> Tensor:
    """Return the direction [F] with x · direction = y by least squares."""
    gram = x_NF.mT @ x_NF
    return torch.linalg.solve(gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).double(), x_NF.mT @ y_N)


def _attend(head: BlockHead, attention: BlockAttention, inputs: list[Tensor], of_states: int) -> None:
    """Set queries and keys: the first `of_states` key-value heads read the newest state, the others the newest token.
    inputs: normalised states, tokens and masked places, each [., C]."""
    layer, D, K = head.config.layer, attention.head_dim, head.config.layer.num_key_value_heads
    C, places = layer.hidden_size, torch.arange(1, head.config.block_size)
    cos, sin = (pairs(table, D // 2) for table in head.rotary()(torch.ones(1), torch.arange(2)[None]))
    angles = torch.atan2(sin[0, 1], cos[0, 1])
    direction = torch.cat([(angles >= min(MIN_ANGLE, float(angles.max()))).float()] * 2)
    # Norms make every key as long as its head is wide.
    direction *= (D / direction.square().sum()).sqrt()
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((SHARPNESS / D**0.5) ** 0.5)
    x = torch.cat(inputs)
    # A step back by each distance: the angles of a negative position.
    table = places[:, None] * angles
    kinds = torch.cat([torch.full((len(part),), float(i)) for i, part in enumerate(inputs)])
    to_places = torch.linalg.pinv(inputs[2]).mT
    for kind, heads in ((0, slice(0, of_states)), (1, slice(of_states, K))):
        key = fit(x, torch.where(kinds == kind, 1.0, -1.0).double())
        distance = table + angles if kind == 0 else table
        query = rotate(direction.expand(len(places), -1)[None, None], distance.cos()[None], -distance.sin()[None])[0, 0]
        q = attention.q_proj.weight.view(K, -1, D, C)[heads]
        k = attention.k_proj.weight.view(K, D, C)[heads]
        for part in (q, k):
            part.mul_(NOISE * C**-0.5 / INIT_STD)
        k += torch.outer(direction, key.float() / D**0.5)
        q += (query.double().mT @ to_places).float() / D**0.5


def _write(o_CKGD: Tensor, mixed: Tensor) -> None:
    """Set the output projection of some key-value heads, to whose values `mixed` [C, values] applies."""
    C, K, G, D = o_CKGD.shape
    full = mixed.new_zeros(C, K * D)
    full[:, : mixed.shape[1]] = mixed
    o_CKGD.copy_(full.view(C, K, 1, D).expand(-1, -1, G, -1) / G)
