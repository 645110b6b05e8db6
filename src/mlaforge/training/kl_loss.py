"""Chunked distillation loss: KL divergence between the next-token distributions of teacher and student.

The logits of a whole batch would need more memory than the model. They are computed for a few rows of hidden states at
a time and reduced to the loss and its gradient in the forward pass; the backward pass only scales that gradient, so
nothing is recomputed.

Legend: N rows (tokens), n rows of a chunk, C hidden size, V vocabulary, K cached logits, P distinct teacher states.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mlaforge.data.packing import NO_LABEL

# Rows of logits in memory at a time.
CHUNK_ROWS = 128


class Targets(Protocol):
    """Soft targets: the teacher's logits for N rows, in any representation."""

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Return KL(teacher | student) at the temperature in nats [n], and the gradient of its sum with respect to
        logits / temperature [n, V]. logits_nV: the student's, fp32; may be overwritten."""
        ...


@dataclasses.dataclass(frozen=True)
class HiddenTargets:
    """The teacher's full logits, as final hidden states [N, C'] and language model head [V, C']."""

    hidden_NC: Tensor
    head_VC: Tensor

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        teacher_logp = (self.hidden_NC[rows] @ self.head_VC.T).float().div_(temperature).log_softmax(-1)
        student_logp = logits_nV.div_(temperature).log_softmax(-1)
        p = teacher_logp.exp()
        divergence = torch.linalg.vecdot(p, teacher_logp.sub_(student_logp))
        return divergence, student_logp.exp_().sub_(p)


@dataclasses.dataclass(frozen=True)
class SharedTargets:
    """Like HiddenTargets, with states [P, C'] that several rows share: state_of_row_N is the index of each row's state.

    Logits are computed once per distinct state of a chunk, so rows with equal states should be adjacent.
    """

    hidden_PC: Tensor
    head_VC: Tensor
    state_of_row_N: Tensor

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        states, inverse = self.state_of_row_N[rows].unique(return_inverse=True)
        teacher_logp = (self.hidden_PC[states] @ self.head_VC.T).float().div_(temperature).log_softmax(-1)
        student_logp = logits_nV.div_(temperature).log_softmax(-1)
        p = teacher_logp.exp()
        negentropy, p = torch.linalg.vecdot(p, teacher_logp)[inverse], p[inverse]
        divergence = negentropy - torch.linalg.vecdot(p, student_logp)
        return divergence, student_logp.exp_().sub_(p)


@dataclasses.dataclass(frozen=True)
class TopKTargets:
    """The teacher's K largest logits [N, K], their token ids [N, K], and logsumexp(logits / temperature) over the
    vocabulary [N], for training without the teacher. All other tokens count as one outcome, which gives a lower bound
    of the KL."""

    logits_NK: Tensor
    tokens_NK: Tensor
    lse_N: Tensor

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        tokens = self.tokens_NK[rows].long()
        teacher_logp = self.logits_NK[rows].float() / temperature - self.lse_N[rows, None].float()
        student_logp = logits_nV.div_(temperature).log_softmax(-1)
        cached_logp = student_logp.gather(-1, tokens)
        p, tiny = teacher_logp.exp(), torch.finfo(torch.float32).tiny
        # Probability of all other tokens; clamped because rounding may make it 0 or negative.
        p_other, q_other = ((1 - x.exp().sum(-1)).clamp_min(tiny) for x in (teacher_logp, cached_logp))
        divergence = (p * (teacher_logp - cached_logp)).sum(-1) + p_other * (p_other.log() - q_other.log())
        grad = student_logp.exp_().mul_((1 - p_other / q_other)[:, None])
        return divergence, grad.scatter_(-1, tokens, cached_logp.exp() - p)


