"""Specification of a source model, independent of its family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: `head_dim`/2 frequencies of base `theta`, in half-split pairs (i, i + head_dim/2).

    `parameters` is transformers' `rope_parameters` (such as YaRN's factor and betas). `attention_scaling` multiplies
    cos and sin, so that the logits are multiplied by its square.
    """

    theta: float
    kind: str = "default"
    attention_scaling: float = 1.0
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: each token is routed to `top_k` of `num_experts`."""

    num_experts: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. `window` is the sliding window in tokens, None for full attention.

    `mlp_params` is the number of parameters of one dense MLP or of one expert; `mlp_bits` the bits per parameter in the
    checkpoint (MXFP4: 4.25).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_params: int
    mlp_bits: float
    window: int | None = None
    sinks: bool = False
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    moe: MoeSpec | None = None

    @property
    def cached(self) -> int:
        """Elements that grouped-query attention caches per token: K and V of every KV head."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model. `bits` is the size of a weight outside the experts in the checkpoint."""

    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    softmax_scale: float
    tie_word_embeddings: bool
    bits: float = 16.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layer_params(self, layer: LayerSpec) -> int:
        """Return the parameters of the four attention projections of a layer (biases and norms are negligible)."""
        q = self.hidden_size * layer.num_heads * layer.head_dim
        kv = 2 * self.hidden_size * layer.num_kv_heads * layer.head_dim
        return 2 * q + kv

    @property
    def num_params(self) -> int:
        """Number of parameters of all matrices, including every expert."""
        embed = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        experts = sum(layer.mlp_params * (layer.moe.num_experts if layer.moe else 1) for layer in self.layers)
        return embed + experts + sum(self.layer_params(layer) for layer in self.layers)


def capture_boundaries(num_layers: int) -> tuple[int, int, int]:
    """Return the default boundaries at which an EAGLE-3 head captures its target's hidden states: low, middle and high.

    Boundary j is the input of layer j. The numbers are those of vLLM and SGLang.
    """
    return min(2, num_layers), num_layers // 2, max(0, num_layers - 3)
