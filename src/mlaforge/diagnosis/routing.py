"""Router statistics of a mixture of experts: load, imbalance, router entropy, and which experts co-activate.

Legend: N tokens, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.families.spec import MoeSpec

# Beside a fair share of the load: experts below DEAD hardly ever work, those above HOT are the bottleneck.
DEAD, HOT = 0.05, 3.0
# So many pairs of experts are named.
PAIRS = 10


@dataclasses.dataclass
class RoutingStats:
    """Sums over tokens of one layer, fp64: together [E, E] counts tokens that two experts serve both (its diagonal:
    tokens that one serves), probability [E] the router's softmax over all experts, entropy of that softmax in nats."""

    together: Tensor
    probability: Tensor
    entropy: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, moe: MoeSpec, device: torch.device) -> RoutingStats:
        E = moe.num_experts
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((E, E), (E,), (), ())))

    def add(self, logits: Tensor, top_k: int) -> None:
        """Router logits [..., E]; the `top_k` largest are the experts that serve a token."""
        logits = logits.detach().flatten(0, -2).float()
        logs = logits.log_softmax(-1)
        served = torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
        # Counts of a window are exact in fp32.
        self.together += (served.T @ served).double()
        self.probability += logs.exp().sum(0).double()
        self.entropy -= (logs.exp() * logs).sum().double()
        self.tokens += len(logits)

    def describe(self) -> dict[str, Any]:
        """Plain numbers for JSON. `load` is each expert's share of all routed tokens, over the fair share 1/E."""
        served, E = self.together.diagonal(), len(self.together)
        load = served / served.sum() * E
        # How often two experts meet over how often they would, did they choose tokens on their own.
        lift = self.together * self.tokens / (served[:, None] * served).clamp_min(1)
        upper = torch.triu_indices(E, E, offset=1, device=lift.device)
        meetings = self.together[upper[0], upper[1]]
        most = meetings.topk(min(PAIRS, len(meetings))).indices
        return {
            "load": load.tolist(),
            "probability": (self.probability / self.tokens).tolist(),
            "cv": float(load.std(correction=0)),
            "max_over_mean": float(load.max()),
            "dead": (load < DEAD).nonzero()[:, 0].tolist(),
            "hot": (load > HOT).nonzero()[:, 0].tolist(),
            "router_entropy": float(self.entropy / self.tokens),
            "together": self.together.long().tolist(),
            "pairs": [
                {"experts": [i, j], "share": float(self.together[i, j] / self.tokens), "lift": float(lift[i, j])}
                for i, j in upper[:, most].T.tolist()
                if self.together[i, j] > 0
            ],
        }
