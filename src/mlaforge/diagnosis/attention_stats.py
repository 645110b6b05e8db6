"""Attention statistics per head: the distribution of softmax weights, computed in chunks of query rows.

Memory does not depend on the length of a window. All statistics are over the queries of the second half of each window:
these see at least half a window, so no share is high merely for lack of other keys.

Legend: H query heads, G KV heads, D head_dim, T tokens of a window, R query rows of a chunk, K keys visible to a chunk.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.families.spec import LayerSpec

# Maximum number of attention weights (fp32) of a chunk.
MAX_WEIGHTS = 1 << 23
# Reported shares of attention: on the first tokens, and within the most recent tokens.
FIRST_TOKENS = (1, 4, 16)
RECENT = (128, 256, 1024)
# First tokens that the effective context excludes as attention sinks (StreamingLLM, arXiv:2309.17453, keeps 4).
SINK_TOKENS = 4
# The effective context contains this share of the attention outside those tokens and the learned sink.
CONTEXT_SHARE = 0.9


@dataclasses.dataclass
class AttentionStats:
    """Sums over the queries in the second halves of the windows of one layer, fp64.

    first [H, 3]: weight on the first 1, 4, 16 tokens. sink [H]: weight on the learned sink. entropy [H]: in nats, with
    the sink as an outcome. by_distance, resting [H, T]: weight by distance i - j, for all keys and for the first
    SINK_TOKENS. low, high [H]: minimum and maximum logit. first_norm, mean_norm [G]: norm of the first key and mean
    norm of the others, summed over windows.
    """

    first: Tensor
    sink: Tensor
    entropy: Tensor
    by_distance: Tensor
    resting: Tensor
    low: Tensor
    high: Tensor
    first_norm: Tensor
    mean_norm: Tensor
    rows: Tensor

    @classmethod
    def empty(cls, layer: LayerSpec, length: int, device: torch.device) -> AttentionStats:
        """Return zero sums for windows of `length` tokens."""
        H, G = layer.num_heads, layer.num_kv_heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            zeros(H, len(FIRST_TOKENS)), zeros(H), zeros(H), zeros(H, length), zeros(H, length), zeros(H) + torch.inf,
            zeros(H) - torch.inf, zeros(G), zeros(G), zeros(),
        )  # fmt: skip

    def add(self, q_HTD: Tensor, k_GTD: Tensor, layer: LayerSpec, scale: float, sinks_H: Tensor | None) -> None:
        """Add one window. q_HTD, k_GTD: after RoPE, fp32; sinks_H: logits of the learned sinks."""
        H, T, _ = q_HTD.shape
        norms = k_GTD.norm(dim=-1).double()
        self.first_norm += norms[:, 0]
        self.mean_norm += norms[:, 1:].mean(-1)
        chunk_rows = max(1, MAX_WEIGHTS // (H * T))
        for start in range(T // 2, T, chunk_rows):
            rows = torch.arange(start, min(start + chunk_rows, T), device=q_HTD.device)
            self._rows(q_HTD[:, rows], k_GTD, rows, layer, scale, sinks_H)
            self.rows += len(rows)

    def _rows(
        self, q_HRD: Tensor, k_GTD: Tensor, rows: Tensor, layer: LayerSpec, scale: float, sinks_H: Tensor | None
    ) -> None:
        H, R, D = q_HRD.shape
        first_key, last_key = 0, int(rows[-1]) + 1
        if layer.window is not None:
            first_key = max(0, int(rows[0]) - layer.window + 1)
        keys = torch.arange(first_key, last_key, device=rows.device)
        masked = keys > rows[:, None]
        if layer.window is not None:
            masked |= keys <= rows[:, None] - layer.window
        # The query heads of a group are adjacent, so they become rows of one matrix product.
        scores = q_HRD.reshape(len(k_GTD), -1, D) @ k_GTD[:, first_key:last_key].transpose(1, 2)
        scores = scores.view(H, R, -1).mul_(scale).masked_fill_(masked, torch.inf)
        self.low = torch.minimum(self.low, scores.amin((1, 2)).double())
        scores.masked_fill_(masked, -torch.inf)
        self.high = torch.maximum(self.high, scores.amax((1, 2)).double())
        lse = scores.logsumexp(-1)
        if sinks_H is not None:
            lse = torch.logaddexp(lse, sinks_H[:, None])
            sink_logp = sinks_H[:, None] - lse
            self.sink += sink_logp.exp().double().sum(-1)
            self.entropy -= (sink_logp.exp() * sink_logp).double().sum(-1)
        logp = scores.sub_(lse[..., None])
        a_HRK = logp.exp()
        # Avoids 0 · -inf = NaN.
        logp.masked_fill_(masked, 0)
        self.entropy -= logp.mul_(a_HRK).sum(-1).double().sum(-1)
        for n, count in enumerate(FIRST_TOKENS):
            self.first[:, n] += a_HRK[..., : max(0, count - first_key)].sum((1, 2)).double()
        sums = by_distance(a_HRK).double()
        self.by_distance[:, : sums.shape[1]] += sums
        for column in range(max(0, SINK_TOKENS - first_key)):
            self.resting.index_add_(1, rows - first_key - column, a_HRK[..., column].double())

    def describe(self) -> dict[str, Any]:
        """Return the statistics per head as plain numbers for JSON; None where windows are too short."""
        length, rows = self.by_distance.shape[1], self.rows
        within = self.by_distance.cumsum(-1) / rows
        context = (self.by_distance - self.resting).clamp_min(0).cumsum(-1)
        return {
            "first": {str(count): (self.first[:, n] / rows).tolist() for n, count in enumerate(FIRST_TOKENS)},
            "learned_sink": (self.sink / rows).tolist(),
            "entropy": (self.entropy / rows).tolist(),
            "recent": {str(w): within[:, w - 1].tolist() if 2 * w <= length else None for w in RECENT},
            "effective_context": ((context < CONTEXT_SHARE * context[:, -1:]).sum(-1) + 1).clamp_max(length).tolist(),
            "logit_range": torch.stack((self.low, self.high), -1).tolist(),
            "sink_key_norm": (self.first_norm / self.mean_norm).tolist(),
        }


def by_distance(a_HRK: Tensor) -> Tensor:
    """Return sums over rows by distance to the key (0, 1, 2, ...), [H, K]; the last row's own key is the last key."""
    H, R, K = a_HRK.shape
    # Shift each row by one more place, so that equal distances share a column.
    shifted = nn.functional.pad(a_HRK.flip(1), (0, R)).flatten(1)[:, : R * (K + R - 1)].view(H, R, K + R - 1)
    return shifted.sum(1)[:, :K].flip(-1)
