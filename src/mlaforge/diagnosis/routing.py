"""Router statistics of a mixture of experts: load, imbalance, router entropy, and which experts co-activate.

Legend: N tokens, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.families.spec import MoeSpec

# Relative to a fair share of the load: experts below DEAD_LOAD are hardly used, those above HOT_LOAD are bottlenecks.
DEAD_LOAD, HOT_LOAD = 0.05, 3.0
# Maximum number of reported pairs of experts.
MAX_PAIRS = 10


@dataclasses.dataclass
class RoutingStats:
    """Sums over the tokens of one layer, fp64.

    together [E, E]: tokens routed to both experts (diagonal: to one expert). probability [E]: the router's softmax over
    all experts. entropy: of that softmax, in nats.
    """

    together: Tensor
    probability: Tensor
    entropy: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, moe: MoeSpec, device: torch.device) -> RoutingStats:
        E = moe.num_experts
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((E, E), (E,), (), ())))

    def add(self, logits: Tensor, top_k: int) -> None:
        """Add router logits [..., E]; a token is routed to the experts with the `top_k` largest."""
        logits = logits.detach().flatten(0, -2).float()
        logs = logits.log_softmax(-1)
        routed = torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
        # The counts of one window are exact in fp32.
        self.together += (routed.T @ routed).double()
        self.probability += logs.exp().sum(0).double()
        self.entropy -= (logs.exp() * logs).sum().double()
        self.tokens += len(logits)

    def describe(self) -> dict[str, Any]:
        """Return plain numbers for JSON. `load`: each expert's share of all routed tokens, relative to 1/E."""
        routed, E = self.together.diagonal(), len(self.together)
        load = routed / routed.sum() * E
        # Observed co-activation relative to that of independent experts.
        lift = self.together * self.tokens / (routed[:, None] * routed).clamp_min(1)
        upper = torch.triu_indices(E, E, offset=1, device=lift.device)
        pair_counts = self.together[upper[0], upper[1]]
        largest = pair_counts.topk(min(MAX_PAIRS, len(pair_counts))).indices
        return {
            "load": load.tolist(),
            "probability": (self.probability / self.tokens).tolist(),
            "cv": float(load.std(correction=0)),
            "max_over_mean": float(load.max()),
            "dead": (load < DEAD_LOAD).nonzero()[:, 0].tolist(),
            "hot": (load > HOT_LOAD).nonzero()[:, 0].tolist(),
            "router_entropy": float(self.entropy / self.tokens),
            "together": self.together.long().tolist(),
            "pairs": [
                {"experts": [i, j], "share": float(self.together[i, j] / self.tokens), "lift": float(lift[i, j])}
                for i, j in upper[:, largest].T.tolist()
                if self.together[i, j] > 0
            ],
        }
