"""What a draft head's attention is taught before training: to find where the newest tokens stood before, and so what
followed them there, as prompt lookup does.

A row holds the target's state at a token and the embedding of the next one, which is the newest. So the rows to copy
from are those whose state is of that token, and their embedding is what followed it; a state also says a little of the
token before. This takes queries, keys, and coordinates of `fc` that say which token a state is of. Training on the
target's distributions does not find it in thousands of steps (docs/notes/training.md). Taught alone it takes
hundreds, of which none reads a vocabulary.

Legend: B rows, T tokens, N places, S captured states of the target side by side, C hidden size of the head, I identity
coordinates, H taught heads, K their key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mlaforge.data.packing import Rows
from mlaforge.drafting.unroll import visible
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.runtime import progress

# Steps of Adam at most, text in each (attention weights are kept in full), and how often a row is read at most.
STEPS, TOKENS, PASSES = 600, 2048, 20
RATE = 5e-3

# Rows of a text -> the captured states [B·T, S] and the next tokens' embeddings [B·T, C], normed.
Read = Callable[[Rows], tuple[Tensor, Tensor]]


def taught_heads(config: Eagle3Config) -> int:
    """Key-value heads that look up, the last ones: two thirds, none of a single one. What they can copy is limited by
    the rank of their values."""
    heads: int = config.layer.num_key_value_heads
    return 2 * heads // 3


def identity_size(config: Eagle3Config) -> int:
    """Coordinates of the head's state, the last ones, that say which tokens a place holds."""
    return min(2 * config.layer.head_dim, config.layer.hidden_size // 4) if taught_heads(config) else 0


class Lookup(nn.Module):
    """Parts of a head's `fc`, `q_proj` and `k_proj`: `identity` [I, S], and `queries` [H·D, C + I] and `keys`
    [K·D, C + I], which read the next token's embedding and the identity coordinates. `prediction` [C - I, S] is the
    rest of `fc`: it counts in the norm of a state."""

    prediction: Tensor

    def __init__(self, head: Eagle3Head, prediction: Tensor, draw: torch.Generator):
        super().__init__()
        layer, size = head.config.layer, identity_size(head.config)
        self.D, self.eps, self.rotary = layer.head_dim, layer.rms_norm_eps, head.rotary()
        self.groups = layer.num_attention_heads // layer.num_key_value_heads

        def drawn(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=draw) * (scale / columns**0.5)

        C, outputs = layer.hidden_size, taught_heads(head.config) * self.D
        self.identity = nn.Parameter(drawn(size, prediction.shape[1]))
        # A query is mostly of the next token, a key of the state.
        self.queries = nn.Parameter(
            torch.cat((drawn(self.groups * outputs, C), drawn(self.groups * outputs, size, 0.3)), dim=1)
        )
        self.keys = nn.Parameter(torch.cat((drawn(outputs, C, 0.3), drawn(outputs, size)), dim=1))
        self.register_buffer("prediction", prediction)

    def forward(self, rows: Rows, captured_NS: Tensor, embedded_NC: Tensor) -> Tensor:
        """Log of the attention weights, [B, H, T, T]; a place sees its own text up to itself."""
        B, T = rows.ids.shape
        identity = captured_NS @ self.identity.mT
        squares = (captured_NS @ self.prediction.mT).square().sum(-1) + identity.square().sum(-1)
        identity = identity * torch.rsqrt(squares / embedded_NC.shape[-1] + self.eps)[:, None]
        both = torch.cat((embedded_NC, identity), dim=-1).view(B, T, -1)
        cos, sin = (pairs(table, self.D // 2) for table in self.rotary(both, rows.positions))
        q, k = ((both @ weight.mT).unflatten(-1, (-1, self.D)).transpose(1, 2) for weight in (self.queries, self.keys))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(self.groups, dim=1)
        scores = q @ k.mT * self.D**-0.5
        return scores.masked_fill(~own_text(rows)[:, None], torch.finfo(scores.dtype).min).log_softmax(-1)

    def copied(self, rows: Rows, captured_NS: Tensor, embedded_NC: Tensor) -> Tensor:
        """The embeddings that the heads find, [B·T, C], their mean."""
        weights = self(rows, captured_NS, embedded_NC).exp().mean(1)
        return (weights @ embedded_NC.view(*rows.ids.shape, -1)).flatten(0, 1)


def own_text(rows: Rows) -> Tensor:
    """Which places a place sees, bool [B, T, T]: its own text up to itself."""
    every = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    return visible(rows, every.expand(rows.ids.shape), 0, None)


def places_before(rows: Rows) -> Tensor:
    """bool [B, T, T]: the earlier places with the token that comes next, and of these, if there are such, those where
    the token before is the same too."""
    one = own_text(rows) & (rows.ids[:, None] == rows.ids.roll(-1, dims=1)[:, :, None])
    before = rows.ids.roll(1, dims=1)[:, None] == rows.ids[:, :, None]
    two = one & before & (rows.positions > 0)[:, None]
    return torch.where(two.any(-1, keepdim=True), two, one)


def missed(logs_BHTT: Tensor, rows: Rows) -> Tensor:
    """Cross-entropy of attention, [B, H, T]: a head should see the places before. Where there are none it should see
    all places alike, which adds next to nothing."""
    wanted = places_before(rows)[:, None]
    hit = logs_BHTT.masked_fill(~wanted, torch.finfo(logs_BHTT.dtype).min).logsumexp(-1)
    seen = own_text(rows)[:, None]
    count = seen.sum(-1)
    alike = logs_BHTT.masked_fill(~seen, 0).sum(-1) / count + count.log()
    return -torch.where(wanted.any(-1), hit, alike)


def teach(head: Eagle3Head, prediction: Tensor, rows: Rows, read: Read, draw: torch.Generator) -> Lookup:
    """Queries, keys and identity coordinates for `head`, whose `fc` is `prediction` otherwise, learnt on `rows`; on the
    device of `prediction`."""
    device, at_once = prediction.device, max(1, TOKENS // rows.ids.shape[1])
    lookup = Lookup(head, prediction, draw).to(device)
    steps = min(STEPS, -(-PASSES * len(rows) // at_once))
    adam = torch.optim.Adam(lookup.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    passes = -(-steps * at_once // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=draw) for _ in range(passes)])
    for some in progress(order.split(at_once)[:steps], "teach the lookup", steps):
        part = rows.take(some).to(device)
        with torch.enable_grad():
            missed(lookup(part, *read(part)), part).transpose(0, 1)[:, ~part.last].mean().backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        schedule.step()
    return lookup.requires_grad_(False)
