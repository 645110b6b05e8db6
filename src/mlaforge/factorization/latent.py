"""From a layer's weights and moments to its latent projections: tensors in, tensors out, all in fp64.

docs/conversion.md derives every step. A rotary pair (i, i + P) is read as one complex number, x_i + i·x_{i+P};
RoPE multiplies it by e^{iωt}, so it commutes with every complex mixing across KV heads.

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

# Added to every weight matrix, as a share of its mean diagonal: errors nobody measured are not free, and other text
# than the calibration's asks other questions (docs/notes/conversion.md has the scan).
RIDGE = 0.1
# Share of the Gauss-Newton weights in the blend; the rest is Fisher (docs/notes/conversion.md has the scan).
GAUSS_NEWTON = 0.25


@dataclasses.dataclass
class Projections:
    """A layer's own projections, fp64: w_q [H·D, C], w_k and w_v [G·D, C], w_o [C, H·D], and their biases
    (zeros where the model has none)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor
    b_k: Tensor
    b_v: Tensor

    @functools.cached_property
    def o_gram(self) -> Tensor:
        """[H·D, H·D]: W_oᵀ W_o."""
        return self.w_o.T @ self.w_o


@dataclasses.dataclass
class Latent:
    """A layer's latent projections of rank R, fp64, and by `cut` those of every lower rank; n = 2·G·D.

    kv_a [R+E, C] and b_kv_a; kv_b [n, R], and the outputs at the mean input, `at_mean` [n], whose latent is `centre`
    [R]. rope_index [E/2]: None in the `latent` layout. w_q and b_q: None where they are the source's own; behind q_a
    where the query is factored. values: the whole spectrum; lost: gain of the channels that lose RoPE.
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
        """What makes the outputs exact at the mean input; biases of zeros are for the caller to drop."""
        return self.at_mean - self.kv_b @ self.centre

    @property
    def dropped(self) -> float:
        """The predicted loss, nats per token."""
        return float(self.values[self.rank :].sum()) / 2 + float(self.lost) / 2

    def cut(self, rank: int) -> Latent:
        """The best of a lower rank: the first `rank` directions."""
        kept = [*range(rank), *range(self.rank, len(self.kv_a))]
        return dataclasses.replace(
            self, kv_a=self.kv_a[kept], b_kv_a=self.b_kv_a[kept], kv_b=self.kv_b[:, :rank], centre=self.centre[:rank]
        )

    def tensors(self) -> dict[str, Tensor]:
        """As safetensors can hold it; `Latent(**tensors)` is the same again."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def with_ridge(weight: Tensor) -> Tensor:
    """`weight` + RIDGE · its mean diagonal · I; I alone where nothing has any weight (o_proj is zero)."""
    mean = weight.diagonal().mean()
    ridge = RIDGE * mean if mean > 0 else 1.0
    return weight + ridge * torch.eye(len(weight), dtype=weight.dtype, device=weight.device)


def fisher_scale(fisher: Tensor, gauss_newton: Tensor, covariance: Tensor) -> Tensor:
    """What brings Gauss-Newton weights to the Fisher's scale, which is that of the loss, on `covariance`; 0 where it is
    nothing but rounding, of either sign: in a text of one token again and again."""
    loss, local = (fisher * covariance).sum(), (gauss_newton * covariance).sum()
    return torch.where(local > 0, loss.clamp_min(0) / local, 0.0)


def blend(fisher: Tensor, gauss_newton: Tensor, covariance: Tensor) -> Tensor:
    """Fisher and Gauss-Newton, the latter brought to the Fisher's scale on `covariance`, plus the ridge."""
    scale = fisher_scale(fisher, gauss_newton, covariance)
    return with_ridge((1 - GAUSS_NEWTON) * fisher + GAUSS_NEWTON * scale * gauss_newton)


