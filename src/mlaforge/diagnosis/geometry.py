"""Geometry of queries, keys and values: norms, rotary energy, outlier dimensions, spectra and effective ranks.

Legend: H query heads, G KV heads, D head_dim, P = D/2 rotary pairs, T tokens, C hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.factorization.latent import Projections, key_weight, value_weight, with_ridge
from mlaforge.factorization.moments import LayerMoments, roots
from mlaforge.families.spec import LayerSpec

# A dimension is an outlier if its root mean square exceeds this multiple of its head's median (for x: of all).
OUTLIER = 5.0


@dataclasses.dataclass
class Geometry:
    """Sums over the tokens of one layer, fp64.

    Norms [heads] of q and k before and after norm and RoPE, and of v; energies of rotary pairs [heads, P] (after the
    norm, if there is one); squares per dimension of projected k and v [G, D] and of the input x [C]; kv_sum [2GD] and
    kv_outer [2GD, 2GD] of projected [k; v].
    """

    q_norm: Tensor
    q_rotated_norm: Tensor
    k_norm: Tensor
    k_rotated_norm: Tensor
    v_norm: Tensor
    q_pairs: Tensor
    k_pairs: Tensor
    k_square: Tensor
    v_square: Tensor
    x_square: Tensor
    kv_sum: Tensor
    kv_outer: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, layer: LayerSpec, hidden: int, device: torch.device) -> Geometry:
        H, G, D, n = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.cached
        shapes = ((H,), (H,), (G,), (G,), (G,), (H, D // 2), (G, D // 2), (G, D), (G, D), (hidden,), (n,), (n, n), ())
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, x: Tensor, projected: tuple[Tensor, Tensor, Tensor], normed: tuple[Tensor, Tensor],
            rotated: tuple[Tensor, Tensor]) -> None:  # fmt: skip
        """Add one window, fp32: x [T, C]; projected q, k, v [heads, T, D]; q and k after the norm (the same without
        one), and after RoPE."""
        q, k, v = projected
        for total, heads in ((self.q_norm, q), (self.k_norm, k), (self.v_norm, v), (self.q_rotated_norm, rotated[0]),
                             (self.k_rotated_norm, rotated[1])):  # fmt: skip
            total += heads.norm(dim=-1).double().sum(-1)
        for total, heads in ((self.q_pairs, normed[0]), (self.k_pairs, normed[1])):
            total += heads.square().unflatten(-1, (2, -1)).sum(-2).double().sum(1)
        self.k_square += k.square().double().sum(1)
        self.v_square += v.square().double().sum(1)
        self.x_square += x.square().double().sum(0)
        kv = torch.cat((k, v)).transpose(0, 1).flatten(1)
        self.kv_sum += kv.double().sum(0)
        self.kv_outer += (kv.T @ kv).double()
        self.tokens += len(x)

    def describe(self) -> dict[str, Any]:
        """Return means over tokens as plain numbers for JSON."""
        norms = ("q_norm", "q_rotated_norm", "k_norm", "k_rotated_norm", "v_norm", "q_pairs", "k_pairs")
        means: dict[str, Any] = {name: (getattr(self, name) / self.tokens).tolist() for name in norms}
        squares = {"k": self.k_square, "v": self.v_square, "x": self.x_square[None]}
        return {**means, "outliers": {name: _outliers(square / self.tokens) for name, square in squares.items()}}

    def spectra(self, projections: Projections, m: LayerMoments, layer: LayerSpec) -> dict[str, Tensor]:
        """Return name -> eigenvalues, descending: of the covariances of K, V, and both scaled to equal trace; and of K
        and V weighted by the queries that read them (the local weights of docs/conversion.md)."""
        mean, half = self.kv_sum / self.tokens, layer.cached // 2
        covariance = self.kv_outer / self.tokens - torch.outer(mean, mean)
        k, v = covariance[:half, :half], covariance[half:, half:]
        scale = torch.cat([part.diagonal().mean().clamp_min(1e-300).rsqrt().expand(half) for part in (k, v)])
        weighted = {
            "k_weighted": (k, key_weight(m.key_outer, layer, m.rows)),
            "v_weighted": (v, value_weight(m.value_mix, projections.o_gram, layer, m.rows)),
        }
        matrices = {"k": k, "v": v, "joint": scale[:, None] * covariance * scale}
        for name, (part, weight) in weighted.items():
            root = roots(with_ridge(weight))[0]
            matrices[name] = root @ part @ root
        return {name: torch.linalg.eigvalsh(part).flip(-1).clamp_min(0) for name, part in matrices.items()}


def effective_rank(values: Tensor) -> float:
    """Return exp of the entropy of the normalised eigenvalues: n for n equal ones (Roy and Vetterli 2007)."""
    share = values / values.sum().clamp_min(1e-300)
    return float(torch.special.entr(share).sum().exp())


def _outliers(mean_square: Tensor) -> dict[str, Any]:
    """Return the largest ratio to the median per head, and all outliers. mean_square: [heads, dimensions]."""
    rms = mean_square.sqrt()
    ratio = rms / rms.median(-1, keepdim=True).values.clamp_min(1e-300)
    indices = (ratio > OUTLIER).nonzero()
    return {
        "largest": ratio.amax(-1).tolist(),
        "dimensions": [{"head": h, "dimension": d, "ratio": float(ratio[h, d])} for h, d in indices.tolist()],
    }
