"""A kind of draft head that `draft train` trains: its architecture, start and objective. The loop is the same for all.

Legend: V draft vocabulary, C hidden size of the target.
"""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting.config import DraftTrainConfig
from mlaforge.drafting.initialize import Text
from mlaforge.drafting.objective import DraftObjective
from mlaforge.families.spec import capture_boundaries
from mlaforge.runtime import UserError


class HeadKind(abc.ABC):
    """name: of option --kind."""

    name: str

    @abc.abstractmethod
    def new_config(self, source: SourceModel, config: DraftTrainConfig, size: int) -> Any:
        """Return the architecture of a new head that proposes `size` tokens. Raises UserError for options that do not
        fit the model."""

    @abc.abstractmethod
    def make(self, shape: Any) -> Any:
        """Return an uninitialised head of this architecture."""

    @abc.abstractmethod
    def initialize(self, head: Any, text: Text, target_head: Tensor, seed: int) -> None:
        """Initialise the parameters of a new head. target_head [V, C]: the target's language model head for the draft
        vocabulary."""

    @abc.abstractmethod
    def adopt(self, head: Any, source: SourceModel, config: DraftTrainConfig) -> Any:
        """Return the head of option --init as one of this kind. Raises UserError for a head of another kind."""

    @abc.abstractmethod
    def objective(
        self, head: Any, target: Any, embedding: Tensor, target_head: Tensor, config: DraftTrainConfig, per_row: float
    ) -> DraftObjective:
        """Return the training objective of a head; for the other arguments see DraftObjective."""

    @abc.abstractmethod
    def draft_tokens(self, shape: Any) -> int:
        """Draft length of the acceptance length."""

    def trained(self, head: Any) -> list[str]:
        """Return the names of the parameters that are trained."""
        return [name for name, _ in head.named_parameters()]


def layer_config(source: SourceModel, config: DraftTrainConfig, layers: int) -> Any:
    """Return transformers' config of a head's layers with the target's width and attention heads, and an MLP as wide as
    the active one of its first layer. RoPE is unscaled, with the target's base. Raises UserError for key-value heads
    that do not divide the heads."""
    from transformers import LlamaConfig

    spec, first = source.spec, source.spec.layers[0]
    if config.kv_heads and first.num_heads % config.kv_heads:
        raise UserError(f"kv_heads = {config.kv_heads} must divide the model's {first.num_heads} heads, or be 0")
    return LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, num_hidden_layers=layers,
        intermediate_size=first.mlp_params // (3 * spec.hidden_size) * (first.moe.top_k if first.moe else 1),
        num_attention_heads=first.num_heads, num_key_value_heads=config.kv_heads or first.num_kv_heads,
        head_dim=first.head_dim, rms_norm_eps=source.config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta}, mlp_bias=False,
    )  # fmt: skip


def boundaries(chosen: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the boundaries at which the residual stream is captured. Raises UserError unless there are three valid
    ones."""
    if chosen is None:
        return capture_boundaries(num_layers)
    if len(chosen) != 3 or max(chosen) > num_layers:
        listed = ",".join(map(str, chosen))
        raise UserError(f"boundaries = {listed} must be three numbers from 0 to {num_layers}, such as 0,1,{num_layers}")
    return chosen