def key_weight(outer: Tensor, layer: LayerSpec, rows: int) -> Tensor:
    """Block-diagonal [G·D, G·D] from one [D, D] matrix per query head: the sum over each KV head's queries."""
    per_group = outer.view(layer.num_kv_heads, layer.group, layer.head_dim, layer.head_dim).sum(1) / rows
    return torch.block_diag(*per_group)


def value_weight(value_mix: Tensor, o_gram: Tensor, layer: LayerSpec, rows: int) -> Tensor:
    """[G·D, G·D]: Σ_{h in g, h' in g'} E[Σ_j a^h_ij a^h'_ij] · W_o^hᵀ W_o^h'; o_gram: W_oᵀ W_o."""
    H, G, D = layer.num_heads, layer.num_kv_heads, layer.head_dim
    gram = o_gram.view(H, D, H, D) * (value_mix / rows)[:, None, :, None]
    return gram.view(G, layer.group, D, G, layer.group, D).sum((1, 4)).reshape(G * D, G * D)


@dataclasses.dataclass
class Spectrum:
    """Weighted PCA of linear outputs y = W x + bias: the error of every rank at once.

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
        # Singular values of half the product: squaring it first would drown the small ones.
        vectors, values, _ = torch.linalg.svd(root @ w @ covariance_root, full_matrices=False)
        return cls(values.square(), vectors, root, inverse, w, bias, mean)

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """down [r, C] and up [n, r] with y ≈ up (down x), but for a bias that makes it exact at the mean of x."""
        basis = self.vectors[:, :rank]
        return basis.T @ self.root @ self.w, self.inverse @ basis

    @property
    def at_mean(self) -> Tensor:
        """[n]: y at the mean of x."""
        return self.w @ self.mean + self.bias

    def loss(self, rank: int) -> float:
        return float(self.values[rank:].sum()) / 2


def by_head(kv: Tensor, layer: LayerSpec) -> Tensor:
    """Rows [all keys; all values] -> DeepSeek's order, per KV head its key rows, then its value rows."""
    k, v = kv.view(2, layer.num_kv_heads, layer.head_dim, *kv.shape[1:])
    return torch.cat((k, v), dim=1).reshape(kv.shape)


def latent_spectrum(p: Projections, m: LayerMoments, layer: LayerSpec) -> Spectrum:
    """The joint spectrum of [k before RoPE; v] under the blended weights (layout `latent`)."""
    w = torch.cat((p.w_k, p.w_v))
    gauss_newton = torch.block_diag(
        key_weight(m.key_outer, layer, m.rows), value_weight(m.value_mix, p.o_gram, layer, m.rows)
    )
    weight = blend(m.fisher, gauss_newton, w @ m.covariance @ w.T)
    return Spectrum.of(w, torch.cat((p.b_k, p.b_v)), m.mean, m.covariance_root, weight)


def to_latent(spectrum: Spectrum, layer: LayerSpec, rank: int) -> Latent:
    """Layout `latent`: keys keep all of RoPE, queries stay as they are."""
    down, up = spectrum.truncate(rank)
    return Latent(
        kv_a=down, b_kv_a=down.new_zeros(rank), kv_b=by_head(up, layer), at_mean=by_head(spectrum.at_mean, layer),
        centre=down @ spectrum.mean, values=spectrum.values, lost=down.new_zeros(()),
    )  # fmt: skip


def as_complex(rows: Tensor, heads: int) -> Tensor:
    """[heads·D, n] real rows -> [P, heads, n] complex: pair (i, i + P) of each head is one number."""
    re, im = rows.view(heads, 2, -1, rows.shape[-1]).unbind(1)
    return torch.complex(re, im).transpose(0, 1)


def _with_bias(w: Tensor, b: Tensor) -> Tensor:
    return torch.cat((w, b[:, None]), dim=1)


