"""Other low-bit formats of a grouped-query cache, simulated by rounding in transformers' cache.

`Blocks`: keys per channel over 32 tokens, values per token, asymmetric (KIVI, arXiv:2402.02750). `Rotated`: each vector
rotated by a random Hadamard matrix, its norm in 16 bits, Lloyd-Max levels for its direction (TurboQuant,
arXiv:2504.19874). `PlainCode`: the code of converted models in another basis, the principal components of keys before
RoPE and of values (KVTC, arXiv:2511.01815). `PairWidths`: `Rotated` with integer bits for every rotary pair of a layer
and head, from the energy of queries and keys (Block-GTQ, arXiv:2606.24033). Each leaves a text's first tokens
unrounded, and `bytes` counts everything that the format would store.

Legend: B windows, G KV heads, T tokens, C hidden size, D head_dim, P rotary pairs (D / 2), L layers, n samples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from mlaforge.factorization import code
from mlaforge.families.spec import LayerSpec
from mlaforge.modeling.coded_rows_mla import round_up_bf16, scaled_codes
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.ops.row_formats.int4 import INT4_TOKENS
from mlaforge.runtime import progress

# First tokens of a text that stay in bf16.
EXEMPT = 4
# Elements of a token's values, and tokens of a key channel, that share a scale.
GROUP = INT4_TOKENS
# Tokens per layer on which a code's ranges are measured, as in a conversion.
SAMPLES = 4096
# Most bits of a rotary pair's elements, as in Block-GTQ.
WIDEST = 8


class Rival(Protocol):
    """A cache format. exempt: first tokens that stay in bf16. chunk: tokens, including the query's, that are read
    unrounded until the chunk is full; None: every row is read rounded."""

    exempt: int
    chunk: int | None

    def read(self, index: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, G, T, D] of layer `index`, from position `first` on, after rounding."""

    def bytes(self, layer: LayerSpec, tokens: int) -> int:
        """Bytes that a layer stores for `tokens` tokens."""


def first_bytes(layer: LayerSpec, exempt: int) -> int:
    """Bytes of the first tokens in bf16."""
    return 2 * exempt * layer.cached


