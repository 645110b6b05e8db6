"""Latent projections of a layer, computed from its weights and moments in fp64.

docs/conversion.md has the formulas. A rotary pair (i, i + P) is treated as one complex number, x_i + i·x_{i+P}; RoPE
multiplies it by e^{iωt}, so that it commutes with every complex mixing across KV heads.

Legend: H query heads, G KV heads, D head_dim, P = D/2 rotary pairs, C hidden size, R kv_lora_rank,
E qk_rope_head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq

import torch
from torch import Tensor

from mlaforge.factorization.moments import LayerMoments, roots
from mlaforge.families.spec import LayerSpec

# Added to every weight matrix, as a share of its mean diagonal: regularisation for text that differs from the
# calibration text (docs/notes/conversion.md has the scan).
RIDGE = 0.1
# Share of the Gauss-Newton weights in the blend; the rest is Fisher (docs/notes/conversion.md has the scan).
GAUSS_NEWTON = 0.25


@dataclasses.dataclass
class Projections:
    """Projections of a source layer, fp64: w_q [H·D, C], w_k and w_v [G·D, C], w_o [C, H·D], and their biases (zeros if
    the model has none)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor
    b_k: Tensor
    b_v: Tensor

    @functools.cached_property
    def o_gram(self) -> Tensor:
        """W_oᵀ W_o, [H·D, H·D]."""
        return self.w_o.T @ self.w_o


