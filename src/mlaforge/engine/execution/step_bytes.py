"""Lower bound of the bytes that a step reads, computed on the host: each weight that it needs once, and once each
cached row that attention sees. Without drafting, activations, and rows that retrieval reads a second time."""

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
    """How a set of layers reads the cache: the last `window` tokens, at most `topk` of them, with `row` bytes per token
    (all layers of the set together); to select these, `index` bytes of every token."""

    window: float
    topk: float
    row: float
    index: float


class StepBytesModel:
    """Computes the bytes that steps of a loaded model read, from the cache of its layers and the windows of its
    groups."""

    def __init__(self, model: EngineModel, layers: Sequence[LayerCache], windows: Sequence[int | None]):
        spec, bits = model.spec, BITS[model.format]
        plan = plan_of(model.config.to_dict(), spec)
        # int4 has its vocabulary head in int8 (linear.vocabulary_head).
        self._fixed = spec.vocab_size * spec.hidden_size * BITS["int8" if model.format == "int4" else model.format] / 8
        self._experts = Counter[tuple[MoeSpec, float]]()
        rows, indices = defaultdict[tuple[float, float], float](float), Counter[tuple[float, float]]()
        for module, layer, layer_plan, cache in zip(model.layers, spec.layers, plan.layers, layers, strict=False):
            self._fixed += projection_params(spec, layer, layer_plan) * bits / 8
            if layer.moe is None:
                self._fixed += layer.mlp_params * bits / 8
            else:
                packed = isinstance(module.mlp, Mxfp4Mixture)
                self._experts[layer.moe, layer.mlp_params * (layer.mlp_bits if packed else bits) / 8] += 1
            reads = float(windows[cache.group] or math.inf), float(layer_plan.topk or math.inf)
            rows[reads] += cache.format.bytes_per_token
            indices[reads] += cache.index_bytes
        self._layers = [_Layers(*reads, row, indices[reads]) for reads, row in rows.items()]

    def __call__(self, chunks: Iterable[tuple[int, int, int]]) -> StepBytes:
        """Return the bytes of a step with these chunks (rows, length, full_length): the rows that it computes, the
        tokens of the text up to their end, and how many of those a layer without a window sees. The number of experts
        read is an expectation, for independent and uniform routing."""
        rows, cache = 0, 0.0
        for count, length, full_length in chunks:
            rows += count
            for layers in self._layers:
                seen = full_length if layers.window == math.inf else min(length, count - 1 + layers.window)
                read = min(seen, layers.topk)
                # Under a sparse view no layer selects tokens.
                cache += read * layers.row + (seen * layers.index if read < seen == length else 0)
        experts = ((count, size, experts_touched(moe, rows)) for (moe, size), count in self._experts.items())
        return StepBytes(self._fixed + sum(count * size * touched for count, size, touched in experts), cache)
