"""EAGLE-3's training-time test: the head drafts several tokens in a row while it learns, from its own states.

A column is a place in a text where drafting may begin: the head's row there is made of the target's state and the next
token. Unroll 0 is that row; unroll j is the row j places on, made of the head's own output at unroll j - 1 and the
text's token there, as if all drafts before had been right. It sees the columns up to its own at unroll 0, and of later
unrolls its own column alone, which is what it sees when it drafts (Li et al. 2025, arXiv:2503.01840).

Legend: B rows, T tokens, A columns of a row, C hidden size of the head, S the target's captured states side by side,
H heads, K key-value heads, G heads of one of these, D head dimension, J unrolls, V draft vocabulary.
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

# The loss of unroll j counts so many times that of unroll j - 1.
DECAY = 0.8
# The acceptance length is that of drafts of so many tokens.
DRAFTED = 3


@dataclasses.dataclass(frozen=True)
class States:
    """What the target computes on rows, one after another: captured states [B·T, S], final, normed ones [B·T, C']."""

    captured: Tensor
    final: Tensor


def capture(target: Any, rows: Rows, boundaries: tuple[int, ...]) -> States:
    """Runs the target; boundary b is the input of layer b, the last one that of the final norm."""
    seen: dict[int, Tensor] = {}
    hooks = []
    for boundary, module in enumerate((*target.model.layers, target.model.norm)):
        if boundary in boundaries:

            def keep(_: Any, args: Any, kwargs: Any, boundary: int = boundary) -> None:
                seen[boundary] = args[0] if args else kwargs["hidden_states"]

            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad():
            final = final_states(target, rows)
    finally:
        for hook in hooks:
            hook.remove()
    return States(torch.cat([seen[boundary] for boundary in boundaries], dim=-1).flatten(0, 1), final)


def columns(rows: Rows) -> tuple[Tensor, Tensor]:
    """Where drafting may begin: places [B, A], and how many tokens after the next one the text still has, 0 where a row
    has fewer columns than others. The first drafted token is the answer's second."""
    assert rows.answer is not None
    T = rows.ids.shape[1]
    place = torch.arange(T, device=rows.ids.device)
    ends = torch.where(rows.last, place, T).flip(1).cummin(1).values.flip(1)
    left = (ends - place - 1).clamp_min(0) * rows.answer.roll(-1, dims=1)
    order = (left > 0).int().argsort(dim=1, descending=True, stable=True)
    at = order[:, : max(1, int((left > 0).sum(1).max()))]
    return at, left.gather(1, at)


def visible(rows: Rows, at_BA: Tensor, unroll: int, window: int | None) -> Tensor:
    """Which places a column's row sees at unroll 0, bool [B, A, T]."""
    place = torch.arange(rows.ids.shape[1], device=at_BA.device)
    begun = (at_BA - rows.positions.gather(1, at_BA))[..., None]
    seen = (place <= at_BA[..., None]) & (place >= begun)
    return seen if window is None else seen & (at_BA[..., None] + unroll - place < window)


class Unrolled(nn.Module):
    """A head in training, an optimizer.Objective. `target` is frozen, None where its states come with each batch;
    embedding [vocabulary, C] and the rows of its language model head [V, C'] for the head's own tokens are kept here.
    per_row: columns of an average row."""

    terms = ("loss",)

    def __init__(
        self, head: Eagle3Head, target: Any, embedding: Tensor, wanted_head: Tensor, unrolls: int, per_row: float
    ):  # fmt: skip
        super().__init__()
        self.student, self.teacher = head.requires_grad_(False), target
        self.embedding, self.wanted_head = embedding, wanted_head
        self.unrolls, self.per_row = unrolls, per_row
        vocabulary = head.config.layer.vocab_size
        self.proposed = torch.zeros(vocabulary, dtype=torch.bool, device=embedding.device)
        self.proposed[head.target_ids] = True
        # Not `head.target_ids`, which is made of what may be sharded.
        self.target_ids = head.target_ids.clone()

    def parts(self) -> list[tuple[Any, list[nn.Module]]]:
        """Head and target, and of the target the layers that are sharded one by one."""
        target = [] if self.teacher is None else [(self.teacher, list(self.teacher.model.layers))]
        return [(self.student, []), *target]

    def forward(self, rows: Rows, states: States | None = None) -> Tensor:
        """Per column of an average row: the sum over unrolls of DECAY^j · KL(target | head) on the draft vocabulary,
        which is soft cross-entropy but for the target's own entropy, [1] as `terms`. Where the head cannot propose the
        text's token, nothing counts."""
        states = states or capture(self.teacher, rows, self.student.config.boundaries)
        at_BA, left_BA = columns(rows)
        place = torch.arange(len(rows), device=at_BA.device)[:, None] * rows.ids.shape[1]
        outs, which, weights = [], [], []
        for j, out_BAC in enumerate(self._outs(rows, states, at_BA)):
            counts = (left_BA > j) & self.proposed[self._token(rows, at_BA, 2 + j)]
            outs.append(self.student.norm(out_BAC[counts]))
            which.append((place + at_BA + 1 + j)[counts])
            weights.append(torch.full_like(which[-1], DECAY**j, dtype=torch.float32))
        # Side by side what is compared with the same logits.
        order = torch.cat(which).argsort(stable=True)
        targets = SharedTargets(states.final.to(self.wanted_head.dtype), self.wanted_head, torch.cat(which)[order])
        share = torch.cat(weights)[order] / (len(rows) * self.per_row)
        hidden = torch.cat(outs)[order]
        loss, _, _ = distillation_loss(hidden, self.student.lm_head.weight, targets, 1.0, weights_N=share)
        return loss[None]

    @torch.no_grad()
    def validate(self, rows: Rows, states: States) -> Tensor:
        """Whether the head's likeliest token at each column and unroll is the text's, bool [B, A, J]; False beyond the
        end of a text."""
        at_BA, left_BA = columns(rows)
        right = []
        for j, out_BAC in enumerate(self._outs(rows, states, at_BA)):
            drafted = self.target_ids[self.student.logits(out_BAC).argmax(-1)]
            right.append((drafted == self._token(rows, at_BA, 2 + j)) & (left_BA > j))
        return torch.stack(right, dim=-1)

    def _token(self, rows: Rows, at_BA: Tensor, further: int) -> Tensor:
        """The token `further` places on, [B, A]; any token beyond the end of the row."""
        return rows.ids.gather(1, (at_BA + further).clamp_max(rows.ids.shape[1] - 1))

    def _outs(self, rows: Rows, states: States, at_BA: Tensor) -> list[Tensor]:
        """The head's output at each unroll, before its final norm, [B, A, C]."""
        head, layer = self.student, self.student.midlayer
        attention, half = layer.self_attn, head.config.layer.head_dim // 2
        rotary = head.rotary()

        def turned(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = rotary(like, positions)
            return pairs(cos, half), pairs(sin, half)

        def beside(state: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
            """What the attention reads, and what the layer adds to."""
            normed = layer.hidden_norm(state)
            embedded = layer.input_layernorm(F.embedding(token_ids, self.embedding))
            return torch.cat((embedded, normed), dim=-1), normed if layer.norm_before_residual else state

        def columns_of(x_BTI: Tensor) -> Tensor:
            return x_BTI.gather(1, at_BA[..., None].expand(-1, -1, x_BTI.shape[-1]))

        fused = head.fuse(states.captured.to(head.fc.weight.dtype)).view(*rows.ids.shape, -1)
        both, plus = beside(fused, rows.ids.roll(-1, dims=1))
        angles = turned(both, rows.positions)
        seen = rotate(_heads(attention.k_proj(both), attention), *angles), _heads(attention.v_proj(both), attention)
        both, plus = columns_of(both), columns_of(plus)
        positions = rows.positions.gather(1, at_BA)
        own: list[tuple[Tensor, Tensor]] = []
        outs: list[Tensor] = []
        for j in range(self.unrolls):
            if j:
                both, plus = beside(head.fed_back(outs[-1]), self._token(rows, at_BA, 1 + j))
            angles = turned(both, positions + j)
            q = rotate(_heads(attention.q_proj(both), attention), *angles)
            if j:
                key = rotate(_heads(attention.k_proj(both), attention), *angles)
                own.append((key, _heads(attention.v_proj(both), attention)))
            mask = visible(rows, at_BA, j, head.config.sliding_window)
            recent = own if (window := head.config.sliding_window) is None else own[-window:]
            mixed = attention.o_proj(attend(q, *seen, mask, recent, attention.scaling))
            hidden = plus + mixed
            outs.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        return outs


def _heads(x_BTI: Tensor, attention: Eagle3Attention) -> Tensor:
    return x_BTI.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def attend(
    q_BHAD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, seen_BAT: Tensor, own: list[tuple[Tensor, Tensor]], scaling: float
) -> Tensor:  # fmt: skip
    """Attention of columns to places of unroll 0 and to keys and values [B, K, A, D] of their own, [B, A, H·D]."""
    B, K, T, D = k_BKTD.shape
    A = q_BHAD.shape[2]
    q = (q_BHAD * scaling).view(B, K, -1, A, D)
    scores = (q.flatten(2, 3) @ k_BKTD.mT).view(B, K, -1, A, T)
    scores = scores.masked_fill(~seen_BAT[:, None, None], torch.finfo(scores.dtype).min)
    ours = [(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
    p = torch.cat([scores, *ours], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    mixed = (p[..., :T].flatten(2, 3) @ v_BKTD).view(B, K, -1, A, D)
    for m, (_, value) in enumerate(own):
        mixed = mixed + p[..., T + m : T + m + 1] * value[:, :, None]
    return mixed.flatten(1, 2).transpose(1, 2).flatten(2)


class Validation:
    """Answers that nothing is trained on. They are the target's own greedy text, and drafts are made from its true
    states, so what is counted is what the engine would accept, but for near ties of another dtype or batch."""

    metric_for_best = "steps_per_token"
    progress_metrics: tuple[str, ...] = ("acceptance_length",)

    def __init__(self, rows: Rows, targets: Callable[[Rows], States], at_once: int):
        self.rows = [rows.take(part) for part in torch.arange(len(rows)).split(at_once)]
        self.targets = targets

    def measure(self, model: Unrolled) -> dict[str, Any]:
        """acceptance: per drafted token, where all before it were accepted, whether it is; over all places. steps and
        acceptance_length: tokens a step, the bonus included, of greedy decoding with drafts of DRAFTED tokens, and the
        inverse."""
        drafted, accepted = torch.zeros(model.unrolls), torch.zeros(model.unrolls)
        steps = tokens = 0
        for rows in self.rows:
            rows = rows.to(model.embedding.device)
            right, left = model.validate(rows, self.targets(rows)).cpu(), columns(rows)[1].cpu()
            so_far = right.cumprod(dim=-1)
            before = torch.cat((torch.ones_like(so_far[..., :1]), so_far[..., :-1]), dim=-1)
            possible = left[..., None] > torch.arange(model.unrolls)
            drafted += (before * possible).sum((0, 1))
            accepted += so_far.sum((0, 1))
            lengths = so_far[..., :DRAFTED].sum(-1)
            for row_lengths, row_left in zip(lengths.tolist(), left.tolist(), strict=True):
                decoded = _decoded(row_lengths, row_left)
                steps, tokens = steps + decoded[0], tokens + decoded[1]
        return {
            "acceptance": [a / n if n else None for a, n in zip(accepted.tolist(), drafted.tolist(), strict=True)],
            "acceptance_length": tokens / steps,
            self.metric_for_best: steps / tokens,
        }

    def summary(self, metrics: dict[str, Any]) -> str:
        """`measure`'s result in words."""
        shares = ", ".join("–" if share is None else f"{share:.3f}" for share in metrics["acceptance"])
        return f"{metrics['acceptance_length']:.3f} tokens a step (3 drafted), accepted {shares}"


def _decoded(accepted: list[int], left: list[int]) -> tuple[int, int]:
    """Steps and tokens of decoding a row's answers, from what would be accepted at each column and how many tokens are
    left there. Columns of an answer stand one after another, and the next begins where nothing is left."""
    at = steps = 0
    while at < len(left) and left[at]:
        at += min(accepted[at] + 1, left[at])
        steps += 1
    return steps, at
