"""Where a selection costs what: how many tokens each layer reads, and which layers have an index of their own.

One layer at a time reads a selection, and the others read all. What that does to the model is KL(dense | sparse) of its
next tokens. The divergences of several layers are taken to add up; benchmarks/sparsity.py judges what comes of it.

Legend: T tokens of a window, k tokens that are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.runtime import progress_bar
from mlaforge.tensor_store import TensorStore
from mlaforge.training import kl_loss

# Budgets are measured at these parts of the mean one, and lie between the least and the most of them.
PARTS = (0.5, 1.0, 2.0)
# A window is so many times as long as the mean budget. Its last tokens are judged, at the most so many; those before
# them are a prompt, which is read densely and once.
LONGER, JUDGED = 8, 1024
# Tokens by which a budget grows.
STEP = 16


class Divergences:
    """Nats per token of a sparse model whose L layers without a window all have an index.

    `own` [L, budgets] is a layer's that reads what its index chooses; `taken` [L, distances] of one that reads what the
    layer so many indexes before it chose at the mean budget.
    """

    def __init__(self, stream: LayerStream, topk: int, distances: int):
        self.stream, self.topk, self.distances = stream, topk, distances
        self.layers = [i for i, kind in enumerate(stream.config.indexer_types) if kind != "dense"]
        assert stream.sparsity is not None
        self.sparsity = stream.sparsity
        forced = self.sparsity.sink + self.sparsity.window
        self.budgets = [max(int(part * topk), forced + 1) for part in PARTS]
        self.own = torch.zeros(len(self.layers), len(PARTS))
        self.taken = torch.zeros(len(self.layers), distances)

    @torch.no_grad()
    def measure(self, windows: Sequence[Tensor], work: TensorStore) -> None:
        """The means over windows of token ids [T]; those in `work` are not measured again. The whole model is in memory
        meanwhile."""
        each = self.own.numel() + sum(min(n, self.distances) for n in range(len(self.layers)))
        with ExitStack() as stack:
            loaded = [stack.enter_context(self.stream.layer(i)) for i in range(self.stream.num_layers)]
            head = stack.enter_context(self.stream.head())
            bar = stack.enter_context(progress_bar("placement", each * len(windows)))
            for n, ids in enumerate(windows):
                name = f"divergences-{n:04d}"
                if name in work:
                    bar.update(each)
                else:
                    work[name] = self._window(loaded, head, ids, bar)
                self.own += work[name]["own"] / len(windows)
                self.taken += work[name]["taken"] / len(windows)

    def _window(self, loaded: list[Any], head: tuple[Any, Tensor], ids: Tensor, bar: Any) -> dict[str, Tensor]:
        sparsity, norm, weight = self.sparsity, *head
        sparses = [loaded[i].self_attn.sparse for i in self.layers]
        for sparse in sparses:
            sparse.topk = len(ids)
        # As transformers' own makes it without a config, it holds all of a layer with a window, too.
        past, prompt = DynamicCache(), len(ids) - min(JUDGED, len(ids) // 2)
        hidden, states = (self.stream.embed(part[None]) for part in (ids[:prompt], ids[prompt:]))
        inputs = []
        for i, layer in enumerate(loaded):
            hidden = self._run(layer, i, hidden, past, 0)
            inputs.append(states)
            states = self._run(layer, i, states, past, prompt)
        _forget(past, prompt)
        expected, rows = (
            (norm(states)[0], weight),
            torch.zeros(states.shape[1], dtype=torch.int64, device=weight.device),
        )

        def divergence(start: int) -> float:
            states = inputs[start]
            for i in range(start, self.stream.num_layers):
                states = self._run(loaded[i], i, states, past, prompt)
            _forget(past, prompt)
            bar.update()
            return float(kl_loss.compare((norm(states)[0], weight), expected, rows)[2].mean())

        found = {"own": torch.zeros_like(self.own), "taken": torch.zeros_like(self.taken)}
        chosen: list[Tensor] = []
        for n, (layer, sparse) in enumerate(zip(self.layers, sparses, strict=True)):
            index, sparse.index, sparse.topk = sparse.index, None, self.topk
            for d, sparsity.chosen in enumerate(chosen):
                found["taken"][n, d] = divergence(layer)
            sparse.index = index
            for b, sparse.topk in enumerate(self.budgets):
                found["own"][n, b] = divergence(layer)
                if sparse.topk == self.topk:
                    choice = sparsity.chosen
            chosen = [choice, *chosen][: self.distances]
            sparse.topk = len(ids)
        return found

    def _run(self, layer: Any, index: int, hidden_1TC: Tensor, past: Any, first: int) -> Tensor:
        """A layer on tokens from position `first` on; those before them are in `past`."""
        stream, T = self.stream, hidden_1TC.shape[1]
        at = torch.arange(first + T, device=hidden_1TC.device)
        own, window = at[first:], stream.spec.layers[index].window
        mask = None
        if first or window is not None:
            behind = own[:, None] - at
            mask = ((behind >= 0) & (behind < (window or len(at))))[None, None]
        turned = stream.decoder.rotary_emb(hidden_1TC, own[None])
        # By place: transformers 5.24 gave the cache another name.
        out: Tensor = layer(hidden_1TC, mask, own[None], past, position_embeddings=turned)
        return out


def _forget(past: Any, tokens: int) -> None:
    """Leaves the first tokens in every layer; not all have more."""
    for held in past.layers:
        held.keys, held.values = held.keys[..., :tokens, :], held.values[..., :tokens, :]


def place(divergences: Divergences, share: int) -> dict[str, Any]:
    """Config's `indexer_types` and `index_topk_per_layer`: of `share` layers that are not dense one has an index, the
    mean budget is `topk`, and the divergences' sum is the least."""
    num_layers = divergences.stream.num_layers
    kinds, budgets = ["dense"] * num_layers, [divergences.topk] * num_layers
    runs = _runs(divergences, share)
    for layers, k in zip(runs, _budgets(divergences, runs), strict=True):
        for layer in layers:
            kinds[layer], budgets[layer] = "shared", k
        kinds[layers[0]] = "full"
    return {"indexer_types": kinds, "index_topk_per_layer": budgets}


