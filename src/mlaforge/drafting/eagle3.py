"""`draft train --kind eagle3`: EAGLE-3 heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting.config import DraftTrainConfig
from mlaforge.drafting.head_kind import HeadKind, boundaries, layer_config
from mlaforge.drafting.initialize import Text, initialize_head
from mlaforge.drafting.objective import DraftObjective
from mlaforge.drafting.unroll import UnrolledHead
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head

# Draft length of the acceptance length.
NUM_DRAFT_TOKENS = 3


class Eagle3Kind(HeadKind):
    """One layer that reads its own output of the token before (modeling/eagle3.py)."""

    name = "eagle3"

    def new_config(self, source: SourceModel, config: DraftTrainConfig, size: int) -> Eagle3Config:
        spec = source.spec
        return Eagle3Config(
            layer_config(source, config, 1), spec.hidden_size, size, boundaries(config.boundaries, spec.num_layers),
            # The norms of a few tokens' states exceed the others by factors of hundreds.
            config.sliding_window or None, fc_norm=True,
        )  # fmt: skip

    def make(self, shape: Eagle3Config) -> Eagle3Head:
        return Eagle3Head(shape)

    def initialize(self, head: Eagle3Head, text: Text, target_head: Tensor, seed: int) -> None:
        initialize_head(head, text, target_head, seed)

    def objective(
        self, head: Eagle3Head, target: Any, embedding: Tensor, target_head: Tensor, config: DraftTrainConfig,
        per_row: float,
    ) -> DraftObjective:  # fmt: skip
        return UnrolledHead(head, target, embedding, target_head, config.unroll, per_row)

    def draft_tokens(self, shape: Eagle3Config) -> int:
        return NUM_DRAFT_TOKENS
