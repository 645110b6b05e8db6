"""The bytes that a step reads at least, computed on the host: every weight that it needs once, and once every cached
row that attention sees. Drafting, activations, and rows that retrieval reads again are left out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mlaforge.engine.cache.kv_cache import LayerCache
from mlaforge.engine.execution.linear import BITS
from mlaforge.engine.execution.mlp import Mxfp4Mixture
from mlaforge.engine.execution.model import EngineModel
from mlaforge.families.spec import MoeSpec
from mlaforge.planning.costs import experts_touched, projection_params
from mlaforge.planning.plan import plan_of


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of weights and of the cache."""

    weights: float = 0.0
    cache: float = 0.0

    def __add__(self, other: StepBytes) -> StepBytes:
        return StepBytes(self.weights + other.weights, self.cache + other.cache)


@dataclasses.dataclass(frozen=True)
class _Layers:
    """How layers read the cache: the last `window` tokens, no more than `topk` of them, a row each of so many bytes
    (all of those layers together); in order to choose these, `index` bytes of every token."""

    window: float
    topk: float
    row: float
    index: float


class StepBytesModel:
    """Computes the bytes that steps of a loaded model read, from its layers' cache layout and their groups' windows."""

    def __init__(self, model: EngineModel, layers: Sequence[LayerCache], windows: Sequence[int | None]):
        spec, bits = model.spec, BITS[model.format]
        plan = plan_of(model.config.to_dict(), spec)
        # int4 has a vocabulary in int8 (linear.vocabulary_head).
        self._fixed = spec.vocab_size * spec.hidden_size * BITS["int8" if model.format == "int4" else model.format] / 8
        self._experts = Counter[tuple[MoeSpec, float]]()
        rows, indices = defaultdict[tuple[float, float], float](float), Counter[tuple[float, float]]()
        for own, layer, chosen, cache in zip(model.layers, spec.layers, plan.layers, layers, strict=False):
            self._fixed += projection_params(spec, layer, chosen) * bits / 8
            if layer.moe is None:
                self._fixed += layer.mlp_params * bits / 8
            else:
                packed = isinstance(own.mlp, Mxfp4Mixture)
                self._experts[layer.moe, layer.mlp_params * (layer.mlp_bits if packed else bits) / 8] += 1
            how = float(windows[cache.group] or math.inf), float(chosen.topk or math.inf)
            rows[how] += cache.format.unit_bytes / cache.format.tokens
            indices[how] += cache.index
        self._layers = [_Layers(*how, row, indices[how]) for how, row in rows.items()]

    def __call__(self, chunks: Iterable[tuple[int, int, int]]) -> StepBytes:
        """Of a step that computes these chunks: rows, tokens of the text up to their end, and how many of these a layer
        without a window sees. How many experts are read is expected, were routing independent and uniform."""
        rows, cache = 0, 0.0
        for count, length, seen_by_all in chunks:
            rows += count
            for layers in self._layers:
                seen = seen_by_all if layers.window == math.inf else min(length, count - 1 + layers.window)
                read = min(seen, layers.topk)
                # Under a partial view nothing is chosen.
                cache += read * layers.row + (seen * layers.index if read < seen == length else 0)
        experts = ((count, size, experts_touched(moe, rows)) for (moe, size), count in self._experts.items())
        return StepBytes(self._fixed + sum(count * size * touched for count, size, touched in experts), cache)
