"""The layers of a block draft head on the paged cache.

Legend: N rows, S captured states of a row, C hidden size, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.checkpoint.eagle3 import check_head
from mlaforge.engine.cache.view import mutual_view
from mlaforge.engine.execution.attention import PagedGroupedQueryAttention, Step
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.draft_head import MarkovCorrection, convert, head_format, head_tag
from mlaforge.engine.execution.linear import fused, vocabulary_head
from mlaforge.engine.execution.mlp import GatedMlp
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.modeling.block_head import BlockHead
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.runtime import on_device

# Token id at a masked place.
MASK = -1


@dataclasses.dataclass(frozen=True)
class _Layer:
    """input_norm and post_attention_norm: functions of hidden states."""

    input_norm: Any
    attention: PagedGroupedQueryAttention
    post_attention_norm: Any
    mlp: GatedMlp


class PagedBlockHead:
    """A block head, which takes dtype, device, weight format and embedding from `model`. rows: its layers' cache."""

    def __init__(self, head: BlockHead, model: EngineModel, rows: Sequence[PagedRows]):
        self.config = config = head.config
        check_head(config, model.spec.hidden_size, model.spec.vocab_size)
        self.format = format = head_format(model.format, model.device)
        convert(head.to(model.device), model.dtype, format)
        norm = model.make_norm
        self.embedding, self.mask_embedding = model.embedding, head.mask_embedding.detach().to(model.dtype)
        self.state_norms = [norm(weight) for weight in head.fc_norm] if config.fc_norm else None
        self.fc, self.hidden_norm = fused([head.fc], format, "draft_fc"), norm(head.hidden_norm)
        self.layers = [
            _Layer(
                norm(layer.input_layernorm),
                PagedGroupedQueryAttention(layer.self_attn, 0, of_layer, False, format, ("draft_qkv", "draft_o")),
                norm(layer.post_attention_layernorm), GatedMlp(layer.mlp, format, ("draft_ffn", "draft_ffn")),
            )
            for layer, of_layer in zip(head.layers, rows, strict=True)
        ]  # fmt: skip
        self.norm, self.lm_head = (
            norm(head.norm),
            vocabulary_head(head.lm_head.weight, format, head_tag(config.draft_vocab_size, model)),
        )
        self.markov = MarkovCorrection(head, format) if config.markov_rank else None
        self.angles = RotaryEmbedding(head.rotary(), config.layer.head_dim, model.dtype)

    def store(self, states_NS: Tensor, batch: Batch) -> None:
        """Write the keys and values of captured states to every layer's cache."""
        if self.state_norms is not None:
            parts = states_NS.split(self.config.target_hidden_size, dim=-1)
            states_NS = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], dim=-1)
        fused_NC, step = self.hidden_norm(self.fc(states_NS)), Step.make(batch, self.angles)
        for layer in self.layers:
            layer.attention.store(fused_NC, batch.views[0], step)

    def __call__(self, blocks: Sequence[Sequence[int]], batch: Batch) -> Tensor:
        """Return the logits [N, V] at all places of each block but its first, the newest token's.

        blocks: token ids, MASK at masked places. batch: of their rows, to which keys and values are written."""
        ids = [token for block in blocks for token in block]
        places = [place for block in blocks for place in range(len(block))]
        masked = [row for row, token in enumerate(ids) if token == MASK]
        drafted = [row for row, place in enumerate(places) if place]
        device = self.mask_embedding.device
        # One transfer to the device; padding for masked rows, which are overwritten.
        indices = [max(token, 0) for token in ids], masked, [places[row] - 1 for row in masked], drafted
        flat = on_device([number for part in indices for number in part], torch.int64, device)
        ids_N, masked_M, masks_M, drafted_N = flat.split([len(part) for part in indices])
        hidden_NC = F.embedding(ids_N, self.embedding)
        hidden_NC.index_copy_(0, masked_M, self.mask_embedding.index_select(0, masks_M))
        view, step = mutual_view(batch.views[0]), Step.make(batch, self.angles)
        for layer in self.layers:
            hidden_NC = layer.attention(layer.input_norm(hidden_NC), view, step, hidden_NC)
            hidden_NC = layer.mlp(layer.post_attention_norm(hidden_NC), hidden_NC)
        logits: Tensor = self.lm_head(self.norm(hidden_NC.index_select(0, drafted_N)))
        return logits
