"""Runs the model on a batch; on CUDA uniform steps as graphs, captured by bucket (engine/execution/graphs.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlaforge.engine.execution.angles import Angles
from mlaforge.engine.execution.attention import Step
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.graphs import CudaCapture, Graphs
from mlaforge.engine.execution.mlp import Mxfp4Mixture
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.nvtx import span
from mlaforge.runtime import ops_choice


class Runner:
    """A batch in, hidden states before the final norm out.

    `scratch` is the scratch block of every cache group (Cache.scratch), `max_num_seqs` bounds the sequences of a batch;
    both are for graphs only.
    """

    def __init__(self, model: EngineModel, scratch: Sequence[int], max_num_seqs: int):
        self.model = model
        self.angles = Angles(model.rotary, model.spec.layers[0].head_dim, model.dtype)
        self.graphs: Graphs | None = None
        if model.device.type == "cuda":
            self.graphs = Graphs(self.eager, self.capturable, scratch, max_num_seqs, CudaCapture(model.device))

    def __call__(self, batch: Batch) -> Tensor:
        """[N, C], valid until the next call."""
        if self.graphs is None or batch.partial or batch.probe is not None:
            return self.eager(batch)
        decodes = len(batch.token_ids_N) == len(batch.last_S)
        with span("BASE_DECODE_STEP" if decodes else "BASE_PREFILL_STEP", self.model.device):
            hidden_NC = self.graphs(batch, (self.model.boundaries, ops_choice()))
            return self.eager(batch) if hidden_NC is None else hidden_NC

    def eager(self, batch: Batch) -> Tensor:
        """[N, C], kernel after kernel."""
        return self.model.hidden(batch.token_ids_N, Step.make(batch, self.angles))

    def capturable(self, batch: Batch) -> bool:
        """Whether all layers attend, and mix packed experts, through ops that launch from host numbers only."""
        return all(
            layer.attention.capturable(batch.views[layer.attention.group])
            and (not isinstance(layer.mlp, Mxfp4Mixture) or layer.mlp.capturable())
            for layer in self.model.layers
        )
