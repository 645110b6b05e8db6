"""Lookup heads: pre-training of a draft head's attention to find earlier occurrences of the newest tokens, and so the
tokens that followed them, as prompt lookup does.

A position of the head combines the target's state at a token with the embedding of the next token, the newest one. The
positions to copy from are those whose state belongs to that token: their embedding is the token that followed. This
needs queries, keys, and coordinates of `fc` that identify the token of a state (and, weakly, the token before it).
Training on the target's distributions does not find them in thousands of steps (docs/notes/training.md); training them
separately takes hundreds, without any logits.

Legend: B rows, T tokens, N positions, S concatenated captured states of the target, C hidden size of the head, I
identity coordinates, H lookup heads, K their key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mlaforge.data.packing import Rows
from mlaforge.drafting.objective import visible
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.runtime import progress

# Maximum number of steps, batch size in tokens (full attention matrices are stored), maximum number of epochs.
MAX_STEPS, BATCH_TOKENS, MAX_EPOCHS = 600, 2048, 20
LEARNING_RATE = 5e-3

# Rows of a text -> captured states [B·T, S] and embeddings of the next tokens [B·T, C], normalised.
ReadInputs = Callable[[Rows], tuple[Tensor, Tensor]]


def num_lookup_heads(config: Eagle3Config) -> int:
    """Return the number of key-value heads for lookup, the last ones: two thirds, 0 for a single one. The rank of their
    values limits what they can copy."""
    heads: int = config.layer.num_key_value_heads
    return 2 * heads // 3


def identity_size(config: Eagle3Config) -> int:
    """Return the number of identity coordinates, the last ones of the head's state."""
    return min(2 * config.layer.head_dim, config.layer.hidden_size // 4) if num_lookup_heads(config) else 0


class Lookup(nn.Module):
    """The lookup parts of a head.

    identity [I, S]: identity rows of `fc`. queries [H·D, C + I] and keys [K·D, C + I]: parts of `q_proj` and `k_proj`,
    applied to the next token's embedding and the identity coordinates. prediction [C - I, S]: the other rows of `fc`,
    which contribute to the norm of a state.
    """

    prediction: Tensor

    def __init__(self, head: Eagle3Head, prediction: Tensor, generator: torch.Generator):
        super().__init__()
        layer, size = head.config.layer, identity_size(head.config)
        self.D, self.eps, self.rotary = layer.head_dim, layer.rms_norm_eps, head.rotary()
        self.groups = layer.num_attention_heads // layer.num_key_value_heads

        def random_matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)

        C, outputs = layer.hidden_size, num_lookup_heads(head.config) * self.D
        self.identity = nn.Parameter(random_matrix(size, prediction.shape[1]))
        # Queries depend mostly on the next token, keys on the state.
        self.queries = nn.Parameter(
            torch.cat((random_matrix(self.groups * outputs, C), random_matrix(self.groups * outputs, size, 0.3)), dim=1)
        )
        self.keys = nn.Parameter(torch.cat((random_matrix(outputs, C, 0.3), random_matrix(outputs, size)), dim=1))
        self.register_buffer("prediction", prediction)

    def forward(self, rows: Rows, captured_NS: Tensor, embedded_NC: Tensor) -> Tensor:
        """Return the log attention weights, [B, H, T, T], causal within each document."""
        B, T = rows.ids.shape
        identity = captured_NS @ self.identity.mT
        squares = (captured_NS @ self.prediction.mT).square().sum(-1) + identity.square().sum(-1)
        identity = identity * torch.rsqrt(squares / embedded_NC.shape[-1] + self.eps)[:, None]
        inputs = torch.cat((embedded_NC, identity), dim=-1).view(B, T, -1)
        cos, sin = (pairs(table, self.D // 2) for table in self.rotary(inputs, rows.positions))
        q, k = (
            (inputs @ weight.mT).unflatten(-1, (-1, self.D)).transpose(1, 2) for weight in (self.queries, self.keys)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(self.groups, dim=1)
        scores = q @ k.mT * self.D**-0.5
        return scores.masked_fill(~causal_document_mask(rows)[:, None], torch.finfo(scores.dtype).min).log_softmax(-1)

    def copied(self, rows: Rows, captured_NS: Tensor, embedded_NC: Tensor) -> Tensor:
        """Return the embeddings that the heads attend to, averaged over heads, [B·T, C]."""
        weights = self(rows, captured_NS, embedded_NC).exp().mean(1)
        return (weights @ embedded_NC.view(*rows.ids.shape, -1)).flatten(0, 1)


def causal_document_mask(rows: Rows) -> Tensor:
    """Return the mask of visible positions, bool [B, T, T]: those of the same document up to the position itself."""
    positions = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    return visible(rows, positions.expand(rows.ids.shape), 0, None)


def matching_positions(rows: Rows) -> Tensor:
    """Return the mask of earlier positions with the next token, bool [B, T, T]; only those that also match the token
    before it, if there are any."""
    unigram = causal_document_mask(rows) & (rows.ids[:, None] == rows.ids.roll(-1, dims=1)[:, :, None])
    before = rows.ids.roll(1, dims=1)[:, None] == rows.ids[:, :, None]
    bigram = unigram & before & (rows.positions > 0)[:, None]
    return torch.where(bigram.any(-1, keepdim=True), bigram, unigram)


def lookup_loss(logs_BHTT: Tensor, rows: Rows) -> Tensor:
    """Return the cross-entropy of attention, [B, H, T]. The target is the matching positions; without a match, the
    uniform distribution, which copies next to nothing."""
    targets = matching_positions(rows)[:, None]
    match_logp = logs_BHTT.masked_fill(~targets, torch.finfo(logs_BHTT.dtype).min).logsumexp(-1)
    visible_BTT = causal_document_mask(rows)[:, None]
    count = visible_BTT.sum(-1)
    uniform_loss = logs_BHTT.masked_fill(~visible_BTT, 0).sum(-1) / count + count.log()
    return -torch.where(targets.any(-1), match_logp, uniform_loss)


def train_lookup(
    head: Eagle3Head, prediction: Tensor, rows: Rows, read: ReadInputs, generator: torch.Generator
) -> Lookup:
    """Train queries, keys and identity coordinates for `head` on `rows`, on the device of `prediction` (the other rows
    of `fc`)."""
    device, batch_rows = prediction.device, max(1, BATCH_TOKENS // rows.ids.shape[1])
    lookup = Lookup(head, prediction, generator).to(device)
    steps = min(MAX_STEPS, -(-MAX_EPOCHS * len(rows) // batch_rows))
    adam = torch.optim.Adam(lookup.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    epochs = -(-steps * batch_rows // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(epochs)])
    for indices in progress(order.split(batch_rows)[:steps], "train the lookup heads", steps):
        batch = rows.take(indices).to(device)
        with torch.enable_grad():
            lookup_loss(lookup(batch, *read(batch)), batch).transpose(0, 1)[:, ~batch.last].mean().backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        schedule.step()
    return lookup.requires_grad_(False)
