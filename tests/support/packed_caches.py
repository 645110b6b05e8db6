"""Caches of one layer, packed and decoded, for the compiled kernels, and a converted layer that reads them."""

import dataclasses
import itertools
import random

import torch
from torch import Tensor

from mlaforge.ops.latent_attention import CodeWeights
from mlaforge.ops.native import pack
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.int8 import Int8

CPU = torch.device("cpu")
POSITIONS = 1000  # whose angles a layer has


@dataclasses.dataclass(frozen=True)
class Cache:
    """Cache of one layer and its view in a step. `decoded`: the same cache in bf16, with invisible `spare` slots;
    `mixed`: some blocks are unpacked. `view`: arguments of an operation from the block table on, except scale and
    tree."""

    format: RowFormat
    packed: Tensor
    whole: Tensor
    decoded: Tensor
    slots: Tensor
    spare: Tensor
    view: tuple
    mixed: bool

    def rows(self, decoded: bool) -> tuple:
        whole = self.whole if self.mixed else None
        return (self.decoded, None, [0]) if decoded else (self.packed, whole, self.format.descriptor)

    def read(self) -> Tensor:
        """Return all rows, decoded by the reference."""
        return torch.cat((self.format.read(self.packed, torch.arange(len(self.packed))), self.whole))


def apart(rows: Tensor, gap: int) -> tuple[Tensor, Tensor]:
    """Return a copy of `rows` that leaves `gap` elements before and after each, and these elements."""
    around = torch.full((len(rows), rows.shape[1] + 2 * gap), 99, dtype=rows.dtype)
    inside, gaps = (
        around[:, gap:-gap],
        around.as_strided((len(rows), 2, gap), (around.stride(0), around.shape[1] - gap, 1)),
    )
    return inside.copy_(rows), gaps


