"""Cases of attention in Triton: a layout and a step, or the key of a launch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mlaforge.bench import kernels
from mlaforge.ops import tuned
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.check import TOLERANCES
from mlaforge.ops.gpu_properties import gpu_properties
from mlaforge.ops.paged_attention import OP
from mlaforge.ops.tuned import Configuration, Key
from mlaforge.tuning.cases import Case, WrongResult
from mlaforge.tuning.tile_statistics import TileStatistics, of_launch, tile_statistics


class AttentionCase(Case):
    """Paged attention of S sequences with P cached tokens and T query tokens each. sparse: over P selected tokens."""

    op = "attention"

    def __init__(
        self, layout: kernels.Layout, S: int, P: int, T: int, device: torch.device, dtype: torch.dtype,
        sparse: bool = False, cold: int = kernels.COLD,
    ):  # fmt: skip
        self.device, self.layout, self.dtype = device, layout, dtype
        q, k, v, view, scale = kernels.make_inputs(layout, S, P, T, device.type, dtype)
        if sparse:
            view = _selected(view)
        self.inputs = q, k, v, view, scale
        self.minimum = kernels.cost(layout, S, P, T, dtype.itemsize)
        self.copies = kernels.layers(layout, self.inputs, self.minimum.bytes, cold)
        span = P if layout.window is None else min(P, layout.window + T)
        kind = "gqa" if layout.rope is None else "mla"
        name = str(dtype).removeprefix("torch.")
        self.key = tuned.attention_key(
            kind, layout.key, layout.value, layout.heads, layout.key_heads, name, T, S, span, sparse
        )

    @classmethod
    def of_key(cls, key: Key, device: torch.device) -> AttentionCase | None:
        """Return the case of a launch's key; None for a format that has no inputs here."""
        kind, D, V, heads, kv_heads, format, queries, sequences, span, reading = key
        numbers = [number for number in (D, V, heads, kv_heads, queries, sequences, span) if isinstance(number, int)]
        dtype = getattr(torch, str(format), None)
        if len(numbers) != 7 or dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        D, V, heads, kv_heads, queries, sequences, span = numbers
        rope = D - V if kind == "mla" else None
        if rope is None and D != V:
            return None
        layout = kernels.Layout(heads, kv_heads, V, rope)
        return cls(layout, sequences, max(span, queries), queries, device, dtype, reading == "sparse")

    def candidates(self) -> list[Configuration]:
        from mlaforge.ops import attention_tiles

        group = self.layout.heads // self.layout.key_heads
        v_in_k = self.layout.rope is not None
        cut_keys, cut_values = attention_tiles.cut(self.layout.key, self.layout.value, v_in_k)
        sizes = sum(cut_keys), sum(cut_values), v_in_k, self.dtype.itemsize, gpu_properties(self.device)
        return [{}, *attention_tiles.candidates(self.inputs[3].max_query * group, *sizes)]

    def result(self) -> Tensor:
        out: Tensor = OP(*self.inputs, implementation="triton")[0]
        return out

    def expected(self) -> Tensor:
        out: Tensor = OP.reference(*self.inputs)[0]
        return out.float()

    def error(self, configuration: Configuration, expected: Tensor | None = None) -> float:
        """Return the largest error, relative to the largest value. Raises WrongResult."""
        out = self._with(configuration, self.result).float()
        expected = self.expected() if expected is None else expected
        error = float((out - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCES[self.dtype][0]:
            raise WrongResult(f"attention {tuned.text(self.key)}: {configuration} has an error of {error:.2e}")
        return error

    def run(self) -> int:
        for inputs in self.copies:
            OP(*inputs, implementation="triton")
        return len(self.copies)

    def tiles(self, configuration: Configuration) -> TileStatistics:
        """Return the tiles of a launch with a configuration."""
        from mlaforge.ops import paged_attention_triton

        view: CacheView = self.inputs[3]
        launch = self._with(configuration, lambda: paged_attention_triton.make_launch(*self.inputs))
        return tile_statistics(view.lengths, view.queries, of_launch(launch, view), view.window)


def _selected(view: CacheView) -> CacheView:
    """Return a view of as many rows as `view`, scattered over the cache."""
    S, P = len(view.lengths), view.max_seq_len
    slots = torch.randperm(view.block_table_SB.numel() * view.block_size)[: S * P].view(S, P)
    table = slots.to(view.block_table_SB.device, torch.int32)
    return dataclasses.replace(view, block_table_SB=table, block_size=1, runs=())
