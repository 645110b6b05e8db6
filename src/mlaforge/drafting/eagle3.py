"""`draft train --kind eagle3` and `parallel`: EAGLE-3 heads, token by token or all tokens in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.draft_head import DraftHead
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting.config import DraftTrainConfig
from mlaforge.drafting.head_kind import HeadKind, boundaries, layer_config
from mlaforge.drafting.initialize import Text, initialize_head
from mlaforge.drafting.markov import with_markov
from mlaforge.drafting.objective import DraftObjective
from mlaforge.drafting.unroll import UnrolledHead
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.runtime import UserError

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

    def adopt(self, head: DraftHead, source: SourceModel, config: DraftTrainConfig) -> Eagle3Head:
        if not isinstance(head, Eagle3Head) or head.config.mask_token_id is not None:
            raise UserError("the head is no EAGLE-3 head that drafts token by token; give another --kind or --init")
        return head

    def objective(
        self, head: Eagle3Head, target: Any, embedding: Tensor, target_head: Tensor, config: DraftTrainConfig,
        per_row: float,
    ) -> DraftObjective:  # fmt: skip
        return UnrolledHead(head, target, embedding, target_head, config.unroll, per_row)

    def draft_tokens(self, shape: Eagle3Config) -> int:
        return NUM_DRAFT_TOKENS


class ParallelKind(Eagle3Kind):
    """An EAGLE-3 head that drafts all tokens in one pass from masked inputs (P-EAGLE, arXiv:2602.01469), started from
    an EAGLE-3 head or as one."""

    name = "parallel"

    def new_config(self, source: SourceModel, config: DraftTrainConfig, size: int) -> Eagle3Config:
        plain = super().new_config(source, config, size)
        return dataclasses.replace(plain, mask_token_id=mask_token(source), markov_rank=config.markov_rank)

    def initialize(self, head: Eagle3Head, text: Text, target_head: Tensor, seed: int) -> None:
        super().initialize(head, text, target_head, seed)
        randomize_mask(head, seed)

    def adopt(self, head: DraftHead, source: SourceModel, config: DraftTrainConfig) -> Eagle3Head:
        if isinstance(head, Eagle3Head) and head.config.mask_token_id is not None:
            return with_markov(head, config.markov_rank)
        plain = super().adopt(head, source, config)
        masked = Eagle3Head(dataclasses.replace(plain.config, mask_token_id=mask_token(source)))
        masked.load_state_dict({**masked.state_dict(), **plain.state_dict()})
        randomize_mask(masked, config.seed)
        return with_markov(masked, config.markov_rank)


def mask_token(source: SourceModel) -> int:
    """The token that stands at masked inputs: one that no text has inside."""
    return source.tokenizer.eos_token_id or 0


@torch.no_grad()
def randomize_mask(head: Eagle3Head, seed: int) -> None:
    """Initialise the state at masked inputs with the size of an initialised head's states."""
    generator: Any = torch.Generator().manual_seed(seed)
    head.mask_state.normal_(generator=generator)