def make_cache(
    format: RowFormat,
    sequences: list[tuple[int, int]],
    block_size: int,
    window: int | None = None,
    whole: tuple[int, ...] = (),
    shared: int = 0,
) -> Cache:
    """`sequences`: (length, query tokens) of each; `whole`: which of their blocks are (-1: the newest). Their first
    `shared` blocks are those of the first sequence."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    gone = [max(0, length - T - window + 1) // block_size if window else 0 for length, T in sequences]
    columns = [-(-length // block_size) - before for (length, _), before in zip(sequences, gone, strict=True)]
    names = [[(s if b >= shared else 0, b) for b in range(count)] for s, count in enumerate(columns)]
    every = sorted(set(itertools.chain(*names)))
    chance.shuffle(every)
    kept = {own[at] for own in names for at in whole}
    ids = {name: i for i, name in enumerate(sorted(every, key=lambda name: name in kept))}
    P, units = len(ids) - len(kept) + 2, block_size // format.tokens
    ids = {name: i + 2 * (name in kept) for name, i in ids.items()}

    rows = torch.randn(P * block_size, format.width, generator=generator).bfloat16() * 2
    packed = format.empty(P * units, CPU).fill_(255)
    used = torch.tensor([block for name, block in ids.items() if name not in kept], dtype=torch.int64)
    at = (used[:, None] * units + torch.arange(units)).flatten()
    format.write(packed, at, rows.view(P * units, -1)[at].view(-1, format.width))
    whole_rows = torch.randn((len(kept) + 1) * block_size, format.width, generator=generator).bfloat16()
    decoded = torch.cat((format.read(packed, torch.arange(len(packed))), whole_rows))

    table = torch.zeros(len(sequences), max(columns) + 1, dtype=torch.int32)
    slots = []
    for s, ((length, T), own) in enumerate(zip(sequences, names, strict=True)):
        table[s, : len(own)] = torch.tensor([ids[name] for name in own])
        written = range(length - gone[s] * block_size - T, length - gone[s] * block_size)
        slots += [int(table[s, t // block_size]) * block_size + t % block_size for t in written]
    lengths, firsts = [length for length, _ in sequences], [before * block_size for before in gone]
    starts = [0, *itertools.accumulate(T for _, T in sequences)]
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (lengths, firsts, starts))
    spare = torch.arange(len(decoded) - block_size, len(decoded)).repeat(-(-len(slots) // block_size))[: len(slots)]
    view = (table, *numbers, block_size, window or 0)
    return Cache(format, packed, whole_rows, decoded, torch.tensor(slots), spare, view, bool(kept))


def regrouped(cache: Cache, block_size: int) -> Cache:
    """The same rows in blocks of a size that divides theirs, which lie in another order: where a window has passed
    blocks of this size they are gone too. Of what is packed together all stays together."""
    table, lengths, firsts, starts, size, window = cache.view
    unit, generator = max(block_size, cache.format.tokens), torch.Generator().manual_seed(1)
    P = len(cache.packed) * cache.format.tokens
    order = [torch.randperm(len(rows) // unit, generator=generator) for rows in (cache.decoded[:P], cache.whole)]
    to = torch.cat((order[0], order[1] + P // unit))

    def moved(rows: Tensor, order: Tensor) -> Tensor:
        grouped = rows.unflatten(0, (len(order), -1))
        return torch.empty_like(grouped).index_copy_(0, order, grouped).flatten(0, 1)

    def slot(slots: Tensor) -> Tensor:
        return to[slots // unit] * unit + slots % unit

    ends = (lengths - starts.diff() - (window or 0) + 1).clamp(min=0)
    gone = (ends // block_size * block_size if window else 0 * ends).to(torch.int32)
    columns = -(-(lengths - gone) // block_size)
    new = torch.zeros(len(table), int(columns.max()) + 1, dtype=torch.int32)
    for s, count in enumerate(columns.tolist()):
        at = int(gone[s] - firsts[s]) + torch.arange(count) * block_size
        new[s, :count] = slot(table[s, at // size].long() * size + at % size) // block_size
    view = (new, lengths, gone, starts, block_size, window)
    return dataclasses.replace(
        cache, packed=moved(cache.packed, order[0]), whole=moved(cache.whole, order[1]),
        decoded=moved(cache.decoded, to), slots=slot(cache.slots), spare=slot(cache.spare), view=view,
    )  # fmt: skip


def latent_format(stored: str, rank: int, rope: int) -> RowFormat:
    """`stored` int8 or coded; the rank of coded ones is whole bytes of every plane."""
    if stored == "int8":
        return Int8((rank, rope) if rope else (rank,))
    # As many bits as there are, some planes shorter than what is read at a time.
    return Coded(tuple(max(8, (rank - 11 * bit) // 8 * 8) for bit in range(11)), rope)


def packed_up(w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """W_uk [G, D, R] and W_uv [G, V, R] as LatentWeights.w_up."""
    return torch.cat([pack(w_uk.flatten(0, 1), 32), *(pack(w, 32) for w in w_uv)])


# The arguments of `latent` for latents that are not coded.
NO_CODES = (None, None, None, 0)


def latent_layer(format: RowFormat, heads: int, kv_heads: int, rank: int, rope: int, queries: int) -> tuple:
    """What a kernel of latent attention is given first, for this many query tokens; the first are the projections."""
    H, G, D, V, R, E, N = heads, kv_heads, 16, 24, rank, rope, queries
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    both, (w_uk, w_uv) = normal(N, H * (D + E) + R + E).bfloat16(), (normal(G, x, R).bfloat16() / 8 for x in (D, V))
    b_v, sinks, up = normal(G, V), normal(H), packed_up(w_uk, w_uv)
    if E:
        turn, index = torch.complex(normal(N, 1, E), normal(N, 1, E)), torch.randperm(E, generator=generator)[: E // 2]
        return both, turn, index, torch.stack([pack(w.T) for w in w_uk]), up, normal(G, D), b_v, sinks
    angles, b_k = normal(POSITIONS, D // 2), normal(G * D).bfloat16()
    norms = normal(D).bfloat16(), normal(D).bfloat16()
    coded = isinstance(format, Coded)
    codes = CodeWeights.of(w_uk.flatten(0, 1), format.counts).arguments if coded else NO_CODES
    return both, angles.cos(), angles.sin(), up, *codes, b_k, b_v, *norms, 1e-5, sinks
