"""The `pairs` index of a layer, from what its attention does on a text: no training.

A head's logit is a sum over rotary frequencies of Re(conj(q) k), q and k a query's and a key's pair as complex numbers.
At one frequency the keys of the G KV heads are a vector of G complex numbers; mixtures of them turn by the same angle,
so they commute with RoPE. With C its covariance over tokens and w the heads' mean |q|², the best approximation of all
logits by one number is the first eigenvector v of C^½ w C^½: a key is vᴴ C^-½ k, and a query q conj((C^½ v)_g). Over
all frequencies the numbers of largest eigenvalue are kept. What does not turn (the latent's own part in `latent_rope`)
has real directions in its place, by the same criterion.

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

# Tokens of a text that count for nothing: they lie where no other does, and are read in any case.
FIRST = 8
# Room above the largest key of the calibration text.
HEADROOM = 1.25


class PairMoments:
    """Of P rotary pairs of G keys a token, in complex128: `outer` [P, G, G] and `sum` [P, G] of turned keys, and
    `power` [G, P], the heads' |q|² in sum."""

    def __init__(self, groups: int, pairs: int):
        self.outer = torch.zeros(pairs, groups, groups, dtype=torch.complex128)
        self.sum = torch.zeros(pairs, groups, dtype=torch.complex128)
        self.power = torch.zeros(groups, pairs, dtype=torch.float64)
        self.keys = self.tokens = 0

    def add(self, k_nGP: Tensor, q_nHP: Tensor, turns_nP: Sequence[Tensor]) -> None:
        """Complex keys and queries of a text as they are before RoPE, and what they are turned by, at one or several
        places: at several, slow frequencies are seen at more angles."""
        self.power += q_nHP.abs().square().unflatten(1, (len(self.power), -1)).sum((0, 2)).double()
        self.tokens += len(k_nGP)
        for turn in turns_nP:
            turned = (k_nGP * turn[:, None])[FIRST:].to(torch.complex128)
            self.outer += torch.einsum("ngp,nhp->pgh", turned, turned.conj())
            self.sum += turned.sum(0).T
            self.keys += len(turned)


@dataclasses.dataclass
class Candidates:
    """Pairs that an index may have, fp64: `worth` [c], the logits' variance that a pair takes over; `key` [c, 2, F] and
    `bias` [c, 2], `query` [G, c, 2, E]; `frequency` [c], -1 where it does not turn."""

    worth: Tensor
    key: Tensor
    bias: Tensor
    query: Tensor
    frequency: Tensor

    @classmethod
    def turning(cls, moments: PairMoments) -> Candidates:
        """Of rotary pairs; features are the keys of all G heads as they are before RoPE, F = G·2P and E = 2P."""
        mean = moments.sum / moments.keys
        covariance = moments.outer / moments.keys - mean[:, :, None] * mean[:, None].conj()
        root, inverse = roots(covariance)
        power = moments.power.T[..., None] / moments.tokens
        values, vectors = torch.linalg.eigh(root @ (power * root))
        P, G, _ = vectors.shape
        key, query = (vectors.mH @ inverse).flatten(0, 1), (root @ vectors).mT.flatten(0, 1)
        each, at = torch.arange(P * G), torch.arange(P).repeat_interleave(G)
        keys = torch.zeros(P * G, 2, G, 2, P, dtype=torch.float64)
        keys[each, 0, :, 0, at] = keys[each, 1, :, 1, at] = key.real
        keys[each, 1, :, 0, at], keys[each, 0, :, 1, at] = key.imag, -key.imag
        queries = torch.zeros(P * G, 2, G, 2, P, dtype=torch.float64)
        queries[each, 0, :, 0, at] = queries[each, 1, :, 1, at] = query.real
        queries[each, 0, :, 1, at], queries[each, 1, :, 0, at] = query.imag, -query.imag
        # The real part of conj(q) k has half of |q|²|k|² in the mean over angles.
        return cls(
            values.flatten() / 2, keys.flatten(2), torch.zeros(P * G, 2, dtype=torch.float64),
            queries.movedim(2, 0).flatten(3), at,
        )  # fmt: skip

    @classmethod
    def still(cls, covariance_RR: Tensor, query_outer_GDD: Tensor, w_uk_GDR: Tensor) -> Candidates:
        """Of latents c whose products with queries, q W_uk c, do not turn: F = R and E = D. Two directions are a
        pair."""
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

    def of_latents(self, w_FR: Tensor, b_F: Tensor) -> Candidates:
        """The same where features are latents, of which the present ones are a linear map."""
        key, w, b = self.key, w_FR.double(), b_F.double()
        return dataclasses.replace(self, key=key @ w, bias=self.bias + key @ b)

    def beside(self, other: Candidates) -> Candidates:
        """Of features that are these and, behind them, the other's; queries likewise."""
        pad = torch.nn.functional.pad
        mine, theirs = (self.key.shape[2], self.query.shape[3]), (other.key.shape[2], other.query.shape[3])
        return Candidates(
            torch.cat((self.worth, other.worth)),
            torch.cat((pad(self.key, (0, theirs[0])), pad(other.key, (mine[0], 0)))),
            torch.cat((self.bias, other.bias)),
            torch.cat((pad(self.query, (0, theirs[1])), pad(other.query, (mine[1], 0))), dim=1),
            torch.cat((self.frequency, other.frequency)),
        )

    def best(self, width: int, features_nF: Tensor, scale: float, attention_scaling: float) -> dict[str, Tensor]:
        """The parameters of a PairsIndex of `width` numbers. Its keys are in units in which those of the calibration
        text, `features_nF`, are whole numbers of 8 bits; `scale` is the softmax's. UserError where there are fewer
        candidates."""
        if width // 2 > len(self.worth):
            raise UserError(f"an index key of {width} numbers is more than a layer has: {2 * len(self.worth)}")
        kept = self.worth.argsort(descending=True)[: width // 2]
        key, bias, query = self.key[kept], self.bias[kept], self.query[:, kept]
        found = torch.einsum("cxf,nf->ncx", key, features_nF.double()) + bias
        unit = HEADROOM * attention_scaling * found.square().sum(-1).amax(0).sqrt() / LARGEST_KEY
        unit = unit.clamp_min(1e-30)[:, None]
        # Half-split: real parts, then imaginary ones.
        return {
            "key.weight": (key / unit[..., None]).transpose(0, 1).flatten(0, 1).float(),
            "key.bias": (bias / unit).T.flatten().float(),
            "query": (query * unit[..., None] * scale).transpose(1, 2).flatten(1, 2).float(),
            "frequency": self.frequency[kept],
        }