class _DistillationLoss(torch.autograd.Function):
    """See `distillation_loss`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, head_VC: Tensor, labels_N: Tensor | None, targets: Targets, temperature: float,
        kl_weight: float, lm_weight: float, weights_N: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        N = len(hidden_NC)
        labelled = 0 if labels_N is None else int((labels_N != NO_LABEL).sum())
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_NC) if need_hidden else None
        grad_head = torch.zeros_like(head_VC, dtype=torch.float32) if need_head else None
        kl = torch.zeros((), device=hidden_NC.device)
        lm = torch.zeros((), device=hidden_NC.device)
        for start in range(0, N, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = (hidden_NC[rows] @ head_VC.T).float()
            label_logp = None
            if lm_weight and labelled and labels_N is not None:
                label_logp = logits.log_softmax(-1)
                lm += functional.nll_loss(label_logp, labels_N[rows], ignore_index=NO_LABEL, reduction="sum") / labelled
            divergence, grad = targets.loss(logits, rows, temperature)
            weights: Any = 1 / N if weights_N is None else weights_N[rows]
            kl += (divergence * weights).sum() * temperature**2
            if not (need_hidden or need_head):
                continue
            grad.mul_(kl_weight * temperature * (weights if weights_N is None else weights[:, None]))
            if label_logp is not None and labels_N is not None:
                has_label = labels_N[rows] != NO_LABEL
                share = (lm_weight / labelled) * has_label.float()
                grad.addcmul_(label_logp.exp_(), share[:, None])
                grad.scatter_add_(-1, labels_N[rows].clamp_min(0)[:, None], -share[:, None])
            grad = grad.to(head_VC.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ head_VC
            if grad_head is not None:
                grad_head += (grad.T @ hidden_NC[rows]).float()
        ctx.grads = grad_hidden, None if grad_head is None else grad_head.to(head_VC.dtype)
        loss = kl_weight * kl + lm_weight * lm
        ctx.mark_non_differentiable(kl, lm)
        return loss, kl, lm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head = (None if g is None else g * grads[0] for g in ctx.grads)
        return hidden, head, None, None, None, None, None, None


def distillation_loss(
    hidden_NC: Tensor, head_VC: Tensor, targets: Targets, temperature: float = 2.0, kl_weight: float = 1.0,
    labels_N: Tensor | None = None, lm_weight: float = 0.0, weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return kl_weight · T² · KL(teacher | student) + lm_weight · cross-entropy, and both terms without gradient.

    KL is the mean over rows in nats at temperature T, or the sum weighted by `weights_N`; T² keeps the size of its
    gradient (Hinton et al. 2015, arXiv:1503.02531). Cross-entropy is the mean over rows with a label; without lm_weight
    it is not computed and returned as 0. Differentiable with respect to hidden_NC (the student's hidden states after
    the final norm) and head_VC (the weight of its language model head).
    """
    losses: tuple[Tensor, Tensor, Tensor] = _DistillationLoss.apply(
        hidden_NC, head_VC, labels_N, targets, temperature, kl_weight, lm_weight, weights_N
    )
    return losses


@torch.no_grad()
def top_k(hidden_NC: Tensor, head_VC: Tensor, k: int, temperature: float) -> TopKTargets:
    """Return the teacher's k largest logits (fp32) and their tokens (int32) per row, for a cache."""
    chunks = []
    for rows in hidden_NC.split(CHUNK_ROWS):
        logits = (rows @ head_VC.T).float()
        values, tokens = logits.topk(k, dim=-1)
        chunks.append((values, tokens.int(), logits.div_(temperature).logsumexp(-1)))
    return TopKTargets(*(torch.cat(part) for part in zip(*chunks, strict=True)))


@torch.no_grad()
def compare(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], labels_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return per row the student's loss, the teacher's loss, KL(teacher | student) (temperature 1, nats, fp32), and
    whether their most likely tokens are equal (bool). Each model is (hidden states [N, C], head [V, C])."""
    parts = []
    for start in range(0, len(labels_N), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        student_logp, teacher_logp = (
            (hidden[rows] @ head.T).float().log_softmax(-1) for hidden, head in (student, teacher)
        )
        labels = labels_N[rows, None]
        kl = torch.linalg.vecdot(teacher_logp.exp(), teacher_logp - student_logp)
        agrees = student_logp.argmax(-1) == teacher_logp.argmax(-1)
        parts.append((-student_logp.gather(-1, labels)[:, 0], -teacher_logp.gather(-1, labels)[:, 0], kl, agrees))
    student_logp, teacher_logp, kl, agrees = (torch.cat(part) for part in zip(*parts, strict=True))
    return student_logp, teacher_logp, kl, agrees
