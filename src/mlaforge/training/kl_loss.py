"""The distillation loss: KL divergence of a student's next tokens from its teacher's, a few rows at a time.

A model's logits are as long as its vocabulary: of a whole batch they would need more room than the model. They are
made for a few rows of hidden states, turned into the loss and its gradient at once, and forgotten; the backward pass
has only to scale the forward pass's gradient. So nothing is computed twice either.

Legend: N rows (tokens), C hidden size, V vocabulary, K kept logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mlaforge.data.packing import NO_LABEL

# Rows of logits held at once.
ROWS = 128


class Targets(Protocol):
    """Soft targets: the teacher's logits of N rows, in one form or another."""

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Student's logits of some rows (fp32, may be overwritten) -> their KL(teacher | student) at the temperature in
        nats, [n], and the gradient of its sum by logits / temperature, [n, V]."""
        ...


@dataclasses.dataclass(frozen=True)
class Hidden:
    """All of the teacher's logits, as its final hidden states [N, C'] and its head [V, C']."""

    hidden_NC: Tensor
    head_VC: Tensor

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        wanted = (self.hidden_NC[rows] @ self.head_VC.T).float().div_(temperature).log_softmax(-1)
        ours = logits_nV.div_(temperature).log_softmax(-1)
        p = wanted.exp()
        divergence = torch.linalg.vecdot(p, wanted.sub_(ours))
        return divergence, ours.exp_().sub_(p)


@dataclasses.dataclass(frozen=True)
class Shared:
    """As Hidden, of P states [P, C'] that several rows are compared with: `which` [N] is each row's. Where equal ones
    stand side by side, logits are computed once for all of them."""

    hidden_PC: Tensor
    head_VC: Tensor
    which_N: Tensor

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        some, which = self.which_N[rows].unique(return_inverse=True)
        wanted = (self.hidden_PC[some] @ self.head_VC.T).float().div_(temperature).log_softmax(-1)
        ours = logits_nV.div_(temperature).log_softmax(-1)
        p = wanted.exp()
        negentropy, p = torch.linalg.vecdot(p, wanted)[which], p[which]
        divergence = negentropy - torch.linalg.vecdot(p, ours)
        return divergence, ours.exp_().sub_(p)


@dataclasses.dataclass(frozen=True)
class TopK:
    """The teacher's K largest logits [N, K], whose they are [N, K], and the log of the sum of exp(logit / temperature)
    over all [N]: for a teacher that is not there. What is not among them counts as one outcome: a lower bound of KL."""

    logits_NK: Tensor
    tokens_NK: Tensor
    lse_N: Tensor

    def loss(self, logits_nV: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
        tokens = self.tokens_NK[rows].long()
        wanted = self.logits_NK[rows].float() / temperature - self.lse_N[rows, None].float()
        ours = logits_nV.div_(temperature).log_softmax(-1)
        chosen = ours.gather(-1, tokens)
        p, tiny = wanted.exp(), torch.finfo(torch.float32).tiny
        # Both rests by what is left of 1; at least `tiny`, which rounding may not leave.
        p_rest, q_rest = ((1 - x.exp().sum(-1)).clamp_min(tiny) for x in (wanted, chosen))
        divergence = (p * (wanted - chosen)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
        grad = ours.exp_().mul_((1 - p_rest / q_rest)[:, None])
        return divergence, grad.scatter_(-1, tokens, chosen.exp() - p)


class _Loss(torch.autograd.Function):
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
        for start in range(0, N, ROWS):
            rows = slice(start, start + ROWS)
            logits = (hidden_NC[rows] @ head_VC.T).float()
            text = None
            if lm_weight and labelled and labels_N is not None:
                text = logits.log_softmax(-1)
                lm += functional.nll_loss(text, labels_N[rows], ignore_index=NO_LABEL, reduction="sum") / labelled
            divergence, grad = targets.loss(logits, rows, temperature)
            weights: Any = 1 / N if weights_N is None else weights_N[rows]
            kl += (divergence * weights).sum() * temperature**2
            if not (need_hidden or need_head):
                continue
            grad.mul_(kl_weight * temperature * (weights if weights_N is None else weights[:, None]))
            if text is not None and labels_N is not None:
                has_label = labels_N[rows] != NO_LABEL
                share = (lm_weight / labelled) * has_label.float()
                grad.addcmul_(text.exp_(), share[:, None])
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
    """kl_weight · T² · KL(teacher | student) + lm_weight · cross-entropy; and both means alone, without gradient.

    KL is the mean over rows at temperature T of softmax(logits / T), in nats, or the sum with `weights_N`; T² keeps its
    gradient's size (Hinton et al. 2015, arXiv:1503.02531). Cross-entropy is the mean over rows with a label.
    Differentiable by hidden_NC (the student's final, normed hidden states) and head_VC (the weight of its language
    model head). Without lm_weight the cross-entropy is not computed and reported as 0.
    """
    losses: tuple[Tensor, Tensor, Tensor] = _Loss.apply(
        hidden_NC, head_VC, labels_N, targets, temperature, kl_weight, lm_weight, weights_N
    )
    return losses


@torch.no_grad()
def top_k(hidden_NC: Tensor, head_VC: Tensor, k: int, temperature: float) -> TopK:
    """What is to be kept of a teacher's logits; logits as fp32, tokens as int32."""
    kept = []
    for rows in hidden_NC.split(ROWS):
        logits = (rows @ head_VC.T).float()
        values, tokens = logits.topk(k, dim=-1)
        kept.append((values, tokens.int(), logits.div_(temperature).logsumexp(-1)))
    return TopK(*(torch.cat(part) for part in zip(*kept, strict=True)))


@torch.no_grad()
def compare(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], labels_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row: the student's loss, the teacher's, KL(teacher | student) (all at temperature 1, nats, fp32) and whether
    both think the same token likeliest (bool). Each model is (hidden states [N, C], head [V, C])."""
    parts = []
    for start in range(0, len(labels_N), ROWS):
        rows = slice(start, start + ROWS)
        ours, theirs = ((hidden[rows] @ head.T).float().log_softmax(-1) for hidden, head in (student, teacher))
        labels = labels_N[rows, None]
        kl = torch.linalg.vecdot(theirs.exp(), theirs - ours)
        same = ours.argmax(-1) == theirs.argmax(-1)
        parts.append((-ours.gather(-1, labels)[:, 0], -theirs.gather(-1, labels)[:, 0], kl, same))
    ours, theirs, kl, same = (torch.cat(part) for part in zip(*parts, strict=True))
    return ours, theirs, kl, same
