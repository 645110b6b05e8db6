"""Cases of the GPU's kernels that are tuned at the keys of their launches, with random weights and rows: attention
(attention_case.py), `latent` and token selection. Coded rows have four bits in every column, because a key does not say
how many bits the coordinates of a layer have.

Legend: S sequences, P cached tokens of each, T query tokens of each, H query heads, G KV heads, D key dimensions, K
columns of a row, I elements of an index key.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.bench import kernels
from mlaforge.ops import tuned
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.check import differences
from mlaforge.ops.gpu_properties import gpu_properties
from mlaforge.ops.latent_attention import LATENT
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.ops.token_selection import SELECT_TOKENS, TokenIndex, empty_keys
from mlaforge.ops.tuned import Configuration, Key
from mlaforge.planning.costs import Cost
from mlaforge.tuning.attention_case import AttentionCase
from mlaforge.tuning.cases import Case, WrongResult

# Tokens that a selection reads, fewer of a short text, and bits of a coded coordinate.
SELECTED, BITS = 1024, 4


def case_of_launch(
    op: str, key: Key, device: torch.device
) -> AttentionCase | LatentCase | SelectionCase | None:  # fmt: skip
    """Return the case of the key of a launch of `attention`, `latent` or `selection`; None where it has none."""
    if op == "attention":
        return AttentionCase.of_key(key, device)
    if op == "selection":
        return SelectionCase(key, device)
    return LatentCase(key, device) if key[5] in ("bf16", "fp16", "fp8", "coded") else None


def _view(S: int, P: int, T: int, device: torch.device) -> tuple[CacheView, Tensor]:
    """A view of shuffled blocks whose last T tokens are a step's, and the slots of all tokens, int64 [S, P]."""
    # One element per row: only the view is used.
    *_, view, _ = kernels.make_inputs(kernels.Layout(1, 1, 1, 0), S, P, T, device.type, torch.float16)
    at = torch.arange(P, device=device)
    slots = view.block_table_SB.long()[:, at // view.block_size] * view.block_size + at % view.block_size
    step = slots[:, P - T :].flatten()
    return dataclasses.replace(view, slots_N=step, generating=(True,) * S), slots


def _copies(tensor: Tensor, read: float, cold: int) -> list[Tensor]:
    """A tensor and copies of it, until one pass over `read` bytes of each reads `cold` bytes."""
    return [tensor, *(tensor.clone() for _ in range(min(128, int(cold / read)) - 1))]


class LatentCase(Case):
    """Attention of the layout `latent` at the key of a launch."""

    op = "latent"

    def __init__(
        self, key: Key, device: torch.device, dtype: torch.dtype = torch.bfloat16, cold: int = kernels.COLD
    ):  # fmt: skip
        self.key, self.device, self.dtype = key, device, dtype
        D, K, H, G, T, S, P = (int(key[i]) for i in (1, 2, 3, 4, 6, 7, 8))
        P = max(P, T)
        self.sizes = S * P, G, D, K
        format = Coded((K,) * BITS) if key[5] == "coded" else Plain.make(str(key[5]), (K,), ())
        view, slots_SP = _view(S, P, T, device)
        torch.manual_seed(0)
        scale = format.code.halves(device) / 2 if isinstance(format, Coded) else torch.ones(K, device=device)
        rows = PagedRows(format, format.empty(int(slots_SP.max()) + 1, device), dtype)
        latents = torch.randn(rows.slots, K, device=device) * scale
        format.write(rows.packed, torch.arange(rows.slots, device=device), latents.to(dtype))
        w_uk, w_uv = (torch.randn(G, D, K, device=device) / (scale * K**0.5) for _ in range(2))
        biases = torch.zeros(2, G, D, device=device)
        weights = GpuLatentWeights.make([part.to(dtype) for part in (w_uk, w_uv, *biases)], rows)
        if key[-1] == "sparse":
            view = _selection_of(view, slots_SP)
        queries = torch.randn(S * T, H * D, device=device)
        q_kv = torch.cat((queries, latents[view.slots_N]), dim=1).to(dtype)
        angle = torch.outer(torch.arange(P, device=device), 0.9 ** torch.arange(D // 2, device=device))
        self.inputs = q_kv, angle.cos(), angle.sin(), weights, rows, view, D**-0.5
        read = S * P * format.unit_bytes + weights.w_uk.numel() * weights.w_uk.element_size()
        # Keys of all rows, logits, sums of rows.
        self.minimum = Cost(2.0 * S * P * (G * D * K + T * H * (D + K)), float(read))
        self.copies = [dataclasses.replace(rows, packed=packed) for packed in _copies(rows.packed, read, cold)]

    def candidates(self) -> list[Configuration]:
        from mlaforge.ops import latent_attention_gpu

        weights = self.inputs[3]
        item = self.dtype.itemsize if weights.columns is None else weights.w_uk.element_size()
        return [{}, *latent_attention_gpu.candidates(*self.sizes, item, gpu_properties(self.device))]

    def result(self) -> Tensor:
        return self._attend(self.copies[0], "triton")

    def expected(self) -> Tensor:
        return self._attend(self.copies[0], "reference").float()

    def run(self) -> int:
        for rows in self.copies:
            self._attend(rows, "triton")
        return len(self.copies)

    def _attend(self, rows: PagedRows, implementation: str) -> Tensor:
        q_kv, cos, sin, weights, _, view, scale = self.inputs
        out: Tensor = LATENT(q_kv, cos, sin, weights, rows, view, scale, implementation=implementation)
        return out


def _selection_of(view: CacheView, slots_SP: Tensor) -> CacheView:
    """A view of all rows of each sequence as a selection, as engine/cache/view.py makes it."""
    S, P = slots_SP.shape
    first = torch.arange(S, dtype=torch.int32, device=slots_SP.device) * P
    positions = torch.arange(P, dtype=torch.int32, device=slots_SP.device).expand(S, P).contiguous()
    return dataclasses.replace(
        view, block_table_SB=slots_SP.int(), first_S=first, seq_lens_S=first + P, block_size=1, runs=(),
        positions_SK=positions, counts=(P,) * S, lengths=(P,) * S,
    )  # fmt: skip


class SelectionCase(Case):
    """Selection of tokens at the key of a launch."""

    op = "selection"

    def __init__(self, key: Key, device: torch.device, dtype: torch.dtype = torch.bfloat16, cold: int = kernels.COLD):
        self.key, self.device = key, device
        H, I, S, P = map(int, key)  # noqa: E741
        view, slots_SP = _view(S, P, 1, device)
        torch.manual_seed(0)
        keys = empty_keys(int(slots_SP.max()) + 1, I, device)
        keys.copy_(torch.randint(-127, 128, keys.shape, dtype=torch.int8, device=device))
        # Queries need no rotation and no product of their own: only the launches over the index keys are tuned.
        query = torch.eye(I, device=device)[None] / (127 * I**0.5)
        nothing = torch.full((I // 2,), -1, device=device)
        index = TokenIndex(query[0], query[0, 0], query, nothing, H, pre_rotated=True, sink=4, window=min(P, 128))
        count = min(SELECTED, max(1, P // 2))
        q = torch.randn(S, H * I, device=device).to(dtype)
        rotation = torch.ones(S, 1, 1, dtype=torch.complex64, device=device)
        self.inputs = q, index, rotation, keys, view, (count,) * S, 1
        self.minimum = Cost(2.0 * S * P * H * I, float(S * P * I))
        self.copies = _copies(keys, self.minimum.bytes, cold)

    def candidates(self) -> list[Configuration]:
        from mlaforge.ops import token_selection_triton

        return [{}, *({"stretch": stretch} for stretch in token_selection_triton.STRETCHES)]

    def result(self) -> Tensor:
        return self._scores("triton")

    def expected(self) -> Tensor:
        return self._scores("reference")

    def _scores(self, implementation: str) -> Tensor:
        """Scores of the selected tokens, whether each has its slot, and whether positions ascend: tokens with close
        scores may take each other's place."""
        outputs = self._select(self.inputs[3], implementation)
        return torch.cat([x.flatten() for x in SELECT_TOKENS.observe(self.inputs, outputs)])

    def error(self, configuration: Configuration, expected: Tensor | None = None) -> float:
        """Return the largest difference of scores, relative to the mean score of a token. Raises WrongResult."""
        out = self._with(configuration, self.result)
        expected = self.expected() if expected is None else expected
        assert SELECT_TOKENS.tolerance is not None
        if line := differences(out, expected, *SELECT_TOKENS.tolerance):
            raise WrongResult(f"selection {tuned.text(self.key)}: {configuration}: {line}")
        # Tokens that are always read have infinite scores.
        return float((out - expected).nan_to_num().abs().max())

    def run(self) -> int:
        for keys in self.copies:
            self._select(keys, "triton")
        return len(self.copies)

    def _select(self, keys: Tensor, implementation: str) -> Any:
        q, index, rotation, _, *others = self.inputs
        return SELECT_TOKENS(q, index, rotation, keys, *others, implementation=implementation)
