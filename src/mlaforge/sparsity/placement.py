"""Measured placement of indexes: the token budget of each layer, and which layers have their own index.

One layer at a time reads a selection while the others read all tokens; its cost is KL(dense | sparse) of the next-token
distribution. Costs of several layers are assumed to add up; benchmarks/sparsity.py evaluates the result.

Legend: T tokens of a window, L layers that are not dense, k tokens that are read.
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

# Measured budgets as fractions of the mean budget; a layer's budget lies between the first and the last.
BUDGET_FRACTIONS = (0.5, 1.0, 2.0)
# Length of a window as a multiple of the mean budget. The divergence is measured on its last tokens, at most
# EVAL_TOKENS; the tokens before them are a prompt, which is read densely and once.
WINDOW_PER_BUDGET, EVAL_TOKENS = 8, 1024
# Resolution of a budget in tokens.
BUDGET_STEP = 16


class Divergences:
    """Divergences in nats per token of a sparse model in which all L layers without a window have an index.

    indexed [L, budgets]: of a layer that reads the selection of its own index. shared [L, distances]: of a layer that
    reads the selection of the layer 1, 2, ... indexes before it, at the mean budget.
    """

    def __init__(self, stream: LayerStream, topk: int, distances: int):
        self.stream, self.topk, self.distances = stream, topk, distances
        self.layers = [i for i, kind in enumerate(stream.config.indexer_types) if kind != "dense"]
        assert stream.sparsity is not None
        self.sparsity = stream.sparsity
        forced = self.sparsity.sink + self.sparsity.window
        self.budgets = [max(int(part * topk), forced + 1) for part in BUDGET_FRACTIONS]
        self.indexed = torch.zeros(len(self.layers), len(BUDGET_FRACTIONS))
        self.shared = torch.zeros(len(self.layers), distances)

    @torch.no_grad()
    def measure(self, windows: Sequence[Tensor], work: TensorStore) -> None:
        """Measure the means over windows of token ids [T], except windows that `work` has already.

        Needs memory for the whole model.
        """
        passes = self.indexed.numel() + sum(min(n, self.distances) for n in range(len(self.layers)))
        with ExitStack() as stack:
            loaded = [stack.enter_context(self.stream.layer(i)) for i in range(self.stream.num_layers)]
            head = stack.enter_context(self.stream.head())
            bar = stack.enter_context(progress_bar("placement", passes * len(windows)))
            for n, ids in enumerate(windows):
                name = f"divergences-{n:04d}"
                if name in work:
                    bar.update(passes)
                else:
                    work[name] = self._window(loaded, head, ids, bar)
                self.indexed += work[name]["own"] / len(windows)
                self.shared += work[name]["taken"] / len(windows)

    def _window(self, loaded: list[Any], head: tuple[Any, Tensor], ids: Tensor, bar: Any) -> dict[str, Tensor]:
        sparsity, norm, weight = self.sparsity, *head
        selectors = [loaded[i].self_attn.sparse for i in self.layers]
        for sparse in selectors:
            sparse.topk = len(ids)
        # Without a config, transformers' cache stores all tokens of layers with a window too.
        past, prompt = DynamicCache(), len(ids) - min(EVAL_TOKENS, len(ids) // 2)
        hidden, states = (self.stream.embed(part[None]) for part in (ids[:prompt], ids[prompt:]))
        inputs = []
        for i, layer in enumerate(loaded):
            hidden = self._run(layer, i, hidden, past, 0)
            inputs.append(states)
            states = self._run(layer, i, states, past, prompt)
        _truncate(past, prompt)
        expected, rows = (
            (norm(states)[0], weight),
            torch.zeros(states.shape[1], dtype=torch.int64, device=weight.device),
        )

        def divergence(start: int) -> float:
            states = inputs[start]
            for i in range(start, self.stream.num_layers):
                states = self._run(loaded[i], i, states, past, prompt)
            _truncate(past, prompt)
            bar.update()
            return float(kl_loss.compare((norm(states)[0], weight), expected, rows)[2].mean())

        # The keys are those of the work files on disk.
        divergences = {"own": torch.zeros_like(self.indexed), "taken": torch.zeros_like(self.shared)}
        selections: list[Tensor] = []
        for n, (layer, sparse) in enumerate(zip(self.layers, selectors, strict=True)):
            index, sparse.index, sparse.topk = sparse.index, None, self.topk
            for d, sparsity.chosen in enumerate(selections):
                divergences["taken"][n, d] = divergence(layer)
            sparse.index = index
            for b, sparse.topk in enumerate(self.budgets):
                divergences["own"][n, b] = divergence(layer)
                if sparse.topk == self.topk:
                    selection = sparsity.chosen
            selections = [selection, *selections][: self.distances]
            sparse.topk = len(ids)
        return divergences

    def _run(self, layer: Any, index: int, hidden_1TC: Tensor, past: Any, first: int) -> Tensor:
        """Run a layer on tokens from position `first` on; the cache `past` has those before them."""
        stream, T = self.stream, hidden_1TC.shape[1]
        key_positions = torch.arange(first + T, device=hidden_1TC.device)
        positions, window = key_positions[first:], stream.spec.layers[index].window
        mask = None
        if first or window is not None:
            distances = positions[:, None] - key_positions
            mask = ((distances >= 0) & (distances < (window or len(key_positions))))[None, None]
        embeddings = stream.decoder.rotary_emb(hidden_1TC, positions[None])
        # Positional, because transformers 5.24 renamed the cache argument.
        out: Tensor = layer(hidden_1TC, mask, positions[None], past, position_embeddings=embeddings)
        return out


def _truncate(past: Any, tokens: int) -> None:
    """Truncate the cache of every layer to its first tokens."""
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


def place_indexes(divergences: Divergences, share: int) -> dict[str, Any]:
    """Return `indexer_types` and `index_topk_per_layer` for config.json that minimise the sum of the divergences.

    One in `share` layers that are not dense has an index, and the mean budget is `topk`.
    """
    num_layers = divergences.stream.num_layers
    kinds, budgets = ["dense"] * num_layers, [divergences.topk] * num_layers
    runs = _runs(divergences, share)
    for layers, k in zip(runs, _budgets(divergences, runs), strict=True):
        for layer in layers:
            kinds[layer], budgets[layer] = "shared", k
        kinds[layers[0]] = "full"
    return {"indexer_types": kinds, "index_topk_per_layer": budgets}


def _runs(divergences: Divergences, share: int) -> list[list[int]]:
    """Return the groups of layers that share a selection, by dynamic programming over the positions of the indexes."""
    layers = divergences.layers
    extra = (divergences.shared - divergences.indexed[:, BUDGET_FRACTIONS.index(1.0), None]).tolist()
    count = math.ceil(len(layers) / share)
    # (layers, indexes) -> minimum divergence of the first layers with so many indexes, and the layer of the last index.
    best_costs: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for start in range(len(layers)):
        cost = 0.0
        for distance in range(min(divergences.distances + 1, len(layers) - start)):
            cost += extra[start + distance][distance - 1] if distance else 0.0
            for indexes in range(count):
                if (start, indexes) in best_costs:
                    key, total = (start + distance + 1, indexes + 1), best_costs[start, indexes][0] + cost
                    best_costs[key] = min(best_costs.get(key, (math.inf, 0)), (total, start))
    runs, end = list[list[int]](), len(layers)
    for indexes in range(count, 0, -1):
        start = best_costs[end, indexes][1]
        runs, end = [layers[start:end], *runs], start
    return runs


def _budgets(divergences: Divergences, runs: list[list[int]]) -> list[int]:
    """Return the budget of each run, by bisection of a price per token until the mean is at most topk."""
    grid = range(divergences.budgets[0], divergences.budgets[-1] + 1, BUDGET_STEP)
    # Log-log interpolation: between measured budgets, the divergence is assumed to be a power of k.
    by_layer = dict(zip(divergences.layers, divergences.indexed.clamp_min(1e-12).log().numpy(), strict=True))
    measured = np.log(divergences.budgets)
    curves = [
        np.sum([np.exp(np.interp(np.log(grid), measured, by_layer[i])) for i in layers], axis=0) for layers in runs
    ]
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
