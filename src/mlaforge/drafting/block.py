"""`draft train --kind block`: block heads (DFlash, arXiv:2602.06036), trained on every column of a text at once.

The block of a column is the next token and one masked place per drafted token. It sees itself and the target's states
up to the column; blocks do not see each other. As in drafting, place j predicts the token at its own position.

Legend: B rows, T tokens, A columns of a row, N tokens of a block, C hidden size, S concatenated captured states, H
heads, K key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.checkpoint.draft_head import DraftHead
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data.packing import Rows
from mlaforge.drafting.block_init import initialize_block_head
from mlaforge.drafting.config import DraftTrainConfig
from mlaforge.drafting.head_kind import HeadKind, boundaries, layer_config
from mlaforge.drafting.initialize import Text
from mlaforge.drafting.markov import with_markov
from mlaforge.drafting.objective import DraftObjective, States, visible
from mlaforge.modeling.block_head import BlockConfig, BlockHead
from mlaforge.runtime import UserError

# The language model head stays the target's.
TIED = "lm_head.weight"


def decay(block_size: int) -> float:
    """Weight of the loss of a place relative to the place before: exp(-1 / γ). The paper's γ is about half of the block
    size (7, 5 and 4 for 16, 10 and 8)."""
    return math.exp(-2 / block_size)


class BlockObjective(DraftObjective):
    """Objective of a block head. For the arguments see DraftObjective."""

    def __init__(self, head: BlockHead, target: Any, embedding: Tensor, target_head: Tensor, per_row: float):
        size = head.config.block_size
        super().__init__(head, target, embedding, target_head, size - 1, decay(size), per_row)

    def outputs(self, rows: Rows, states: States, at_BA: Tensor) -> list[Tensor]:
        captured = states.captured.view(*rows.ids.shape, -1)
        newest = F.embedding(self.token(rows, at_BA, 1), self.embedding)
        mask_BAT = visible(rows, at_BA, self.drafted + 1, self.student.config.sliding_window)
        return list(block_outputs(self.student, captured, newest, rows.positions, at_BA, mask_BAT).unbind(2))


def block_outputs(
    head: BlockHead, states_BTS: Tensor, newest_BAC: Tensor, positions_BT: Tensor, at_BA: Tensor, mask_BAT: Tensor
) -> Tensor:
    """Return the outputs before the final norm at the masked places of the blocks of columns at_BA, [B, A, places, C].

    newest_BAC: embeddings of the columns' next tokens. positions_BT: of the states in their texts. mask_BAT: the states
    that a column's block sees."""
    places, dtype = head.config.block_size - 1, head.fc.weight.dtype
    fused_BTC = head.fuse(states_BTS.to(dtype))
    masked = head.mask_embedding.to(dtype).expand(*at_BA.shape, -1, -1)
    hidden_BANC = torch.cat((newest_BAC[:, :, None].to(dtype), masked), dim=2)
    angles = head.angles(fused_BTC, positions_BT)
    # Positions [B, A, N] of each block's tokens in their text.
    steps_N = torch.arange(1, 2 + places, device=at_BA.device)
    positions = positions_BT.gather(1, at_BA)[..., None] + steps_N
    cos, sin = (table.unflatten(1, positions.shape[1:]) for table in head.angles(fused_BTC, positions.flatten(1)))
    layers: Any = head.layers
    for number, layer in enumerate(layers, start=1):
        attention, x = layer.self_attn, layer.input_layernorm(hidden_BANC)
        earlier, block = attention.keys_values(fused_BTC, *angles), attention.keys_values(x, cos, sin)
        if number == len(layers):
            # Nobody reads the last layer's output at the newest token.
            x, hidden_BANC, cos, sin = (part[:, :, 1:] for part in (x, hidden_BANC, cos, sin))
        q = attention.queries(x, cos, sin) * attention.scaling
        hidden_BANC = hidden_BANC + attention.o_proj(attend(q, earlier, block, mask_BAT))
        hidden_BANC = hidden_BANC + layer.mlp(layer.post_attention_layernorm(hidden_BANC))
    return hidden_BANC


def attend(
    q_BAHND: Tensor, earlier: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask_BAT: Tensor
) -> Tensor:  # fmt: skip
    """Return the attention of blocks, [B, A, N, H·D], to earlier keys and values [B, K, T, D], of which a column sees
    those in the mask, and to all of their own [B, A, K, M, D]."""
    B, A, H, N, D = q_BAHND.shape
    (k_BKTD, v_BKTD), (k_BAKMD, v_BAKMD) = earlier, block
    K, T = k_BKTD.shape[1:3]
    q = q_BAHND.reshape(B, A, K, H // K * N, D)
    scores = (q.transpose(1, 2).flatten(2, 3) @ k_BKTD.mT).view(B, K, A, -1, T)
    scores = scores.masked_fill(~mask_BAT[:, None, :, None], torch.finfo(scores.dtype).min)
    in_block = (q @ k_BAKMD.mT).transpose(1, 2)
    p = torch.cat((scores, in_block), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    attended = (p[..., :T].flatten(2, 3) @ v_BKTD).view(B, K, A, -1, D).transpose(1, 2)
    attended = attended + p[..., T:].transpose(1, 2) @ v_BAKMD
    return attended.reshape(B, A, H, N, D).transpose(2, 3).flatten(3)


class BlockKind(HeadKind):
    """A block of masked places that one pass fills (modeling/block_head.py)."""

    name = "block"

    def new_config(self, source: SourceModel, config: DraftTrainConfig, size: int) -> BlockConfig:
        spec = source.spec
        return BlockConfig(
            layer_config(source, config, config.layers), spec.hidden_size, size,
            boundaries(config.boundaries, spec.num_layers), config.block_size, config.sliding_window or None,
            fc_norm=True, markov_rank=config.markov_rank,
        )  # fmt: skip

    def make(self, shape: BlockConfig) -> BlockHead:
        return BlockHead(shape)

    def initialize(self, head: BlockHead, text: Text, target_head: Tensor, seed: int) -> None:
        initialize_block_head(head, text, target_head, seed)

    def adopt(self, head: DraftHead, source: SourceModel, config: DraftTrainConfig) -> BlockHead:
        if not isinstance(head, BlockHead):
            raise UserError("the head is no block head; give another --kind or --init")
        return with_markov(head, config.markov_rank)

    def objective(
        self, head: BlockHead, target: Any, embedding: Tensor, target_head: Tensor, config: DraftTrainConfig,
        per_row: float,
    ) -> DraftObjective:  # fmt: skip
        return BlockObjective(head, target, embedding, target_head, per_row)

    def draft_tokens(self, shape: BlockConfig) -> int:
        return shape.block_size - 1

    def trained(self, head: BlockHead) -> list[str]:
        return [name for name in super().trained(head) if name != TIED]
