"""Runs the model on a batch; on CUDA the decoding steps as graphs, captured by bucket."""

from __future__ import annotations

from torch import Tensor

from mlaforge.engine.attention import Step
from mlaforge.engine.batch import Batch
from mlaforge.engine.loading import EngineModel


class Runner:
    """A batch in, hidden states before the final norm out."""

    def __init__(self, model: EngineModel):
        self.model = model
        self.head_dim = model.spec.layers[0].head_dim

    def __call__(self, batch: Batch) -> Tensor:
        """[N, C]"""
        step = Step.make(batch, self.model.rotary, self.head_dim, self.model.embedding)
        return self.model.hidden(batch.token_ids_N, step)
