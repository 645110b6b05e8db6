"""Training objective shared by all kinds of draft heads, and its validation.

A column is a position of a text where drafting can begin: the target's states are known up to it, and the next token.

Legend: B rows, T tokens, A columns of a row, C hidden size of the head, S concatenated captured states of the target,
J drafted tokens, V draft vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.data.packing import Rows
from mlaforge.training.forward import final_states
from mlaforge.training.kl_loss import SharedTargets, distillation_loss


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


class DraftObjective(nn.Module, abc.ABC):
    """Training objective of a head of some kind (optimizer.Objective): a subclass computes the head's outputs.

    target: frozen; None if its states are passed with each batch. embedding [vocabulary, C] and target_head [V, C']:
    the target's embedding, and its language model head for the draft vocabulary. drafted: tokens drafted in a row.
    decay: weight of the loss of a drafted token relative to the one before. per_row: mean columns of a row.
    """

    terms = ("loss",)

    def __init__(
        self, head: Any, target: Any, embedding: Tensor, target_head: Tensor, drafted: int, decay: float,
        per_row: float,
    ):  # fmt: skip
        super().__init__()
        self.student, self.teacher = head.requires_grad_(False), target
        self.embedding, self.target_head = embedding, target_head
        self.drafted, self.decay, self.per_row = drafted, decay, per_row
        # Copies, because `head.target_ids` is computed from tensors that may be sharded.
        self.target_ids, self.draft_ids = head.target_ids.clone(), head.draft_ids()
        self.markov = bool(head.config.markov_rank)

    def parts(self) -> list[tuple[Any, list[nn.Module]]]:
        """Return head and target, each with the layers to shard one by one."""
        target = [] if self.teacher is None else [(self.teacher, list(self.teacher.model.layers))]
        return [(self.student, []), *target]

    def forward(self, rows: Rows, states: States | None = None) -> Tensor:
        """Return the loss [1]: per column of a mean row, the sum over drafted tokens j of decay^j · KL(target | head)
        on the draft vocabulary (soft cross-entropy less the target's entropy). Columns are skipped where the text's
        token is not in the draft vocabulary."""
        states = states or capture(self.teacher, rows, self.student.config.boundaries)
        at_BA, remaining_BA = columns(rows)
        row_offsets = torch.arange(len(rows), device=at_BA.device)[:, None] * rows.ids.shape[1]
        outputs, previous, state_rows, weights = [], [], [], []
        for j, out_BAC in enumerate(self.outputs(rows, states, at_BA)):
            counts = (remaining_BA > j) & (self.draft_ids[self.token(rows, at_BA, 2 + j)] >= 0)
            outputs.append(self.student.norm(out_BAC[counts]))
            previous.append(self.previous(rows, at_BA, j)[counts])
            state_rows.append((row_offsets + at_BA + 1 + j)[counts])
            weights.append(torch.full_like(state_rows[-1], self.decay**j, dtype=torch.float32))
        # Adjacent where the target's logits are the same, as SharedTargets needs.
        order = torch.cat(state_rows).argsort(stable=True)
        targets = SharedTargets(states.final.to(self.target_head.dtype), self.target_head, torch.cat(state_rows)[order])
        share = torch.cat(weights)[order] / (len(rows) * self.per_row)
        hidden, head = torch.cat(outputs)[order], self.student.lm_head.weight
        if self.markov:
            hidden = torch.cat((hidden, self.student.follows(torch.cat(previous)[order])), dim=-1)
            head = torch.cat((head, self.student.markov_head.weight), dim=-1)
        loss, _, _ = distillation_loss(hidden, head, targets, 1.0, weights_N=share)
        return loss[None]

    @abc.abstractmethod
    def outputs(self, rows: Rows, states: States, at_BA: Tensor) -> list[Tensor]:
        """Return the head's outputs before its final norm for each drafted token of every column, [B, A, C], as if all
        earlier drafts were accepted."""

    @torch.no_grad()
    def validate(self, rows: Rows, states: States) -> Tensor:
        """Return whether the head's most likely token for each drafted token of a column is the text's, bool
        [B, A, J]; False beyond the end of a text."""
        at_BA, remaining_BA = columns(rows)
        correct = []
        for j, out_BAC in enumerate(self.outputs(rows, states, at_BA)):
            logits = self.student.logits(out_BAC)
            if self.markov:
                logits = logits + self.student.markov_head(self.student.follows(self.previous(rows, at_BA, j)))
            drafted = self.target_ids[logits.argmax(-1)]
            correct.append((drafted == self.token(rows, at_BA, 2 + j)) & (remaining_BA > j))
        return torch.stack(correct, dim=-1)

    def previous(self, rows: Rows, at_BA: Tensor, j: int) -> Tensor:
        """Return the draft token before drafted token j, as if all earlier drafts were accepted, [B, A]; -1 before the
        first, whose pass knows the newest token."""
        return self.draft_ids[self.token(rows, at_BA, 1 + j)] if j else torch.full_like(at_BA, -1)

    def token(self, rows: Rows, at_BA: Tensor, offset: int) -> Tensor:
        """Return the tokens `offset` positions after the columns, [B, A]; arbitrary beyond the end of the row."""
        return rows.ids.gather(1, (at_BA + offset).clamp_max(rows.ids.shape[1] - 1))


class Validation:
    """Acceptance on validation answers.

    The answers are the target's greedy text and the drafts come from its true states, so the counts equal the engine's,
    up to near ties in another dtype or batch. draft_tokens: draft length of the acceptance length.
    """

    metric_for_best = "steps_per_token"
    progress_metrics: tuple[str, ...] = ("acceptance_length",)

    def __init__(self, rows: Rows, targets: Callable[[Rows], States], micro_rows: int, draft_tokens: int):
        self.rows = [rows.take(part) for part in torch.arange(len(rows)).split(micro_rows)]
        self.targets, self.draft_tokens = targets, draft_tokens

    def measure(self, model: DraftObjective) -> dict[str, Any]:
        """Return the acceptance per draft position (given that all earlier ones are accepted), the acceptance_length
        (tokens per step, bonus token included, of greedy decoding with `draft_tokens` drafts), and its inverse."""
        drafted, accepted = torch.zeros(model.drafted), torch.zeros(model.drafted)
        steps = tokens = 0
        for rows in self.rows:
            rows = rows.to(model.embedding.device)
            correct, remaining = model.validate(rows, self.targets(rows)).cpu(), columns(rows)[1].cpu()
            accepted_prefix = correct.cumprod(dim=-1)
            reached = torch.cat((torch.ones_like(accepted_prefix[..., :1]), accepted_prefix[..., :-1]), dim=-1)
            possible = remaining[..., None] > torch.arange(model.drafted)
            drafted += (reached * possible).sum((0, 1))
            accepted += accepted_prefix.sum((0, 1))
            lengths = accepted_prefix[..., : self.draft_tokens].sum(-1)
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
        return f"{metrics['acceptance_length']:.3f} tokens per step ({self.draft_tokens} drafted), accepted {shares}"


def _decoding_steps(accepted: list[int], remaining: list[int]) -> tuple[int, int]:
    """Return steps and tokens of decoding a row's answers, from the accepted drafts and remaining tokens per column.

    The columns of an answer are adjacent; padding has no remaining tokens.
    """
    at = steps = 0
    while at < len(remaining) and remaining[at]:
        at += min(accepted[at] + 1, remaining[at])
        steps += 1
    return steps, at
