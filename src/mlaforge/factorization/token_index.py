"""The `pairs` index of a layer, computed from its attention on a text without training.

A head's logit is a sum over rotary frequencies of Re(conj(q) k), with q and k a query's and a key's pair as complex
numbers. At one frequency the keys of the G KV heads are a vector of G complex numbers; its linear combinations rotate
by the same angle, so that they commute with RoPE. With its covariance C over tokens and the heads' mean |q|² w, the
best approximation of all logits by one coordinate is the first eigenvector v of C^½ w C^½: a key is vᴴ C^-½ k, and a
query q conj((C^½ v)_g). The coordinates with the largest eigenvalues of all frequencies are selected. The part without
RoPE (the latent in `latent_rope`) has real directions, selected by the same criterion.

Legend: n tokens, G KV heads, H query heads, D head_dim, P rotary pairs, R latent rank, c candidates, F features of a
key, E of a query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.factorization.moments import roots
from mlaforge.modeling.token_index_mla import LARGEST_KEY
from mlaforge.runtime import UserError

# First tokens of a text, which are excluded: their keys are outliers, and they are always selected.
FIRST = 8
# Margin above the largest key of the calibration text.
HEADROOM = 1.25


class PairMoments:
    """Moments of P rotary pairs of G keys per token, complex128: `outer` [P, G, G] and `sum` [P, G] of rotated keys,
    and `power` [G, P], the sum of the heads' |q|²."""

    def __init__(self, groups: int, pairs: int):
        self.outer = torch.zeros(pairs, groups, groups, dtype=torch.complex128)
        self.sum = torch.zeros(pairs, groups, dtype=torch.complex128)
        self.power = torch.zeros(groups, pairs, dtype=torch.float64)
        self.keys = self.tokens = 0

    def add(self, k_nGP: Tensor, q_nHP: Tensor, rotations_nP: Sequence[Tensor]) -> None:
        """Add complex keys and queries of a text before RoPE, and the rotations at one or several position offsets:
        several offsets sample more angles of slow frequencies."""
        self.power += q_nHP.abs().square().unflatten(1, (len(self.power), -1)).sum((0, 2)).double()
        self.tokens += len(k_nGP)
        for rotation in rotations_nP:
            rotated = (k_nGP * rotation[:, None])[FIRST:].to(torch.complex128)
            self.outer += torch.einsum("ngp,nhp->pgh", rotated, rotated.conj())
            self.sum += rotated.sum(0).T
            self.keys += len(rotated)


