"""EAGLE-3's training-time test: the head is trained on several consecutive drafts from its own states.

A column is a position of a text where drafting can begin; its input is the target's state there and the next token.
Unroll 0 is that input; unroll j is j positions later, with the head's own output at unroll j - 1 and the text's token,
as if all earlier drafts were accepted. Unroll j attends to unroll 0 of the columns up to its own, and to the earlier
unrolls of its own column, as in drafting (Li et al. 2025, arXiv:2503.01840).

Legend: B rows, T tokens, A columns of a row, C hidden size of the head, S concatenated captured states of the target,
H heads, K key-value heads, G heads per key-value head, D head dimension, J unrolls, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlaforge.data.packing import Rows
from mlaforge.modeling.eagle3 import Eagle3Attention, Eagle3Head
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.training.forward import final_states
from mlaforge.training.kl_loss import SharedTargets, distillation_loss

# Weight of the loss of unroll j relative to unroll j - 1.
DECAY = 0.8
# Draft length for the acceptance length.
NUM_DRAFT_TOKENS = 3


@dataclasses.dataclass(frozen=True)
class States:
    """Target states of rows: captured [B·T, S], and final after the norm [B·T, C']."""

    captured: Tensor
    final: Tensor


def capture(target: Any, rows: Rows, boundaries: tuple[int, ...]) -> States:
    """Run the target and capture its states; boundary b is the input of layer b, the last that of the final norm."""
    captured: dict[int, Tensor] = {}
    hooks = []
    for boundary, module in enumerate((*target.model.layers, target.model.norm)):
        if boundary in boundaries:

            def record(_: Any, args: Any, kwargs: Any, boundary: int = boundary) -> None:
                captured[boundary] = args[0] if args else kwargs["hidden_states"]

            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        with torch.no_grad():
            final = final_states(target, rows)
    finally:
        for hook in hooks:
            hook.remove()
    return States(torch.cat([captured[boundary] for boundary in boundaries], dim=-1).flatten(0, 1), final)


def columns(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the columns of rows: positions [B, A], and the number of tokens of the text after the next one, 0 for
    padding of rows with fewer columns. The first drafted token is the answer's second."""
    assert rows.answer is not None
    T = rows.ids.shape[1]
    positions = torch.arange(T, device=rows.ids.device)
    ends = torch.where(rows.last, positions, T).flip(1).cummin(1).values.flip(1)
    remaining = (ends - positions - 1).clamp_min(0) * rows.answer.roll(-1, dims=1)
    order = (remaining > 0).int().argsort(dim=1, descending=True, stable=True)
    at = order[:, : max(1, int((remaining > 0).sum(1).max()))]
    return at, remaining.gather(1, at)


def visible(rows: Rows, at_BA: Tensor, unroll: int, window: int | None) -> Tensor:
    """Return the mask of unroll-0 positions that a column attends to, bool [B, A, T]."""
    positions = torch.arange(rows.ids.shape[1], device=at_BA.device)
    document_start = (at_BA - rows.positions.gather(1, at_BA))[..., None]
    mask = (positions <= at_BA[..., None]) & (positions >= document_start)
    return mask if window is None else mask & (at_BA[..., None] + unroll - positions < window)


class UnrolledHead(nn.Module):
    """Training objective of a head (optimizer.Objective).

    target: frozen; None if its states are passed with each batch. embedding [vocabulary, C] and target_head [V, C']:
    the target's embedding, and its language model head for the draft vocabulary. per_row: mean columns of a row.
    """

    terms = ("loss",)

    def __init__(
        self, head: Eagle3Head, target: Any, embedding: Tensor, target_head: Tensor, unrolls: int, per_row: float
    ):  # fmt: skip
        super().__init__()
        self.student, self.teacher = head.requires_grad_(False), target
        self.embedding, self.target_head = embedding, target_head
        self.unrolls, self.per_row = unrolls, per_row
        vocabulary = head.config.layer.vocab_size
        self.proposed = torch.zeros(vocabulary, dtype=torch.bool, device=embedding.device)
        self.proposed[head.target_ids] = True
        # A copy, because `head.target_ids` is computed from tensors that may be sharded.
        self.target_ids = head.target_ids.clone()

    def parts(self) -> list[tuple[Any, list[nn.Module]]]:
        """Return head and target, each with the layers to shard one by one."""
        target = [] if self.teacher is None else [(self.teacher, list(self.teacher.model.layers))]
        return [(self.student, []), *target]

    def forward(self, rows: Rows, states: States | None = None) -> Tensor:
        """Return the loss [1]: per column of a mean row, the sum over unrolls of DECAY^j · KL(target | head) on the
        draft vocabulary (soft cross-entropy less the target's entropy). Columns are skipped where the text's token is
        not in the draft vocabulary."""
        states = states or capture(self.teacher, rows, self.student.config.boundaries)
        at_BA, remaining_BA = columns(rows)
        row_offsets = torch.arange(len(rows), device=at_BA.device)[:, None] * rows.ids.shape[1]
        outputs, state_rows, weights = [], [], []
        for j, out_BAC in enumerate(self._outputs(rows, states, at_BA)):
            counts = (remaining_BA > j) & self.proposed[self._token(rows, at_BA, 2 + j)]
            outputs.append(self.student.norm(out_BAC[counts]))
            state_rows.append((row_offsets + at_BA + 1 + j)[counts])
            weights.append(torch.full_like(state_rows[-1], DECAY**j, dtype=torch.float32))
        # Adjacent where the target's logits are the same, as SharedTargets needs.
        order = torch.cat(state_rows).argsort(stable=True)
        targets = SharedTargets(states.final.to(self.target_head.dtype), self.target_head, torch.cat(state_rows)[order])
        share = torch.cat(weights)[order] / (len(rows) * self.per_row)
        hidden = torch.cat(outputs)[order]
        loss, _, _ = distillation_loss(hidden, self.student.lm_head.weight, targets, 1.0, weights_N=share)
        return loss[None]

    @torch.no_grad()
    def validate(self, rows: Rows, states: States) -> Tensor:
        """Return whether the head's most likely token at each column and unroll is the text's, bool [B, A, J]; False
        beyond the end of a text."""
        at_BA, remaining_BA = columns(rows)
        correct = []
        for j, out_BAC in enumerate(self._outputs(rows, states, at_BA)):
            drafted = self.target_ids[self.student.logits(out_BAC).argmax(-1)]
            correct.append((drafted == self._token(rows, at_BA, 2 + j)) & (remaining_BA > j))
        return torch.stack(correct, dim=-1)

    def _token(self, rows: Rows, at_BA: Tensor, offset: int) -> Tensor:
        """Return the tokens `offset` positions after the columns, [B, A]; arbitrary beyond the end of the row."""
        return rows.ids.gather(1, (at_BA + offset).clamp_max(rows.ids.shape[1] - 1))

    def _outputs(self, rows: Rows, states: States, at_BA: Tensor) -> list[Tensor]:
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
        for j in range(self.unrolls):
            if j:
                inputs, residual = layer_inputs(head.fed_back(outputs[-1]), self._token(rows, at_BA, 1 + j))
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


class Validation:
    """Acceptance on validation answers.

    The answers are the target's greedy text and the drafts come from its true states, so the counts equal the engine's,
    up to near ties in another dtype or batch.
    """

    metric_for_best = "steps_per_token"
    progress_metrics: tuple[str, ...] = ("acceptance_length",)

    def __init__(self, rows: Rows, targets: Callable[[Rows], States], micro_rows: int):
        self.rows = [rows.take(part) for part in torch.arange(len(rows)).split(micro_rows)]
        self.targets = targets

    def measure(self, model: UnrolledHead) -> dict[str, Any]:
        """Return the acceptance per draft position (given that all earlier ones are accepted), the acceptance_length
        (tokens per step, bonus token included, of greedy decoding with NUM_DRAFT_TOKENS drafts), and its inverse."""
        drafted, accepted = torch.zeros(model.unrolls), torch.zeros(model.unrolls)
        steps = tokens = 0
        for rows in self.rows:
            rows = rows.to(model.embedding.device)
            correct, remaining = model.validate(rows, self.targets(rows)).cpu(), columns(rows)[1].cpu()
            accepted_prefix = correct.cumprod(dim=-1)
            reached = torch.cat((torch.ones_like(accepted_prefix[..., :1]), accepted_prefix[..., :-1]), dim=-1)
            possible = remaining[..., None] > torch.arange(model.unrolls)
            drafted += (reached * possible).sum((0, 1))
            accepted += accepted_prefix.sum((0, 1))
            lengths = accepted_prefix[..., :NUM_DRAFT_TOKENS].sum(-1)
            for row_lengths, row_remaining in zip(lengths.tolist(), remaining.tolist(), strict=True):
                decoded = _decoding_steps(row_lengths, row_remaining)
                steps, tokens = steps + decoded[0], tokens + decoded[1]
        return {
            "acceptance": [a / n if n else None for a, n in zip(accepted.tolist(), drafted.tolist(), strict=True)],
            "acceptance_length": tokens / steps,
            self.metric_for_best: steps / tokens,
        }

    def summary(self, metrics: dict[str, Any]) -> str:
        """Format the metrics of `measure` for a log line."""
        shares = ", ".join("–" if share is None else f"{share:.3f}" for share in metrics["acceptance"])
        return f"{metrics['acceptance_length']:.3f} tokens per step ({NUM_DRAFT_TOKENS} drafted), accepted {shares}"


def _decoding_steps(accepted: list[int], remaining: list[int]) -> tuple[int, int]:
    """Return steps and tokens of decoding a row's answers, from the accepted drafts and remaining tokens per column.

    The columns of an answer are adjacent; padding has no remaining tokens.
    """
    at = steps = 0
    while at < len(remaining) and remaining[at]:
        at += min(accepted[at] + 1, remaining[at])
        steps += 1
    return steps, at
