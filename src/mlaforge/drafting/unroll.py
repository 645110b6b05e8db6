"""EAGLE-3's training-time test: the head is trained on several consecutive drafts from its own states.

A column is a position of a text where drafting can begin; its input is the target's state there and the next token.
Unroll 0 is that input; unroll j is j positions later, with the head's own output at unroll j - 1 and the text's token,
as if all earlier drafts were accepted. Unroll j attends to unroll 0 of the columns up to its own, and to the earlier
unrolls of its own column, as in drafting (Li et al. 2025, arXiv:2503.01840).

Legend: B rows, T tokens, A columns of a row, C hidden size of the head, S concatenated captured states of the target,
H heads, K key-value heads, G heads per key-value head, D head dimension, J unrolls, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.data.packing import Rows
from mlaforge.drafting.objective import DraftObjective, States, visible
from mlaforge.modeling.eagle3 import Eagle3Attention, Eagle3Head
from mlaforge.modeling.rope_mla import pairs, rotate

# Weight of the loss of unroll j relative to unroll j - 1.
DECAY = 0.8


class UnrolledHead(DraftObjective):
    """Objective of an EAGLE-3 head; one with masks reads these instead of its own output and the text's token. For the
    arguments see DraftObjective."""

    def __init__(
        self, head: Eagle3Head, target: Any, embedding: Tensor, target_head: Tensor, unrolls: int, per_row: float
    ):  # fmt: skip
        super().__init__(head, target, embedding, target_head, unrolls, DECAY, per_row)

    def outputs(self, rows: Rows, states: States, at_BA: Tensor) -> list[Tensor]:
        """Return the head's output at each unroll, before its final norm, [B, A, C]."""
        head, layer = self.student, self.student.midlayer
        attention, half = layer.self_attn, head.config.layer.head_dim // 2
        rotary = head.rotary()

        def rotary_tables(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = rotary(like, positions)
            return pairs(cos, half), pairs(sin, half)

        def layer_inputs(state: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
            """Return the inputs of the attention, and the residual."""
            normed = layer.hidden_norm(state)
            embedded = layer.input_layernorm(F.embedding(token_ids, self.embedding))
            return torch.cat((embedded, normed), dim=-1), normed if layer.norm_before_residual else state

        def columns_of(x_BTI: Tensor) -> Tensor:
            return x_BTI.gather(1, at_BA[..., None].expand(-1, -1, x_BTI.shape[-1]))

        fused = head.fuse(states.captured.to(head.fc.weight.dtype)).view(*rows.ids.shape, -1)
        inputs, residual = layer_inputs(fused, rows.ids.roll(-1, dims=1))
        angles = rotary_tables(inputs, rows.positions)
        first_k = rotate(_heads(attention.k_proj(inputs), attention), *angles)
        first_v = _heads(attention.v_proj(inputs), attention)
        inputs, residual = columns_of(inputs), columns_of(residual)
        positions = rows.positions.gather(1, at_BA)
        unrolled_kv: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for j in range(self.drafted):
            if j and head.config.mask_token_id is not None:
                state = head.mask_state.expand(*at_BA.shape, -1)
                inputs, residual = layer_inputs(state, torch.full_like(at_BA, head.config.mask_token_id))
            elif j:
                inputs, residual = layer_inputs(head.fed_back(outputs[-1]), self.token(rows, at_BA, 1 + j))
            angles = rotary_tables(inputs, positions + j)
            q = rotate(_heads(attention.q_proj(inputs), attention), *angles)
            if j:
                key = rotate(_heads(attention.k_proj(inputs), attention), *angles)
                unrolled_kv.append((key, _heads(attention.v_proj(inputs), attention)))
            mask = visible(rows, at_BA, j, head.config.sliding_window)
            recent = unrolled_kv if (window := head.config.sliding_window) is None else unrolled_kv[-window:]
            attended = attention.o_proj(attend(q, first_k, first_v, mask, recent, attention.scaling))
            hidden = residual + attended
            outputs.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        return outputs


def _heads(x_BTI: Tensor, attention: Eagle3Attention) -> Tensor:
    return x_BTI.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def attend(
    q_BHAD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask_BAT: Tensor, unrolled_kv: list[tuple[Tensor, Tensor]],
    scaling: float,
) -> Tensor:  # fmt: skip
    """Return the attention of columns to unroll 0 and to the keys and values [B, K, A, D] of their later unrolls,
    [B, A, H·D]."""
    B, K, T, D = k_BKTD.shape
    A = q_BHAD.shape[2]
    q = (q_BHAD * scaling).view(B, K, -1, A, D)
    scores = (q.flatten(2, 3) @ k_BKTD.mT).view(B, K, -1, A, T)
    scores = scores.masked_fill(~mask_BAT[:, None, None], torch.finfo(scores.dtype).min)
    unrolled_scores = [(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in unrolled_kv]
    p = torch.cat([scores, *unrolled_scores], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    attended = (p[..., :T].flatten(2, 3) @ v_BKTD).view(B, K, -1, A, D)
    for m, (_, value) in enumerate(unrolled_kv):
        attended = attended + p[..., T + m : T + m + 1] * value[:, :, None]
    return attended.flatten(1, 2).transpose(1, 2).flatten(2)
