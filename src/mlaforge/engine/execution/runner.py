"""Runs the model on a batch. On CUDA, steps with few query tokens per sequence run as graphs, captured per bucket
(engine/execution/graphs.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlaforge.engine.execution.attention import Step
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.graphs import CudaCapture, Graphs
from mlaforge.engine.execution.mlp import Mxfp4Mixture
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.runtime import ops_choice


class Runner:
    """From a batch to hidden states before the final norm.

    `scratch` is the scratch block of every cache group (Cache.scratch) and `max_num_seqs` the most sequences of a
    batch; only graphs need them.
    """

    def __init__(self, model: EngineModel, scratch: Sequence[int], max_num_seqs: int):
        self.model = model
        self.rotary_embedding = RotaryEmbedding(model.rotary, model.spec.layers[0].head_dim, model.dtype)
        self.graphs: Graphs | None = None
        if model.device.type == "cuda":
            self.graphs = Graphs(self.eager, self.capturable, scratch, max_num_seqs, CudaCapture(model.device))

    def __call__(self, batch: Batch) -> Tensor:
        """Return hidden states [N, C], valid until the next call."""
        if self.graphs is None or batch.sparse_views or batch.probe is not None:
            return self.eager(batch)
        decodes = len(batch.token_ids_N) == len(batch.last_S)
        with span("BASE_DECODE_STEP" if decodes else "BASE_PREFILL_STEP", self.model.device):
            hidden_NC = self.graphs(batch, (self.model.boundaries, ops_choice()))
            return self.eager(batch) if hidden_NC is None else hidden_NC

    def eager(self, batch: Batch) -> Tensor:
        """Return hidden states [N, C], without a graph."""
        return self.model.hidden(batch.token_ids_N, Step.make(batch, self.rotary_embedding))

    def capturable(self, batch: Batch) -> bool:
        """Whether all layers, and all packed experts, use ops that are launched from host numbers only."""
        return all(
            layer.attention.capturable(batch.views[layer.attention.group])
            and (not isinstance(layer.mlp, Mxfp4Mixture) or layer.mlp.capturable())
            for layer in self.model.layers
        )