def _runs(divergences: Divergences, share: int) -> list[list[int]]:
    """Layers that read one selection, by dynamic programming over where indexes stand."""
    layers = divergences.layers
    extra = (divergences.taken - divergences.own[:, PARTS.index(1.0), None]).tolist()
    count = math.ceil(len(layers) / share)
    # (layers, indexes) -> the least that so many first layers diverge by, and where their last index stands.
    least: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for start in range(len(layers)):
        cost = 0.0
        for distance in range(min(divergences.distances + 1, len(layers) - start)):
            cost += extra[start + distance][distance - 1] if distance else 0.0
            for indexes in range(count):
                if (start, indexes) in least:
                    key, total = (start + distance + 1, indexes + 1), least[start, indexes][0] + cost
                    least[key] = min(least.get(key, (math.inf, 0)), (total, start))
    runs, end = list[list[int]](), len(layers)
    for indexes in range(count, 0, -1):
        start = least[end, indexes][1]
        runs, end = [layers[start:end], *runs], start
    return runs


def _budgets(divergences: Divergences, runs: list[list[int]]) -> list[int]:
    """Each run's k, by the price of a token at which the mean is not above topk."""
    grid = range(divergences.budgets[0], divergences.budgets[-1] + 1, STEP)
    # Between budgets that were measured a divergence is taken for a power of k.
    by_layer = dict(zip(divergences.layers, divergences.own.clamp_min(1e-12).log().numpy(), strict=True))
    at = np.log(divergences.budgets)
    curves = [np.sum([np.exp(np.interp(np.log(grid), at, by_layer[i])) for i in layers], axis=0) for layers in runs]
    sizes = [*map(len, runs)]

    def budgets(price: float) -> list[int]:
        return [grid[int(np.argmin(c + price * n * np.array(grid)))] for c, n in zip(curves, sizes, strict=True)]

    low, high = 1e-12, 1.0
    for _ in range(100):
        price = math.sqrt(low * high)
        if np.dot(budgets(price), sizes) > divergences.topk * sum(sizes):
            low = price
        else:
            high = price
    return budgets(high)
