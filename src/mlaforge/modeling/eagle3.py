"""EAGLE-3 draft head (arXiv:2503.01840): one decoder layer that reads a target's hidden states and proposes its next
tokens.

Row i of the input is the target's state at position i and the embedding of token i + 1; its output predicts token i +
2. The first state is `fuse` of three of the target's states; the states of drafted tokens are the head's own output.
Parameter names are those of checkpoints (`LlamaForCausalLMEagle3`). Requires only torch and transformers.

Legend: B sequences, T rows, C hidden size of the head, S concatenated states of the target (3 times its hidden size), V
draft vocabulary.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from .draft_vocabulary import DraftVocabularyHead
from .rope_mla import pairs, rotate

# Boundary after the target's final norm.
AFTER_NORM = -1


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Architecture of a head. `layer` is a transformers config with the sizes, RoPE and norm epsilon of the head's
    layer; its vocab_size is the target's.

    boundaries            where the target's residual stream is captured: boundary b is the input of its layer b, the
                          number of its layers is the output of the last one, AFTER_NORM the output of the final norm
    sliding_window        tokens that the head's attention sees; None for all
    norm_before_residual  the residual connection adds to the normed state instead of the state
    norm_before_fc        one norm over all captured states (`input_norm`)
    fc_norm               one norm per captured state
    norm_output           the normed output becomes the next state
    has_embed_tokens      the head has `embed_tokens`; otherwise it uses the target's
    mask_token_id         of a head that drafts all tokens in one pass (P-EAGLE, arXiv:2602.01469): after the first, the
                          input is this token and the learnt `mask_state` instead of the drafted token and its state
    markov_rank           of such a head's Markov correction (draft_vocabulary.py); 0: none
    """

    layer: Any
    target_hidden_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    sliding_window: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_embed_tokens: bool = False
    mask_token_id: int | None = None
    markov_rank: int = 0


class Eagle3Attention(nn.Module):
    """Causal attention with an input twice as wide as its output."""

    def __init__(self, layer: Any):
        super().__init__()
        self.head_dim: int = layer.head_dim
        self.scaling = self.head_dim**-0.5
        heads, kv_heads, bias = layer.num_attention_heads, layer.num_key_value_heads, layer.attention_bias
        self.q_proj = nn.Linear(2 * layer.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * layer.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * layer.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, layer.hidden_size, bias=bias)

    def forward(self, x_BTI: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Return [B, T, C]. `mask`: boolean, True = visible, broadcast against [B, heads, T, T]."""
        q, k, v = (
            proj(x_BTI).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scaling, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class Eagle3Layer(nn.Module):
    """The head's decoder layer. Inputs are a state and the embedding of the next token."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        layer = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.self_attn = Eagle3Attention(layer)
        self.post_attention_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = LlamaMLP(layer)

    def forward(self, hidden_BTC: Tensor, embedded_BTC: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Return [B, T, C], before the final norm."""
        normed = self.hidden_norm(hidden_BTC)
        plus = normed if self.norm_before_residual else hidden_BTC
        x_BTI = torch.cat((self.input_layernorm(embedded_BTC), normed), dim=-1)
        hidden = plus + self.self_attn(x_BTI, cos, sin, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(DraftVocabularyHead):
    """EAGLE-3 head in plain PyTorch."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        layer, states = config.layer, len(config.boundaries)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(states * config.target_hidden_size, layer.rms_norm_eps)
        if config.fc_norm:
            norms = (LlamaRMSNorm(config.target_hidden_size, layer.rms_norm_eps) for _ in range(states))
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(states * config.target_hidden_size, layer.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        if config.mask_token_id is not None:
            self.mask_state = nn.Parameter(torch.zeros(layer.hidden_size))
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        self.make_vocabulary()

    def fuse(self, states_BTS: Tensor) -> Tensor:
        """Combine the target's captured states into the state that the layer reads: [B, T, C]."""
        if self.config.norm_before_fc:
            states_BTS = self.input_norm(states_BTS)
        if self.config.fc_norm:
            parts = states_BTS.split(self.config.target_hidden_size, dim=-1)
            states_BTS = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states_BTS)
        return fused

    def forward(self, hidden_BTC: Tensor, embedded_BTC: Tensor, positions_BT: Tensor, mask: Tensor) -> Tensor:
        """Run the layer on states and the embeddings of the next tokens: [B, T, C] before the final norm, the input of
        `logits` and `fed_back`. `mask`: boolean, broadcast against [B, heads, T, T]."""
        half = self.config.layer.head_dim // 2
        cos, sin = (pairs(table, half) for table in self.rotary()(hidden_BTC, positions_BT))
        out: Tensor = self.midlayer(hidden_BTC, embedded_BTC, cos, sin, mask)
        return out

    def fed_back(self, out_BTC: Tensor) -> Tensor:
        """Return the state of a drafted token, from the output that proposed it."""
        return self.norm(out_BTC) if self.config.norm_output else out_BTC
