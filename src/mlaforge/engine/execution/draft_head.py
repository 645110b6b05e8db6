"""The layer of an EAGLE-3 draft head on the paged cache.

Legend: N rows, S captured states of a row, C hidden size of the head, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.checkpoint.draft_head import DraftHead
from mlaforge.checkpoint.eagle3 import DraftConfig, check_head
from mlaforge.engine.cache.kv_cache import LayerCache
from mlaforge.engine.execution.attention import PagedGroupedQueryAttention, Step
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.linear import QUANTIZED, fused, vocabulary_head
from mlaforge.engine.execution.mlp import GatedMlp
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.modeling.block_head import BlockConfig
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.ops import native
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.plain import Plain, dtype_name

# Tables that are read row by row: they are never quantized.
EMBEDDINGS = ("embed_tokens.", "markov_embed.")


def head_caches(config: DraftConfig, group: int, dtype: torch.dtype) -> list[LayerCache]:
    """Cache of each of the head's layers, in cache group `group`: rows are always in the model's dtype."""
    width = 2 * config.layer.num_key_value_heads * config.layer.head_dim
    layers = config.layer.num_hidden_layers if isinstance(config, BlockConfig) else 1
    return [LayerCache("gqa", Plain(width, dtype_name(dtype)), group)] * layers


def head_format(format: str, device: torch.device) -> str:
    """Weight format of a head for a model of weight format `format`.

    Drafting a token costs about the time to read the head's weights. Rounding them changes no token of the model and
    hardly changes the drafts (docs/draft.md).
    """
    return "int8" if format == "bfloat16" and device.type == "cpu" and native.is_available() else format


def convert(head: DraftHead, dtype: torch.dtype, format: str) -> None:
    """Convert the head to the model's dtype, in place, except matrices that will be quantized: they are rounded once,
    and a head that is stored in int8 gets the same codes again."""
    for name, parameter in head.named_parameters():
        quantized = format in QUANTIZED and parameter.ndim == 2 and not name.startswith(EMBEDDINGS)
        if not quantized:
            parameter.data = parameter.data.to(dtype)


def head_tag(draft_vocab_size: int, model: EngineModel) -> str:
    """Return the tag of a draft head's product with its vocabulary, for records of shapes."""
    return "draft_lm_head" if draft_vocab_size == model.spec.vocab_size else "draft_lm_head_smallvoc"


class MarkovCorrection:
    """Logits that drafted tokens add to the places after them (modeling/draft_vocabulary.py)."""

    def __init__(self, head: DraftHead, format: str):
        self.embed, self.draft_ids = head.markov_embed.weight, head.draft_ids()
        self.head = vocabulary_head(head.markov_head.weight, format, "draft_markov")

    def __call__(self, token_ids_N: Tensor) -> Tensor:
        """Return logits [N, V] from target token ids."""
        logits: Tensor = self.head(F.embedding(self.draft_ids[token_ids_N], self.embed))
        return logits


class PagedDraftHead:
    """A draft head, which takes dtype, device, weight format and, if it has none, the embedding from `model`. rows: its
    cache. A call computes the layer."""

    def __init__(self, head: Eagle3Head, model: EngineModel, rows: PagedRows):
        self.config = config = head.config
        check_head(config, model.spec.hidden_size, model.spec.vocab_size)
        self.format = head_format(model.format, model.device)
        convert(head.to(model.device), model.dtype, self.format)
        layer, norm = head.midlayer, model.make_norm
        self.embedding = head.embed_tokens.weight if config.has_embed_tokens else model.embedding
        self.state_norms = [norm(weight) for weight in head.fc_norm] if config.fc_norm else None
        self.states_norm = norm(head.input_norm) if config.norm_before_fc else None
        self.fc = fused([head.fc], self.format, "draft_fc")
        self.hidden_norm, self.input_norm = norm(layer.hidden_norm), norm(layer.input_layernorm)
        self.attention = PagedGroupedQueryAttention(
            layer.self_attn, 0, rows, False, self.format, ("draft_qkv", "draft_o")
        )
        self.post_attention_norm = norm(layer.post_attention_layernorm)
        self.mlp = GatedMlp(layer.mlp, self.format, ("draft_ffn", "draft_ffn"))
        tag = head_tag(config.draft_vocab_size, model)
        self.norm, self.lm_head = norm(head.norm), vocabulary_head(head.lm_head.weight, self.format, tag)
        self.mask_state = None if config.mask_token_id is None else head.mask_state.detach()
        self.markov = MarkovCorrection(head, self.format) if config.markov_rank else None
        self.angles = RotaryEmbedding(head.rotary(), self.attention.head_dim, model.dtype)

    def fused(self, states_NS: Tensor) -> Tensor:
        """Return the layer's input [N, C] from captured states."""
        if self.states_norm is not None:
            states_NS = self.states_norm(states_NS)
        if self.state_norms is not None:
            parts = states_NS.split(self.config.target_hidden_size, dim=-1)
            states_NS = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], dim=-1)
        return self.fc(states_NS)

    def __call__(
        self, hidden_NC: Tensor, ids_N: Tensor, batch: Batch, outputs: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Return the layer's output [N, C] before the final norm, from fused states and the next tokens. Add the
        outputs of attention and MLP to `outputs`."""
        step = Step.make(batch, self.angles)
        normed_NC = self.hidden_norm(hidden_NC)
        embedded_NC = self.input_norm(F.embedding(ids_N, self.embedding))
        attention_input = torch.cat((embedded_NC, normed_NC), dim=-1)
        residual_NC = normed_NC if self.config.norm_before_residual else hidden_NC
        view = batch.views[self.attention.group]
        hidden_NC = self.attention(attention_input, view, step, residual_NC)
        if outputs is not None:
            # Computed again without the residual: subtracting it would lose digits.
            outputs["attn_out"] = self.attention(attention_input, view, step, torch.zeros_like(residual_NC))
            outputs["ffn_out"] = self.mlp(self.post_attention_norm(hidden_NC), torch.zeros_like(hidden_NC))
        return self.mlp(self.post_attention_norm(hidden_NC), hidden_NC)

    def next(self, out_NC: Tensor, ids_N: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output at drafted tokens, from its outputs at the tokens before."""
        return self(self.norm(out_NC) if self.config.norm_output else out_NC, ids_N, batch)

    def logits(self, out_NC: Tensor) -> Tensor:
        """Return logits [N, V]."""
        logits: Tensor = self.lm_head(self.norm(out_NC))
        return logits

    @torch.inference_mode()
    def stages(self, states_NS: Tensor, ids_N: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return intermediate outputs under the names of drafting/parity.py."""
        outputs = {"fc_out": self.fused(states_NS)}
        out_NC = self(outputs["fc_out"], ids_N, batch, outputs)
        return {**outputs, "pre_head_hidden": self.norm(out_NC), "logits": self.logits(out_NC)}
