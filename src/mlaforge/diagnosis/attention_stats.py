"""Attention statistics, head by head: where softmax weights lie, without ever holding all of them at once.

Query rows are taken in chunks, so that the memory does not depend on the length of a window. Every number is over the
queries of the second half of each window: each sees at least half a window, so that no number is high only because
there was nothing else to look at.

Legend: H query heads, G KV heads, D head_dim, T tokens of a window, R query rows of a chunk, K keys that it may see.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.families.spec import LayerSpec

# Rows are chunked so that one chunk's weights (fp32) stay below this many numbers.
MAX_WEIGHTS = 1 << 23
# The share of attention on so many first tokens, and within so many last ones, is reported.
FIRST = (1, 4, 16)
RECENT = (128, 256, 1024)
# Tokens at the start that the effective context leaves out: what rests there is no context (arXiv:2309.17453 keeps 4).
RESTING = 4
# The effective context holds this share of what rests neither on those tokens nor on a learned sink.
HELD = 0.9


@dataclasses.dataclass
class AttentionStats:
    """Sums over the queries of the second half of the windows of one layer, fp64.

    first [H, 3]: weight on the first 1, 4, 16 tokens.   sink [H]: on the learned sink.   entropy [H]: in nats, the sink
    one more outcome.   by_distance, resting [H, T]: weight by distance i - j, of all tokens and of the first RESTING.
    low, high [H]: the least and the greatest logit.   first_norm, mean_norm [G]: norm of the first key, and the mean
    over the others, summed over windows.
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
        """For windows of `length` tokens."""
        H, G = layer.num_heads, layer.num_kv_heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            zeros(H, len(FIRST)), zeros(H), zeros(H), zeros(H, length), zeros(H, length), zeros(H) + torch.inf,
            zeros(H) - torch.inf, zeros(G), zeros(G), zeros(),
        )  # fmt: skip

    def add(self, q_HTD: Tensor, k_GTD: Tensor, layer: LayerSpec, scale: float, sinks_H: Tensor | None) -> None:
        """One window; queries and keys rotated, fp32."""
        H, T, _ = q_HTD.shape
        norms = k_GTD.norm(dim=-1).double()
        self.first_norm += norms[:, 0]
        self.mean_norm += norms[:, 1:].mean(-1)
        size = max(1, MAX_WEIGHTS // (H * T))
        for start in range(T // 2, T, size):
            rows = torch.arange(start, min(start + size, T), device=q_HTD.device)
            self._rows(q_HTD[:, rows], k_GTD, rows, layer, scale, sinks_H)
            self.rows += len(rows)

    def _rows(
        self, q_HRD: Tensor, k_GTD: Tensor, rows: Tensor, layer: LayerSpec, scale: float, sinks_H: Tensor | None
    ) -> None:
        H, R, D = q_HRD.shape
        begin, end = 0, int(rows[-1]) + 1
        if layer.window is not None:
            begin = max(0, int(rows[0]) - layer.window + 1)
        keys = torch.arange(begin, end, device=rows.device)
        unseen = keys > rows[:, None]
        if layer.window is not None:
            unseen |= keys <= rows[:, None] - layer.window
        # The heads of one group lie one after another, so they fold into the rows of one matrix product.
        scores = q_HRD.reshape(len(k_GTD), -1, D) @ k_GTD[:, begin:end].transpose(1, 2)
        scores = scores.view(H, R, -1).mul_(scale).masked_fill_(unseen, torch.inf)
        self.low = torch.minimum(self.low, scores.amin((1, 2)).double())
        scores.masked_fill_(unseen, -torch.inf)
        self.high = torch.maximum(self.high, scores.amax((1, 2)).double())
        lse = scores.logsumexp(-1)
        if sinks_H is not None:
            lse = torch.logaddexp(lse, sinks_H[:, None])
            rest = sinks_H[:, None] - lse
            self.sink += rest.exp().double().sum(-1)
            self.entropy -= (rest.exp() * rest).double().sum(-1)
        logs = scores.sub_(lse[..., None])
        a_HRK = logs.exp()
        # Nothing times minus infinity would be NaN.
        logs.masked_fill_(unseen, 0)
        self.entropy -= logs.mul_(a_HRK).sum(-1).double().sum(-1)
        for n, count in enumerate(FIRST):
            self.first[:, n] += a_HRK[..., : max(0, count - begin)].sum((1, 2)).double()
        sums = by_distance(a_HRK).double()
        self.by_distance[:, : sums.shape[1]] += sums
        for column in range(max(0, RESTING - begin)):
            self.resting.index_add_(1, rows - begin - column, a_HRK[..., column].double())

    def describe(self) -> dict[str, Any]:
        """Per head, plain numbers for JSON; None where windows were too short to tell."""
        length, rows = self.by_distance.shape[1], self.rows
        within = self.by_distance.cumsum(-1) / rows
        context = (self.by_distance - self.resting).clamp_min(0).cumsum(-1)
        return {
            "first": {str(count): (self.first[:, n] / rows).tolist() for n, count in enumerate(FIRST)},
            "learned_sink": (self.sink / rows).tolist(),
            "entropy": (self.entropy / rows).tolist(),
            "recent": {str(w): within[:, w - 1].tolist() if 2 * w <= length else None for w in RECENT},
            "effective_context": ((context < HELD * context[:, -1:]).sum(-1) + 1).clamp_max(length).tolist(),
            "logit_range": torch.stack((self.low, self.high), -1).tolist(),
            "sink_key_norm": (self.first_norm / self.mean_norm).tolist(),
        }


def by_distance(a_HRK: Tensor) -> Tensor:
    """[H, K]: sums over rows of what lies 0, 1, 2, ... keys back, where the last row's own key is the last one."""
    H, R, K = a_HRK.shape
    # Rows laid one place apart, so that equal distances stand one below the other.
    slanted = nn.functional.pad(a_HRK.flip(1), (0, R)).flatten(1)[:, : R * (K + R - 1)].view(H, R, K + R - 1)
    return slanted.sum(1)[:, :K].flip(-1)
