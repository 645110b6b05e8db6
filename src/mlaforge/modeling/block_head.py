"""Block draft head (DFlash, arXiv:2602.06036): proposes several next tokens of a target in one pass.

A block is the newest token and one masked place per token to propose, at the following positions. Its tokens see each
other, later ones too, and the target's states at all earlier positions, which every layer projects to keys and values.
The output at a masked place predicts the token at that place. Embedding and language model head are the target's.
Requires only torch and transformers.

Legend: B sequences, P earlier positions, M masked places of a block, T = 1 + M tokens of a block, C hidden size, S
concatenated states of the target, V draft vocabulary.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from .draft_vocabulary import DraftVocabularyHead
from .rope_mla import pairs, rotate


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Architecture of a block head. `layer` is a transformers config with the sizes, RoPE, norm epsilon and number of
    the head's layers; its vocab_size and hidden_size are the target's.

    boundaries      as Eagle3Config.boundaries, any number of them
    block_size      tokens of the longest block, the newest token included
    sliding_window  the last position of a block and the ones before it that its tokens see; None for all
    fc_norm         one norm per captured state
    markov_rank     of the Markov correction (draft_vocabulary.py); 0: none
    """

    layer: Any
    target_hidden_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    block_size: int
    sliding_window: int | None = None
    fc_norm: bool = False
    markov_rank: int = 0
    has_embed_tokens: ClassVar[bool] = False


class BlockAttention(nn.Module):
    """Attention of a block to itself and to earlier positions."""

    def __init__(self, layer: Any):
        super().__init__()
        self.head_dim: int = layer.head_dim
        self.scaling = self.head_dim**-0.5
        C, bias = layer.hidden_size, layer.attention_bias
        heads, kv_heads = layer.num_attention_heads * self.head_dim, layer.num_key_value_heads * self.head_dim
        self.q_proj, self.k_proj = nn.Linear(C, heads, bias=bias), nn.Linear(C, kv_heads, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(C, kv_heads, bias=bias), nn.Linear(heads, C, bias=bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, layer.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.head_dim, layer.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated queries [..., heads, tokens, head_dim] of x [..., tokens, C]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, each [..., kv_heads, tokens, head_dim], of x [..., tokens, C]."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)


class BlockLayer(nn.Module):
    """Decoder layer of a block head."""

    def __init__(self, layer: Any):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.self_attn = BlockAttention(layer)
        self.post_attention_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = LlamaMLP(layer)


class BlockHead(DraftVocabularyHead):
    """Block head in plain PyTorch. `mask_embedding` [block_size - 1, C] is the input at each masked place."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        layer, states = config.layer, len(config.boundaries)
        if config.fc_norm:
            norms = (LlamaRMSNorm(config.target_hidden_size, layer.rms_norm_eps) for _ in range(states))
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(states * config.target_hidden_size, layer.hidden_size, bias=False)
        self.hidden_norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(config.block_size - 1, layer.hidden_size))
        self.layers = nn.ModuleList([BlockLayer(layer) for _ in range(layer.num_hidden_layers)])
        self.norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.make_vocabulary()

    def angles(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [B, T], one column per rotary pair, in the dtype of `like`."""
        half = self.config.layer.head_dim // 2
        cos, sin = self.rotary()(like, positions)
        return pairs(cos, half), pairs(sin, half)

    def fuse(self, states: Tensor) -> Tensor:
        """Combine the target's captured states [..., S] into the input of all layers' keys and values, [..., C]."""
        if self.config.fc_norm:
            parts = states.split(self.config.target_hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.hidden_norm(self.fc(states))
        return fused

    def forward(self, states_BPS: Tensor, embedded_BC: Tensor, places: int) -> Tensor:
        """Return the outputs before the final norm at the first `places` masked places, [B, places, C], from the
        states at positions 0 to P - 1 and the embedding of the newest token, which is at position P."""
        B, P, _ = states_BPS.shape
        fused = self.fuse(states_BPS)
        hidden = torch.cat((embedded_BC[:, None], self.mask_embedding[:places].expand(B, -1, -1)), dim=1)
        positions = torch.arange(P + 1 + places, device=hidden.device)
        cos, sin = self.angles(hidden, positions[None])
        visible = positions > P + places - (self.config.sliding_window or len(positions))
        layers: Any = self.layers
        for layer in layers:
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            q = attention.queries(x, cos[:, P:], sin[:, P:])
            k, v = attention.keys_values(torch.cat((fused, x), dim=1), cos, sin)
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, visible[None, None, None], scale=attention.scaling, enable_gqa=True
            )
            hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden[:, 1:]