@dataclasses.dataclass
class Latent:
    """A layer's latent projections of rank R, fp64; `cut` gives those of lower ranks; n = 2·G·D.

    kv_a [R+E, C] and b_kv_a; kv_b [n, R]. `at_mean` [n]: outputs at the mean input; `centre` [R]: its latent.
    rope_index [E/2]: None in the `latent` layout. w_q and b_q: None if they equal the source's; q_a: None unless the
    query is factored. values: the full spectrum; lost: gain of the channels that lose RoPE.
    """

    kv_a: Tensor
    b_kv_a: Tensor
    kv_b: Tensor
    at_mean: Tensor
    centre: Tensor
    values: Tensor
    lost: Tensor
    rope_index: Tensor | None = None
    w_q: Tensor | None = None
    b_q: Tensor | None = None
    q_a: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.kv_b.shape[1]

    @property
    def b_kv_b(self) -> Tensor:
        """The bias that makes the outputs exact at the mean input."""
        return self.at_mean - self.kv_b @ self.centre

    @property
    def dropped(self) -> float:
        """The predicted loss, nats per token."""
        return float(self.values[self.rank :].sum()) / 2 + float(self.lost) / 2

    def cut(self, rank: int) -> Latent:
        """Truncate to a lower rank: the first `rank` directions."""
        retained = [*range(rank), *range(self.rank, len(self.kv_a))]
        return dataclasses.replace(
            self, kv_a=self.kv_a[retained], b_kv_a=self.b_kv_a[retained], kv_b=self.kv_b[:, :rank],
            centre=self.centre[:rank],
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors for safetensors; `Latent(**tensors)` restores them."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def with_ridge(weight: Tensor) -> Tensor:
    """Return `weight` + RIDGE · its mean diagonal · I; I for a zero matrix (o_proj is zero)."""
    mean = weight.diagonal().mean()
    ridge = RIDGE * mean if mean > 0 else 1.0
    return weight + ridge * torch.eye(len(weight), dtype=weight.dtype, device=weight.device)


def fisher_scale(fisher: Tensor, gauss_newton: Tensor, covariance: Tensor) -> Tensor:
    """Return the factor from Gauss-Newton weights to the scale of the Fisher matrix, which is that of the loss, on
    `covariance`; 0 if they are rounding errors of either sign (in a text of one repeated token)."""
    loss, local = (fisher * covariance).sum(), (gauss_newton * covariance).sum()
    return torch.where(local > 0, loss.clamp_min(0) / local, 0.0)


def blend(fisher: Tensor, gauss_newton: Tensor, covariance: Tensor) -> Tensor:
    """Return the weighted mean of Fisher and Gauss-Newton, the latter scaled to the former on `covariance`, plus the
    ridge."""
    scale = fisher_scale(fisher, gauss_newton, covariance)
    return with_ridge((1 - GAUSS_NEWTON) * fisher + GAUSS_NEWTON * scale * gauss_newton)


def key_weight(outer: Tensor, layer: LayerSpec, rows: int) -> Tensor:
    """Return a block-diagonal matrix [G·D, G·D] from one [D, D] matrix per query head, summed over each KV head's query
    heads."""
    per_group = outer.view(layer.num_kv_heads, layer.group, layer.head_dim, layer.head_dim).sum(1) / rows
    return torch.block_diag(*per_group)


def value_weight(value_mix: Tensor, o_gram: Tensor, layer: LayerSpec, rows: int) -> Tensor:
    """Return Σ_{h in g, h' in g'} E[Σ_j a^h_ij a^h'_ij] · W_o^hᵀ W_o^h', [G·D, G·D]; o_gram: W_oᵀ W_o."""
    H, G, D = layer.num_heads, layer.num_kv_heads, layer.head_dim
    gram = o_gram.view(H, D, H, D) * (value_mix / rows)[:, None, :, None]
    return gram.view(G, layer.group, D, G, layer.group, D).sum((1, 4)).reshape(G * D, G * D)


@dataclasses.dataclass
class Spectrum:
    """Weighted PCA of linear outputs y = W x + bias, with the error of every rank.

    `values` [min(n, C)] descending, in units of loss: truncating to r costs half the sum of values[r:].
    """

    values: Tensor
    vectors: Tensor
    root: Tensor
    inverse: Tensor
    w: Tensor
    bias: Tensor
    mean: Tensor

    @classmethod
    def of(cls, w: Tensor, bias: Tensor, mean: Tensor, covariance_root: Tensor, weight: Tensor) -> Spectrum:
        root, inverse = roots(weight)
        # Singular values of the factor: squaring it first would lose the small ones in rounding.
        vectors, values, _ = torch.linalg.svd(root @ w @ covariance_root, full_matrices=False)
        return cls(values.square(), vectors, root, inverse, w, bias, mean)

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return down [r, C] and up [n, r] with y ≈ up (down x), up to the bias that makes the mean of x exact."""
        basis = self.vectors[:, :rank]
        return basis.T @ self.root @ self.w, self.inverse @ basis

    @property
    def at_mean(self) -> Tensor:
        """y at the mean of x, [n]."""
        return self.w @ self.mean + self.bias

    def loss(self, rank: int) -> float:
        return float(self.values[rank:].sum()) / 2


def by_head(kv: Tensor, layer: LayerSpec) -> Tensor:
    """Reorder rows [all keys; all values] to DeepSeek's order: for each KV head its key rows, then its value rows."""
    k, v = kv.view(2, layer.num_kv_heads, layer.head_dim, *kv.shape[1:])
    return torch.cat((k, v), dim=1).reshape(kv.shape)


def latent_spectrum(p: Projections, m: LayerMoments, layer: LayerSpec) -> Spectrum:
    """Return the joint spectrum of [k before RoPE; v] under the blended weights (layout `latent`)."""
    w = torch.cat((p.w_k, p.w_v))
    gauss_newton = torch.block_diag(
        key_weight(m.key_outer, layer, m.rows), value_weight(m.value_mix, p.o_gram, layer, m.rows)
    )
    weight = blend(m.fisher, gauss_newton, w @ m.covariance @ w.T)
    return Spectrum.of(w, torch.cat((p.b_k, p.b_v)), m.mean, m.covariance_root, weight)


def to_latent(spectrum: Spectrum, layer: LayerSpec, rank: int) -> Latent:
    """Return the projections of layout `latent`: keys keep all of RoPE, queries are unchanged."""
    down, up = spectrum.truncate(rank)
    return Latent(
        kv_a=down, b_kv_a=down.new_zeros(rank), kv_b=by_head(up, layer), at_mean=by_head(spectrum.at_mean, layer),
        centre=down @ spectrum.mean, values=spectrum.values, lost=down.new_zeros(()),
    )  # fmt: skip


def as_complex(rows: Tensor, heads: int) -> Tensor:
    """Convert real rows [heads·D, n] to complex [P, heads, n]: pair (i, i + P) of each head is one number."""
    re, im = rows.view(heads, 2, -1, rows.shape[-1]).unbind(1)
    return torch.complex(re, im).transpose(0, 1)


def _with_bias(w: Tensor, b: Tensor) -> Tensor:
    return torch.cat((w, b[:, None]), dim=1)


@dataclasses.dataclass
class Channels:
    """Candidate rotary channels of a layer, best first.

    c = write[n]ᴴ·k and k ≈ read[n]·c, where k are the keys of all KV heads at the pairs of band[n], and c rotates with
    pair `index[n]`; `gain`: the loss avoided by keeping the channel rotary. A band is one pair, or `fold` neighbouring
    ones. write, read [N, fold·G] complex. Every c has mean square 1, because packed rows round a rotary key with one
    scale.
    """

    band: Tensor
    index: Tensor
    write: Tensor
    read: Tensor
    gain: Tensor
    fold: int

    def take(self, chosen: Tensor) -> Channels:
        return Channels(
            self.band[chosen], self.index[chosen], self.write[chosen], self.read[chosen], self.gain[chosen], self.fold
        )

    def best(self, count: int) -> Tensor:
        """Return the channels with the largest gain: a pair may have none or several."""
        return torch.arange(count, device=self.gain.device)

    def one_per_pair(self, count: int) -> Tensor:
        """Return the best channel of every (P/count)-th pair: DeepSeek's frequencies for qk_rope_head_dim = 2·count."""
        assert self.fold == 1
        step = int(self.band.max() + 1) // count
        return torch.stack([(self.band == i * step).nonzero()[0, 0] for i in range(count)])


def channels(p: Projections, m: LayerMoments, layer: LayerSpec, fold: int = 1) -> Channels:
    """Return all P·G channels: eigenvectors of the weighted second moment of the keys in every band of `fold` pairs."""
    G, P = layer.num_kv_heads, layer.head_dim // 2
    k = as_complex(_with_bias(p.w_k, p.b_k), G).reshape(P // fold, fold * G, -1)
    x = torch.cat((m.mean, m.mean.new_ones(1)))
    second = torch.block_diag(m.covariance, m.covariance.new_zeros(1, 1)) + torch.outer(x, x)
    # Two real products: a complex product with a real matrix does four.
    rows = k.flatten(0, 1)
    moment = torch.complex(rows.real @ second, rows.imag @ second).view_as(k) @ k.mH
    # Loss of a head at each frequency if a constant phase replaces the rotation.
    lost = 1 - m.rho.abs().square()
    per_pair = m.key_outer.diagonal(dim1=1, dim2=2).view(layer.num_heads, 2, -1).sum(1) / 2 / m.rows
    weight = (per_pair * lost).view(G, layer.group, -1).sum(1).T.reshape(P // fold, fold * G)
    weight = weight + (RIDGE * weight.mean() if weight.any() else 1.0)
    # Gains in units of loss, like the spectra.
    keys = G * layer.head_dim
    covariance = p.w_k @ m.covariance @ p.w_k.T
    scale = fisher_scale(m.fisher[:keys, :keys], key_weight(m.key_outer, layer, m.rows), covariance)
    root = weight.sqrt()[..., None].to(moment.dtype)
    values, vectors = torch.linalg.eigh(root * moment * root.mT)
    size = values.clamp_min(values.amax() * 1e-12 + 1e-300).sqrt()[..., None, :]
    write, read = (root * vectors / size).mT.reshape(P * G, -1), (vectors / root * size).mT.reshape(P * G, -1)
    gain, order = (scale * values.clamp_min(0)).flatten().sort(descending=True, stable=True)
    band = torch.arange(P // fold, device=gain.device).repeat_interleave(fold * G)
    # A folded channel rotates with its largest pair.
    share = vectors.mT.reshape(P * G, fold, G).abs().square().sum(-1)
    index = band * fold + share.argmax(-1)
    return Channels(band[order], index[order], write[order], read[order], gain, fold)


def as_real(matrix: Tensor) -> Tensor:
    """Convert a complex matrix [n, m] to the real matrix [2n, 2m] acting on [real parts; imaginary parts]."""
    return torch.cat((torch.cat((matrix.real, -matrix.imag), 1), torch.cat((matrix.imag, matrix.real), 1)))


@dataclasses.dataclass
class RopeSplit:
    """A layer split into an exact rotary key and a rest without RoPE, of which `spectrum` is the low-rank spectrum.

    rope [E, C+1]: rows of the shared rotary key. query [H·(D+E), C+1]: for each head the query of the rest, then of the
    rotary key. The last column of both is the bias. `lost`: gain of the channels that lose RoPE.
    """

    rope: Tensor
    query: Tensor
    index: Tensor
    spectrum: Spectrum
    lost: float


def split_rope(
    p: Projections, m: LayerMoments, layer: LayerSpec, candidates: Channels, chosen: Tensor, attention_scaling: float,
    centred: bool = True,
) -> RopeSplit:  # fmt: skip
    """Split a layer at the chosen rotary channels. Dimensions that lose RoPE are scaled by `attention_scaling`, which
    cos and sin contained. centred: PCA about the mean; otherwise about zero, so that the latent adds no bias."""
    selected = candidates.take(chosen)
    lost = float(candidates.gain.sum() - selected.gain.sum())
    H, G, D, fold = layer.num_heads, layer.num_kv_heads, layer.head_dim, selected.fold
    k = as_complex(_with_bias(p.w_k, p.b_k), G)
    banded = k.reshape(D // 2 // fold, fold * G, -1)
    channel = torch.einsum("ng,ngc->nc", selected.write.conj(), banded[selected.band])
    rest = banded.index_add(0, selected.band, -selected.read[..., None] * channel[:, None]).view_as(k)

    q = as_complex(_with_bias(p.w_q, p.b_q), H)
    read = selected.read.view(-1, fold, G).repeat_interleave(layer.group, dim=2)
    q_rope = torch.einsum("nfh,nfhc->nhc", read.conj(), q.reshape(-1, fold, H, q.shape[-1])[selected.band])
    q_nope = m.rho.T.conj()[..., None] * q * attention_scaling**2
    query = torch.cat((q_nope.real, q_nope.imag, q_rope.real, q_rope.imag)).transpose(0, 1)

    rest_rows = torch.cat((rest.real, rest.imag)).transpose(0, 1).reshape(G * D, -1)
    w = torch.cat((rest_rows[:, :-1], p.w_v))
    rotation = torch.stack([as_real(torch.diag(row.conj())) for row in m.rho]) * attention_scaling**2
    nope_outer = rotation @ m.query_outer @ rotation.mT
    gauss_newton = torch.block_diag(
        key_weight(nope_outer, layer, m.rows), value_weight(m.value_mix, p.o_gram, layer, m.rows)
    )
    shrink = m.rho.abs().square().view(G, layer.group, -1).mean(1).sqrt()
    shrink = torch.cat((shrink, shrink), dim=1).flatten()
    shrink = torch.cat((shrink, shrink.new_ones(G * D)))
    fisher = shrink[:, None] * m.fisher * shrink
    weight = blend(fisher, gauss_newton, w @ m.covariance @ w.T)
    bias = torch.cat((rest_rows[:, -1], p.b_v))
    mean, root = m.mean, m.covariance_root
    if not centred:
        mean, root = torch.zeros_like(mean), roots(m.covariance + torch.outer(mean, mean))[0]
    return RopeSplit(
        rope=torch.cat((channel.real, channel.imag)),
        query=query.reshape(H * (D + 2 * len(selected.index)), -1),
        index=selected.index,
        spectrum=Spectrum.of(w, bias, mean, root, weight),
        lost=lost,
    )


def to_latent_rope(split: RopeSplit, layer: LayerSpec, rank: int) -> Latent:
    """Return the projections of layout `latent_rope`: the exact rotary key, and one latent of `rank` for the rest of K
    and V."""
    rest = to_latent(split.spectrum, layer, rank)
    return dataclasses.replace(
        rest, kv_a=torch.cat((rest.kv_a, split.rope[:, :-1])), b_kv_a=torch.cat((rest.b_kv_a, split.rope[:, -1])),
        w_q=split.query[:, :-1], b_q=split.query[:, -1], rope_index=split.index, lost=rest.lost + split.lost,
    )  # fmt: skip


def factor_query(w_q: Tensor, b_q: Tensor, m: LayerMoments, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_a [rank, C], q_b [n, rank] and the bias of q_b: the best factors for the calibration inputs."""
    eye = torch.eye(len(w_q), dtype=w_q.dtype, device=w_q.device)
    spectrum = Spectrum.of(w_q, b_q, m.mean, m.covariance_root, eye)
    q_a, q_b = spectrum.truncate(rank)
    return q_a, q_b, spectrum.at_mean - q_b @ (q_a @ m.mean)


def allocate(spectra: dict[int, Tensor], total: int, minimum: int, block: int = 8) -> dict[int, int]:
    """Allocate `total` ranks to layers in blocks, each to the layer whose loss the next block reduces most.

    spectra: for each layer its values, descending. Every layer gets at least `minimum`, at most its full rank.
    """
    ranks = {i: min(minimum, len(values)) for i, values in spectra.items()}
    remaining = total - sum(ranks.values())
    assert remaining >= 0

    def gain(i: int) -> tuple[float, int]:
        return -float(spectra[i][ranks[i] : ranks[i] + block].sum()), i

    queue = [gain(i) for i in spectra]
    heapq.heapify(queue)
    while queue and remaining > 0:
        _, i = heapq.heappop(queue)
        count = min(block, remaining, len(spectra[i]) - ranks[i])
        if count > 0:
            ranks[i] += count
            remaining -= count
            heapq.heappush(queue, gain(i))
    return ranks
