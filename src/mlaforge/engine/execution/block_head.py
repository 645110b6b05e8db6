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
from mlaforge.engine.execution.draft_head import convert, head_format
from mlaforge.engine.execution.linear import fused, vocabulary_head
from mlaforge.engine.execution.mlp import GatedMlp
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.rotary_embedding import RotaryEmbedding
from mlaforge.modeling.block_head import BlockHead
from mlaforge.ops.paged_rows import PagedRows


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
        self.fc, self.hidden_norm = fused([head.fc], format), norm(head.hidden_norm)
        self.layers = [
            _Layer(
                norm(layer.input_layernorm), PagedGroupedQueryAttention(layer.self_attn, 0, of_layer, False, format),
                norm(layer.post_attention_layernorm), GatedMlp(layer.mlp, format),
            )
            for layer, of_layer in zip(head.layers, rows, strict=True)
        ]  # fmt: skip
        self.norm, self.lm_head = norm(head.norm), vocabulary_head(head.lm_head.weight, format)
        self.angles = RotaryEmbedding(head.rotary(), config.layer.head_dim, model.dtype)

    def store(self, states_NS: Tensor, batch: Batch) -> None:
        """Write the keys and values of captured states to every layer's cache."""
        if self.state_norms is not None:
            parts = states_NS.split(self.config.target_hidden_size, dim=-1)
            states_NS = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], dim=-1)
        fused_NC, step = self.hidden_norm(self.fc(states_NS)), Step.make(batch, self.angles)
        for layer in self.layers:
            layer.attention.store(fused_NC, batch.views[0], step)

    def __call__(self, newest_ids: Tensor, places: Sequence[int], batch: Batch) -> Tensor:
        """Return the logits [N, V] of all masked places, sequence after sequence.

        newest_ids: newest token of each sequence, int64. places: its masked places. batch: of the rows of both, to
        which the block's keys and values are written."""
        newest = F.embedding(newest_ids, self.embedding)
        parts = [
            part for row, count in zip(newest, places, strict=True) for part in (row[None], self.mask_embedding[:count])
        ]
        hidden_NC, view, step = torch.cat(parts), mutual_view(batch.views[0]), Step.make(batch, self.angles)
        for layer in self.layers:
            hidden_NC = layer.attention(layer.input_norm(hidden_NC), view, step, hidden_NC)
            hidden_NC = layer.mlp(layer.post_attention_norm(hidden_NC), hidden_NC)
        # Without the rows of the newest tokens.
        blocks = hidden_NC.split([1 + count for count in places])
        logits: Tensor = self.lm_head(self.norm(torch.cat([rows[1:] for rows in blocks])))
        return logits