@dataclasses.dataclass
class Candidates:
    """Candidate pairs of an index, fp64: `variance` [c], the variance of the logits that a pair explains; `key`
    [c, 2, F] and `bias` [c, 2], `query` [G, c, 2, E]; `frequency` [c], -1 without RoPE."""

    variance: Tensor
    key: Tensor
    bias: Tensor
    query: Tensor
    frequency: Tensor

    @classmethod
    def rotary(cls, moments: PairMoments) -> Candidates:
        """Return the candidates of rotary pairs; features are the keys of all G heads before RoPE, F = G·2P and
        E = 2P."""
        mean = moments.sum / moments.keys
        covariance = moments.outer / moments.keys - mean[:, :, None] * mean[:, None].conj()
        root, inverse = roots(covariance)
        power = moments.power.T[..., None] / moments.tokens
        values, vectors = torch.linalg.eigh(root @ (power * root))
        P, G, _ = vectors.shape
        key, query = (vectors.mH @ inverse).flatten(0, 1), (root @ vectors).mT.flatten(0, 1)
        row, pair = torch.arange(P * G), torch.arange(P).repeat_interleave(G)
        keys = torch.zeros(P * G, 2, G, 2, P, dtype=torch.float64)
        keys[row, 0, :, 0, pair] = keys[row, 1, :, 1, pair] = key.real
        keys[row, 1, :, 0, pair], keys[row, 0, :, 1, pair] = key.imag, -key.imag
        queries = torch.zeros(P * G, 2, G, 2, P, dtype=torch.float64)
        queries[row, 0, :, 0, pair] = queries[row, 1, :, 1, pair] = query.real
        queries[row, 0, :, 1, pair], queries[row, 1, :, 0, pair] = query.imag, -query.imag
        # The mean square of Re(conj(q) k) over angles is half of |q|²|k|².
        return cls(
            values.flatten() / 2, keys.flatten(2), torch.zeros(P * G, 2, dtype=torch.float64),
            queries.movedim(2, 0).flatten(3), pair,
        )  # fmt: skip

    @classmethod
    def unrotated(cls, covariance_RR: Tensor, query_outer_GDD: Tensor, w_uk_GDR: Tensor) -> Candidates:
        """Return the candidates of latents c whose products with queries, q W_uk c, have no RoPE: F = R and E = D. Two
        directions form a pair."""
        root, inverse = roots(covariance_RR.double())
        w_uk = w_uk_GDR.double()
        power = torch.einsum("gdr,gde,ges->rs", w_uk, query_outer_GDD.double(), w_uk)
        values, vectors = (t.flip(-1) for t in torch.linalg.eigh(root @ power @ root))
        even = len(values) // 2 * 2
        key, query = (vectors.T @ inverse)[:even], (w_uk @ root @ vectors)[..., :even].mT
        return cls(
            values[:even].view(-1, 2).sum(1), key.unflatten(0, (-1, 2)), torch.zeros(even // 2, 2, dtype=torch.float64),
            query.unflatten(1, (-1, 2)), torch.full((even // 2,), -1),
        )  # fmt: skip

    def on_latents(self, w_FR: Tensor, b_F: Tensor) -> Candidates:
        """Return the candidates as functions of latents, of which the present features are a linear map."""
        key, w, b = self.key, w_FR.double(), b_F.double()
        return dataclasses.replace(self, key=key @ w, bias=self.bias + key @ b)

    def concatenate(self, other: Candidates) -> Candidates:
        """Return both candidates on concatenated features and queries."""
        pad = torch.nn.functional.pad
        (F, E), (other_F, other_E) = (
            (candidates.key.shape[2], candidates.query.shape[3]) for candidates in (self, other)
        )
        return Candidates(
            torch.cat((self.variance, other.variance)),
            torch.cat((pad(self.key, (0, other_F)), pad(other.key, (F, 0)))),
            torch.cat((self.bias, other.bias)),
            torch.cat((pad(self.query, (0, other_E)), pad(other.query, (E, 0))), dim=1),
            torch.cat((self.frequency, other.frequency)),
        )

    def best(self, width: int, features_nF: Tensor, scale: float, attention_scaling: float) -> dict[str, Tensor]:
        """Return the parameters of a PairsIndex with keys of `width` coordinates. The keys are scaled such that those
        of the calibration text, `features_nF`, fit into signed 8 bits; `scale` is that of the softmax. Raises UserError
        for too few candidates."""
        if width // 2 > len(self.variance):
            raise UserError(
                f"an index key of width {width} exceeds the maximum of this layer, {2 * len(self.variance)}"
            )
        selected = self.variance.argsort(descending=True)[: width // 2]
        key, bias, query = self.key[selected], self.bias[selected], self.query[:, selected]
        index_keys = torch.einsum("cxf,nf->ncx", key, features_nF.double()) + bias
        unit = HEADROOM * attention_scaling * index_keys.square().sum(-1).amax(0).sqrt() / LARGEST_KEY
        unit = unit.clamp_min(1e-30)[:, None]
        # Half-split: real parts, then imaginary ones.
        return {
            "key.weight": (key / unit[..., None]).transpose(0, 1).flatten(0, 1).float(),
            "key.bias": (bias / unit).T.flatten().float(),
            "query": (query * unit[..., None] * scale).transpose(1, 2).flatten(1, 2).float(),
            "frequency": self.frequency[selected],
        }