@dataclasses.dataclass(frozen=True)
class Blocks:
    """`bits` per element, with a scale and a minimum in bf16 per key channel over a block of tokens, and per `group` of
    a token's values. The newest block stays in bf16 until it is full."""

    bits: int
    group: int = GROUP
    exempt: int = EXEMPT
    chunk: int | None = GROUP

    def read(self, index: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        grouped = values.unflatten(-1, (-1, self.group))
        return self._rounded(keys, -2), self._rounded(grouped, -1).flatten(-2)

    def _rounded(self, x: Tensor, dim: int) -> Tensor:
        full, levels = x.bfloat16().float(), 2**self.bits - 1
        minimum = full.amin(dim, keepdim=True)
        scale = round_up_bf16((full.amax(dim, keepdim=True) - minimum) / levels).float()
        return (scaled_codes(full - minimum, scale, 0, levels) * scale + minimum).bfloat16().to(x.dtype)

    def bytes(self, layer: LayerSpec, tokens: int) -> int:
        numbers = layer.cached // 2
        scales = 4 * numbers + GROUP * 4 * (numbers // self.group)
        block = 2 * GROUP * numbers * self.bits // 8 + scales
        return first_bytes(layer, self.exempt) + math.ceil(tokens / GROUP) * block


def lloyd_max(density: Tensor, at: Tensor, bits: int) -> Tensor:
    """[2^bits] levels of least squared error for a density [m] at the ascending points `at` [m], fp64."""
    weight = density / density.sum()
    total, first = weight.cumsum(0), (weight * at).cumsum(0)
    # Starting from the quantiles, each level moves to the mean of its nearest points.
    levels = at[torch.searchsorted(total, (torch.arange(2**bits, dtype=at.dtype) + 0.5) / 2**bits)]
    for _ in range(2000):
        # Points between the midpoints to its neighbours are nearest to a level.
        ends = torch.cat((torch.searchsorted(at, (levels[1:] + levels[:-1]) / 2), torch.tensor([len(at)]))) - 1
        mass, moment = (torch.cat((sums[ends[:1]], sums[ends].diff())) for sums in (total, first))
        moved = moment / mass
        if torch.allclose(moved, levels, rtol=0, atol=1e-9):
            break
        levels = moved
    return moved


def hadamard(size: int) -> Tensor:
    """[size, size] orthogonal, of ±1 / sqrt(size); `size` is a power of two."""
    assert size & (size - 1) == 0, f"{size} is not a power of two"
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def rotation(size: int) -> Tensor:
    """[size, size] orthogonal and random: a Hadamard matrix with random signs if `size` is a power of two."""
    generator = torch.Generator().manual_seed(0)
    if size & (size - 1):
        return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return hadamard(size) * (torch.randint(0, 2, (size,), generator=generator) * 2 - 1)


@dataclasses.dataclass(frozen=True)
class Rotated:
    """A head's vector is stored as its norm in fp16 and its direction. After a random rotation the coordinates of the
    direction are distributed like those of a point on the sphere, for which the `bits`-bit levels are optimal.
    (Renormalising the rounded direction was worse on calibration text: x1.263 at 3 bits instead of x1.256.)"""

    bits: int
    exempt: int = EXEMPT
    chunk: int | None = None

    @functools.cache  # noqa: B019 (one object for a run)
    def _table(self, D: int) -> tuple[Tensor, Tensor]:
        """The rotation [D, D] and the levels [2^bits]."""
        # Without the ends, at which the density in two dimensions is infinite.
        at = torch.linspace(-1, 1, 200_003, dtype=torch.float64)[1:-1]
        return rotation(D), lloyd_max((1 - at.square()).pow((D - 3) / 2), at, self.bits).float()

    def read(self, index: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.rounded(keys), self.rounded(values)

    def rounded(self, x: Tensor) -> Tensor:
        """Vectors [..., D] as they are read."""
        turn, levels = self._table(x.shape[-1])
        full = x.float()
        norm = full.norm(dim=-1, keepdim=True)
        direction = full / norm.clamp_min(1e-30) @ turn.T
        read = levels[torch.bucketize(direction, (levels[1:] + levels[:-1]) / 2)]
        return (read @ turn * norm.half().float()).to(x.dtype)

    def bytes(self, layer: LayerSpec, tokens: int) -> int:
        vector = layer.head_dim * self.bits // 8 + 2
        return first_bytes(layer, self.exempt) + (tokens - self.exempt) * 2 * layer.num_kv_heads * vector


def pair_widths(energy_P: Tensor, bits: int) -> Tensor:
    """[P] integer widths, `bits` in the mean: one bit for every pair, and then bit by bit for the pair whose error,
    energy / 4^width, falls most."""
    widths = torch.ones_like(energy_P, dtype=torch.long)
    for _ in range((bits - 1) * len(widths)):
        gain = energy_P * 4.0**-widths
        widths[gain.where(widths < WIDEST, -1.0).argmax()] += 1
    return widths


class PairWidths:
    """`bits` per element. A key's rotary pairs of equal widths form one `Rotated` vector, as does a head's value."""

    chunk: int | None = None

    def __init__(self, bits: int, energies_LGP: Tensor, exempt: int = EXEMPT):
        self.bits, self.exempt, self.values = bits, exempt, Rotated(bits)
        self.widths = [[pair_widths(energy, bits) for energy in layer] for layer in energies_LGP]

    def read(self, index: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        read = torch.empty_like(keys)
        for head, widths_P in enumerate(self.widths[index]):
            columns = torch.cat((widths_P, widths_P))
            for bits in widths_P.unique().tolist():
                read[:, head, :, columns == bits] = Rotated(bits).rounded(keys[:, head, :, columns == bits])
        return read, self.values.rounded(values)

    def bytes(self, layer: LayerSpec, tokens: int) -> int:
        """Mean over layers, whose numbers of norms differ."""
        norms = sum(len(widths.unique()) for heads in self.widths for widths in heads) / len(self.widths)
        codes = layer.cached * self.bits / 8
        row = codes + 2 * (norms + layer.num_kv_heads)
        return first_bytes(layer, self.exempt) + math.ceil((tokens - self.exempt) * row)


@torch.no_grad()
def pair_energies(model: Any, windows: Tensor, exempt: int = EXEMPT) -> Tensor:
    """[L, G, P]: mean square of the queries times that of the keys, on windows [N, T] of calibration text."""
    config, squares, hooks = model.config, {}, []
    pairs_of_head = config.head_dim // 2

    def add(key: tuple[int, str]) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            # RoPE rotates within a pair, so its energy is the same before and after.
            pairs_of = out[:, exempt:].double().unflatten(-1, (config.num_key_value_heads, -1, 2, pairs_of_head))
            squares[key] = squares.get(key, 0) + pairs_of.square().mean((0, 1, 3, 4))

        return hook

    for i, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            hooks.append(getattr(layer.self_attn, name).register_forward_hook(add((i, name))))
    for ids in progress(windows, "energies"):
        model.model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    layers = range(len(model.model.layers))
    return torch.stack([squares[i, "q_proj"] * squares[i, "k_proj"] for i in layers])


@dataclasses.dataclass
class Basis:
    """Principal components [G·D, G·D] of a layer's keys or values about their mean, and the rounding error along each
    at every width (factorization/code.py), with equal weights of all tokens."""

    mean: Tensor
    vectors: Tensor
    rates: code.Rates

    @classmethod
    def of(cls, sum_: Tensor, outer: Tensor, tokens: int, samples_nC: Tensor) -> Basis:
        """From sums over all tokens, fp64, and some of them."""
        mean = sum_ / tokens
        _, vectors = torch.linalg.eigh(outer / tokens - torch.outer(mean, mean))
        mean, vectors = mean.float(), vectors.float()
        along = (samples_nC - mean) @ vectors
        # First tokens are exempt, so they do not affect the ranges.
        none = along.new_zeros(1, len(mean)), along.new_full((1,), 1e-30)
        return cls(mean, vectors, code.Rates.of(along, along.new_ones(len(along)), *none))

    def rounded(self, x_TC: Tensor, widths_C: Tensor) -> Tensor:
        order, columns = self.rates.order, torch.arange(len(widths_C))
        step, centre = self.rates.step[widths_C, columns], self.rates.centre[widths_C, columns]
        half = 2.0 ** (widths_C - 1)
        along = ((x_TC - self.mean) @ self.vectors)[..., order]
        codes = torch.minimum(torch.maximum(((along - centre) / step - 0.5).round(), -half), half - 1)
        return torch.where(widths_C > 0, (codes + 0.5) * step + centre, 0.0) @ self.vectors[:, order].T + self.mean


class PlainCode:
    """`bits` per element in the mean over all layers' keys, and over all values."""

    chunk: int | None = None

    def __init__(self, bits: float, model: Any, bases: list[tuple[Basis, Basis]], exempt: int = EXEMPT):
        self.bits, self.model, self.bases, self.exempt = bits, model, bases, exempt
        self.widths = []
        for which in range(2):
            errors = {i: pair[which].rates.error for i, pair in enumerate(bases)}
            room = bits * sum(len(pair[which].mean) for pair in bases)
            self.widths.append(code.allocate_bits(errors, int(room)))

    def read(self, index: int, first: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = angles(self.model, first, keys)
        plain = rotate(keys.float(), cos, -sin)
        read = [
            basis.rounded(x.transpose(1, 2).flatten(2).float(), widths[index]).unflatten(2, keys.shape[1::2])
            for basis, x, widths in zip(self.bases[index], (plain, values), self.widths, strict=True)
        ]
        k, v = (x.transpose(1, 2) for x in read)
        return rotate(k, cos, sin).to(keys.dtype), v.to(values.dtype)

    def bytes(self, layer: LayerSpec, tokens: int) -> int:
        """Mean over layers, whose widths differ."""
        bits = sum(int(widths.sum()) for by_layer in self.widths for widths in by_layer.values()) / len(self.bases)
        return first_bytes(layer, self.exempt) + math.ceil((tokens - self.exempt) * bits / 8)


def angles(model: Any, first: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, D/2] of these keys' positions, fp32."""
    positions = torch.arange(first, first + keys.shape[2])[None]
    cos, sin = model.model.rotary_emb(keys.float(), positions)
    return pairs(cos, keys.shape[3] // 2), pairs(sin, keys.shape[3] // 2)


class RoundedLayer(DynamicLayer):
    """Layer of transformers' cache that returns rows rounded by a format."""

    def __init__(self, rival: Rival, index: int):
        super().__init__()
        self.rival, self.index = rival, index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        exact = key_states, value_states
        exempt = max(0, self.rival.exempt - first)
        read = self.rival.read(self.index, first + exempt, *(x[..., exempt:, :] for x in exact))
        rounded = [torch.cat((x[..., :exempt, :], y), dim=-2) for x, y in zip(exact, read, strict=True)]
        past = self.keys, self.values
        now = rounded if self.rival.chunk is None else exact
        k, v = (torch.cat((a, b), dim=-2) for a, b in zip(past, now, strict=True))
        self.keys, self.values = (torch.cat((a, b), dim=-2) for a, b in zip(past, rounded, strict=True))
        return k, v


@torch.no_grad()
def rounded_states(model: Any, rival: Rival | None, windows: Tensor) -> Tensor:
    """Final states [N, T, C] of windows [N, T], with the cache rounded by `rival`, or unrounded if None."""
    states = []
    for batch in progress(windows.split(4), "windows"):
        cache = rival and Cache(layers=[RoundedLayer(rival, i) for i in range(model.config.num_hidden_layers)])
        chunk = (rival and rival.chunk) or windows.shape[1]
        parts = [
            model.model(ids, past_key_values=cache, use_cache=rival is not None).last_hidden_state
            for ids in batch.split(chunk, dim=1)
        ]
        states.append(torch.cat(parts, dim=1))
    return torch.cat(states)


class Sums(DynamicLayer):
    """Layer of transformers' cache that accumulates moments of its keys and values, without the first tokens."""

    def __init__(self, model: Any, exempt: int, sampled: int):
        super().__init__()
        self.model, self.exempt, self.sampled, self.tokens = model, exempt, sampled, 0
        self.sums: list[Any] = [0.0, 0.0]
        self.outers: list[Any] = [0.0, 0.0]
        self.samples: tuple[list[Tensor], list[Tensor]] = ([], [])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = angles(self.model, 0, key_states)
        plain = rotate(key_states.float(), cos, -sin)
        for which, x in enumerate((plain, value_states.float())):
            rows = x.transpose(1, 2).flatten(2)[:, self.exempt :].flatten(0, 1)
            self.sums[which] = self.sums[which] + rows.double().sum(0)
            self.outers[which] = self.outers[which] + (rows.T @ rows).double()
            self.samples[which].append(rows[:: max(1, len(rows) // self.sampled)][: self.sampled])
        self.tokens += len(rows)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def bases(self) -> tuple[Basis, Basis]:
        k, v = (
            Basis.of(sum_, outer, self.tokens, torch.cat(rows))
            for sum_, outer, rows in zip(self.sums, self.outers, self.samples, strict=True)
        )
        return k, v


@torch.no_grad()
def plain_bases(model: Any, windows: Tensor, exempt: int = EXEMPT) -> list[tuple[Basis, Basis]]:
    """Bases of every layer's keys (before RoPE) and values on windows [N, T] of calibration text."""
    layers = [Sums(model, exempt, SAMPLES // len(windows)) for _ in range(model.config.num_hidden_layers)]
    for ids in progress(windows, "principal components"):
        model.model(ids[None], past_key_values=Cache(layers=layers), use_cache=True)
    return [layer.bases() for layer in layers]