@dataclasses.dataclass
class Channels:
    """Candidate rotary channels of a layer, best first: c = write[n]ᴴ·k and k ≈ read[n]·c, where k holds the keys of
    all KV heads at the pairs of band[n] and c turns with pair `index[n]`; `gain` is the loss that keeping it
    rotary avoids. A band is one pair, or `fold` neighbouring ones. write, read [N, fold·G] complex. Every c has mean
    square 1: packed rows round all of a rotary key by one scale."""

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
        """The channels that avoid the most loss: a pair may get none or several."""
        return torch.arange(count, device=self.gain.device)

    def one_per_pair(self, count: int) -> Tensor:
        """The best channel of every (P/count)-th pair: DeepSeek's own frequencies for qk_rope_head_dim = 2·count."""
        assert self.fold == 1
        step = int(self.band.max() + 1) // count
        return torch.stack([(self.band == i * step).nonzero()[0, 0] for i in range(count)])


def channels(p: Projections, m: LayerMoments, layer: LayerSpec, fold: int = 1) -> Channels:
    """All P·G channels: eigenvectors of the weighted key second moment of every band of `fold` pairs."""
    G, P = layer.num_kv_heads, layer.head_dim // 2
    k = as_complex(_with_bias(p.w_k, p.b_k), G).reshape(P // fold, fold * G, -1)
    x = torch.cat((m.mean, m.mean.new_ones(1)))
    second = torch.block_diag(m.covariance, m.covariance.new_zeros(1, 1)) + torch.outer(x, x)
    # As two real products: a complex one of a real matrix does four.
    rows = k.flatten(0, 1)
    moment = torch.complex(rows.real @ second, rows.imag @ second).view_as(k) @ k.mH
    # What a head would lose at each frequency if a constant phase replaced its rotation.
    lost = 1 - m.rho.abs().square()
    per_pair = m.key_outer.diagonal(dim1=1, dim2=2).view(layer.num_heads, 2, -1).sum(1) / 2 / m.rows
    weight = (per_pair * lost).view(G, layer.group, -1).sum(1).T.reshape(P // fold, fold * G)
    weight = weight + (RIDGE * weight.mean() if weight.any() else 1.0)
    # Gains in units of loss, as the spectra are.
    keys = G * layer.head_dim
    covariance = p.w_k @ m.covariance @ p.w_k.T
    scale = fisher_scale(m.fisher[:keys, :keys], key_weight(m.key_outer, layer, m.rows), covariance)
    root = weight.sqrt()[..., None].to(moment.dtype)
    values, vectors = torch.linalg.eigh(root * moment * root.mT)
    size = values.clamp_min(values.amax() * 1e-12 + 1e-300).sqrt()[..., None, :]
    write, read = (root * vectors / size).mT.reshape(P * G, -1), (vectors / root * size).mT.reshape(P * G, -1)
    gain, order = (scale * values.clamp_min(0)).flatten().sort(descending=True, stable=True)
    band = torch.arange(P // fold, device=gain.device).repeat_interleave(fold * G)
    # A folded channel turns with the pair that carries most of it.
    share = vectors.mT.reshape(P * G, fold, G).abs().square().sum(-1)
    index = band * fold + share.argmax(-1)
    return Channels(band[order], index[order], write[order], read[order], gain, fold)


def as_real(matrix: Tensor) -> Tensor:
    """Complex [n, m] acting on complex vectors -> real [2n, 2m] acting on [real parts; imaginary parts]."""
    return torch.cat((torch.cat((matrix.real, -matrix.imag), 1), torch.cat((matrix.imag, matrix.real), 1)))


@dataclasses.dataclass
class RopeSplit:
    """A layer after its rotary channels are chosen: what turns is exact, the rest waits for its low rank.

    rope [E, C+1]: rows of the shared rotary key. query [H·(D+E), C+1]: per head the query of the rest, then of the
    rotary key. The last column of each is its bias. `lost`: gain of the channels that are not kept.
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
    """Keeps the chosen channels rotary. Dimensions that lose RoPE carry `attention_scaling`, which cos and sin
    carried for them, themselves. Not `centred`, the latent has no bias beyond the source's own: the PCA is about
    zero instead of about the mean."""
    kept = candidates.take(chosen)
    lost = float(candidates.gain.sum() - kept.gain.sum())
    H, G, D, fold = layer.num_heads, layer.num_kv_heads, layer.head_dim, kept.fold
    k = as_complex(_with_bias(p.w_k, p.b_k), G)
    banded = k.reshape(D // 2 // fold, fold * G, -1)
    channel = torch.einsum("ng,ngc->nc", kept.write.conj(), banded[kept.band])
    rest = banded.index_add(0, kept.band, -kept.read[..., None] * channel[:, None]).view_as(k)

    q = as_complex(_with_bias(p.w_q, p.b_q), H)
    read = kept.read.view(-1, fold, G).repeat_interleave(layer.group, dim=2)
    q_rope = torch.einsum("nfh,nfhc->nhc", read.conj(), q.reshape(-1, fold, H, q.shape[-1])[kept.band])
    q_nope = m.rho.T.conj()[..., None] * q * attention_scaling**2
    query = torch.cat((q_nope.real, q_nope.imag, q_rope.real, q_rope.imag)).transpose(0, 1)

    rest_rows = torch.cat((rest.real, rest.imag)).transpose(0, 1).reshape(G * D, -1)
    w = torch.cat((rest_rows[:, :-1], p.w_v))
    turn = torch.stack([as_real(torch.diag(row.conj())) for row in m.rho]) * attention_scaling**2
    nope_outer = turn @ m.query_outer @ turn.mT
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
        query=query.reshape(H * (D + 2 * len(kept.index)), -1),
        index=kept.index,
        spectrum=Spectrum.of(w, bias, mean, root, weight),
        lost=lost,
    )


def to_latent_rope(split: RopeSplit, layer: LayerSpec, rank: int) -> Latent:
    """Layout `latent_rope`: the rotary key as it is, the rest of K and V through one latent of `rank`."""
    rest = to_latent(split.spectrum, layer, rank)
    return dataclasses.replace(
        rest, kv_a=torch.cat((rest.kv_a, split.rope[:, :-1])), b_kv_a=torch.cat((rest.b_kv_a, split.rope[:, -1])),
        w_q=split.query[:, :-1], b_q=split.query[:, -1], rope_index=split.index, lost=rest.lost + split.lost,
    )  # fmt: skip


def factor_query(w_q: Tensor, b_q: Tensor, m: LayerMoments, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """q_a [rank, C], q_b [n, rank] and the bias of q_b: the best `rank` for the inputs that calibration saw."""
    eye = torch.eye(len(w_q), dtype=w_q.dtype, device=w_q.device)
    spectrum = Spectrum.of(w_q, b_q, m.mean, m.covariance_root, eye)
    q_a, q_b = spectrum.truncate(rank)
    return q_a, q_b, spectrum.at_mean - q_b @ (q_a @ m.mean)


def allocate(spectra: dict[int, Tensor], total: int, minimum: int, block: int = 8) -> dict[int, int]:
    """Hands `total` ranks to layers in blocks, each to the layer whose next block is worth most loss.

    spectra: per layer its values, descending. Every layer gets `minimum` first; none more than it can hold.
    """
    ranks = {i: min(minimum, len(values)) for i, values in spectra.items()}
    left = total - sum(ranks.values())
    assert left >= 0

    def worth(i: int) -> tuple[float, int]:
        return -float(spectra[i][ranks[i] : ranks[i] + block].sum()), i

    queue = [worth(i) for i in spectra]
    heapq.heapify(queue)
    while queue and left > 0:
        _, i = heapq.heappop(queue)
        step = min(block, left, len(spectra[i]) - ranks[i])
        if step > 0:
            ranks[i] += step
            left -= step
            heapq.heappush(queue, worth(i))
    return ranks
